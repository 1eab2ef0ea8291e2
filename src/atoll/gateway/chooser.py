"""The learned choice: embed the request, estimate each candidate, decide, and let a conversation stay where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError
from atoll.gateway.parse import ParsedRequest
from atoll.gateway.routing import Choice
from atoll.gateway.sessions import Session
from atoll.routers.base import Router
from atoll.routers.decision import decide
from atoll.routers.eligibility import Exclusion, Requirements
from atoll.routers.embedding.routing_text import routing_text
from atoll.routers.stickiness import Conversation, stay_or_leave
from atoll.types import Candidate, Estimate, Outcome


class Vector(Protocol):
    """A text's place in a space."""

    @property
    def vector(self) -> npt.NDArray[np.float32]: ...

    @property
    def space(self) -> str: ...


class QueryEmbedder(Protocol):
    async def embed(self, text: str) -> Vector: ...


class LearnedChooser:
    """Chooses with the router of the space that the request's vector lies in."""

    def __init__(
        self, routers: Sequence[Router], candidates: Mapping[str, Candidate], embedder: QueryEmbedder, exploration: float
    ) -> None:
        """`candidates` are the routable ones; each of `routers` knows all of them, and each has a space of its own."""
        self._routers = {router.space_: router for router in routers}
        self._candidates = candidates
        self._embedder = embedder
        self._exploration = exploration

    async def choose(
        self,
        request: ParsedRequest,
        requirements: Requirements,
        excluded: Mapping[str, Exclusion],
        session: Session | None,
    ) -> Choice:
        """Raises NoneEligible for a hard cap that rules everybody out, RouterError where there is no router to ask."""
        embedded = await self._embedder.embed(routing_text(request.data))
        router = self._router_for(embedded.space)
        estimates = self._estimates(router, embedded.vector, requirements.prompt_tokens)
        conversation = self._conversation(request, session)
        decision = decide(
            estimates,
            request.extensions.preference,
            router=router.name,
            router_version=router.version,
            excluded=excluded,
            exploration=0.0 if conversation is not None else self._exploration,
        )
        if conversation is not None:
            decision = stay_or_leave(decision, conversation)
        return Choice(decision, embedded.vector, embedded.space)

    def learn(self, outcome: Outcome, embedding: npt.NDArray[np.float32], space: str) -> bool:
        """Teach the router of `space` one outcome; False where there is none, or it does not know the candidate."""
        router = self._routers.get(space)
        if router is None or outcome.candidate not in self._candidates:
            return False
        router.update([outcome], {outcome.prompt: embedding})
        return True

    def _router_for(self, space: str) -> Router:
        router = self._routers.get(space)
        if router is None:
            raise RouterError(f"no router was fitted in the space {space!r}. There are: {', '.join(self._routers)}")
        return router

    def _estimates(
        self, router: Router, vector: npt.NDArray[np.float32], prompt_tokens: int
    ) -> list[Estimate]:
        arrays = router.estimate(vector[np.newaxis], np.array([prompt_tokens], dtype=np.int64))
        return [
            Estimate(
                candidate=candidate.name,
                quality=float(arrays.quality[0, column]),
                quality_std=float(arrays.quality_std[0, column]),
                output_tokens=float(arrays.output_tokens[0, column]),
                cost_usd=float(arrays.cost_usd[0, column]),
            )
            for column, candidate in enumerate(router.candidates_)
            if candidate.name in self._candidates
        ]

    def _conversation(self, request: ParsedRequest, session: Session | None) -> Conversation | None:
        candidate = self._candidates.get(session.candidate) if session is not None else None
        if session is None or candidate is None:
            return None
        return Conversation(candidate, session.prompt_tokens, is_in_tool_loop=_is_in_tool_loop(request))


def _is_in_tool_loop(request: ParsedRequest) -> bool:
    messages = request.data.get("messages")
    return bool(messages) and messages[-1].get("role") in ("tool", "function")
