"""What a model is like, as a vector: descriptors, and the files they lie in.

Two kinds are measured on N probe prompts (CSCR, arXiv 2508.12491, section 3): *logit* footprints of models whose
next-token probabilities can be seen, and *perplexity* fingerprints of any model that answers. Both can share one index
when they have one dimension (N = K): then they are *mixed*. The file is safetensors: one vector by name of the model,
JSON in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError

Floats = npt.NDArray[np.float64]

FORMAT: Final = 1
KINDS: Final = ("logit", "perplexity", "mixed", "outcomes")
N_PROBES: Final = 192
N_TOKENS: Final = 256
"""K: the tokens that are most frequent over all probes, the same for every model."""
N_STEPS: Final = 10
"""T: how many greedy steps of an answer are looked at."""
_HEADER_KEY: Final = "atoll"
_TINY: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Of m models, by name. Raises DataError for a kind, a shape or values that are none."""

    kind: str
    names: tuple[str, ...]
    vectors: Floats
    """Unit vectors (or zero, of which nothing is known), of shape (m, D)."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How they were measured, for people: probes, scoring model."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"descriptors of kind {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.names) or self.vectors.shape[1] == 0:
            raise DataError(f"descriptors of shape {self.vectors.shape} for {len(self.names)} models: give (m, D)")
        if len(set(self.names)) < len(self.names):
            raise DataError("two descriptors have the same name; names are unique")
        if not np.isfinite(self.vectors).all():
            raise DataError("a descriptor holds NaN or infinity; measure that model again")

    @property
    def dimension(self) -> int:
        return int(self.vectors.shape[1])

    def of(self, name: str) -> Floats | None:
        """Shape (D,); None for a model that is not there."""
        return self.vectors[self.names.index(name)] if name in self.names else None


def normalised(vectors: Floats) -> Floats:
    """Rows of unit length; zeros stay zeros."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(np.where(length > _TINY, vectors / np.maximum(length, _TINY), 0.0), dtype=np.float64)


def standardised(rows: Floats) -> Floats:
    """Each row mean-centred and of unit variance; constant rows become zero."""
    centred = rows - rows.mean(axis=-1, keepdims=True)
    spread = centred.std(axis=-1, keepdims=True)
    return np.asarray(np.where(spread > _TINY, centred / np.maximum(spread, _TINY), 0.0), dtype=np.float64)


def logit_footprint(probabilities: npt.NDArray[Any]) -> Floats:
    """One model's footprint, of shape (K,) and unit length.

    `probabilities` of shape (N, T, K): what the model gave the K tokens next, at each of T greedy steps on each of N
    probes. A step after the end of an answer is NaN and left out. DataError when no step is left.
    """
    values = np.asarray(probabilities, dtype=np.float64)
    if values.ndim != 3:
        raise DataError(f"probabilities of shape {values.shape}: give (probes, steps, tokens)")
    steps = values.reshape(-1, values.shape[2])
    steps = steps[np.isfinite(steps).all(axis=1)]
    if len(steps) == 0:
        raise DataError("there is no step with probabilities: every probe was answered with nothing")
    return normalised(steps.mean(axis=0))


def perplexity_fingerprint(mean_negative_logprob: npt.NDArray[Any]) -> Floats:
    """Fingerprints of shape (n_models, N): rows mean-centred, of unit variance. `normalised` puts them on the sphere.

    `mean_negative_logprob` of shape (n_models, N): -mean log p(token) of each model's greedy answer to each probe under
    one small public model, in nats. NaN where an answer was empty: it counts as the model's mean.
    """
    values = np.asarray(mean_negative_logprob, dtype=np.float64)
    if values.ndim != 2:
        raise DataError(f"negative log-probabilities of shape {values.shape}: give (models, probes)")
    return standardised(with_means(values))


def with_means(rows: Floats) -> Floats:
    """NaN replaced by the mean of its row; zero in a row that has none."""
    known = np.isfinite(rows)
    means = np.where(known, rows, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return np.asarray(np.where(known, rows, means[:, None]), dtype=np.float64)


def mix(one: Descriptors, other: Descriptors) -> Descriptors:
    """Both kinds in one index; a model that has both keeps that of `one`.

    Raises DataError unless both have the same dimension: measure as many probes as tokens (N = K).
    """
    if one.dimension != other.dimension:
        raise DataError(
            f"{one.kind} descriptors of {one.dimension} and {other.kind} ones of {other.dimension} dimensions cannot "
            "share an index: measure with as many probes as tokens (N = K)"
        )
    more = [index for index, name in enumerate(other.names) if name not in one.names]
    names = (*one.names, *(other.names[index] for index in more))
    kind = one.kind if one.kind == other.kind else "mixed"
    return Descriptors(kind, names, normalised(np.concatenate([one.vectors, other.vectors[more]])))


def write_descriptors(path: Path, descriptors: Descriptors) -> None:
    """One safetensors file, whole or not at all. DataError where it cannot be written."""
    from safetensors.numpy import save_file

    if not descriptors.names:
        raise DataError("there is no descriptor to write")
    about = {
        "format": FORMAT,
        "kind": descriptors.kind,
        "names": list(descriptors.names),
        "dimension": descriptors.dimension,
        "about": dict(descriptors.about),
    }
    header = json.dumps(about, allow_nan=False)
    tensors = {
        name: vector.astype(np.float32)
        for name, vector in zip(descriptors.names, normalised(descriptors.vectors), strict=True)
    }
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata={_HEADER_KEY: header})
        part.replace(path)
    except OSError as error:
        raise DataError(f"descriptors cannot be written to {str(path)!r}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def read_descriptors(path: Path) -> Descriptors:
    """What `write_descriptors` wrote; DataError for anything else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as stored:
            about = json.loads((stored.metadata() or {})[_HEADER_KEY])
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']!r}, not {FORMAT}")
            names = tuple(str(name) for name in about["names"])
            vectors = np.stack([stored.get_tensor(name) for name in names]).astype(np.float64)
        return Descriptors(str(about["kind"]), names, normalised(vectors), about.get("about", {}))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{str(path)!r} holds no descriptors that Atoll wrote ({error}). Make it with `atoll fingerprint`"
        ) from error
