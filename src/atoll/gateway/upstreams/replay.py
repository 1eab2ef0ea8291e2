"""Answers from a table of recorded answers: for demos and tests, without keys and network.

The table is a JSONL file, one recorded answer a line:

    {"model": "gpt-4o-mini", "prompt": "What is 2+2?", "answer": "4"}
    {"model": "*", "messages": [{"role": "user", "content": "Hi"}], "answer": "Hi!", "usage": {"completion_tokens": 2}}

`prompt` is matched against the last user turn (or the text of a completion), `messages` against the whole
conversation, which is looked up first. `model` is what the candidate's model is called, `*` any. `prompt` `*` is the
answer to everything else. `usage` may give OpenAI's counts; without it tokens are counted as four bytes each.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from atoll.config import ReplayUpstream
from atoll.errors import ConfigError
from atoll.gateway.upstreams.base import Upstream, UpstreamRequest, UpstreamResponse
from atoll.gateway.upstreams.whole import DONE, MadeResponse, event, refusal
from atoll.types import Candidate

_ANY: Final = "*"
_PIECES: Final = re.compile(r"\S+\s*|\s+")
_BYTES_PER_TOKEN: Final = 4
_MAX_CHOICES: Final = 128
_ALLOWED: Final = ("model", "prompt", "messages", "answer", "finish_reason", "usage")


@dataclass(frozen=True, slots=True)
class _Recorded:
    answer: str
    finish_reason: str
    usage: dict[str, Any] | None


class Replay(Upstream):
    """Gives back what was recorded."""

    def __init__(self, name: str, settings: ReplayUpstream) -> None:
        self.name = name
        self._path = settings.table
        self._delay_s = settings.chunk_delay_s
        self._answers: dict[tuple[str, str], _Recorded] = {}

    async def start(self) -> None:
        """Raises ConfigError for a table that cannot be read."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"upstreams.{self.name}.table: {self._path} cannot be read: {error}") from None
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                model, key, recorded = self._entry(line, number)
                self._answers[model, key] = recorded

    async def send(self, request: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        body = orjson.loads(request.body)
        if request.path not in ("/chat/completions", "/completions"):
            return refusal(404, f"The upstream {self.name!r} has recorded answers only, none for {request.path}")
        choices = body.get("n") or 1
        if not isinstance(choices, int) or not 1 <= choices <= _MAX_CHOICES:
            return refusal(400, f"'n' must be an integer from 1 to {_MAX_CHOICES}, found {choices!r:.80}")
        recorded = self._find(candidate.model, body)
        if recorded is None:
            return refusal(
                404,
                f"The table {self._path.name!r} of the upstream {self.name!r} has no answer of {candidate.model!r} "
                f"to {_last_text(body)[:200]!r}. Add a line for it, or one with the prompt '*'",
                code="no_recorded_answer",
            )
        shape = _Shape(candidate.model, request.path == "/chat/completions", choices)
        usage = _usage(recorded, body)
        if not request.is_streaming:
            return MadeResponse(200, body=orjson.dumps(shape.whole(recorded, usage)))
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return MadeResponse(200, stream=self._stream(shape, recorded, usage if wants_usage else None))

    async def is_ready(self) -> bool:
        return bool(self._answers)

    async def close(self) -> None:
        self._answers.clear()

    def _entry(self, line: str, number: int) -> tuple[str, str, _Recorded]:
        where = f"{self._path}:{number}"
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("answer"), str):
            raise ConfigError(f"{where}: expected an object with the text 'answer' and 'prompt' or 'messages'")
        unknown = sorted(set(entry) - set(_ALLOWED))
        if unknown:
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}. Allowed: {', '.join(_ALLOWED)}")
        if isinstance(entry.get("messages"), list):
            key = _conversation(entry["messages"])
        elif isinstance(entry.get("prompt"), str):
            key = entry["prompt"].strip()
        else:
            raise ConfigError(f"{where}: 'prompt' (a text) or 'messages' (a list) is missing")
        usage = entry.get("usage")
        if usage is not None and not _is_usage(usage):
            raise ConfigError(f"{where}: 'usage' must be an object of token counts, found {usage!r:.80}")
        recorded = _Recorded(entry["answer"], str(entry.get("finish_reason") or "stop"), usage)
        return str(entry.get("model") or _ANY), key, recorded

    def _find(self, model: str, body: dict[str, Any]) -> _Recorded | None:
        messages = body.get("messages")
        keys = [_conversation(messages)] if isinstance(messages, list) else []
        keys += [_last_text(body).strip(), _ANY]
        for key in keys:
            for name in (model, _ANY):
                found = self._answers.get((name, key))
                if found is not None:
                    return found
        return None

    async def _stream(self, shape: _Shape, recorded: _Recorded, usage: dict[str, Any] | None) -> AsyncIterator[bytes]:
        for chunk in shape.chunks(recorded, usage):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            yield event(chunk)
        yield DONE


class _Shape:
    """OpenAI's answer objects for one request."""

    def __init__(self, model: str, is_chat: bool, n: int) -> None:
        self._is_chat = is_chat
        self._n = n
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, recorded: _Recorded, usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "finish_reason": recorded.finish_reason,
                "logprobs": None,
                **self._content(recorded.answer),
            }
            for index in range(self._n)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def chunks(self, recorded: _Recorded, usage: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        for index in range(self._n):
            if self._is_chat:
                yield self._chunk(index, {"role": "assistant", "content": ""}, usage)
            for piece in _PIECES.findall(recorded.answer):
                yield self._chunk(index, {"content": piece}, usage)
            yield self._chunk(index, {}, usage, recorded.finish_reason)
        if usage is not None:
            yield {**self._head, "object": self._chunk_kind, "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}

    def _chunk(
        self, index: int, delta: dict[str, str], usage: dict[str, Any] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        return chunk if usage is None else {**chunk, "usage": None}


def _conversation(messages: list[Any]) -> str:
    """A conversation as a key: roles and texts, whatever else the messages hold."""
    turns = [[str(turn.get("role")), _text(turn.get("content"))] for turn in messages if isinstance(turn, dict)]
    return orjson.dumps(turns).decode()


def _last_text(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if isinstance(messages, list):
        for turn in reversed(messages):
            if isinstance(turn, dict) and turn.get("role") == "user":
                return _text(turn.get("content"))
        return ""
    prompt = body.get("prompt")
    return _text(prompt[0] if isinstance(prompt, list) and prompt else prompt)


def _text(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _usage(recorded: _Recorded, body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    prompt = (
        "".join(_text(turn.get("content")) for turn in messages) if isinstance(messages, list) else _last_text(body)
    )
    usage = {"prompt_tokens": _tokens(prompt), "completion_tokens": _tokens(recorded.answer)} | (recorded.usage or {})
    return {**usage, "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}


def _is_usage(usage: Any) -> bool:
    """Whether these are counts; the details in it may be anything."""
    return isinstance(usage, dict) and all(
        isinstance(usage.get(name, 0), int) and usage.get(name, 0) >= 0
        for name in ("prompt_tokens", "completion_tokens")
    )


def _tokens(text: str) -> int:
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)
