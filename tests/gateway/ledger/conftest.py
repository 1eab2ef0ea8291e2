from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from atoll.config import LedgerSettings
from atoll.gateway.ledger import Ledger, LedgerRow

RowMaker = Callable[..., LedgerRow]


@pytest.fixture
def make_row() -> RowMaker:
    numbers = count()

    def make(request_id: str | None = None, **fields: Any) -> LedgerRow:
        fields = {"started_at": time.time(), "endpoint": "/v1/chat/completions", "status": 200} | fields
        return LedgerRow(request_id or f"req_{next(numbers):06d}", **fields)

    return make


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger(LedgerSettings(), tmp_path)
    await ledger.start()
    yield ledger
    await ledger.close()


@pytest.fixture
def open_ledger(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """Opens ledgers on one folder, and closes them."""
    opened: list[Ledger] = []

    def open_one(settings: LedgerSettings | None = None, **options: Any) -> Ledger:
        ledger = Ledger(settings or LedgerSettings(), tmp_path, **options)
        ledger.open()
        opened.append(ledger)
        return ledger

    yield open_one
    for ledger in opened:
        ledger.shut()
