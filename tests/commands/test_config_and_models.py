from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.cli import atoll

CONFIG = """
upstreams:
  own: {kind: openai, base_url: "http://127.0.0.1:1/v1", api_key: "${OWN_KEY}"}
candidates:
  - name: small
    upstream: own
    prices: {input: 0.1, output: 0.4, cached_input: 0.05}
    context_tokens: 8192
    quality_prior: 0.4
  - {name: large, upstream: own, prices: {input: 5, output: 20}, is_routable: false}
routing: {default_candidate: small}
"""
SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OWN_KEY", SECRET)
    monkeypatch.chdir(tmp_path)
    Path("atoll.yaml").write_text(CONFIG)
    return "atoll.yaml"


def test_a_right_configuration(config: str) -> None:
    done = CliRunner().invoke(atoll, ["config", "check"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "atoll.yaml is right."
    assert lines[1].endswith("when routing fails, small answers.")
    assert lines[4].split() == [
        *[
            "small",
            "own",
            "(openai)",
            "0.1",
            "0.05",
            "0.4",
            "8192",
            "json_schema,logprobs,tools",
            "0.40",
            "yes,",
            "default",
        ]
    ]
    assert lines[5].split()[-1] == "no"


def test_for_programs(config: str) -> None:
    checked = json.loads(CliRunner().invoke(atoll, ["config", "check", "--json", "--config", config]).output)
    assert checked["upstreams"] == {"own": "openai"}
    assert checked["default_candidate"] == "small"
    assert json.loads(CliRunner().invoke(atoll, ["models", "--json"]).output) == checked["candidates"]
    small, large = checked["candidates"]
    assert (small["input_usd_per_mtok"], small["quality_prior"], small["is_default"]) == (0.1, 0.4, True)
    assert (large["context_tokens"], large["is_routable"]) == (None, False)
    assert small["expected_quality"] == pytest.approx(0.4, abs=0.01)
    assert 0.4 < large["expected_quality"] < 1


def test_a_router_of_ones_own_says_nothing_without_a_prompt(config: str) -> None:
    Path(config).write_text(CONFIG.replace("routing: {", "routing: {router: /some/router, "))
    small, large = json.loads(CliRunner().invoke(atoll, ["models", "--json"]).output)
    assert (small["expected_quality"], large["expected_quality"]) == (0.4, None)


@pytest.mark.parametrize(
    "command", [["config", "check"], ["config", "check", "--json"], ["models"], ["models", "--json"]]
)
def test_no_secret_is_shown(config: str, command: list[str]) -> None:
    """GW-61."""
    done = CliRunner().invoke(atoll, command)
    assert done.exit_code == 0
    assert SECRET not in done.output


def test_a_missing_variable_names_itself(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OWN_KEY")
    done = CliRunner().invoke(atoll, ["config", "check"])
    assert done.exit_code == 2
    assert "OWN_KEY" in done.stderr
    assert "atoll.yaml:3" in done.stderr


def test_everything_that_is_wrong_is_told_at_once(config: str) -> None:
    Path(config).write_text("server: {port: 99999}\nrouting: {exploration: much}\nlegder: {}\n")
    done = CliRunner().invoke(atoll, ["config", "check"])
    assert done.exit_code == 2
    assert all(word in done.stderr for word in ("port", "exploration", "legder", ":1", ":2", ":3"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(atoll, ["config", "check", "--config", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2
    assert "No such file" in done.stderr
