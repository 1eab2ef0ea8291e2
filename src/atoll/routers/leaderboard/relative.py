"""A router beside the best single model and the oracle, and whether it collapses onto the dearest model.

`chosen` are columns of shape (..., n), `quality` and `cost_usd` full tables of shape (n, m).
"""

from __future__ import annotations

import numpy as np

from atoll.routers.leaderboard.curves import SAME_QUALITY, Floats, Integers, picked


def gap_at_oracle(chosen: Integers, quality: Floats) -> Floats:
    """Gap@O of LLMRouterBench: by what share of its quality the router stays behind the oracle; down is better."""
    oracle = quality.max(axis=1).mean(dtype=np.float64)
    return np.asarray(1.0 - _ratio(picked(chosen, quality).mean(axis=-1), oracle))


def gain_at_best(chosen: Integers, quality: Floats, best: int | None = None) -> Floats:
    """Gain@B of LLMRouterBench: the router's quality over the best single model's, − 1; up is better.

    `best` is that model's column, as validation names it; None takes the best in hindsight.
    """
    means = quality.mean(axis=0, dtype=np.float64)
    of_best = float(means.max() if best is None else means[best])
    return np.asarray(_ratio(picked(chosen, quality).mean(axis=-1), of_best) - 1.0)


def rci(chosen: Integers, quality: Floats, cost_usd: Floats) -> Floats:
    """Routing collapse: the share of prompts that were neither answered as well as any model can, by another than the
    dearest model, nor rightly sent to the dearest because it alone is best. Down is better; after ORBIT.

    The dearest model is the one of the highest mean cost.
    """
    dearest = int(np.argmax(cost_usd.mean(axis=0)))
    is_best = quality >= quality.max(axis=1, keepdims=True) - SAME_QUALITY
    others = np.arange(quality.shape[1]) != dearest
    dearest_alone = is_best[:, dearest] & ~is_best[:, others].any(axis=1)
    took_best = picked(chosen, is_best.astype(np.float64)) > 0
    took_dearest = np.asarray(chosen) == dearest
    sound = (took_best & ~took_dearest) | (dearest_alone & took_dearest)
    return np.asarray(1.0 - sound.mean(axis=-1))


def _ratio(quality: Floats, reference: float) -> Floats:
    return quality / reference if reference > 0.0 else np.full(np.shape(quality), np.nan)
