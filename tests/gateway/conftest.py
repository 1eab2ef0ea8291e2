from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from doubles.gateway import Running, running_gateway
from doubles.scripted import ScriptedUpstream, answering


@pytest.fixture
async def first() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream([answering("from first")]).running() as upstream:
        yield upstream


@pytest.fixture
async def second() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream([answering("from second")]).running() as upstream:
        yield upstream


@pytest.fixture
async def gateway(first: ScriptedUpstream, second: ScriptedUpstream) -> AsyncIterator[Running]:
    """Two candidates, `first` and `second`, each at an upstream of its own; `auto` prefers `first`."""
    async with running_gateway({"first": first.base_url, "second": second.base_url}) as running:
        yield running
