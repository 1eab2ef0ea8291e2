from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from atoll.cli import atoll
from atoll.config import LedgerSettings
from atoll.gateway.ledger import Ledger, LedgerRow

DECISION = {
    "candidate": "small",
    "estimates": [
        {
            "candidate": "small",
            "quality": 0.5,
            "quality_std": 0.1,
            "output_tokens": 80.0,
            "cost_usd": 1e-5,
            "score": 0.4,
        },
        {
            "candidate": "large",
            "quality": 0.9,
            "quality_std": 0.1,
            "output_tokens": 90.0,
            "cost_usd": 1e-3,
            "score": 0.3,
        },
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = Ledger(LedgerSettings(store_content=True), tmp_path)
    ledger.open()
    shared: dict[str, Any] = {"endpoint": "/v1/chat/completions", "requested_model": "auto"}
    now = time.time()
    ledger.record(
        LedgerRow(
            "req_good",
            now - 7200,
            served_model="small",
            status=200,
            reason="Good enough",
            decision_json=json.dumps(DECISION),
            prompt_tokens=7,
            completion_tokens=9,
            cost_usd=0.0123,
            latency_s=0.5,
            embedding=bytes(1024),
            answer_text="=cmd|' /C calc'!A0",
            **shared,
        )
    )
    ledger.record(
        LedgerRow(
            "req_bad", now, served_model="large", status=502, error_message="No \x1b[31manswer\n at all", **shared
        )
    )
    ledger.shut()
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(atoll, ["ledger", *arguments, "--data-dir", str(folder)])


def test_tail(folder: Path) -> None:
    head, good, bad = run(folder, "tail").output.splitlines()
    assert head.split()[:3] == ["time", "request", "model"]
    assert good.split()[2:] == [
        *["req_good", "auto", "→", "small", "200", "7", "9", "$0.0123", "500", "ms", "-"],
        "Good",
        "enough",
    ]
    assert bad.endswith("No \ufffd[31manswer at all")


def test_tail_filters(folder: Path) -> None:
    assert run(folder, "tail", "--errors").output.count("\n") == 2
    assert "req_good" not in run(folder, "tail", "--since", "1h").output
    assert "req_bad" not in run(folder, "tail", "--until", "1h").output
    assert "req_bad" not in run(folder, "tail", "--model", "small").output
    assert run(folder, "tail", "-n", "1").output.count("\n") == 2
    assert run(folder, "tail", "--since", "yesterday").exit_code == 2


def test_tail_for_programs(folder: Path) -> None:
    good, bad = map(json.loads, run(folder, "tail", "--json").output.splitlines())
    assert good["decision"] == DECISION
    assert good["cost_usd"] == 0.0123
    assert bad["error_message"] == "No \ufffd[31manswer\n at all"


def test_follow_shows_what_comes_while_it_runs(folder: Path) -> None:
    command = [sys.executable, "-m", "atoll", "ledger", "tail", "-n", "0", "-f", "--json", "--data-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        ledger = Ledger(LedgerSettings(), folder)
        ledger.open()
        number = 0
        seen: list[str] = []
        while not seen:
            # Until it has begun to follow.
            ledger.record(LedgerRow(f"req_{number}", time.time(), "/v1/completions"))
            number += 1
            time.sleep(0.2)
            if number > 5:
                seen.append(json.loads(following.stdout.readline())["request_id"])
        ledger.record(LedgerRow("req_last", time.time(), "/v1/completions"))
        while seen[-1] != "req_last":
            seen.append(json.loads(following.stdout.readline())["request_id"])
        following.terminate()
    assert len(seen) == len(set(seen))
    assert "req_good" not in seen
    ledger.shut()


def test_show(folder: Path) -> None:
    told = run(folder, "show", "req_good").output
    assert "cost_usd            $0.0123\n" in told
    assert "embedding           256 numbers\n" in told
    assert "→  small        0.500  0.100          80  $1.00e-05  0.4000" in told
    shown = json.loads(run(folder, "show", "req_good", "--json").output)
    assert shown["decision"] == DECISION
    assert len(shown["embedding"]) == 1368


def test_show_of_an_unknown_request(folder: Path) -> None:
    done = run(folder, "show", "req_none")
    assert done.exit_code == 1
    assert done.stderr.startswith("atoll: There is no request 'req_none' in this ledger.")


def test_totals(folder: Path) -> None:
    assert [
        (total["name"], total["requests"], total["errors"])
        for total in json.loads(run(folder, "totals", "--json").output)
    ] == [
        ("small", 1, 0),
        ("large", 1, 1),
    ]
    assert run(folder, "totals", "--by", "key").output.splitlines()[1].split()[:3] == ["-", "2", "1"]


def test_export_jsonl(folder: Path) -> None:
    good, bad = map(json.loads, run(folder, "export").output.splitlines())
    assert good["decision_json"] == json.dumps(DECISION)
    assert good["feedback_score"] is None
    assert bad["request_id"] == "req_bad"


def test_export_csv_runs_nothing_in_a_spreadsheet(folder: Path) -> None:
    good, bad = csv.DictReader(io.StringIO(run(folder, "export", "--format", "csv").output))
    assert good["cost_usd"] == "0.0123"
    assert good["answer_text"] == "'=cmd|' /C calc'!A0"
    assert bad["error_message"] == "No \ufffd[31manswer\n at all"


def test_export_parquet(folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "rows.parquet"
    assert run(folder, "export", "--format", "parquet", "--out", str(out)).exit_code == 0
    good, bad = parquet.read_table(out).to_pylist()
    assert good["embedding"] == bytes(1024)
    assert (good["cost_usd"], good["is_streaming"], bad["status"]) == (0.0123, False, 502)


def test_export_to_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    done = run(folder, "export", "--out", str(tmp_path / "no" / "rows.jsonl"))
    assert done.exit_code == 1
    assert "rows.jsonl cannot be written" in done.stderr


def test_the_folder_is_that_of_the_configuration(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text(f"data_dir: {folder}\n")
    told = CliRunner().invoke(atoll, ["ledger", "tail", "--config", str(config)])
    assert "req_good" in told.output


def test_no_ledger_yet(tmp_path: Path) -> None:
    done = run(tmp_path / "none", "tail")
    assert done.exit_code == 1
    assert "no ledger at" in done.stderr
    assert "atoll serve" in done.stderr
