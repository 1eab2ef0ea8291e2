"""The `atoll` command. Each subcommand is imported when it is called, so that help comes at once.

Exit codes: 0 it worked; 1 it failed; 2 the command line or the configuration is wrong; 130 it was interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import click

from atoll import __version__
from atoll.errors import AtollError, ConfigError

COMMANDS: Final = {
    "serve": ("atoll.commands.serve:serve", "Answer on http://127.0.0.1:8700/v1."),
    "ask": ("atoll.commands.ask:ask", "Ask a question; the answer streams to the terminal."),
    "route": ("atoll.commands.route:route", "Show which model would answer, and why."),
    "models": ("atoll.commands.models:models", "List what can be asked for, with prices."),
    "config": ("atoll.commands.config:config", "Check the configuration."),
    "ledger": ("atoll.commands.ledger:ledger", "Read what was asked, decided, answered and paid."),
    "fit": ("atoll.commands.fit:fit", "Train a router on outcomes."),
}
"""Where each command is, and its line in the help (the first sentence of its own)."""

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130


class _Root(click.Group):
    """Finds commands in `COMMANDS` and tells our errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AtollError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"atoll: {error}", err=True)
            sys.exit(MISUSED if isinstance(error, ConfigError) else FAILED)
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(INTERRUPTED)


@click.group(
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""
\b
Examples:
  atoll serve                                  answer on http://127.0.0.1:8700/v1
  atoll ask "Why is the sky blue?"             stream an answer, chosen by routing
  atoll route "Prove Fermat's last theorem"    who would answer, and why
  atoll ledger tail --follow                   watch what is asked and paid

Configuration is read from ./atoll.yaml where that exists, else from the file that --config names. Without
one, Atoll serves its embedded model and every provider whose key is in the environment.
""",
)
@click.version_option(__version__, "-V", "--version", prog_name="atoll", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def atoll(debug: bool) -> None:
    """One OpenAI-compatible endpoint in front of many models: each prompt goes to the model that pays."""
