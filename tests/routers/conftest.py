"""Real data for the tests that want it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def routing_data() -> Path:
    """The folder with one folder of outcome tables per dataset."""
    folder = Path(os.environ.get("ATOLL_ROUTING_DATA") or ROOT.parent / "shared" / "data" / "routing")
    if not (folder / "mmlupro" / "outcomes.parquet").exists():
        pytest.skip(f"NOT CHECKED ON REAL OUTCOMES: no data in {folder}; set ATOLL_ROUTING_DATA")
    return folder
