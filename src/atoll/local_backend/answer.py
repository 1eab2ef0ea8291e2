"""From drawn tokens to the text of one answer: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.local_backend.codec import Codec, TextDecoder
from atoll.local_backend.engine import TokenLogprob
from atoll.local_backend.sampling import Drawn
from atoll.local_backend.stop import StopMatcher


class Answer:
    """The text of one choice so far. `push` each token, `flush` at the end."""

    def __init__(self, codec: Codec, stop: Sequence[str]) -> None:
        self._codec = codec
        self._decoder = TextDecoder(codec)
        self._matcher = StopMatcher(stop)
        self._decoded_chars = 0
        self._given_chars = 0
        self._pending: deque[tuple[int, int, TokenLogprob]] = deque()
        """(first character, end, token) of tokens whose text was not given out yet; only with log-probabilities."""

    def push(self, drawn: Drawn) -> tuple[str, tuple[TokenLogprob, ...], bool]:
        """Add a token; returns the text and the tokens to give out now, and whether a stop string was found."""
        text = self._decoder.push(drawn.token_id)
        first = self._decoded_chars
        self._decoded_chars += len(text)
        if drawn.logprob is not None:
            self._pending.append((first, self._decoded_chars, token_logprob(self._codec, drawn)))
        given, is_stopped = self._matcher.push(text)
        self._given_chars += len(given)
        return given, self._released(is_final=is_stopped), is_stopped

    def flush(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The answer ends without a stop string: what was held back, and a cut character as U+FFFD."""
        rest = self._decoder.flush()
        self._decoded_chars += len(rest)
        given, is_stopped = self._matcher.push(rest)
        text = given if is_stopped else given + self._matcher.flush()
        self._given_chars += len(text)
        released = self._released(is_final=is_stopped)
        if not is_stopped:
            released += tuple(token for _, _, token in self._pending)
        return text, released

    def _released(self, *, is_final: bool) -> tuple[TokenLogprob, ...]:
        """Tokens whose text has begun to go out. At the end, one without text before the border goes with its text."""
        released = []
        while self._pending:
            first, end, token = self._pending[0]
            is_out = first < self._given_chars or (not is_final and end <= self._given_chars)
            if not is_out:
                break
            released.append(token)
            self._pending.popleft()
        return tuple(released)


def token_logprob(codec: Codec, drawn: Drawn) -> TokenLogprob:
    """A drawn token as the caller sees it."""
    assert drawn.logprob is not None
    top = tuple(_named(codec, token_id, logprob) for token_id, logprob in drawn.top)
    raw = codec.token_bytes(drawn.token_id)
    return TokenLogprob(drawn.token_id, raw.decode("utf-8", "replace"), raw, drawn.logprob, top)


def _named(codec: Codec, token_id: int, logprob: float) -> TokenLogprob:
    raw = codec.token_bytes(token_id)
    return TokenLogprob(token_id, raw.decode("utf-8", "replace"), raw, logprob)
