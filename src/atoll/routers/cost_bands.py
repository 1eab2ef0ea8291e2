"""The cost-spectrum loss of CSCR (arXiv 2508.12491): InfoNCE in bands of cost, one temperature each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_MODELS: Final = 2
"""In a band: with fewer a temperature of its own only fragments the loss."""
_LOW: Final = -1e9


def scaled_costs(cost_usd: Floats) -> Floats:
    """Costs of m models in [0, 1], cheapest 0 and dearest 1; all 0 where they are equal."""
    spread = cost_usd.max() - cost_usd.min()
    return np.asarray((cost_usd - cost_usd.min()) / spread if spread > 0 else np.zeros_like(cost_usd))


def bands_of(costs: Floats, n_bands: int) -> Ints:
    """Which band each of m models is in, of shape (m,): quantiles of cost, merged until each holds two models.

    Models of one cost stay together.
    """
    n = max(1, min(n_bands, len(costs) // MIN_MODELS))
    edges = np.quantile(costs, np.arange(1, n) / n)
    band = np.searchsorted(edges, costs, side="right")
    return np.asarray(np.unique(band, return_inverse=True)[1], dtype=np.int64)


def band_temperatures(costs: Floats, band: Ints, tau_min: float, alpha: float) -> Floats:
    """tau_k = tau_min + alpha * mean cost of band k, of shape (n_bands,)."""
    return np.array([tau_min + alpha * costs[band == k].mean() for k in range(int(band.max()) + 1)])


def cost_banded_loss(
    similarity: Any, is_correct: Any, is_known: Any, costs: Any, band: Any, tau: Any, gamma: float
) -> Any:
    """Mean over prompts with a correct model of

        l_i = -1/|K_i| sum_{k in K_i} log(sum_{m in P_ik} e^{s_im / tau_k} / sum_{m'} e^{(s_im' + gamma c_m') / tau_k})

    with K_i the bands in which i has correct models P_ik. `similarity`, `is_correct`, `is_known` of shape (b, m);
    `costs`, `band` of shape (m,); `tau` of shape (n_bands,). `gamma` carries its sign: negative as the paper prints it.
    """
    import torch

    total, n_bands = torch.zeros(len(similarity)), torch.zeros(len(similarity))
    for k in range(len(tau)):
        positive = is_correct & (band == k)
        above = torch.where(positive, similarity / tau[k], _LOW).logsumexp(dim=1)
        below = torch.where(is_known, (similarity + gamma * costs) / tau[k], _LOW).logsumexp(dim=1)
        has = positive.any(dim=1)
        total = total + torch.where(has, below - above, 0.0)
        n_bands = n_bands + has
    usable = n_bands > 0
    return (total / n_bands.clamp(min=1)).sum() / usable.sum().clamp(min=1)
