"""How far a fitted router is off, as feedback tells: for a model, and for a model in a group of prompts.

Surprise is quality minus what was predicted before any correction. A model's level and its deviation in a group are
drawn to zero by pseudo-counts (the posterior means of a normal random-effects model, solved level by level). Memory
does not grow with feedback. With a half-life old surprises fade, so that a model that has changed is known anew.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVEL_STRENGTH: Final = 5.0
"""Outcomes that "as predicted" counts for in a model's level."""
GROUP_STRENGTH: Final = 10.0
"""Outcomes that "no different from other groups" counts for."""
TOKEN_STRENGTH: Final = 5.0
_FIELDS: Final = ("count", "surprise", "token_count", "token_log")


class Corrections:
    """Of m models and g groups. Not safe against `learn` during reads: the router holds a lock."""

    def __init__(self, n_models: int, n_groups: int, half_life: float | None = None) -> None:
        """`half_life` in outcomes of the same model; None never forgets."""
        self.is_told = False
        self.keep = 1.0 if half_life is None else math.exp(-math.log(2.0) / half_life)
        self.count = np.zeros((n_models, n_groups + 1))
        """Outcomes by memberships; the last column is for prompts of no known group."""
        self.surprise = np.zeros((n_models, n_groups + 1))
        self.token_count = np.zeros(n_models)
        self.token_log = np.zeros(n_models)
        """Sum of log(output tokens / predicted)."""
        self._solve()

    def add_model(self) -> None:
        for name in _FIELDS:
            array = getattr(self, name)
            setattr(self, name, np.pad(array, ((0, 1), *((0, 0),) * (array.ndim - 1))))
        self._solve()

    def copy_model(self, source: int, target: int) -> None:
        for name in _FIELDS:
            getattr(self, name)[target] = getattr(self, name)[source]
        self._solve()

    def learn(
        self,
        models: Ints,
        memberships: Floats,
        surprise: Floats,
        token_log: Floats,
        weights: Floats | None = None,
        *,
        is_stream: bool = True,
    ) -> None:
        """One row per outcome: its model, memberships of shape (n, g), surprise and log token ratio (NaN: unknown).

        `weights` are how many outcomes each surprise counts for, None for one. What is no stream was seen at one time,
        so nothing of it is older than the rest.
        """
        keep = self.keep if is_stream else 1.0
        far = 1.0 - memberships.sum(axis=1, keepdims=True)
        belongs = np.concatenate([memberships, far], axis=1)
        if weights is not None:
            belongs *= weights[:, None]
        for row, model in enumerate(models.tolist()):
            if math.isfinite(surprise[row]):
                self.count[model] = keep * self.count[model] + belongs[row]
                self.surprise[model] = keep * self.surprise[model] + belongs[row] * surprise[row]
            if math.isfinite(token_log[row]):
                self.token_count[model] = keep * self.token_count[model] + 1.0
                self.token_log[model] = keep * self.token_log[model] + token_log[row]
        self._solve()

    def quality(self, memberships: Floats) -> Floats:
        """What is added to predictions, of shape (n, m)."""
        return np.asarray(self._level + memberships @ self._deviation)

    def certainty(self, memberships: Floats) -> Floats:
        """By what a prediction's standard deviation is multiplied, of shape (n, m): less with outcomes near."""
        near = memberships @ self._near
        return np.asarray(np.sqrt(GROUP_STRENGTH / (GROUP_STRENGTH + near)))

    def token_factor(self) -> Floats:
        """Of shape (m,)."""
        return self._token_factor

    def arrays(self) -> dict[str, Floats]:
        return {name: getattr(self, name) for name in _FIELDS}

    def restore(self, arrays: dict[str, Floats]) -> None:
        for name in _FIELDS:
            setattr(self, name, arrays[name].copy())
        self._solve()

    def _solve(self) -> None:
        level = self.surprise.sum(axis=1) / (self.count.sum(axis=1) + LEVEL_STRENGTH)
        deviation = (self.surprise - self.count * level[:, None]) / (self.count + GROUP_STRENGTH)
        self._level, self._deviation = level, deviation[:, :-1].T.copy()
        self._near = self.count[:, :-1].T.copy()
        self._token_factor = np.exp(self.token_log / (self.token_count + TOKEN_STRENGTH))
        self.is_told = bool(self.count.any() or self.token_count.any())
