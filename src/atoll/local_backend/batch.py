"""One step's work as flat tensors: the tokens of all sequences side by side, and who attends to what.

Sequences that add one token are grouped by slab and attend together; those that add more (a prompt, or a part of
one) attend alone. Everything but attention sees one list of tokens, so a prompt is computed in the same matrix products
as the next tokens of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from atoll.local_backend.kv_slabs import Row, Slab


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: `token_ids` go to the positions from `row.used_tokens` on."""

    row: Row
    token_ids: Sequence[int]
    wants_every_logit: bool = False
    """Logits for all these tokens, not for the last one alone."""
    wants_last_logit: bool = True


class Batch:
    """Spans laid out for one forward pass. Rows must have room; `finish` books the tokens when the pass is done.

    `token_ids` and `positions` are int64 of shape (tokens,), `logit_places` says after which tokens logits are wanted:
    those of `spans` in order.
    """

    def __init__(self, spans: Sequence[Span], *, device: torch.device, dtype: torch.dtype) -> None:
        singles = sorted((span for span in spans if len(span.token_ids) == 1), key=lambda span: id(span.row.slab))
        longer = [span for span in spans if len(span.token_ids) != 1]
        self.spans = spans
        self._parts: list[_Singles | _Stretch] = []
        token_ids: list[int] = []
        positions: list[int] = []
        starts: dict[int, int] = {}
        self._starts = starts
        for span in (*singles, *longer):
            starts[id(span)] = len(token_ids)
            first = span.row.used_tokens
            token_ids.extend(span.token_ids)
            positions.extend(range(first, first + len(span.token_ids)))
        for slab, members in _by_slab(singles):
            self._parts.append(_Singles(slab, members, starts[id(members[0])], device, dtype))
        self._parts.extend(_Stretch(span, starts[id(span)], device, dtype) for span in longer)
        self.token_ids = torch.tensor(token_ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.logit_places = torch.tensor(_places(spans, starts), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.token_ids)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store the new keys and values of `layer`, and attend causally to all that a sequence has.

        `query` has shape (tokens, heads, head size) and `key` and `value` (tokens, kv heads, head size), rotated; the
        result has the shape of `query`.
        """
        if len(self._parts) == 1:
            return self._parts[0].attend(layer, query, key, value, scale)
        return torch.cat(
            [
                part.attend(
                    layer, query[part.start : part.end], key[part.start : part.end], value[part.start : part.end], scale
                )
                for part in self._parts
            ]
        )

    def places_of(self, span: Span) -> slice:
        """Where the tokens of `span` stand in `token_ids`, and their hidden states in the result."""
        start = self._starts[id(span)]
        return slice(start, start + len(span.token_ids))

    def finish(self) -> None:
        """The pass is done: the new tokens are in the rows."""
        for span in self.spans:
            span.row.used_tokens += len(span.token_ids)


class _Singles:
    """One new token for each of some sequences in one slab."""

    def __init__(self, slab: Slab, spans: Sequence[Span], start: int, device: torch.device, dtype: torch.dtype) -> None:
        spans_rows = [span.row.index for span in spans]
        self.start, self.end = start, start + len(spans)
        self._slab = slab
        self._rows = torch.tensor(spans_rows, device=device)
        self._positions = torch.tensor([span.row.used_tokens for span in spans], device=device)
        self._taken = max(spans_rows) + 1
        lengths = [1] * self._taken
        for span in spans:
            lengths[span.row.index] = span.row.used_tokens + 1
        self._longest = max(lengths)
        self._is_whole = spans_rows == list(range(self._taken))
        self._mask: torch.Tensor | None = None
        if min(lengths) != self._longest:
            places = torch.arange(self._longest, device=device)
            beyond = places >= torch.tensor(lengths, device=device)[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))
            self._mask = mask[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._slab.keys(layer), self._slab.values(layer)
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
        attended = functional.scaled_dot_product_attention(
            grouped,
            keys[: self._taken, :, : self._longest],
            values[: self._taken, :, : self._longest],
            attn_mask=self._mask,
            scale=scale,
        )
        attended = attended.reshape(self._taken, heads, size)
        return attended if self._is_whole else attended[self._rows]


class _Stretch:
    """Several new tokens of one sequence: a prompt, or a part of it."""

    def __init__(self, span: Span, start: int, device: torch.device, dtype: torch.dtype) -> None:
        count = len(span.token_ids)
        self.start, self.end = start, start + count
        self._row = span.row
        self._first = span.row.used_tokens
        self._length = self._first + count
        self._mask: torch.Tensor | None = None
        if self._first:
            beyond = torch.ones(count, self._length, dtype=torch.bool, device=device).triu_(self._first + 1)
            self._mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys = self._row.slab.keys(layer)[self._row.index, :, : self._length]
        values = self._row.slab.values(layer)[self._row.index, :, : self._length]
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


def _by_slab(spans: Sequence[Span]) -> list[tuple[Slab, list[Span]]]:
    groups: list[tuple[Slab, list[Span]]] = []
    for span in spans:
        if not groups or groups[-1][0] is not span.row.slab:
            groups.append((span.row.slab, []))
        groups[-1][1].append(span)
    return groups


def _places(spans: Sequence[Span], starts: dict[int, int]) -> list[int]:
    places: list[int] = []
    for span in spans:
        start, count = starts[id(span)], len(span.token_ids)
        if span.wants_every_logit:
            places.extend(range(start, start + count))
        elif span.wants_last_logit:
            places.append(start + count - 1)
    return places
