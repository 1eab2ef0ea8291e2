"""The engine's process: OpenAI's HTTP shape over a Unix socket.

    python -m atoll.local_backend.server --socket PATH --cache-dir DIR [--model NAME] …

It says `ready` on standard output once it answers, and ends when standard input is closed, which happens when the
gateway that started it is gone, however it went.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from aiohttp import web

from atoll.errors import (
    AtollError,
    ClientClosed,
    EngineError,
    InternalFault,
    InvalidRequest,
    NotFound,
    RequestError,
    Unavailable,
)
from atoll.local_backend import protocol
from atoll.local_backend.engine import Engine, FinishReason, GenerateRequest, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from atoll.local_backend.codec import Codec

logger = logging.getLogger(__name__)

READY_LINE: Final = "ready"
"""What the process prints when it answers."""
EXIT_CANNOT_START: Final = 78
"""Exit status (EX_CONFIG) when another start would fail in the same way."""
_MAX_BODY_BYTES: Final = 64 << 20
_LONG_TEXT_CHARS: Final = 20_000
"""Texts beyond this are tokenised in another thread; shorter ones take less than a millisecond or two."""
_DRAIN_S: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The HTTP face of one engine."""

    def __init__(self, engine: Engine, codec: Codec) -> None:
        self._engine, self._codec = engine, codec
        self._runner: web.AppRunner | None = None
        self._fingerprint = "atoll-" + hashlib.sha256(engine.model_name.encode()).hexdigest()[:10]

    async def start(self, path: Path) -> None:
        """Listen on a Unix socket. The folder is made private, and the socket is so from the moment it exists."""
        _make_private(path.parent)
        _remove(path)
        # `handler_cancellation`: when a client leaves, its handler is cancelled, and with it the generation.
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=_DRAIN_S
        )
        await self._runner.setup()
        mask = os.umask(0o177)
        try:
            await web.UnixSite(self._runner, str(path), backlog=1024).start()
        finally:
            os.umask(mask)

    async def close(self) -> None:
        """Accept nothing any more, give what runs a moment, and break the rest off. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[_errors_in_shape], client_max_size=_MAX_BODY_BYTES)
        application.router.add_post("/v1/chat/completions", self.chat)
        application.router.add_post("/v1/completions", self.completions)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/health", self.health)
        application.router.add_get("/stats", self.stats)
        return application

    async def health(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self._engine.model_name, "context_tokens": self._engine.context_tokens})

    async def stats(self, _request: web.Request) -> web.Response:
        return _json(self._engine.stats().as_dict())

    async def models(self, _request: web.Request) -> web.Response:
        model = {"id": self._engine.model_name, "object": "model", "created": 0, "owned_by": "atoll"}
        return _json({"object": "list", "data": [model]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = protocol.read_chat(protocol.read_body(await request.read()))
        prompt_ids = await self._off_loop(
            _size(asked.messages), lambda: self._codec.encode(self._codec.render(asked.messages))
        )
        return await self._answer(request, asked.wanted, [prompt_ids], is_chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = protocol.read_completion(protocol.read_body(await request.read()))
        prompts = [await self._prompt_ids(prompt) for prompt in asked.prompts]
        if asked.echo:
            return await self._echo(request, asked.wanted, prompts)
        return await self._answer(request, asked.wanted, prompts, is_chat=False)

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._off_loop(len(prompt), lambda: self._codec.encode(prompt, with_special=True))
        return prompt

    async def _off_loop(self, chars: int, encode: Callable[[], list[int]]) -> list[int]:
        """Tokenise here if it is quick, else in a thread, so that other requests need not wait."""
        return await asyncio.to_thread(encode) if chars > _LONG_TEXT_CHARS else encode()

    async def _answer(
        self, request: web.Request, wanted: protocol.Wanted, prompts: Sequence[Sequence[int]], *, is_chat: bool
    ) -> web.StreamResponse:
        reply = protocol.Reply(is_chat=is_chat, model=self._engine.model_name, fingerprint=self._fingerprint)
        events = _all_events(self._engine, [_generate_request(wanted, prompt) for prompt in prompts])
        async with contextlib.aclosing(events):
            if wanted.is_streaming:
                return await _Stream(request, reply, wanted, prompts, is_chat).send(events)
            collected = [_Collected() for _ in range(len(prompts) * wanted.choices)]
            async for event in events:
                collected[event.choice].add(event)
        choices = [
            reply.choice(index, choice.text, choice.finish_reason, _logprobs(wanted, choice.tokens, is_chat))
            for index, choice in enumerate(collected)
        ]
        return _json_bytes(reply.whole(choices, _usage(prompts, [choice.completion_tokens for choice in collected])))

    async def _echo(
        self, request: web.Request, wanted: protocol.Wanted, prompts: Sequence[Sequence[int]]
    ) -> web.StreamResponse:
        """A completion that repeats its prompt, with the prompt's log-probabilities if they were asked for."""
        reply = protocol.Reply(is_chat=False, model=self._engine.model_name, fingerprint=self._fingerprint)
        collected = [_Collected() for _ in range(len(prompts) * wanted.choices)]
        if wanted.max_tokens != 0:
            events = _all_events(self._engine, [_generate_request(wanted, prompt) for prompt in prompts])
            async with contextlib.aclosing(events):
                async for event in events:
                    collected[event.choice].add(event)
        choices = []
        for index, choice in enumerate(collected):
            prompt = prompts[index // wanted.choices]
            logprobs = None
            if wanted.top_logprobs is not None:
                scored = await self._engine.score(prompt, wanted.top_logprobs)
                first = self._codec.token_bytes(prompt[0]).decode("utf-8", "replace")
                logprobs = protocol.completion_logprobs([*scored, *choice.tokens], 0, has_unscored_first=first)
            text = self._codec.decode(prompt) + choice.text
            choices.append(reply.choice(index, text, choice.finish_reason or "length", logprobs))
        return _json_bytes(reply.whole(choices, _usage(prompts, [choice.completion_tokens for choice in collected])))


class _Collected:
    """One choice of an answer that is sent whole."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.tokens: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, event: TokenEvent) -> None:
        self._texts.append(event.text)
        self.tokens.extend(event.tokens)
        self.finish_reason = event.finish_reason
        self.completion_tokens = event.completion_tokens


class _Stream:
    """One answer as server-sent events."""

    def __init__(
        self,
        request: web.Request,
        reply: protocol.Reply,
        wanted: protocol.Wanted,
        prompts: Sequence[Sequence[int]],
        is_chat: bool,
    ) -> None:
        self._request, self._reply, self._wanted, self._prompts, self._is_chat = (
            request,
            reply,
            wanted,
            prompts,
            is_chat,
        )
        self._completion_tokens = [0] * (len(prompts) * wanted.choices)
        self._chars = [0] * len(self._completion_tokens)

    async def send(self, events: AsyncIterator[TokenEvent]) -> web.StreamResponse:
        """The head goes out with the first event, so that an error before it still has a status of its own."""
        first = await anext(events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(self._request)
        await response.write(self._openings() + self._chunks(first))
        try:
            async for event in events:
                await response.write(self._chunks(event))
        except RequestError as error:
            await response.write(b"data: " + error.body_bytes() + b"\n\n")
            return response
        except EngineError as error:
            await response.write(b"data: " + _as_request_error(error).body_bytes() + b"\n\n")
            return response
        if self._wanted.includes_usage:
            await response.write(self._reply.usage_chunk(_usage(self._prompts, self._completion_tokens)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _openings(self) -> bytes:
        if not self._is_chat:
            return b""
        with_usage = self._wanted.includes_usage
        choices = range(len(self._completion_tokens))
        return b"".join(self._reply.chunk(index, None, is_first=True, with_usage=with_usage) for index in choices)

    def _chunks(self, event: TokenEvent) -> bytes:
        """A chunk for the text, and in chat one of its own for the finish reason."""
        index, with_usage = event.choice, self._wanted.includes_usage
        self._completion_tokens[index] = event.completion_tokens
        logprobs = _logprobs(self._wanted, event.tokens, self._is_chat, self._chars[index])
        self._chars[index] += len(event.text)
        if not self._is_chat:
            return self._reply.chunk(index, event.text, event.finish_reason, logprobs, with_usage=with_usage)
        parts = b""
        if event.text or event.tokens:
            parts = self._reply.chunk(index, event.text, None, logprobs, with_usage=with_usage)
        if event.finish_reason:
            parts += self._reply.chunk(index, None, event.finish_reason, with_usage=with_usage)
        return parts


async def _all_events(engine: Engine, requests: Sequence[GenerateRequest]) -> AsyncGenerator[TokenEvent, None]:
    """Events of several prompts, as they come; prompt p's choice c is choice p * n + c of the answer."""
    if len(requests) == 1:
        async with contextlib.aclosing(engine.generate(requests[0])) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[TokenEvent | Exception | None] = asyncio.Queue()

    async def pump(request: GenerateRequest, offset: int) -> None:
        try:
            async with contextlib.aclosing(engine.generate(request)) as events:
                async for event in events:
                    queue.put_nowait(_moved(event, offset))
        except AtollError as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(request, place * request.choices)) for place, request in enumerate(requests)]
    try:
        unfinished = len(tasks)
        while unfinished:
            got = await queue.get()
            if isinstance(got, TokenEvent):
                yield got
            elif got is None:
                unfinished -= 1
            else:
                raise got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _moved(event: TokenEvent, offset: int) -> TokenEvent:
    return TokenEvent(
        event.choice + offset,
        event.text,
        event.tokens,
        event.finish_reason,
        event.completion_tokens,
        event.cached_tokens,
    )


def _generate_request(wanted: protocol.Wanted, prompt_ids: Sequence[int]) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt_ids,
        max_tokens=wanted.max_tokens,
        sampling=wanted.sampling,
        stop=wanted.stop,
        choices=wanted.choices,
        top_logprobs=wanted.top_logprobs,
        ignore_end=wanted.ignore_end,
    )


def _logprobs(
    wanted: protocol.Wanted, tokens: Sequence[TokenLogprob], is_chat: bool, start: int = 0
) -> dict[str, Any] | None:
    if wanted.top_logprobs is None:
        return None
    return protocol.chat_logprobs(tokens) if is_chat else protocol.completion_logprobs(tokens, start)


def _usage(prompts: Sequence[Sequence[int]], completion_tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has."""
    return protocol.usage_object(sum(map(len, prompts)), sum(completion_tokens))


def _size(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)


@web.middleware
async def _errors_in_shape(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape; nothing of a traceback leaves the process."""
    try:
        return await handler(request)
    except RequestError as error:
        return _error(error)
    except EngineError as error:
        return _error(_as_request_error(error))
    except web.HTTPRequestEntityTooLarge:
        return _error(InvalidRequest(f"The body is larger than {_MAX_BODY_BYTES} bytes", status=413))
    except web.HTTPException as error:
        return _error(NotFound(f"{request.method} {request.path}: {error.reason}", status=error.status))
    except ConnectionResetError:
        return _error(ClientClosed("The client left"))
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(InternalFault("The local engine's server failed; see its log"))


def _as_request_error(error: EngineError) -> RequestError:
    return Unavailable(str(error), code="engine_failed")


def _error(error: RequestError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return _json_bytes(error.body_bytes(), status=error.http_status, headers=headers)


def _json(data: Any) -> web.Response:
    return _json_bytes(orjson.dumps(data))


def _json_bytes(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m atoll.local_backend.server", description="Serve one local model.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--context-tokens", type=int)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--stay", action="store_true", help="do not end when standard input is closed")
    return parser.parse_args(arguments)


def _end_with_parent() -> None:
    """End at once when the gateway is gone: the kernel's signal on Linux, a closed standard input everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock this thread would hold when the process ends
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


async def _serve(options: argparse.Namespace) -> None:
    import torch

    from atoll.local_backend.checkpoint import prepare
    from atoll.local_backend.codec import Codec
    from atoll.local_backend.torch_engine import EngineLimits, TorchEngine

    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    folder = prepare(options.model, options.cache_dir)
    codec = Codec.load(folder)
    limits = EngineLimits(options.context_tokens, options.max_batch, options.max_waiting)
    name = Path(options.model).stem if os.sep in options.model else options.model
    engine = TorchEngine.load(folder, model_name=name, codec=codec, dtype=options.dtype, limits=limits)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = EngineServer(engine, codec)
    await server.start(options.socket)
    print(READY_LINE, flush=True)  # noqa: T201
    await stop.wait()
    await server.close()
    await engine.close()
    _remove(options.socket)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM, SIGINT or the end of standard input."""
    options = _parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not options.stay:
        _end_with_parent()
    try:
        asyncio.run(_serve(options))
    except AtollError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return EXIT_CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
