"""Rates by category of prompt, after DSC (Kassem et al., arXiv 2504.07113): do routers see difficulty or topic?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError
from atoll.routers.leaderboard.curves import Integers

Flags = npt.NDArray[np.bool_]


def category_rates(categories: Sequence[str], flags: Flags) -> dict[str, float]:
    """By category, in order of appearance, the share of prompts that `flags`, of shape (n,), holds true.

    `flags` may say that a strong model was called, that a jailbreak went to a weak one, that private data left the
    house, or that a keyword turned the decision.
    """
    flags = np.asarray(flags, dtype=bool)
    if flags.shape != (len(categories),):
        raise DataError(f"expected one flag for each of {len(categories)} prompts, found {flags.shape}")
    of_prompt = np.asarray(categories)
    return {category: float(flags[of_prompt == category].mean()) for category in dict.fromkeys(categories)}


def flip_rate(chosen: Integers, chosen_changed: Integers) -> float:
    """The share of prompts whose choice turns when they are worded otherwise (DSC: trigger words put in); both (n,)."""
    chosen, chosen_changed = np.asarray(chosen), np.asarray(chosen_changed)
    if chosen.shape != chosen_changed.shape or chosen.size == 0:
        raise DataError(f"expected the choices for the same prompts twice: {chosen.shape} and {chosen_changed.shape}")
    return float(np.mean(chosen != chosen_changed))


def difficulty_gap(is_easy: Flags, is_strong: Flags) -> float:
    """Strong-call rate of hard prompts − that of easy ones: 1 sees difficulty alone, 0 topic alone; shapes (n,)."""
    is_easy, is_strong = np.asarray(is_easy, dtype=bool), np.asarray(is_strong, dtype=bool)
    if is_easy.shape != is_strong.shape or is_easy.all() or not is_easy.any():
        raise DataError("a gap needs easy and hard prompts, and a flag for each")
    return float(is_strong[~is_easy].mean() - is_strong[is_easy].mean())
