"""The command line as a whole: help, exit codes, errors in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import atoll as atoll_package
from atoll import __version__
from atoll.cli import COMMANDS, atoll

SOURCE = str(Path(atoll_package.__file__).parents[1])
"""Absolute, for programs that run in another folder."""


def run(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        check=False,
        env=os.environ | {"HOME": str(cwd or "/nonexistent"), "COLUMNS": "100", "PYTHONPATH": SOURCE} | environ,
    )


def test_the_version() -> None:
    assert run("--version").stdout == f"atoll {__version__}\n"


def test_the_help_names_every_command_and_teaches_by_example() -> None:
    told = run("--help").stdout
    assert told.startswith("Usage: atoll ")
    assert all(f"\n  {name} " in told for name in COMMANDS)
    assert 'atoll ask "Why is the sky blue?"' in told


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_the_list_says_of_it(name: str) -> None:
    context = click.Context(atoll)
    command = atoll.get_command(context, name)
    assert command is not None
    assert command.help is not None
    first_sentence = " ".join(command.help.split()).partition(". ")[0].removesuffix(".") + "."
    assert COMMANDS[name][1] == first_sentence


@pytest.mark.parametrize("name", ["serve", "ask", "route", "models", "config check", "ledger tail", "ledger export"])
def test_the_help_of_a_command_has_examples(name: str) -> None:
    told = CliRunner().invoke(atoll, [*name.split(), "--help"])
    assert told.exit_code == 0
    assert f"Examples:\n    atoll {name}" in told.output


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    program = """
import sys
from click.testing import CliRunner
from atoll.cli import atoll
for command in (["--help"], ["serve", "--help"], ["ask", "--help"], ["route", "--help"], ["ledger", "tail", "--help"]):
    assert CliRunner().invoke(atoll, command).exit_code == 0
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "litellm", "sqlalchemy", "alembic", "numpy", "aiohttp", "fastapi", "pydantic"} & set(modules)


def test_an_unknown_command() -> None:
    done = run("sevre")
    assert done.returncode == 2
    assert "No such command 'sevre'" in done.stderr


def test_a_wrong_configuration_is_told_in_one_line_without_a_stack_trace(tmp_path: Path) -> None:
    (tmp_path / "atoll.yaml").write_text("server:\n  prot: 9000\n")
    for command in (["serve"], ["config", "check"], ["models"], ["route", "Hello"], ["ledger", "tail"]):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("atoll: atoll.yaml:2: ")
        assert "prot" in done.stderr
        assert done.stderr.count("\n") == 1


def test_debug_shows_the_stack_trace(tmp_path: Path) -> None:
    done = run("--debug", "models", "--config", "none.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    program = f"{sys.executable} -m atoll models --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, env=os.environ | {"HOME": str(tmp_path)}
    )
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_with_130_and_no_stack_trace(tmp_path: Path) -> None:
    from atoll.config import LedgerSettings
    from atoll.gateway.ledger import Ledger, LedgerRow

    ledger = Ledger(LedgerSettings(), tmp_path)
    ledger.open()
    ledger.record(LedgerRow("req_1", time.time(), "/v1/chat/completions"))
    ledger.shut()
    command = [sys.executable, "-m", "atoll", "ledger", "tail", "--follow", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        following.stdout.readline()
        assert "req_1" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130
        assert following.stderr.read().strip() == ""
