"""`TorchEngine`: torch on CPU or GPU, with continuous batching.

One thread runs the model, step after step; requests join and leave between two steps. The event loop only hands
sequences in and events out, so it stays responsive however long a step takes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from atoll.errors import ContextOverflow, EngineError, InvalidRequest, RateLimited
from atoll.local_backend.answer import Answer, token_logprob
from atoll.local_backend.batch import Abandoned, Batch
from atoll.local_backend.codec import Codec
from atoll.local_backend.engine import Engine, EngineStats, FinishReason, GenerateRequest, TokenEvent, TokenLogprob
from atoll.local_backend.kv_slabs import MIN_ROW_TOKENS, KVSlabs
from atoll.local_backend.machine import available_memory_bytes, choose_device, choose_dtype
from atoll.local_backend.model import CausalModel, load_model
from atoll.local_backend.sampling import Draw, Drawn, draw_tokens, logprobs_of
from atoll.local_backend.scheduler import Scheduler, Sequence, Work

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS: Final = 512
"""For requests that name none: enough for most answers, and no forgotten request runs for thousands of steps."""
_KV_TOKENS_PER_SEQUENCE: Final = 1024
"""What memory is set aside for: `max_batch` sequences of this length, however they share it."""
_KV_MEMORY_SHARE: Final = 0.4
"""At most this share of the memory that is free after the weights are loaded."""
_STEP_COST: Final = {"bfloat16": 1.75e10, "float32": 4.5e9}
"""Weights times prompt tokens in one step on a CPU: about a twentieth of a second on two cores."""
_GPU_PROMPT_TOKENS_PER_STEP: Final = 2048
_IDLE_TRIM_S: Final = 10.0
"""Memory of empty slabs goes back to the system when nothing was asked for so long."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much an engine takes on. None is the default that suits model and machine."""

    context_tokens: int | None = None
    max_batch: int = 64
    max_waiting: int = 1024
    kv_budget_tokens: int | None = None
    prompt_tokens_per_step: int | None = None


class TorchEngine(Engine):
    """Runs a `CausalModel`. Create and use it inside one event loop; `close` it there."""

    def __init__(
        self, model: CausalModel, codec: Codec, *, model_name: str, limits: EngineLimits = EngineLimits()
    ) -> None:
        self._model, self._codec, self._limits = model, codec, limits
        self.model_name = model_name
        budget_tokens = limits.kv_budget_tokens or _kv_budget_tokens(model, limits.max_batch)
        wanted = min(limits.context_tokens or model.config.context_tokens, model.config.context_tokens)
        self.context_tokens = wanted if limits.kv_budget_tokens else min(wanted, budget_tokens)
        self.default_max_tokens = DEFAULT_MAX_TOKENS
        self._slabs = KVSlabs(
            layers=model.config.layers,
            kv_heads=model.config.kv_heads,
            head_size=model.config.head_size,
            dtype=model.dtype,
            device=model.device,
            context_tokens=self.context_tokens,
            budget_tokens=budget_tokens,
        )
        self._scheduler = Scheduler(
            self._slabs,
            max_running=limits.max_batch,
            max_prompt_tokens_per_step=limits.prompt_tokens_per_step or _prompt_tokens_per_step(model),
        )
        self._loop = asyncio.get_running_loop()
        self._live = 0
        """Sequences that were handed in and have not ended, as the event loop knows."""
        self._wake = threading.Condition()
        self._inbox: list[Sequence] = []
        self._is_closing = False
        self._outbox: list[tuple[Callable[[Any], None], Any]] = []
        """(receiver, event) pairs of this step, called in the event loop."""
        self._counts: Counter[str] = Counter()
        self._stats = EngineStats(kv_tokens_budget=self._slabs.budget_tokens)
        self._thread = threading.Thread(target=self._run, name="atoll-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        model_name: str,
        codec: Codec,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        limits: EngineLimits = EngineLimits(),
    ) -> TorchEngine:
        """Read a Hugging Face folder; blocks for as long as that takes. Raises EngineError if it cannot be served."""
        device = choose_device()
        model = load_model(folder, choose_dtype(dtype, device), device)
        return cls(model, codec, model_name=model_name, limits=limits)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        max_tokens = self._check(request)
        events: asyncio.Queue[Any] = asyncio.Queue()
        sequences = [
            Sequence(
                ids=list(request.prompt_ids),
                prompt_tokens=len(request.prompt_ids),
                max_tokens=max_tokens,
                on_event=events.put_nowait,
                choice=choice,
                draw=Draw.for_choice(request.sampling, choice, request.top_logprobs),
                answer=Answer(self._codec, request.stop),
                end_ids=frozenset() if request.ignore_end else self._codec.end_ids,
            )
            for choice in range(request.choices)
        ]
        self._submit(sequences)
        unfinished = len(sequences)
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            if unfinished:
                self._cancel(sequences)

    async def embed(self, prompts: Seq[Seq[int]]) -> npt.NDArray[np.float32]:
        if not prompts:
            return np.zeros((0, self._model.config.hidden_size), dtype=np.float32)
        vectors = await asyncio.gather(*(self._read(prompt, wants_hidden=True) for prompt in prompts))
        return np.stack(vectors)

    async def score(self, prompt_ids: Seq[int], top_logprobs: int = 0) -> list[TokenLogprob]:
        scored: list[Drawn] = await self._read(prompt_ids, top_logprobs=top_logprobs)
        return [token_logprob(self._codec, drawn) for drawn in scored]

    def stats(self) -> EngineStats:
        return replace(self._stats, waiting=self._stats.waiting + len(self._inbox))

    async def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GenerateRequest) -> int:
        """The number of tokens to generate at most. Raises what a request can be refused for."""
        prompt_tokens = len(request.prompt_ids)
        if not prompt_tokens:
            raise InvalidRequest("The prompt is empty; it needs at least one token", param="prompt")
        self._check_ids(request.prompt_ids, "prompt")
        self._check_ids(request.sampling.logit_bias, "logit_bias")
        room = self.context_tokens - prompt_tokens
        if room < 1:
            raise self._overflow(prompt_tokens, f"the prompt alone has {prompt_tokens} tokens", "Shorten the prompt")
        if request.max_tokens is None:
            return min(self.default_max_tokens, room)
        if request.max_tokens > room:
            raise self._overflow(
                prompt_tokens + request.max_tokens,
                f"the prompt has {prompt_tokens} tokens and {request.max_tokens} were asked for",
                f"Shorten the prompt, or ask for at most {room}",
            )
        return request.max_tokens

    def _check_ids(self, token_ids: Iterable[int], param: str) -> None:
        """An id beyond the vocabulary would make the step fail, and with it the answers of everybody else in it."""
        vocab_size = self._model.config.vocab_size
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"Invalid '{param}': {unknown} is no token id; this model has 0 to {vocab_size - 1}", param=param
            )

    def _overflow(self, tokens: int, told: str, advice: str) -> ContextOverflow:
        return ContextOverflow(
            f"This model's maximum context length is {self.context_tokens} tokens, but {tokens} are needed: {told}. "
            f"{advice}.",
            param="messages",
        )

    async def _read(self, prompt: Seq[int], *, wants_hidden: bool = False, top_logprobs: int | None = None) -> Any:
        """Compute a text without generating: its log-probabilities, or its embedding."""
        if not prompt or len(prompt) > self.context_tokens:
            if prompt:
                raise self._overflow(len(prompt), f"the text has {len(prompt)} tokens", "Shorten it")
            raise InvalidRequest("The text is empty; it needs at least one token", param="input")
        self._check_ids(prompt, "input")
        result: asyncio.Future[Any] = self._loop.create_future()

        def settle(event: Any) -> None:
            if result.done():
                return
            if isinstance(event, Exception):
                result.set_exception(event)
            else:
                result.set_result(event)

        sequence = Sequence(
            ids=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=0,
            on_event=settle,
            top_logprobs=top_logprobs,
            wants_hidden=wants_hidden,
        )
        self._submit([sequence])
        try:
            return await result
        finally:
            if not result.done() or result.cancelled():
                self._cancel([sequence])

    def _submit(self, sequences: list[Sequence]) -> None:
        most = self._limits.max_batch + self._limits.max_waiting
        if self._live + len(sequences) > most:
            raise RateLimited(
                f"The local model is busy: {self._live} answers run or wait, and at most {most} may. Try again soon.",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )
        with self._wake:
            if self._is_closing:
                raise EngineError("The local engine is shutting down")
            self._live += len(sequences)
            self._inbox.extend(sequences)
            self._wake.notify()

    def _cancel(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.is_cancelled = True

    # From here on: the engine's thread.

    def _run(self) -> None:
        while self._take_in():
            for sequence in self._scheduler.cancelled():
                self._end(sequence, "cancelled")
            try:
                self._step()
            except Exception as error:
                logger.exception("a step failed; all running requests end with an error")
                self._fail_all(EngineError(f"The local engine failed: {type(error).__name__}: {error}"))
            self._hand_out()
        self._fail_all(EngineError("The local engine is shutting down"))
        self._hand_out()

    def _take_in(self) -> bool:
        """Wait until there is work and accept new sequences; False when the engine is to end."""
        with self._wake:
            while not self._inbox and self._scheduler.is_idle and not self._is_closing:
                if not self._wake.wait(_IDLE_TRIM_S):
                    self._slabs.trim()
            for sequence in self._inbox:
                self._scheduler.add(sequence)
            self._inbox.clear()
            return not self._is_closing

    def _step(self) -> None:
        work = self._scheduler.plan()
        if not work:
            return
        parts = [(item, item.is_last_part) for item in work]
        self._counts["prompt_tokens"] += sum(item.prompt_tokens for item in work)
        batch = Batch(
            [item.span for item in work],
            device=self._model.device,
            dtype=self._model.dtype,
            is_abandoned=lambda: all(item.sequence.is_cancelled for item in work),
        )
        try:
            hidden = self._model.forward(batch)
        except Abandoned:
            return
        self._gather_hidden(parts, batch, hidden)
        if batch.logit_count:
            self._read_logits(parts, self._model.logits(hidden[batch.logit_places])[: batch.logit_count])
        self._counts["steps"] += 1

    def _gather_hidden(self, parts: list[tuple[Work, bool]], batch: Batch, hidden: torch.Tensor) -> None:
        for item, is_last in parts:
            sequence = item.sequence
            if sequence.wants_hidden:
                sequence.gathered.append(hidden[batch.places_of(item.span)].float().sum(dim=0))
                if is_last:
                    mean = torch.stack(sequence.gathered).sum(dim=0)
                    self._end(sequence, "finished", functional.normalize(mean, dim=0).cpu().numpy())

    def _read_logits(self, parts: list[tuple[Work, bool]], logits: torch.Tensor) -> None:
        """Rows of `logits` come in the order of `parts`."""
        place = 0
        drawing: list[Sequence] = []
        rows: list[int] = []
        for item, is_last in parts:
            count = len(item.span.token_ids) if item.span.wants_every_logit else int(item.span.wants_last_logit)
            if item.span.wants_every_logit:
                self._score(item, is_last, logits[place : place + count])
            elif count:
                drawing.append(item.sequence)
                rows.append(place)
            place += count
        if drawing:
            wanted = logits if len(rows) == len(logits) else logits[rows]
            draws = [sequence.draw for sequence in drawing if sequence.draw is not None]
            for sequence, drawn in zip(drawing, draw_tokens(wanted, draws), strict=True):
                self._append(sequence, drawn)

    def _score(self, item: Work, is_last: bool, logits: torch.Tensor) -> None:
        """Logits after a token tell how likely the next one was."""
        sequence, end = item.sequence, item.sequence.computed
        start = end - len(item.span.token_ids)
        following = sequence.ids[start + 1 : end + 1]
        if following:
            sequence.gathered.extend(logprobs_of(logits[: len(following)], following, sequence.top_logprobs or 0))
        if is_last:
            self._end(sequence, "finished", list(sequence.gathered))

    def _append(self, sequence: Sequence, drawn: Drawn) -> None:
        answer = sequence.answer
        assert answer is not None
        sequence.ids.append(drawn.token_id)
        self._counts["completion_tokens"] += 1
        if drawn.token_id in sequence.end_ids:
            text, tokens = answer.flush()
            self._end(sequence, "finished", _event(sequence, text, tokens, "stop"))
            return
        text, tokens, is_stopped = answer.push(drawn)
        if is_stopped:
            self._end(sequence, "finished", _event(sequence, text, tokens, "stop"))
        elif sequence.generated_tokens >= sequence.max_tokens:
            rest, rest_tokens = answer.flush()
            self._end(sequence, "finished", _event(sequence, text + rest, tokens + rest_tokens, "length"))
        elif text or tokens:
            self._outbox.append((sequence.on_event, _event(sequence, text, tokens, None)))

    def _end(self, sequence: Sequence, how: Literal["finished", "cancelled", "failed"], event: Any = None) -> None:
        self._scheduler.finish(sequence)
        self._counts[how] += 1
        if event is not None:
            self._outbox.append((sequence.on_event, event))
        self._outbox.append((self._forget, sequence))

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for sequence in [*self._scheduler.all(), *inbox]:
            self._end(sequence, "failed", error)

    def _hand_out(self) -> None:
        """Everything a step made, in one call into the event loop."""
        self._stats = EngineStats(
            running=self._scheduler.running_count,
            waiting=self._scheduler.waiting_count,
            kv_tokens_used=self._slabs.used_tokens,
            kv_tokens_reserved=self._slabs.reserved_tokens,
            kv_tokens_budget=self._slabs.budget_tokens,
            preempted=self._scheduler.preempted,
            **self._counts,
        )
        outbox, self._outbox = self._outbox, []
        if outbox:
            try:
                self._loop.call_soon_threadsafe(_deliver, outbox)
            except RuntimeError:  # the loop is closed: nobody is left to hear
                self._is_closing = True

    def _forget(self, _sequence: Sequence) -> None:
        """In the event loop: a sequence has ended."""
        self._live -= 1


def _deliver(outbox: list[tuple[Callable[[Any], None], Any]]) -> None:
    for receive, event in outbox:
        receive(event)


def _event(sequence: Sequence, text: str, tokens: tuple[TokenLogprob, ...], reason: FinishReason | None) -> TokenEvent:
    return TokenEvent(sequence.choice, text, tokens, reason, sequence.generated_tokens)


def _kv_budget_tokens(model: CausalModel, max_batch: int) -> int:
    config = model.config
    token_bytes = 2 * config.layers * config.kv_heads * config.head_size * model.dtype.itemsize
    if model.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(model.device)
    else:
        free_bytes = available_memory_bytes()
    affordable = int(free_bytes * _KV_MEMORY_SHARE) // token_bytes
    wanted = max(max_batch * _KV_TOKENS_PER_SEQUENCE, config.context_tokens)
    return max(min(wanted, affordable), MIN_ROW_TOKENS)


def _prompt_tokens_per_step(model: CausalModel) -> int:
    """As many as a CPU computes in about 50 ms: with the next tokens of all others a step stays well below 200 ms."""
    if model.device.type == "cuda":
        return _GPU_PROMPT_TOKENS_PER_STEP
    cost = _STEP_COST["bfloat16" if model.dtype == torch.bfloat16 else "float32"]
    return min(max(int(cost / model.parameters) // 16 * 16, 16), _GPU_PROMPT_TOKENS_PER_STEP)
