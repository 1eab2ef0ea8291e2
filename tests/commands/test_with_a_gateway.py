"""The commands against the real gateway, which answers from recorded answers: no key, no model, no network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import atoll

ANSWER = "Rayleigh scattering 🙂: blue light is scattered most."
CONFIG = """
server: {{port: {port}}}
data_dir: {folder}/data
upstreams: {{tape: {{kind: replay, table: {folder}/answers.jsonl, chunk_delay_s: {delay_s}}}}}
candidates:
  - {{name: small, upstream: tape, prices: {{input: 1, output: 2}}}}
  - {{name: large, upstream: tape, prices: {{input: 10, output: 20}}}}
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert isinstance(port, int)
        return port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "answers.jsonl").write_text(json.dumps({"model": "*", "prompt": "*", "answer": ANSWER}) + "\n")
    configure(tmp_path)
    return tmp_path


def configure(folder: Path, **more: Any) -> int:
    port = free_port()
    (folder / "atoll.yaml").write_text(CONFIG.format(**{"port": port, "folder": folder, "delay_s": 0.0} | more))
    return port


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    # Absolute, since the programs run in another folder.
    return kept | {"COLUMNS": "200", "PYTHONPATH": str(Path(atoll.__file__).parents[1])} | more


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        check=False,
        env=environ(),
    )


def gateways(folder: Path) -> list[psutil.Process]:
    """Processes that serve from this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "serve" in process.cmdline() and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while gateways(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not gateways(folder)


@pytest.fixture
def serving(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "atoll", "serve"], cwd=folder, stderr=subprocess.PIPE, text=True, env=environ()
    ) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if " on http://" in line:
                break
        yield server
        server.terminate()


def test_a_question_without_a_gateway_starts_one_and_stops_it(folder: Path) -> None:
    done = run(folder, "ask", "Why is the sky blue?", "--model", "small")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ANSWER + "\n"
    told, summary = done.stderr.splitlines()
    assert told.startswith("No gateway at http://127.0.0.1:")
    assert summary.startswith("small · ")
    assert " tokens · $" in summary
    assert not gateways(folder)
    row = json.loads(run(folder, "ledger", "tail", "--json").stdout)
    assert (row["requested_model"], row["status"]) == ("small", 200)
    assert row["cost_usd"] > 0


def test_what_keeps_a_gateway_from_starting_is_told(folder: Path) -> None:
    (folder / "data").write_text("a file in place of the data folder")
    done = run(folder, "ask", "Hello")
    assert done.returncode == 1
    assert "atoll: The gateway could not start: " in done.stderr
    assert "cannot be written: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert not gateways(folder)


def test_an_own_gateway_ends_with_the_question_that_was_interrupted(folder: Path) -> None:
    configure(folder, delay_s=0.7)
    for how, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with subprocess.Popen(
            [sys.executable, "-m", "atoll", "ask", "Hello"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ(),
        ) as asking:
            assert asking.stdout is not None
            assert asking.stdout.read(3)
            assert len(gateways(folder)) == 1
            asking.send_signal(how)
            assert asking.wait(60) == code
        wait_until_gone(folder)


def test_a_gateway_that_runs_is_asked(folder: Path, serving: subprocess.Popen[str]) -> None:
    done = run(folder, "ask", "Why?", "--json", "--preference", "1", "--model", "large")
    assert done.returncode == 0, done.stderr
    answered = json.loads(done.stdout)
    assert answered["answer"] == ANSWER
    assert answered["model"] == "large"
    assert answered["usage"]["completion_tokens"] > 0
    assert answered["cost_usd"] > 0
    assert done.stderr == ""
    shown = run(folder, "ledger", "show", answered["request_id"])
    assert "served_model        large\n" in shown.stdout


def test_an_unknown_model_is_told(folder: Path, serving: subprocess.Popen[str]) -> None:
    done = run(folder, "ask", "Why?", "--model", "smal")
    assert done.returncode == 1
    assert "'smal'" in done.stderr
    assert "(HTTP 404)" in done.stderr


def test_stopping_a_gateway_writes_the_ledger(folder: Path, serving: subprocess.Popen[str]) -> None:
    port = json.loads(run(folder, "config", "check", "--json").stdout)
    assert port["upstreams"] == {"tape": "replay"}
    assert run(folder, "ask", "Why?", "--model", "small").returncode == 0
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(30) == 0
    assert len(run(folder, "ledger", "tail", "--json").stdout.splitlines()) == 1


def test_feedback_is_in_the_ledger(folder: Path) -> None:
    port = configure(folder)
    with subprocess.Popen(
        [sys.executable, "-m", "atoll", "serve"], cwd=folder, stderr=subprocess.PIPE, text=True, env=environ()
    ) as server:
        assert server.stderr is not None
        server.stderr.readline()
        request_id = json.loads(run(folder, "ask", "Why?", "--json").stdout)["request_id"]
        body = json.dumps({"request_id": request_id, "score": 0.75, "comment": "good"}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/feedback", body, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            assert answer.status == 200
        row = json.loads(run(folder, "ledger", "show", request_id, "--json").stdout)
        assert (row["feedback_score"], row["feedback_comment"]) == (0.75, "good")
        server.terminate()


def test_a_port_in_use_is_told(folder: Path, serving: subprocess.Popen[str]) -> None:
    done = run(folder, "serve")
    assert done.returncode == 1
    assert "is in use by another program" in done.stderr
    assert "--port" in done.stderr


def test_a_damaged_ledger_is_told_before_anything_is_served(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "ledger.sqlite3").write_bytes(b"no database" * 1000)
    done = run(folder, "serve")
    assert done.returncode == 1
    assert "is damaged" in done.stderr
    assert "mv " in done.stderr
    assert "Traceback" not in done.stderr
