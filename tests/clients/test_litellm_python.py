"""The litellm client, with Atoll as its OpenAI-compatible endpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson

from doubles.process import Process

CLIENT = Path(__file__).resolve().parent / "litellm_client.py"


def test_the_litellm_client(gateway: Process) -> None:
    command = [sys.executable, str(CLIENT), gateway.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout.splitlines()[-1]) == {
        "whole": "Hello 0",
        "total_tokens": 15,
        "text": "Hello",
        "completion_tokens": 5,
        "arguments": '{"city":"Oslo"}',
        "errors": ["NotFoundError", "AuthenticationError"],
    }
