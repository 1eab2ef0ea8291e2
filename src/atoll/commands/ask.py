"""`atoll ask`."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from atoll.commands.chat import Answered, AskFailed, Gateway, GatewayUnreachable
from atoll.commands.options import config_file, config_option, json_option, read_settings
from atoll.commands.output import NOTHING, echo_json, one_line, terminal_safe, usd, write
from atoll.commands.prompts import body_of, valid_text
from atoll.errors import ConfigError

DEFAULT_URL: Final = "http://127.0.0.1:8700/v1"
_MAX_REASON_CHARS: Final = 200
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (to call, not to bind)


@click.command(
    epilog="""
\b
Examples:
  atoll ask "Why is the sky blue?"
  atoll ask --preference 1 "Prove that there is no largest prime"
  atoll ask --model gpt-4o-mini --system "Answer in French" "Hello"
  git diff | atoll ask - --system "Write a commit message"

The answer goes to standard output. Model, tokens, cost and reason follow in one line on standard error, so that a pipe
gets the answer alone.
"""
)
@click.argument("prompt")
@click.option("--model", default="auto", show_default=True, help="Who shall answer; `auto` lets Atoll choose.")
@click.option("--preference", type=click.FloatRange(0, 1), help="0 = cheapest acceptable, 1 = best at any cost.")
@click.option("--max-cost", "max_cost_usd", type=click.FloatRange(0), help="At most so many dollars for this answer.")
@click.option("--session", help="The conversation that this belongs to.")
@click.option("--system", help="The system prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="How long the answer may be.")
@click.option("--temperature", type=click.FloatRange(0, 2))
@click.option(
    "--url", envvar="ATOLL_URL", show_envvar=True, help=f"The gateway.  [default: the configured one, {DEFAULT_URL}]"
)
@click.option("--api-key", envvar="ATOLL_API_KEY", show_envvar=True, help="Where the gateway wants one.")
@config_option
@json_option
def ask(
    prompt: str,
    model: str,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    url: str | None,
    api_key: str | None,
    config_path: Path | None,
    as_json: bool,
    **extension: Any,
) -> None:
    """Ask a question; the answer streams to the terminal.

    PROMPT is the question, or - to read it from standard input. Where no gateway runs and none is named, one is started
    for this question alone, with the configuration that `atoll serve` would read.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature}
    body: dict[str, Any] = {
        "model": valid_text(model),
        **body_of(_standard_input() if prompt == "-" else prompt, system),
        "stream": True,
        "stream_options": {"include_usage": True},
        "atoll": {
            name: valid_text(value) if isinstance(value, str) else value
            for name, value in extension.items()
            if value is not None
        },
    } | {name: value for name, value in given.items() if value is not None}
    answered = Answered()
    with _answer(body, answered, url, api_key, config_path) as texts:
        if as_json:
            _echo_answer_json("".join(texts), answered)
        else:
            _echo_answer(texts, answered)


@contextlib.contextmanager
def _answer(
    body: dict[str, Any], answered: Answered, url: str | None, api_key: str | None, config_path: Path | None
) -> Iterator[Iterator[str]]:
    """The answer's texts, from the gateway that was named, the one that runs, or one of our own."""
    where = url if url is not None else _configured_url(config_path)
    # Closed here: an interruption between two texts would leave the generator waiting with an open connection.
    with contextlib.closing(Gateway(where, api_key).chat(body, answered)) as texts:
        try:
            first = next(texts, "")
        except GatewayUnreachable:
            if url is not None:
                raise
        else:
            yield itertools.chain([first], texts)
            return
    from atoll.commands.own_gateway import own_gateway

    click.echo(f"No gateway at {where}: starting one for this question (`atoll serve` keeps one).", err=True)
    with (
        own_gateway(config_file(config_path)) as own_url,
        contextlib.closing(Gateway(own_url, api_key or _own_key(config_path)).chat(body, answered)) as texts,
    ):
        yield texts


def _configured_url(config_path: Path | None) -> str:
    """Where `atoll serve` would listen."""
    try:
        server = read_settings(config_path).server
    except ConfigError:
        # Whether it is right matters once a gateway has to be started from it.
        return DEFAULT_URL
    host = _LOOPBACK.get(server.host, server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}/v1" if server.port else DEFAULT_URL


def _own_key(config_path: Path | None) -> str | None:
    """A gateway that we start reads the same configuration: its keys are ours."""
    return next((key.get_secret_value() for key in read_settings(config_path).server.api_keys), None)


def _echo_answer(texts: Iterator[str], answered: Answered) -> None:
    is_terminal = sys.stdout.isatty()
    last = ""
    try:
        for text in texts:
            write(terminal_safe(text) if is_terminal else text)
            last = text or last
    finally:
        # An error, and whatever the shell prints, begins a line of its own.
        if last and not last.endswith("\n"):
            click.echo()
    click.secho(_summary(answered), err=True, dim=True)


def _echo_answer_json(text: str, answered: Answered) -> None:
    echo_json({"answer": text, **asdict(answered)})


def _summary(answered: Answered) -> str:
    usage = answered.usage
    tokens = f"{usage.get('prompt_tokens', NOTHING)} + {usage.get('completion_tokens', NOTHING)} tokens"
    parts = [answered.model or NOTHING, tokens, usd(answered.cost_usd), answered.reason or NOTHING]
    return one_line(" · ".join(parts), _MAX_REASON_CHARS)


def _standard_input() -> str:
    text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not text:
        raise AskFailed("There is no question on standard input")
    return text
