"""Fits the prior router that ships; writes `src/atoll/routers/data/prior/`.

    python scripts/fit_prior.py --data DIR [--cache DIR] [--out DIR]

DIR holds one folder per dataset (`prompts.parquet`, `outcomes.parquet`) and `prices.csv` (dataset, model, US dollars
per million input and output tokens). Only datasets under Apache-2.0 or MIT are read, and of those only the prompts
that `is_held_out` leaves; what ships are averages over clusters of hundreds of prompts, never a prompt or an outcome.

Clusters are found in MiniLM's space; their centres are written for both embedders, so feedback that came in through
one serves the other. Needs the `dev` extra; embedding takes some ten minutes without --cache.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from atoll.routers.datasets import Dataset, is_held_out, joined, load_dataset
from atoll.routers.embedding.load import load_embedder
from atoll.routers.names import canonical_name, size_in_name
from atoll.routers.prior import SHIPPED, PriorRouter
from atoll.types import Candidate

FIT_DATASETS = ("mmlupro", "routellm2", "fusionbench9")
"""Apache-2.0, Apache-2.0, MIT. Never RouterArena, which is for evaluation only, and no set without a licence."""
CURVE_DATASETS = ("mmlupro", "routellm2")
"""For quality over price and size. In the third, models failed for the form of their answers, not for their skill."""
N_CLUSTERS = 128
DEVIATION_STD = 0.8
SIZES_BILLION = {"phi-3-mini-4k-instruct": 3.8, "c4ai-command-r-v01": 35.0, "jamba-1.5-large": 193.0}
"""Where names do not tell. Jamba: geometric mean of 398 in all and 94 active."""
Matrix = npt.NDArray[np.float32]


def fit_set(folder: Path) -> Dataset:
    """The prompts that may be fitted on, models under their canonical names."""
    dataset = load_dataset(folder)
    names = [canonical_name(model) for model in dataset.models]
    assert len(set(names)) == len(names), f"two models of {folder.name} have one name"
    order = np.argsort(names)
    dataset = replace(
        dataset,
        models=tuple(names[column] for column in order),
        quality=dataset.quality[:, order],
        input_tokens=dataset.input_tokens[:, order],
        output_tokens=dataset.output_tokens[:, order],
        cost_usd=dataset.cost_usd[:, order],
    )
    return dataset.take(np.array([row for row, text in enumerate(dataset.texts) if not is_held_out(text)]))


def read_prices(path: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """By dataset and canonical model name."""
    with path.open(encoding="utf-8", newline="") as lines:
        return {
            (row["dataset"], canonical_name(row["model"])): (
                float(row["usd_per_m_input"]),
                float(row["usd_per_m_output"]),
            )
            for row in csv.DictReader(lines)
        }


def priced(model: str, datasets: Sequence[Dataset], prices: dict[tuple[str, str], tuple[float, float]]) -> Candidate:
    in_sets = [prices[dataset.name, model] for dataset in datasets if model in dataset.models]
    return Candidate(
        name=model,
        model=model,
        upstream="",
        input_usd_per_mtok=in_sets[0][0],
        output_usd_per_mtok=in_sets[0][1],
        parameters_billion=SIZES_BILLION.get(model) or size_in_name(model),
    )


def embedded(kind: str, dataset: Dataset, cache: Path | None) -> tuple[str, Matrix]:
    """Space and vectors. A cache file is named for what it holds: dataset, space and number of prompts."""
    embedder = load_embedder(kind)
    file = None if cache is None else cache / f"{dataset.name}-{embedder.space}-{len(dataset)}.npy"
    if file is not None and file.exists():
        return embedder.space, np.load(file)
    vectors = np.empty((len(dataset), embedder.dimension), dtype=np.float32)
    by_length = sorted(range(len(dataset)), key=lambda row: len(dataset.texts[row]))
    for start in range(0, len(dataset), 64):
        rows = by_length[start : start + 64]
        vectors[rows] = embedder.embed([dataset.texts[row] for row in rows])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, vectors)
    return embedder.space, vectors


def fit(data: Path, cache: Path | None) -> PriorRouter:
    datasets = [fit_set(data / name) for name in FIT_DATASETS]
    prices = read_prices(data / "prices.csv")
    spaces: dict[str, Matrix] = {}
    for kind in ("minilm", "static"):
        each = [embedded(kind, dataset, cache) for dataset in datasets]
        spaces[each[0][0]] = np.concatenate([vectors for _, vectors in each])
    space, *others = spaces
    models, table = joined(datasets, [spaces[space][:0]] * len(datasets))
    table = replace(table, embeddings=spaces[space])
    candidates = [priced(model, datasets, prices) for model in models]
    in_curve = {model for dataset in datasets if dataset.name in CURVE_DATASETS for model in dataset.models}
    return PriorRouter(N_CLUSTERS, deviation_std=DEVIATION_STD).fit_table(
        table,
        candidates,
        space=space,
        dataset=np.repeat(np.arange(len(datasets)), [len(dataset) for dataset in datasets]),
        other_spaces={name: spaces[name] for name in others},
        curve_candidates=[candidate for candidate in candidates if candidate.name in in_curve],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keeps the vectors between runs")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    router = fit(arguments.data, arguments.cache)
    router.save(arguments.out)
    for candidate, skill in sorted(zip(router.known_, router.skills_.skill, strict=True), key=lambda pair: -pair[1]):
        print(f"{skill:6.2f}  {candidate.name}")
    print(f"price curve: {router.curves_.by_price}\nsize curve: {router.curves_.by_size}")
    size_kb = sum(file.stat().st_size for file in arguments.out.iterdir()) / 1000
    print(f"{router.summary()}; {size_kb:.0f} kB in {arguments.out}")


if __name__ == "__main__":
    main()
