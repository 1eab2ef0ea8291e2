"""The official Node client, unchanged."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from doubles.process import Process

HERE = Path(__file__).resolve().parent / "node"
CACHE = HERE.parent.parent.parent / ".cache" / "node-client"


@pytest.fixture(scope="module")
def installed() -> Path:
    """The client, installed once from its lock file."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("SKIPPED LOUDLY: no Node.js on this machine, the official Node client was not tried")
    wanted = (HERE / "package-lock.json").read_bytes()
    stamp = CACHE / "installed-lock.json"
    if not stamp.is_file() or stamp.read_bytes() != wanted:
        CACHE.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, CACHE / name)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            pytest.skip(f"SKIPPED LOUDLY: npm could not install the Node client: {done.stderr[-500:]}")
        stamp.write_bytes(wanted)
    shutil.copy(HERE / "client.mjs", CACHE / "client.mjs")
    return CACHE


@pytest.mark.timeout(360)
def test_the_node_client(gateway: Process, installed: Path) -> None:
    done = subprocess.run(
        ["node", "client.mjs", gateway.url], cwd=installed, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    got = orjson.loads(done.stdout)
    assert got["whole"] == "Hello 0"
    assert got["text"] == "Hello"
    assert got["completionTokens"] == 5
    assert got["arguments"] == '{"city":"Oslo"}'
    assert got["errors"] == ["NotFoundError", "BadRequestError"]
    assert {"auto", "gpt-4o", "gpt-4o-mini"} <= set(got["names"])
    assert got["length"] == pytest.approx(1, abs=1e-3)
