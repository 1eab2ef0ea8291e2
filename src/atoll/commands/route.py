"""`atoll route`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import click

from atoll.commands.options import config_option, json_option, read_catalog
from atoll.commands.output import NOTHING, echo_json, echo_table, number, one_line, terminal_safe, usd
from atoll.commands.prompts import Body, body_of, read_prompts
from atoll.errors import RequestError

if TYPE_CHECKING:
    from atoll.config import Settings
    from atoll.gateway.catalog import Catalog

Decision = dict[str, Any]
"""As `/v1/route` answers and the ledger keeps it."""

_CHOSEN: Final = "→"
_MAX_NAME_CHARS: Final = 60


@click.command(
    epilog="""
\b
Examples:
  atoll route "Why is the sky blue?"
  atoll route "Prove Fermat's last theorem" --preference 1 --json
  atoll route "Hello" --preference 0 --preference 0.5 --preference 1
  atoll route --file prompts.txt --preference 0 --preference 1       one prompt a line
  atoll route --file prompts.jsonl                                   {"prompt": "..."} or {"messages": [...]} a line
"""
)
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompt_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Many prompts instead of one: shows who would get which share, at what cost and quality.",
)
@click.option(
    "--preference",
    "preferences",
    type=click.FloatRange(0, 1),
    multiple=True,
    help="0 = cheapest acceptable, 1 = best at any cost; several to compare.  [default: routing.default_preference]",
)
@click.option("--max-cost", "max_cost_usd", type=click.FloatRange(0), help="At most so many dollars for one answer.")
@click.option("--system", help="The system prompt.")
@config_option
@json_option
def route(
    prompt: str | None,
    prompt_file: Path | None,
    preferences: tuple[float, ...],
    max_cost_usd: float | None,
    system: str | None,
    config_path: Path | None,
    as_json: bool,
) -> None:
    """Show which model would answer, and why. Needs no running gateway and asks no model.

    It reads the configuration, embeds the prompt and decides as the gateway would. What a running gateway has learned
    since it started is not known here.
    """
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give either a prompt or --file with prompts.")
    settings, catalog = read_catalog(config_path)
    bodies = [body_of(prompt, system)] if prompt is not None else read_prompts(prompt_file or Path(), system)
    wanted = preferences or (settings.routing.default_preference,)
    with _quiet():
        answers = asyncio.run(_decide(settings, catalog, bodies, wanted, max_cost_usd))
    if prompt_file is None:
        _echo_each(wanted, [_decision(answer) for (answer,) in answers], as_json=as_json)
    else:
        _echo_summaries([_summary(*pair) for pair in zip(wanted, answers, strict=True)], as_json=as_json)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings for a while: what went wrong in routing stands in the reason."""
    logger = logging.getLogger("atoll")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _decide(
    settings: Settings,
    catalog: Catalog,
    bodies: Sequence[Body],
    preferences: Sequence[float],
    max_cost_usd: float | None,
) -> list[list[Decision | RequestError]]:
    """For each preference, one decision a body; or why nobody may answer it."""
    import orjson

    from atoll.gateway.parse import Endpoint, parse_request
    from atoll.gateway.parts import open_request_router
    from atoll.gateway.routing import decision_body

    async def one(body: Body, preference: float) -> Decision | RequestError:
        extension = {"preference": preference} | ({} if max_cost_usd is None else {"max_cost_usd": max_cost_usd})
        raw = orjson.dumps({**body, "atoll": extension})
        try:
            request = parse_request(Endpoint.ROUTE, raw, {}, settings.limits, settings.routing.default_preference)
            return decision_body(await router.plan(request, None))
        except RequestError as error:
            return error

    async with open_request_router(settings, catalog) as router:
        return [[await one(body, preference) for body in bodies] for preference in preferences]


def _echo_each(preferences: Sequence[float], decisions: Sequence[Decision], *, as_json: bool) -> None:
    """One prompt."""
    if as_json:
        echo_json(decisions[0] if len(decisions) == 1 else decisions)
        return
    for place, (preference, decision) in enumerate(zip(preferences, decisions, strict=True)):
        if place:
            click.echo()
        if len(preferences) > 1:
            click.echo(f"preference {preference:g}")
        _echo_decision(decision)


def _echo_decision(decision: Decision) -> None:
    """The chosen one first, then the others in the order of standing in, last those that cannot."""
    estimates = {estimate["candidate"]: estimate for estimate in decision["estimates"]}
    names = dict.fromkeys([decision["candidate"], *decision["alternatives"], *estimates, *decision["excluded"]])
    echo_table(
        ["", "candidate", ">quality ± std", ">out tokens", ">cost", ">score", ""],
        [_row(name, estimates.get(name), decision) for name in names],
    )
    click.echo(terminal_safe(f"\n{decision['reason']}  [{decision['router']} {decision['router_version']}]"))


def _row(name: str, estimate: dict[str, Any] | None, decision: Decision) -> list[str]:
    mark = _CHOSEN if name == decision["candidate"] else ""
    why_not = decision["excluded"].get(name)
    facts = [NOTHING] * 4
    if estimate is not None:
        facts = [
            f"{number(estimate['quality'], 3)} ± {number(estimate['quality_std'], 3)}",
            number(estimate["output_tokens"], 0),
            usd(estimate["cost_usd"]),
            number(estimate["score"], 4),
        ]
    return [mark, one_line(name, _MAX_NAME_CHARS), *facts, one_line(why_not["detail"], 100) if why_not else ""]


def _decision(answer: Decision | RequestError) -> Decision:
    if isinstance(answer, RequestError):
        raise answer
    return answer


def _summary(preference: float, answers: Sequence[Decision | RequestError]) -> dict[str, Any]:
    decisions = [answer for answer in answers if not isinstance(answer, RequestError)]
    chosen = [
        estimate
        for decision in decisions
        for estimate in decision["estimates"]
        if estimate["candidate"] == decision["candidate"]
    ]
    shares = Counter(decision["candidate"] for decision in decisions)
    return {
        "preference": preference,
        "prompts": len(answers),
        "mean_cost_usd": fmean(estimate["cost_usd"] for estimate in chosen) if chosen else None,
        "mean_quality": fmean(estimate["quality"] for estimate in chosen) if chosen else None,
        "fallbacks": sum(decision["is_fallback"] for decision in decisions),
        "refused": len(answers) - len(decisions),
        "first_refusal": next((str(answer) for answer in answers if isinstance(answer, RequestError)), None),
        "shares": {name: count / len(decisions) for name, count in shares.most_common()},
    }


def _echo_summaries(summaries: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Many prompts."""
    if as_json:
        echo_json(summaries)
        return
    names = list(dict.fromkeys(name for summary in summaries for name in summary["shares"]))
    click.echo(f"{summaries[0]['prompts']} prompts; estimates of the chosen candidates, and who is chosen how often\n")
    echo_table(
        [">preference", ">mean cost", ">mean quality", *(f">{one_line(name, _MAX_NAME_CHARS)}" for name in names)],
        [
            [
                f"{summary['preference']:g}",
                usd(summary["mean_cost_usd"]),
                number(summary["mean_quality"], 3),
                *(f"{100 * summary['shares'].get(name, 0):.0f} %" for name in names),
            ]
            for summary in summaries
        ],
    )
    for summary in summaries:
        if summary["fallbacks"]:
            click.echo(
                f"\nRouting failed for {summary['fallbacks']} prompts at preference {summary['preference']:g}: "
                "the default candidate would answer them. `atoll route PROMPT` shows why."
            )
        if summary["refused"]:
            told = one_line(summary["first_refusal"], 500)
            click.echo(f"\nNobody answers {summary['refused']} prompts at preference {summary['preference']:g}: {told}")
