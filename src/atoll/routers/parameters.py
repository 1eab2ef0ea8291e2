"""Allowed ranges of hyper-parameters, declared as data and checked when a router is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.errors import RouterError


@dataclass(frozen=True, slots=True)
class Range:
    """A number between `low` and `high`, both included; `is_optional` allows None."""

    low: float
    high: float
    is_integer: bool = False
    is_optional: bool = False

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.is_optional
        wanted = (int,) if self.is_integer else (int, float)
        return isinstance(value, wanted) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.is_integer else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}" + (" or None" if self.is_optional else "")


def check_parameters(router: object, constraints: Mapping[str, Range]) -> None:
    """Raises RouterError for the first attribute of `router` that is out of its range."""
    for name, allowed in constraints.items():
        value = getattr(router, name)
        if not allowed.allows(value):
            raise RouterError(f"{type(router).__name__}: {name}={value!r} is not allowed; give {allowed}")
