from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from atoll.cli import atoll

CONFIG = """
upstreams: {own: {kind: openai, base_url: "http://127.0.0.1:1/v1"}}
candidates:
  - {name: gpt-4-1106-preview, upstream: own, prices: {input: 10, output: 30}, context_tokens: 128000}
  - {name: claude-v2, upstream: own, prices: {input: 8, output: 24}, context_tokens: 100000}
  - {name: gpt-3.5-turbo-1106, upstream: own, prices: {input: 1, output: 2}, context_tokens: 16385}
  - {name: mixtral-8x7b-chat, upstream: own, prices: {input: 0.6, output: 0.6}, context_tokens: 32768}
  - {name: llama-2-70b-chat, upstream: own, prices: {input: 0.9, output: 0.9}, context_tokens: 4096}
  - {name: mistral-7b-chat, upstream: own, prices: {input: 0.2, output: 0.2}, context_tokens: 4096}
"""
NAMES = [line.split()[2].rstrip(",") for line in CONFIG.splitlines() if "name:" in line]
PROMPTS = [
    "Why is the sky blue?",
    "Prove that the square root of two is irrational.",
    "Write a Python function that merges two sorted lists.",
    "Translate 'good morning' into French.",
    "What is 17 * 23?",
    "Which of these is a mammal? A: shark B: whale C: trout D: eel",
    "A train leaves at noon at 60 km/h; another follows an hour later at 90 km/h. When does it catch up?",
    "Write a short story about a lighthouse keeper.",
]


@pytest.fixture
def route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    Path("atoll.yaml").write_text(CONFIG + f"data_dir: {tmp_path / 'data'}\n")
    return lambda *arguments: CliRunner().invoke(atoll, ["route", *arguments])


def parsed(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_all_candidates_the_choice_and_the_reason(route: Callable[..., Result]) -> None:
    done = route("Why is the sky blue?")
    assert done.exit_code == 0, done.output
    head, *rows, _, reason = done.stdout.splitlines()
    assert head.split() == ["candidate", "quality", "±", "std", "out", "tokens", "cost", "score"]
    assert sorted(row.replace("→", " ").split()[0] for row in rows) == sorted(NAMES)
    assert [row[0] for row in rows] == ["→"] + [" "] * 5
    assert all("±" in row and "$" in row for row in rows)
    assert reason.startswith(rows[0].split()[1])
    assert "[prior " in reason


def test_for_programs(route: Callable[..., Result]) -> None:
    decision = parsed(route("Why is the sky blue?", "--json", "--preference", "1"))
    assert decision["preference"] == 1
    assert sorted([decision["candidate"], *decision["alternatives"]]) == sorted(NAMES)
    assert {estimate["candidate"] for estimate in decision["estimates"]} == set(NAMES)
    for estimate in decision["estimates"]:
        assert 0 <= estimate["quality"] <= 1
        assert estimate["cost_usd"] > 0
        assert estimate["output_tokens"] > 0
    assert decision["router"] == "prior"
    assert decision["is_fallback"] is False


def test_several_preferences(route: Callable[..., Result]) -> None:
    cheap, dear = parsed(route("Why is the sky blue?", "--preference", "0", "--preference", "1", "--json"))
    assert (cheap["preference"], dear["preference"]) == (0, 1)
    told = route("Why is the sky blue?", "--preference", "0", "--preference", "1").stdout
    assert told.count("→") == 2
    assert "preference 0\n" in told
    assert "preference 1\n" in told


def test_cost_and_quality_fall_with_the_preference(route: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = [option for preference in ("0", "0.5", "1") for option in ("--preference", preference)]
    summaries = parsed(route("--file", "prompts.txt", *options, "--json"))
    assert [summary["preference"] for summary in summaries] == [0, 0.5, 1]
    costs = [summary["mean_cost_usd"] for summary in summaries]
    qualities = [summary["mean_quality"] for summary in summaries]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1] / 5
    assert qualities == sorted(qualities)
    assert qualities[0] < qualities[-1]
    for summary in summaries:
        assert summary["prompts"] == len(PROMPTS)
        assert sum(summary["shares"].values()) == pytest.approx(1)
        assert (summary["fallbacks"], summary["refused"]) == (0, 0)
    told = route("--file", "prompts.txt", *options).stdout.splitlines()
    assert told[0].startswith("8 prompts")
    assert [line.split()[0] for line in told[3:]] == ["0", "0.5", "1"]


def test_who_cannot_answer_is_shown_with_the_reason(route: Callable[..., Result]) -> None:
    done = route("word " * 30_000)
    assert done.exit_code == 0, done.output
    (row,) = [line for line in done.stdout.splitlines() if "mistral-7b-chat" in line and "±" in line]
    assert "holds 4096 tokens" in row
    assert not row.startswith("→")
    assert done.stdout.splitlines()[1].split()[1] in ("gpt-4-1106-preview", "claude-v2", "mixtral-8x7b-chat")


def test_a_cap_that_nobody_meets(route: Callable[..., Result], tmp_path: Path) -> None:
    done = route("Hello", "--max-cost", "0.000000001")
    assert done.exit_code == 1
    assert "max_cost_usd" in done.stderr
    assert done.stdout == ""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    told = route("--file", "prompts.txt", "--max-cost", "0.000000001").stdout
    assert f"Nobody answers {len(PROMPTS)} prompts at preference 0.5: No model" in told


def test_the_cap_is_kept(route: Callable[..., Result]) -> None:
    free = parsed(route("Hello", "--preference", "1", "--json"))
    costs = {estimate["candidate"]: estimate["cost_usd"] for estimate in free["estimates"]}
    cap = costs[free["candidate"]] / 2
    capped = parsed(route("Hello", "--preference", "1", "--max-cost", f"{cap:.12f}", "--json"))
    assert costs[capped["candidate"]] <= cap


@pytest.mark.parametrize("arguments", [[], ["Hello", "--file", "prompts.txt"]])
def test_one_prompt_or_a_file(route: Callable[..., Result], arguments: list[str]) -> None:
    done = route(*arguments)
    assert done.exit_code == 2
    assert "Give either a prompt or --file" in done.stderr


@pytest.mark.parametrize("prompt", ["", " ", "\x00\x1b[2J", "🙂" * 1000, "[" * 5000, "\ud800"])
def test_any_prompt_can_be_routed(route: Callable[..., Result], prompt: str) -> None:
    assert parsed(route(prompt, "--json"))["candidate"] in NAMES


def test_a_prompt_that_looks_like_an_option(route: Callable[..., Result]) -> None:
    assert parsed(route("--json", "--", "--help"))["candidate"] in NAMES


def test_a_router_that_is_not_there(route: Callable[..., Result], tmp_path: Path) -> None:
    config = (tmp_path / "atoll.yaml").read_text() + "routing: {router: /nowhere/router}\n"
    (tmp_path / "atoll.yaml").write_text(config)
    done = route("Hello")
    assert done.exit_code == 2
    assert "/nowhere/router" in done.stderr
    assert "atoll fit" in done.stderr


def test_it_needs_no_network_and_makes_no_ledger(route: Callable[..., Result], tmp_path: Path) -> None:
    assert route("Hello").exit_code == 0
    assert not list(tmp_path.rglob("*.sqlite3"))


def test_routing_at_the_terminal_does_not_silence_the_log_of_its_process(route: Callable[..., Result]) -> None:
    before = logging.getLogger("atoll").level
    assert route("Why is the sky blue?").exit_code == 0
    assert logging.getLogger("atoll").level == before
