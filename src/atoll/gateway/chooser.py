"""The learned choice: embed the request, estimate each candidate, decide, and let a conversation stay where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from atoll.gateway.parse import ParsedRequest
from atoll.gateway.routing import Choice
from atoll.gateway.sessions import Session
from atoll.routers.base import Router
from atoll.routers.decision import decide
from atoll.routers.eligibility import Exclusion, Requirements
from atoll.routers.embedding.routing_text import routing_text
from atoll.routers.embedding.service import Embedded
from atoll.routers.stickiness import Conversation, stay_or_leave
from atoll.types import Outcome


class QueryEmbedder(Protocol):
    async def embed(self, text: str) -> Embedded: ...


class LearnedChooser:
    """Chooses by a router whose pool are the routable candidates, and teaches it."""

    def __init__(self, router: Router, embedder: QueryEmbedder, *, exploration: float) -> None:
        self.router = router
        """May be replaced at any time by one for the same pool: each request keeps the one that it begins with."""
        self._embedder = embedder
        self._exploration = exploration
        self._candidates = {candidate.name: candidate for candidate in router.candidates_}

    async def choose(
        self,
        request: ParsedRequest,
        requirements: Requirements,
        excluded: Mapping[str, Exclusion],
        session: Session | None,
    ) -> Choice:
        """Raises NoneEligible for a hard cap that rules everybody out, RouterError for a space the router lacks."""
        router = self.router
        embedded = await self._embedder.embed(routing_text(request.data))
        estimates = router.estimate_one(embedded.vector, requirements.prompt_tokens, space=embedded.space)
        preference = request.extensions.preference
        scores = None
        if router.is_policy:
            scores = router.score_one(embedded.vector, requirements.prompt_tokens, preference.quality_weight).tolist()
        conversation = self._conversation(request, session)
        decision = decide(
            estimates,
            preference,
            router=router.name,
            router_version=router.version,
            excluded=excluded,
            scores=scores,
            exploration=0.0 if conversation is not None else self._exploration,
        )
        if conversation is not None:
            decision = stay_or_leave(decision, conversation)
        return Choice(decision, embedded.vector, embedded.space)

    def learn(self, outcomes: Sequence[Outcome], embeddings: Mapping[str, npt.NDArray[np.float32]], space: str) -> int:
        """Teach the router what it can learn: outcomes of its candidates, in a space that it knows."""
        known = self.known(outcomes, space)
        if known:
            self.router.update(known, {outcome.prompt: embeddings[outcome.prompt] for outcome in known}, space=space)
        return len(known)

    def known(self, outcomes: Sequence[Outcome], space: str) -> list[Outcome]:
        """Those that the router can learn from."""
        if space not in self.router.spaces:
            return []
        return [outcome for outcome in outcomes if outcome.candidate in self._candidates]

    def _conversation(self, request: ParsedRequest, session: Session | None) -> Conversation | None:
        candidate = self._candidates.get(session.candidate) if session is not None else None
        if session is None or candidate is None:
            return None
        return Conversation(candidate, session.prompt_tokens, is_in_tool_loop=_is_in_tool_loop(request))


def _is_in_tool_loop(request: ParsedRequest) -> bool:
    """Whether the last message is a tool's result."""
    messages = request.data.get("messages") or [{}]
    return messages[-1].get("role") in ("tool", "function")
