"""CSCR: prompts and models in one space, where cost enters the training (Shirkavand et al., arXiv 2508.12491).

Models are fixed descriptors (`descriptors.py`); a two-layer query tower over a frozen embedding learns to point at the
descriptors of models that answer correctly, with the cost-banded InfoNCE of `cost_bands.py`. Deciding is a FAISS lookup
of the `top_k` most similar experts, ranked by similarity - lambda * cost; the paper prints the opposite sign, which
would choose the least similar. All other experts follow behind them, so that the ranking is total.

Where this departs from the paper:
- Without `descriptors` (a file that `atoll fingerprint` writes) they are computed from outcomes: correctness on probe
  prompts that are then left out of the training, mean-centred, unit variance, on the unit sphere like a perplexity
  fingerprint. That looks at labels of 192 prompts (fewer in a small table), which the paper's fingerprints do not.
- The text says that the cost term makes expensive wrong experts count more, the formula -gamma c makes them count less.
  `negative_cost_sign` chooses: -1 as printed, +1 as meant. `benchmarks/cscr_ablation.py` compares them.
- Bands are merged until each holds two models. Small tables are trained for at least `min_steps` updates.
- Correct means a quality of at least 1/2, or, where qualities are no 0 and 1, above the table's mean.
- The cost in a decision is that of the prompt at hand (`utility.py`), not one number per model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError
from atoll.routers.artefact import Tensors
from atoll.routers.columns import ColumnRouter, Observations
from atoll.routers.cost_bands import band_temperatures, bands_of, cost_banded_loss, scaled_costs
from atoll.routers.descriptors import N_PROBES, normalised, read_descriptors, standardised, with_means
from atoll.routers.parameters import Range
from atoll.routers.table import Matrix, OutcomeTable
from atoll.routers.torch_training import one_thread
from atoll.routers.utility import score_table
from atoll.types import Candidate

Floats = npt.NDArray[np.float64]

_PROBE_SHARE: Final = 0.2
"""Of the table at most."""
_NEAREST_OUTCOMES: Final = 5
"""Of a later model, that stand for its answer to a probe."""
_BEHIND: Final = 10.0
"""More than any two scores differ in similarity; experts that were not looked up rank this far behind."""


class CSCRRouter(ColumnRouter):
    """See the module. `top_k=None` ranks all experts; `alpha=0, gamma=0, n_bands=1` is plain InfoNCE."""

    name: ClassVar[str] = "cscr"
    is_policy: ClassVar[bool] = True
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "n_probes": Range(2, 100_000, is_integer=True),
        "hidden": Range(1, 8192, is_integer=True),
        "n_bands": Range(1, 1000, is_integer=True),
        "negative_cost_sign": Range(-1, 1, is_integer=True),
        "gamma": Range(0.0, 10.0),
        "tau_min": Range(1e-3, 100.0),
        "alpha": Range(0.0, 100.0),
        "learning_rate": Range(1e-7, 1.0),
        "batch": Range(1, 100_000, is_integer=True),
        "epochs": Range(1, 1000, is_integer=True),
        "min_steps": Range(0, 100_000, is_integer=True),
        "top_k": Range(1, 100_000, is_integer=True, is_optional=True),
        "seed": Range(0, 2**31 - 1, is_integer=True),
    }

    def __init__(
        self,
        *,
        descriptors: str | Path | None = None,
        n_probes: int = N_PROBES,
        hidden: int = 256,
        n_bands: int = 5,
        negative_cost_sign: int = -1,
        gamma: float = 0.2,
        tau_min: float = 0.05,
        alpha: float = 0.25,
        learning_rate: float = 5e-4,
        batch: int = 512,
        epochs: int = 10,
        min_steps: int = 150,
        top_k: int | None = 4,
        seed: int = 0,
    ) -> None:
        self.descriptors = descriptors
        self.n_probes = n_probes
        self.hidden = hidden
        self.n_bands = n_bands
        self.negative_cost_sign = negative_cost_sign
        self.gamma = gamma
        self.tau_min = tau_min
        self.alpha = alpha
        self.learning_rate = learning_rate
        self.batch = batch
        self.epochs = epochs
        self.min_steps = min_steps
        self.top_k = top_k
        self.seed = seed

    @property
    def version(self) -> str:
        return f"{super().version}-{self._kind}"

    def score(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], preference: float
    ) -> Floats:
        cost_usd = self.estimate(embeddings, prompt_tokens).cost_usd
        similarity, looked_up = self._look_up(np.asarray(embeddings, dtype=np.float32))
        scores = score_table(similarity, cost_usd, preference)
        # A dearer expert may cost any multiple of the typical one: behind is beyond the whole row.
        behind = _BEHIND + np.ptp(scores, axis=1, keepdims=True) if len(scores) else 0.0
        return np.asarray(np.where(looked_up, scores, scores - behind))

    def _look_up(self, embeddings: Matrix) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Similarity to every expert of the pool, of shape (n, n_candidates), and which are among the nearest."""
        import faiss

        experts = self._experts()[self._pool.columns].astype(np.float32)
        index = faiss.IndexFlatIP(experts.shape[1])
        index.add(np.ascontiguousarray(experts))
        n, m = len(embeddings), len(experts)
        similarity, found = np.zeros((n, m)), np.zeros((n, m), dtype=bool)
        if n:
            values, nearest = index.search(np.ascontiguousarray(self._queries(embeddings), dtype=np.float32), m)
            np.put_along_axis(similarity, nearest, values.astype(np.float64), axis=1)
            np.put_along_axis(found, nearest[:, : m if self.top_k is None else self.top_k], True, axis=1)
        return similarity, found

    def _queries(self, embeddings: Matrix) -> Floats:
        """Unit vectors in the space of descriptors, of shape (n, D)."""
        hidden = np.maximum(embeddings.astype(np.float64) @ self._tower["w1"] + self._tower["b1"], 0.0)
        return normalised(hidden @ self._tower["w2"] + self._tower["b2"])

    def _experts(self) -> Floats:
        """Descriptors of fitted and later models, of shape (n_known, D)."""
        if not len(self._mix):
            return self._fitted
        later = normalised(self._mix @ self._fitted)
        for row, name in enumerate(self._known_names[self._n_fitted :]):
            own = self._later.get(self._n_fitted + row)
            in_file = self._in_file.get(name)
            later[row] = own if own is not None else in_file if in_file is not None else later[row]
        return np.concatenate([self._fitted, later])

    def _learn(self, table: OutcomeTable) -> None:
        if self.negative_cost_sign == 0:
            raise RouterError("CSCRRouter: negative_cost_sign=0 is not allowed; give -1 or 1 (or gamma=0)")
        self._later: dict[int, Floats] = {}
        self._in_file: dict[str, Floats] = {}
        self._probes = np.zeros((0, table.embeddings.shape[1]), dtype=np.float32)
        self._kind = "outcomes"
        if self.descriptors is None:
            table = self._describe_by_outcomes(table)
        else:
            self._read_descriptors(Path(self.descriptors))
        self._tower = self._train(table)

    def _read_descriptors(self, path: Path) -> None:
        found = read_descriptors(path)
        missing = [name for name in self._known_names if name not in found.names]
        if missing:
            raise RouterError(
                f"{str(path)!r} holds no descriptor of {', '.join(missing)}. Measure them with `atoll fingerprint`, or "
                "fit without `descriptors` to have all computed from outcomes"
            )
        self._kind = found.kind
        self._in_file = dict(zip(found.names, found.vectors, strict=True))
        self._fitted = np.stack([self._in_file[name] for name in self._known_names])

    def _describe_by_outcomes(self, table: OutcomeTable) -> OutcomeTable:
        """Sets the descriptors and returns the table without the probes, whole where nothing else would be left."""
        order = np.random.default_rng(self.seed).permutation(len(table))
        n_probes = max(1, min(self.n_probes, int(_PROBE_SHARE * len(table))))
        probes, rest = order[:n_probes], order[n_probes:]
        self._probes = table.embeddings[probes]
        self._fitted = _described(table.quality[probes].T.astype(np.float64))
        left = table.take(rest)
        return left if left.n_outcomes else table

    def _train(self, table: OutcomeTable) -> dict[str, Floats]:
        import torch
        from torch.nn.functional import normalize

        with one_thread():
            generator = torch.Generator().manual_seed(self.seed)
            d, width = table.embeddings.shape[1], self._fitted.shape[1]
            tower = {
                "w1": torch.randn(d, self.hidden, generator=generator) * (2.0 / d) ** 0.5,
                "b1": torch.zeros(self.hidden),
                "w2": torch.randn(self.hidden, width, generator=generator) / self.hidden**0.5,
                "b2": torch.zeros(width),
            }
            optimiser = torch.optim.AdamW([each.requires_grad_() for each in tower.values()], lr=self.learning_rate)
            costs = scaled_costs(self._mean_costs(table))
            band = bands_of(costs, self.n_bands)
            tau = torch.from_numpy(band_temperatures(costs, band, self.tau_min, self.alpha).astype(np.float32))
            cost = torch.from_numpy(costs.astype(np.float32))
            bands, experts = torch.from_numpy(band), torch.from_numpy(self._fitted.astype(np.float32))
            known = torch.from_numpy(np.isfinite(table.quality))
            correct, x = torch.from_numpy(is_correct(table.quality)), torch.from_numpy(table.embeddings)
            per_epoch = -(-len(x) // self.batch)
            epochs = max(self.epochs, -(-self.min_steps // per_epoch))
            gamma = self.negative_cost_sign * self.gamma
            for epoch in range(epochs):
                for rows in torch.split(torch.randperm(len(x), generator=generator), self.batch):
                    hidden = torch.relu(x[rows] @ tower["w1"] + tower["b1"])
                    similarity = normalize(hidden @ tower["w2"] + tower["b2"], dim=1) @ experts.T
                    loss = cost_banded_loss(similarity, correct[rows], known[rows], cost, bands, tau, gamma)
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                self._progress((epoch + 1) / epochs)
        return {name: each.detach().double().numpy() for name, each in tower.items()}

    def _mean_costs(self, table: OutcomeTable) -> Floats:
        """USD of an ordinary call of each fitted model; lengths that nobody knows are those of all models."""
        tokens = with_means(table.output_tokens.T.astype(np.float64)).mean(axis=1)
        tokens = np.where(np.isfinite(table.output_tokens).any(axis=0), tokens, tokens.max() if tokens.any() else 1.0)
        lengths = np.array([1.0]) if table.prompt_tokens is None else table.prompt_tokens
        known = lengths[np.isfinite(lengths)]
        prompt = float(known.mean()) if len(known) else 1.0
        return np.asarray(self.prices_[0] * prompt + self.prices_[1] * tokens)

    def _admit(self, column: int, candidate: Candidate, seen: Observations) -> None:
        """A descriptor from the file, or from the outcomes that are nearest to each probe; the tower stays."""
        super()._admit(column, candidate, seen)
        known = np.isfinite(seen.quality)
        if candidate.name in self._in_file or not len(self._probes) or not known.any():
            return
        similarity = self._probes @ seen.embeddings[known].T
        nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :_NEAREST_OUTCOMES]
        self._later[column] = _described(seen.quality[known][nearest].mean(axis=1)[None])[0]

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        arrays: Tensors = {f"tower.{name}": each for name, each in self._tower.items()}
        arrays |= {"fitted": self._fitted, "probes": self._probes}
        arrays |= {f"later.{column}": vector for column, vector in self._later.items()}
        arrays |= {f"file.{name}": vector for name, vector in self._in_file.items()}
        return {"kind": self._kind, "descriptors": None if self.descriptors is None else str(self.descriptors)}, arrays

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        self._kind, self.descriptors = str(about["kind"]), about["descriptors"]
        self._tower = {name: arrays[f"tower.{name}"].copy() for name in ("w1", "b1", "w2", "b2")}
        self._fitted, self._probes = arrays["fitted"].copy(), arrays["probes"].copy()
        self._later = {int(name[6:]): each.copy() for name, each in arrays.items() if name.startswith("later.")}
        self._in_file = {name[5:]: each.copy() for name, each in arrays.items() if name.startswith("file.")}
        if len(self._fitted) != self._n_fitted or self._tower["w2"].shape[1] != self._fitted.shape[1]:
            raise ValueError(f"descriptors of shape {self._fitted.shape} for {self._n_fitted} models")


def is_correct(quality: Matrix) -> npt.NDArray[np.bool_]:
    """Of shape (n, m); unknown cells are not."""
    known = quality[np.isfinite(quality)]
    is_binary = bool(((known == 0) | (known == 1)).mean() > 0.9)
    return np.asarray(np.where(np.isfinite(quality), quality, -1.0) >= (0.5 if is_binary else known.mean()))


def _described(correctness: Floats) -> Floats:
    """Descriptors of correctness on probes, both of shape (m, n_probes); NaN is as good as the model's mean."""
    return normalised(standardised(with_means(correctness)))
