"""The seam between the gateway and whatever answers a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from atoll.config import Timeouts
from atoll.types import Candidate


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One attempt, in OpenAI's wire format, ready to send."""

    path: str
    """Below the API root, with a leading slash: `/chat/completions`, `/completions`, `/embeddings`."""
    body: bytes
    """The JSON body with the candidate's model name already in place."""
    is_streaming: bool
    timeouts: Timeouts
    headers: Mapping[str, str] = field(default_factory=dict)
    """Client headers that may travel on (an allow-list chose them). Never holds credentials."""


class UpstreamResponse(ABC):
    """An answer that has begun: the status line and the headers are here, the body may not be.

    Exactly one of `read` and `chunks` is used, then `close`. `close` is idempotent, never raises and must be called in
    every case: it returns the connection to the pool after a whole body, and aborts the upstream call otherwise, so
    that an upstream stops working at once when nobody listens any more.
    """

    status: int
    headers: Mapping[str, str]
    """Lower-case names."""

    @abstractmethod
    async def read(self) -> bytes:
        """The whole body. Raises UpstreamTimeout, UpstreamUnreachable or UpstreamMalformed (over the size limit)."""

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """Bytes of a `text/event-stream` body as they arrive, cut anywhere.

        Ends when the upstream ends the body properly. Raises UpstreamTimeout (idle or total) or UpstreamUnreachable
        (the connection was lost before the body's end).
        """

    @abstractmethod
    async def close(self) -> None:
        """Release what this answer holds; abort the upstream call if it is still running."""


class Upstream(ABC):
    """Somewhere that answers OpenAI-shaped requests. One instance serves all requests of a process, concurrently.

    Whatever an upstream speaks on its own wire, it takes and gives OpenAI's: `send` of a translated provider yields
    OpenAI chunks as server-sent events.
    """

    name: str

    @abstractmethod
    async def start(self) -> None:
        """Open pools, start processes. Must not need the network: an upstream that is down is found out by `send`."""

    @abstractmethod
    async def send(self, request: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        """Make one attempt, without retries, and return when the answer's head is here.

        An error status of the upstream is an answer like any other (the pipeline decides whether to try elsewhere).
        Raises UpstreamTimeout (connect or first byte), UpstreamUnreachable, UpstreamMalformed. Cancelling the awaiting
        task aborts the call.
        """

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether a request could be answered now, as far as this process knows without sending one."""

    @abstractmethod
    async def close(self) -> None:
        """Abort what runs, close pools, stop processes."""
