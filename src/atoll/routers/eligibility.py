"""Which candidates can answer a request at all, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from atoll.errors import RouterError
from atoll.types import Candidate


class Reason(StrEnum):
    """Why a candidate is left out."""

    CONTEXT = "context"
    """Prompt and answer do not fit."""
    OUTPUT = "output"
    """It cannot write as much as is asked for."""
    CAPABILITY = "capability"
    """It lacks tools, vision, … that the request needs."""
    KEY = "key"
    """The caller's key may not use it."""
    PRIVACY = "privacy"
    """Private data must not be sent there."""
    COST = "cost"
    """Its estimated cost is over the request's hard cap."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One candidate that cannot answer. `str()` says why: `holds 8192 tokens, about 9000 are needed`."""

    candidate: str
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a request asks of whoever answers it."""

    prompt_tokens: int = 0
    max_output_tokens: int | None = None
    """What the client wants at most; None where it says nothing, then room for one token is enough."""
    capabilities: frozenset[str] = frozenset()
    """Of `atoll.types.CAPABILITIES`."""
    allowed_models: frozenset[str] | None = None
    """Names that the caller's key may use; None allows all."""
    is_private: bool = False
    """Whether the prompt holds private data."""


class NoneEligible(RouterError):
    """No candidate can answer this request. `exclusions` says why, one per candidate."""

    def __init__(self, exclusions: Iterable[Exclusion]) -> None:
        self.exclusions: Final = tuple(exclusions)
        self.reasons: Final = frozenset(exclusion.reason for exclusion in self.exclusions)
        listed = "; ".join(f"{exclusion.candidate}: {exclusion.detail}" for exclusion in self.exclusions)
        super().__init__(f"no candidate can answer this request. {listed or 'There are no candidates at all'}")


def exclude(candidates: Iterable[Candidate], requirements: Requirements) -> dict[str, Exclusion]:
    """The candidates that cannot answer, by name; whoever is not in it can."""
    excluded = {}
    for candidate in candidates:
        exclusion = why_not(candidate, requirements)
        if exclusion is not None:
            excluded[candidate.name] = exclusion
    return excluded


def why_not(candidate: Candidate, requirements: Requirements) -> Exclusion | None:
    """The first thing that rules a candidate out, None when it can answer."""
    allowed = requirements.allowed_models
    if allowed is not None and candidate.name not in allowed:
        return Exclusion(candidate.name, Reason.KEY, "the key may not use it")
    if requirements.is_private and not candidate.sees_private_data:
        return Exclusion(candidate.name, Reason.PRIVACY, "private data must not be sent there")
    if not requirements.capabilities <= candidate.capabilities:
        missing = ", ".join(sorted(requirements.capabilities - candidate.capabilities))
        return Exclusion(candidate.name, Reason.CAPABILITY, f"cannot do {missing}")
    return _too_long(candidate, requirements)


def _too_long(candidate: Candidate, requirements: Requirements) -> Exclusion | None:
    output_tokens = requirements.max_output_tokens or 1
    needed = requirements.prompt_tokens + output_tokens
    if candidate.context_tokens is not None and needed > candidate.context_tokens:
        detail = f"holds {candidate.context_tokens} tokens, about {needed} are needed"
        return Exclusion(candidate.name, Reason.CONTEXT, detail)
    if candidate.max_output_tokens is not None and output_tokens > candidate.max_output_tokens:
        detail = f"writes at most {candidate.max_output_tokens} tokens, {output_tokens} are asked for"
        return Exclusion(candidate.name, Reason.OUTPUT, detail)
    return None


def over_cap(candidate: str, cost_usd: float, max_cost_usd: float) -> Exclusion:
    detail = f"costs about ${cost_usd:.6f}, at most ${max_cost_usd:.6f} is allowed"
    return Exclusion(candidate, Reason.COST, detail)
