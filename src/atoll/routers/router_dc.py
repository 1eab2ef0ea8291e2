"""RouterDC: query and model embeddings by dual contrastive learning (Chen et al., NeurIPS 2024).

Sample-LLM loss: a prompt is drawn to each of its K+ best models against its K- worst. Sample-sample loss: it is drawn
to a prompt of its own cluster against H of other clusters. Route = the model with the most similar embedding.

Where this departs from the paper:
- The encoder is frozen and a linear projection of its embedding is trained, in place of tuning all of mDeBERTa; the
  learning rate is that of so small a part.
- Clusters are k-means on the embeddings, without t-SNE before it.
- The paper masks negatives that score above 0.5, which means nothing for soft scores. Here the limits are quantiles of
  the prompt's own scores: a positive stands at or above the median, a negative at or below it, and always below the
  positive that it is compared with. Ties are broken anew in each step, otherwise the first columns win them all.
- The published training script keeps the checkpoint that is best on *test*. Here a part of the training table decides,
  and training ends when that part has seen nothing better for `_PATIENCE` steps.
- The method knows no cost: it is subtracted from the similarity as the preference wants it (`utility.py`).
- A new model needs training anew. Until then it is a mixture of the others, as in `columns.py`; feedback moves its
  estimates, not its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from atoll.routers.artefact import Tensors
from atoll.routers.clusters import find_clusters
from atoll.routers.columns import ColumnRouter
from atoll.routers.parameters import Range
from atoll.routers.table import Matrix, OutcomeTable
from atoll.routers.torch_training import one_thread
from atoll.routers.utility import score_table

Floats = npt.NDArray[np.float64]

_CHECK_EVERY: Final = 50
"""Steps between looks at the validation part."""
_PATIENCE: Final = 250
_INITIAL_STD: Final = 0.78
"""Of the model embeddings, as published."""
_LOW: Final = -1e9


class RouterDCRouter(ColumnRouter):
    """See the module. `temperature` divides cosines; `sample_weight` weighs the sample-sample loss."""

    name: ClassVar[str] = "router_dc"
    is_policy: ClassVar[bool] = True
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "dimension": Range(2, 2048, is_integer=True),
        "n_positives": Range(1, 64, is_integer=True),
        "n_negatives": Range(1, 64, is_integer=True),
        "n_sample_negatives": Range(1, 64, is_integer=True),
        "n_clusters": Range(1, 1000, is_integer=True),
        "temperature": Range(1e-3, 100.0),
        "sample_weight": Range(0.0, 100.0),
        "learning_rate": Range(1e-7, 1.0),
        "batch": Range(1, 10_000, is_integer=True),
        "steps": Range(0, 100_000, is_integer=True),
        "validation_share": Range(0.0, 0.5),
        "seed": Range(0, 2**31 - 1, is_integer=True),
    }

    def __init__(
        self,
        *,
        dimension: int = 128,
        n_positives: int = 3,
        n_negatives: int = 3,
        n_sample_negatives: int = 3,
        n_clusters: int = 20,
        temperature: float = 1.0,
        sample_weight: float = 1.0,
        learning_rate: float = 2e-3,
        batch: int = 64,
        steps: int = 1000,
        validation_share: float = 0.15,
        seed: int = 0,
    ) -> None:
        self.dimension = dimension
        self.n_positives = n_positives
        self.n_negatives = n_negatives
        self.n_sample_negatives = n_sample_negatives
        self.n_clusters = n_clusters
        self.temperature = temperature
        self.sample_weight = sample_weight
        self.learning_rate = learning_rate
        self.batch = batch
        self.steps = steps
        self.validation_share = validation_share
        self.seed = seed

    def score(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], preference: float
    ) -> Floats:
        similarity = self._similarity(np.asarray(embeddings, dtype=np.float32))
        if len(self._mix):
            similarity = np.concatenate([similarity, similarity @ self._mix.T], axis=1)
        cost_usd = self.estimate(embeddings, prompt_tokens).cost_usd
        return score_table(similarity[:, self._pool.columns], cost_usd, preference)

    def _similarity(self, embeddings: Matrix) -> Floats:
        """Cosines of prompts and fitted models, of shape (n, m)."""
        queries = embeddings.astype(np.float64) @ self._projection
        queries /= np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-12)
        return np.asarray(queries @ self._models.T)

    def _learn(self, table: OutcomeTable) -> None:
        rng = np.random.default_rng(self.seed)
        order = rng.permutation(len(table))
        n_validation = int(self.validation_share * len(table))
        validation, training = table.take(order[:n_validation]), table.take(order[n_validation:])
        n_clusters = min(self.n_clusters, len(training))
        cluster = find_clusters(training.embeddings, n_clusters, self.seed)
        self._projection, self._models, self.best_step_ = self._train(training, validation, cluster)

    def _train(
        self, training: OutcomeTable, validation: OutcomeTable, cluster: npt.NDArray[np.int64]
    ) -> tuple[Floats, Floats, int]:
        """Projection (d, p), unit model embeddings (m, p), and the step whose checkpoint this is."""
        import torch
        from torch.nn.functional import normalize

        with one_thread():
            generator = torch.Generator().manual_seed(self.seed)
            d, m = training.embeddings.shape[1], training.quality.shape[1]
            start = torch.randn(d, self.dimension, generator=generator) / self.dimension**0.5
            projection = start.requires_grad_()
            models = (_INITIAL_STD * torch.randn(m, self.dimension, generator=generator)).requires_grad_()
            optimiser = torch.optim.AdamW([projection, models], lr=self.learning_rate)
            x, quality = torch.from_numpy(training.embeddings), torch.from_numpy(training.quality)
            kinds = torch.from_numpy(cluster)
            best, kept, best_step = -np.inf, (np.empty(0), np.empty(0)), 0
            for step in range(self.steps + 1):
                if step % _CHECK_EVERY == 0 or step == self.steps:
                    at = projection.detach(), normalize(models.detach(), dim=1)
                    self._progress(step / max(self.steps, 1))
                    chosen = (torch.from_numpy(validation.embeddings) @ at[0] @ at[1].T).argmax(dim=1).numpy()
                    value = _mean_quality(validation.quality, chosen)
                    # Without a validation part the last step counts.
                    if value > best or not len(validation):
                        best, best_step = value, step
                        kept = at[0].double().numpy().copy(), at[1].double().numpy().copy()
                if step == self.steps or step - best_step >= _PATIENCE:
                    break
                rows = torch.randint(len(x), (min(self.batch, len(x)),), generator=generator)
                queries = normalize(x[rows] @ projection, dim=1)
                logits = queries @ normalize(models, dim=1).T / self.temperature
                loss = sample_llm_loss(logits, quality[rows], self.n_positives, self.n_negatives, generator)
                same = queries @ queries.T / self.temperature
                loss = loss + self.sample_weight * sample_sample_loss(
                    same, kinds[rows], self.n_sample_negatives, generator
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        return kept[0], kept[1], best_step

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        return {"best_step": self.best_step_}, {"projection": self._projection, "models": self._models}

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        self.best_step_ = int(about["best_step"])
        self._projection, self._models = arrays["projection"].copy(), arrays["models"].copy()
        if self._projection.shape[0] != self._dimension or len(self._models) != self._n_fitted:
            raise ValueError(f"{len(self._models)} model embeddings for {self._n_fitted} models")


def sample_llm_loss(logits: Any, quality: Any, n_positives: int, n_negatives: int, generator: Any) -> Any:
    """Mean over prompts and their positives of -log softmax of the positive against the negatives.

    `logits`, `quality` of shape (b, m), NaN where unknown. A prompt without a contrast adds nothing.
    """
    import torch

    known = torch.isfinite(quality)
    tie_break = 1e-4 * torch.rand(quality.shape, generator=generator)
    median = quality.nanmedian(dim=1, keepdim=True).values
    high = torch.where(known, quality + tie_break, _LOW).topk(min(n_positives, quality.shape[1]), dim=1).indices
    low = torch.where(known, -quality + tie_break, _LOW).topk(min(n_negatives, quality.shape[1]), dim=1).indices
    good, bad = quality.gather(1, high), quality.gather(1, low)
    # Of shape (b, positives, negatives); comparisons with NaN are false.
    counts = (good >= median)[:, :, None] & ((bad <= median)[:, None, :] & (bad[:, None, :] < good[:, :, None]))
    positive, negative = logits.gather(1, high), logits.gather(1, low)
    against = torch.where(counts, negative[:, None, :], _LOW)
    losses = torch.logsumexp(torch.cat([positive[:, :, None], against], dim=2), dim=2) - positive
    usable = counts.any(dim=2)
    return (losses * usable).sum() / usable.sum().clamp(min=1)


def sample_sample_loss(similarity: Any, cluster: Any, n_negatives: int, generator: Any) -> Any:
    """-log softmax of one prompt of the same cluster against `n_negatives` of others, all of the same batch.

    `similarity` of shape (b, b), `cluster` of shape (b,).
    """
    import torch

    b = len(cluster)
    same = cluster[:, None] == cluster[None, :]
    partner = same & ~torch.eye(b, dtype=torch.bool)
    dice = torch.rand((2, b, b), generator=generator)
    chosen = torch.where(partner, dice[0], -1.0).argmax(dim=1, keepdim=True)
    others = torch.where(same, -1.0, dice[1]).topk(min(n_negatives, b), dim=1).indices
    is_other = ~same.gather(1, others)
    positive = similarity.gather(1, chosen)
    negative = torch.where(is_other, similarity.gather(1, others), _LOW)
    losses = torch.logsumexp(torch.cat([positive, negative], dim=1), dim=1) - positive[:, 0]
    usable = partner.any(dim=1) & is_other.any(dim=1)
    return (losses * usable).sum() / usable.sum().clamp(min=1)


def _mean_quality(quality: Matrix, chosen: npt.NDArray[np.int64]) -> float:
    """Of the chosen models where it is known; below everything where it never is."""
    values = quality[np.arange(len(quality)), chosen]
    known = np.isfinite(values)
    return float(values[known].mean()) if known.any() else -1.0
