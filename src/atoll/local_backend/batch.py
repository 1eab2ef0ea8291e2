"""One step's work as flat tensors: the tokens of all sequences side by side, and who attends to what.

Sequences that add one token are grouped by their rows and attend together; those that add more (a prompt, or a part of
one) attend alone. Everything but attention sees one list of tokens, so a prompt is computed in the same matrix products
as the next tokens of all others.

On a CPU sizes are rounded up, and what that adds is thrown away: oneDNN prepares and keeps a kernel of a megabyte or
so for every new shape of a product, so with sizes as they come memory would grow by a gigabyte and many steps stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as functional

from atoll.local_backend.kv_slabs import Row

_PAD_TOKEN: Final = 0
_FUSED_BELOW: Final = 1024
"""Rows times tokens up to which the fused attention operator is the quicker one."""
_DENSE_ENOUGH: Final = 0.5
"""Slabs are joined into one call if so much of their rows is taken: free rows in between are computed, too."""


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: `token_ids` go to the positions from `row.used_tokens` on."""

    row: Row
    token_ids: Sequence[int]
    wants_every_logit: bool = False
    """Logits for all these tokens, not for the last one alone."""
    wants_last_logit: bool = True


class Abandoned(Exception):
    """Nobody wants this forward pass any more."""


class Batch:
    """Spans laid out for one forward pass. Rows must have room; `finish` books the tokens when the pass is done.

    `token_ids` and `positions` are int64 of shape (tokens,). `logit_places` says after which tokens logits are wanted:
    those of `spans` in order, `logit_count` of them. All may be longer by what rounding adds.

    `is_abandoned` is asked in every layer; once it is true, `attend` raises Abandoned, and the rows are as before.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        device: torch.device,
        dtype: torch.dtype,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_abandoned = is_abandoned
        singles = sorted((span for span in spans if len(span.token_ids) == 1), key=_place)
        longer = [span for span in spans if len(span.token_ids) != 1]
        self.spans = spans
        self._starts: dict[int, int] = {}
        token_ids: list[int] = []
        positions: list[int] = []
        for span in (*singles, *longer):
            self._starts[id(span)] = len(token_ids)
            first = span.row.used_tokens
            token_ids.extend(span.token_ids)
            positions.extend(range(first, first + len(span.token_ids)))
        self._parts: list[_Singles | _Stretch] = []
        for members in _neighbours(singles):
            self._parts.append(_Singles(members, self._starts[id(members[0])], device, dtype))
        self._parts.extend(_Stretch(span, self._starts[id(span)], device, dtype) for span in longer)
        self._count = len(token_ids)
        places = list(self._logit_places())
        self.logit_count = len(places)
        if device.type == "cpu":
            padding = rounded_tokens(self._count) - self._count
            token_ids += [_PAD_TOKEN] * padding
            positions += [0] * padding
            places += [0] * (rounded_tokens(len(places)) - len(places))
        self.token_ids = torch.tensor(token_ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.logit_places = torch.tensor(places, dtype=torch.int64, device=device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store the new keys and values of `layer`, and attend causally to all that a sequence has.

        `query` has shape (tokens, heads, head size) and `key` and `value` (tokens, kv heads, head size), rotated; the
        result has the shape of `query`.
        """
        if self._is_abandoned():
            raise Abandoned
        if len(self._parts) == 1 and self._count == len(query):
            return self._parts[0].attend(layer, query, key, value, scale)
        attended = torch.empty_like(query)
        attended[self._count :] = 0
        for part in self._parts:
            place = slice(part.start, part.end)
            attended[place] = part.attend(layer, query[place], key[place], value[place], scale)
        return attended

    def places_of(self, span: Span) -> slice:
        """Where the tokens of `span` stand in `token_ids`, and their hidden states in the result."""
        start = self._starts[id(span)]
        return slice(start, start + len(span.token_ids))

    def finish(self) -> None:
        """The pass is done: the new tokens are in the rows."""
        for span in self.spans:
            span.row.used_tokens += len(span.token_ids)

    def _logit_places(self) -> Iterator[int]:
        for span in self.spans:
            place = self.places_of(span)
            if span.wants_every_logit:
                yield from range(place.start, place.stop)
            elif span.wants_last_logit:
                yield place.stop - 1


class _Singles:
    """One new token for each of some sequences in neighbouring slabs, which attend together."""

    def __init__(self, spans: Sequence[Span], start: int, device: torch.device, dtype: torch.dtype) -> None:
        first, last = spans[0].row.slab, spans[-1].row.slab
        self.start, self.end = start, start + len(spans)
        rows = [(span.row.slab.place - first.place) // first.width * first.max_rows + span.row.index for span in spans]
        self._views = first.pool.views(first, last)
        total_rows, _, row_tokens, _ = self._views.keys[0].shape
        self._taken = rows[-1] + 1
        self._longest = max(span.row.used_tokens for span in spans) + 1
        self._is_fused = self._taken * self._longest <= _FUSED_BELOW
        if device.type == "cpu" and not self._is_fused:
            self._taken = min(_round_up(self._taken, 8), total_rows)
            self._longest = min(_round_up(self._longest, 64 if self._longest <= 512 else 256), row_tokens)
        self._rows = torch.tensor(rows, device=device)
        self._positions = torch.tensor([span.row.used_tokens for span in spans], device=device)
        self._is_whole = self._taken == len(spans)
        lengths = [1] * self._taken
        for row, span in zip(rows, spans, strict=True):
            lengths[row] = span.row.used_tokens + 1
        self._mask = _mask_beyond(lengths, self._longest, device, dtype)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._views.keys[layer], self._views.values[layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        _, heads, size = query.shape
        kv_heads = key.shape[1]
        if not self._is_whole:  # rows in between are not in this step; their results are thrown away
            spread = query.new_zeros(self._taken, heads, size)
            spread[self._rows] = query
            query = spread
        # The heads that share a key head stand where a longer query would: no key is repeated.
        grouped = query.view(self._taken, kv_heads, heads // kv_heads, size)
        keys, values = keys[: self._taken, :, : self._longest], values[: self._taken, :, : self._longest]
        attended = self._weigh(grouped, keys, values, scale).reshape(self._taken, heads, size)
        return attended if self._is_whole else attended[self._rows]

    def _weigh(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        if self._is_fused:
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, scale=scale)
        # The keys come first, many rows times a few columns: 0.6 of the fused operator's time on a CPU in bfloat16.
        scores = torch.matmul(keys, (query * scale).transpose(2, 3)).transpose(2, 3)
        if self._mask is not None:
            scores = scores + self._mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, values)


class _Stretch:
    """Several new tokens of one sequence: a prompt, or a part of it."""

    def __init__(self, span: Span, start: int, device: torch.device, dtype: torch.dtype) -> None:
        count = len(span.token_ids)
        self.start, self.end = start, start + count
        self._index, self._views = span.row.index, span.row.slab.views
        self._first = span.row.used_tokens
        self._length = self._first + count
        self._mask: torch.Tensor | None = None
        if self._first:
            beyond = torch.ones(count, self._length, dtype=torch.bool, device=device).triu_(self._first + 1)
            self._mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys = self._views.keys[layer][self._index, :, : self._length]
        values = self._views.values[layer][self._index, :, : self._length]
        keys[:, self._first :] = key.transpose(0, 1)
        values[:, self._first :] = value.transpose(0, 1)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[0].transpose(0, 1)


def rounded_tokens(count: int) -> int:
    """The next token count for which a kernel is kept: 1 to 4, 8, then steps of 16, and of 32 beyond 128."""
    if count <= 4:
        return count
    if count <= 8:
        return 8
    return _round_up(count, 16 if count <= 128 else 32)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _place(span: Span) -> tuple[int, int]:
    return span.row.slab.place, span.row.index


def _neighbours(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans, sorted by place, in groups that attend in one call."""
    group: list[Span] = []
    for span in spans:
        if group:
            before, slab = group[-1].row.slab, span.row.slab
            is_dense = len(before.rows) >= _DENSE_ENOUGH * before.max_rows
            if before is not slab and not (slab.continues(before) and is_dense):
                yield group
                group = []
        group.append(span)
    if group:
        yield group


def _mask_beyond(lengths: Sequence[int], longest: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores of each row: minus infinity beyond its length; None if all are full."""
    if min(lengths) == longest:
        return None
    beyond = torch.arange(longest, device=device) >= torch.tensor(lengths, device=device)[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))
    return mask[:, None, None, :]
