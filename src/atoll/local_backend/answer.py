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
        self._unfinished: list[TokenLogprob] = []
        """Tokens whose character is not whole yet; only with log-probabilities, as `_pending`."""
        self._pending: deque[tuple[int, TokenLogprob]] = deque()
        """(place of its first character, token) of tokens whose text was not given out yet."""

    def push(self, drawn: Drawn) -> tuple[str, tuple[TokenLogprob, ...], bool]:
        """Add a token; returns the text and the tokens to give out now, and whether a stop string was found."""
        text = self._decoder.push(drawn.token_id)
        if drawn.logprob is not None:
            self._unfinished.append(token_logprob(self._codec, drawn))
        given, is_stopped = self._give(text)
        return given, self._released(), is_stopped

    def flush(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The answer ends without a stop string: what was held back, and a cut character as U+FFFD."""
        given, is_stopped = self._give(self._decoder.flush())
        if is_stopped:  # by the U+FFFD, of all things
            return given, self._released()
        rest = self._matcher.flush()
        tokens = [token for _, token in self._pending]
        return given + rest, (*tokens, *self._unfinished)

    def _give(self, text: str) -> tuple[str, bool]:
        """Book decoded text: the part of it (and of what was held back) to give out, and whether a stop was found."""
        if text:
            self._pending.extend((self._decoded_chars, token) for token in self._unfinished)
            self._unfinished.clear()
        self._decoded_chars += len(text)
        given, is_stopped = self._matcher.push(text)
        self._given_chars += len(given)
        return given, is_stopped

    def _released(self) -> tuple[TokenLogprob, ...]:
        """Tokens whose text has begun to go out."""
        released = []
        while self._pending and self._pending[0][0] < self._given_chars:
            released.append(self._pending.popleft()[1])
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
