"""Which candidates answer a request, in which order.

A request that names its candidate gets that one. `auto` goes through eligibility, the conversation's session and the
router's decision. Routing never makes a request fail: whatever goes wrong there, the default candidate answers and the
reason says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import InvalidRequest
from atoll.gateway.catalog import Catalog
from atoll.gateway.needs import Needs, needs_of
from atoll.gateway.parse import ParsedRequest, unknown_model
from atoll.gateway.sessions import Session, Sessions
from atoll.types import Candidate, Decision

_log = logging.getLogger(__name__)

FALLBACK_ROUTER: Final = "default"
NAMED_REASON: Final = "The request names this model"


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision, and the vector that led to it, so that feedback can teach the router without the prompt."""

    decision: Decision
    embedding: npt.NDArray[np.float32] | None = None
    embedding_space: str | None = None


class Chooser(Protocol):
    """Decides among eligible candidates. May raise anything: the caller has a default."""

    async def choose(
        self, request: ParsedRequest, candidates: Sequence[Candidate], needs: Needs, session: Session | None
    ) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The candidates of a request, first choice first."""

    candidates: tuple[Candidate, ...]
    choice: Choice | None = None
    """None for a request that named its candidate."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Why the other routable candidates cannot answer, by name."""


class RequestRouter:
    """Plans every request of a process."""

    def __init__(self, catalog: Catalog, chooser: Chooser, sessions: Sessions) -> None:
        self._catalog = catalog
        self._chooser = chooser
        self._sessions = sessions
        self._routable = [catalog.candidates[name] for name in catalog.routable]
        self._named = {name: Plan((candidate,)) for name, candidate in catalog.candidates.items()}

    async def plan(self, request: ParsedRequest, key_id: str | None) -> Plan:
        """Raises ModelNotFound for a name that is no candidate, InvalidRequest when none can do what is asked."""
        if not request.is_auto:
            plan = self._named.get(request.model)
            if plan is None:
                raise unknown_model(request.model, self._catalog.candidates)
            return plan
        needs = needs_of(request)
        eligible, excluded = self._eligible(needs)
        session = self._sessions.get(key_id, request.extensions.session)
        try:
            choice = await self._chooser.choose(request, eligible, needs, session)
        except Exception as error:
            _log.warning("routing failed, the default candidate answers", exc_info=True)
            choice = self._fallback(eligible, request, error)
        order = (choice.decision.candidate, *choice.decision.alternatives)
        return Plan(tuple(self._catalog.candidates[name] for name in order), choice, excluded)

    def _eligible(self, needs: Needs) -> tuple[list[Candidate], dict[str, str]]:
        eligible, excluded = [], {}
        for candidate in self._routable:
            why = why_not(candidate, needs)
            if why is None:
                eligible.append(candidate)
            else:
                excluded[candidate.name] = why
        return eligible or self._widest(needs, excluded), excluded

    def _widest(self, needs: Needs, excluded: dict[str, str]) -> list[Candidate]:
        """Nobody fits. Where only the length is at fault, those with the most room: estimates err, upstreams count."""
        able = [candidate for candidate in self._routable if needs.capabilities <= candidate.capabilities]
        if not able:
            wanted = ", ".join(sorted(needs.capabilities))
            raise InvalidRequest(
                f"No model that 'auto' may choose can do what this request needs ({wanted}). "
                + "; ".join(f"{name}: {why}" for name, why in excluded.items())[:500],
                param="model",
                code="no_capable_model",
            )
        widest = max(candidate.context_tokens or 0 for candidate in able)
        chosen = [candidate for candidate in able if (candidate.context_tokens or 0) == widest]
        for candidate in chosen:
            excluded.pop(candidate.name, None)
        return chosen

    def _fallback(self, eligible: Sequence[Candidate], request: ParsedRequest, error: Exception) -> Choice:
        names = [candidate.name for candidate in eligible]
        default = self._catalog.default if self._catalog.default in names else names[0]
        return Choice(
            Decision(
                candidate=default,
                alternatives=tuple(name for name in names if name != default),
                router=FALLBACK_ROUTER,
                router_version="1",
                reason=f"Routing failed ({type(error).__name__}), so the default candidate answers",
                preference=request.extensions.preference,
                is_fallback=True,
            )
        )


def why_not(candidate: Candidate, needs: Needs) -> str | None:
    """Why a candidate cannot answer, None when it can."""
    missing = needs.capabilities - candidate.capabilities
    if missing:
        return f"cannot do {', '.join(sorted(missing))}"
    if candidate.context_tokens is not None:
        wanted = needs.prompt_tokens + (needs.max_output_tokens or 1)
        if wanted > candidate.context_tokens:
            return f"holds {candidate.context_tokens} tokens, about {wanted} are needed"
    return None


def decision_body(plan: Plan) -> dict[str, Any]:
    """The decision as clients and the ledger see it."""
    if plan.choice is None:
        return {"candidate": plan.candidates[0].name, "reason": NAMED_REASON}
    decision = plan.choice.decision
    scores: Sequence[float | None] = decision.scores or [None] * len(decision.estimates)
    return {
        "candidate": decision.candidate,
        "alternatives": list(decision.alternatives),
        "router": decision.router,
        "router_version": decision.router_version,
        "reason": decision.reason,
        "is_fallback": decision.is_fallback,
        "propensity": decision.propensity,
        "preference": decision.preference.quality_weight,
        "max_cost_usd": decision.preference.max_cost_usd,
        "estimates": [
            {
                "candidate": estimate.candidate,
                "quality": estimate.quality,
                "quality_std": estimate.quality_std,
                "output_tokens": estimate.output_tokens,
                "cost_usd": estimate.cost_usd,
                "score": score,
            }
            for estimate, score in zip(decision.estimates, scores, strict=True)
        ],
        "excluded": dict(plan.excluded),
    }
