"""Which candidates answer a request, in which order.

A request that names its candidate gets that one. `auto` goes through eligibility, the router's decision and the
conversation's session. Routing never makes a request fail: whatever goes wrong there, the default candidate answers and
the reason says so. What the client itself forbids (a hard cap on cost, say) is told to it.
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
from atoll.gateway.needs import requirements_of
from atoll.gateway.parse import ParsedRequest, unknown_model
from atoll.gateway.sessions import Session, Sessions
from atoll.routers.eligibility import Exclusion, NoneEligible, Reason, Requirements, exclude, over_cap
from atoll.types import Candidate, Decision, Usage

_log = logging.getLogger(__name__)

FALLBACK_ROUTER: Final = "default"
NAMED_REASON: Final = "The request names this model"
_ROOM: Final = frozenset({Reason.CONTEXT, Reason.OUTPUT})
_TYPICAL_OUTPUT_TOKENS: Final = 500
"""For a hard cap when there is no router to estimate better."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision, and the vector that led to it, so that feedback can teach the router without the prompt."""

    decision: Decision
    embedding: npt.NDArray[np.float32] | None = None
    embedding_space: str | None = None


class Chooser(Protocol):
    """Decides among the routable candidates that are not excluded."""

    async def choose(
        self,
        request: ParsedRequest,
        requirements: Requirements,
        excluded: Mapping[str, Exclusion],
        session: Session | None,
    ) -> Choice:
        """May raise anything: the caller has a default. NoneEligible: the client's own cap rules everybody out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The candidates of a request, first choice first."""

    candidates: tuple[Candidate, ...]
    choice: Choice | None = None
    """None for a request that named its candidate."""
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)
    """Why the other routable candidates cannot answer, by name."""


class RequestRouter:
    """Plans every request of a process."""

    def __init__(self, catalog: Catalog, chooser: Chooser, sessions: Sessions) -> None:
        self._catalog = catalog
        self._chooser = chooser
        self._sessions = sessions
        self._failures = 0
        self._routable = [catalog.candidates[name] for name in catalog.routable]
        self._named = {name: Plan((candidate,)) for name, candidate in catalog.candidates.items()}

    async def plan(self, request: ParsedRequest, key_id: str | None) -> Plan:
        """Raises ModelNotFound for a name that is no candidate, InvalidRequest when none can do what is asked."""
        if not request.is_auto:
            plan = self._named.get(request.model)
            if plan is None:
                raise unknown_model(request.model, self._catalog.candidates)
            if request.extensions.preference.max_cost_usd is not None:
                self._under(request.extensions.preference.max_cost_usd, requirements_of(request), [request.model])
            return plan
        requirements = requirements_of(request)
        excluded = self._exclude(requirements)
        session = self._sessions.get(key_id, request.extensions.session)
        try:
            choice = await self._chooser.choose(request, requirements, excluded, session)
        except NoneEligible as error:
            raise _nobody(error) from None
        except Exception as error:
            self._note_failure(error)
            choice = self._fallback(request, requirements, excluded, error)
        order = (choice.decision.candidate, *choice.decision.alternatives)
        return Plan(tuple(self._catalog.candidates[name] for name in order), choice, excluded)

    def _note_failure(self, error: Exception) -> None:
        """The first failure is told with its traceback, then the 2nd, 4th, 8th, …: told, but never a flood."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            _log.warning("routing failed %d times, the default candidate answers", self._failures, exc_info=error)

    def _exclude(self, requirements: Requirements) -> dict[str, Exclusion]:
        """Who cannot answer. Somebody always can: where only the room is short, those with most of it stay.

        Lengths are estimates and upstreams count, so the one with most room gets its chance.
        """
        excluded = exclude(self._routable, requirements)
        if len(excluded) < len(self._routable):
            return excluded
        short = [candidate for candidate in self._routable if excluded[candidate.name].reason in _ROOM]
        if not short:
            raise _nobody(NoneEligible(excluded.values()))
        widest = max(candidate.context_tokens or 0 for candidate in short)
        for candidate in short:
            if (candidate.context_tokens or 0) == widest:
                del excluded[candidate.name]
        return excluded

    def _fallback(
        self, request: ParsedRequest, requirements: Requirements, excluded: Mapping[str, Exclusion], error: Exception
    ) -> Choice:
        """The default candidate, or the first that can answer and is not surely over the client's cap."""
        preference = request.extensions.preference
        names = [candidate.name for candidate in self._routable if candidate.name not in excluded]
        if preference.max_cost_usd is not None:
            names = self._under(preference.max_cost_usd, requirements, names)
        default = self._catalog.default if self._catalog.default in names else names[0]
        return Choice(
            Decision(
                candidate=default,
                alternatives=tuple(name for name in names if name != default),
                router=FALLBACK_ROUTER,
                router_version="1",
                reason=f"Routing failed ({type(error).__name__}), so the default candidate answers",
                preference=preference,
                is_fallback=True,
            )
        )

    def _under(self, max_cost_usd: float, requirements: Requirements, names: Sequence[str]) -> list[str]:
        output_tokens = min(requirements.max_output_tokens or _TYPICAL_OUTPUT_TOKENS, _TYPICAL_OUTPUT_TOKENS)
        usage = Usage(requirements.prompt_tokens, completion_tokens=output_tokens)
        costs = {name: self._catalog.candidates[name].cost_usd(usage) for name in names}
        affordable = [name for name, cost_usd in costs.items() if cost_usd <= max_cost_usd]
        if not affordable:
            raise _nobody(NoneEligible(over_cap(name, cost_usd, max_cost_usd) for name, cost_usd in costs.items()))
        return affordable


def _nobody(error: NoneEligible) -> InvalidRequest:
    """What the client asks for rules everybody out."""
    told = "; ".join(f"{exclusion.candidate}: {exclusion}" for exclusion in error.exclusions)[:800]
    if Reason.COST in error.reasons:
        return InvalidRequest(
            f"No model that may answer stays under max_cost_usd. {told}. Raise it, or shorten the prompt",
            param="atoll.max_cost_usd",
            code="max_cost_exceeded",
        )
    return InvalidRequest(
        f"No model that 'auto' may choose can do what this request needs. {told}",
        param="model",
        code="no_capable_model",
    )


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
        "excluded": {name: {"reason": why.reason, "detail": why.detail} for name, why in plan.excluded.items()},
    }
