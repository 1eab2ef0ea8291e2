"""`atoll fit`: train a router on outcome tables."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from atoll.commands.options import json_option
from atoll.commands.output import echo_json, number
from atoll.errors import DataError, RouterError

if TYPE_CHECKING:
    from rich.progress import Progress

    from atoll.routers.base import Router
    from atoll.routers.datasets import Dataset
    from atoll.routers.embedding.base import Embedder
    from atoll.routers.parameters import Range
    from atoll.routers.table import Matrix, OutcomeTable

_TEXTS_AT_ONCE: Final = 128
_NEVER_FITTED: Final = "routerarena"


class _Routers(click.Group):
    """One command for each router of the registry, made when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from atoll.routers.registry import ROUTERS

        return sorted(ROUTERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from atoll.routers.registry import ROUTERS, router_class

        return _command(router_class(cmd_name)) if cmd_name in ROUTERS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"There is no router {args[0]!r}. There are: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Routers,
    epilog="""
\b
Examples:
  atoll fit knn --data outcomes/mmlupro --out my-router
  atoll fit reef --data outcomes/a --data outcomes/b --out my-router
  atoll fit save_router --data outcomes/a --set n_groups=16 --out my-router

Serve with it: `routing: {router: {name: reef, path: my-router}}` in the configuration.
""",
)
def fit() -> None:
    """Train a router on outcomes."""


def _command(router: type[Router]) -> click.Command:
    """`atoll fit NAME`."""
    constraints: Mapping[str, Range] = getattr(router, "_parameter_constraints", {})
    told = "".join(f"  {name}: {allowed}\n" for name, allowed in constraints.items())
    params: list[click.Parameter] = [
        click.Option(
            ["--data", "folders"],
            type=click.Path(path_type=Path, file_okay=False, exists=True),
            multiple=True,
            required=True,
            help="A folder with outcomes; may be given several times.",
        ),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            required=True,
            help="Where the router goes: a folder, or one file if it ends in .safetensors.",
        ),
        click.Option(["--embedder"], type=click.Choice(["static", "minilm"]), default="static", show_default=True),
        click.Option(
            ["--set", "assignments"], multiple=True, metavar="KEY=VALUE", help="A parameter of the router; see below."
        ),
    ]
    if router.name == "knn":
        params.append(
            click.Option(["--k"], type=click.IntRange(min=1), help="Neighbours.  [default: by cross-validation]")
        )
    if "seed" in constraints:
        params.append(click.Option(["--seed"], type=click.IntRange(min=0), help="Of all that is random.  [default: 0]"))
    command = click.Command(
        router.name,
        params=params,
        callback=partial(_fit, router),
        help=f"Train the router {router.name!r}. {(router.__doc__ or '').strip().splitlines()[0]}",
        epilog=f"""
\b
Parameters for --set:
{told or "  none"}
\b
Example:
  atoll fit {router.name} --data outcomes/mmlupro --out my-router

A data folder holds prompts.parquet (prompt_id, text) and outcomes.parquet (prompt_id, model, quality and, where
known, input_tokens, output_tokens, cost_usd). Serve with it by `routing: {{router: {{name: {router.name}, path:
my-router}}}}` in the configuration, with the same embedder.
""",
    )
    return json_option(command)


def _fit(
    router_type: type[Router],
    folders: Sequence[Path],
    out: Path,
    embedder: str,
    assignments: Sequence[str],
    as_json: bool,
    **given: int | None,
) -> None:
    from atoll.routers.datasets import candidates_of, joined, load_dataset
    from atoll.routers.embedding.load import load_embedder
    from atoll.routers.parameters import check_parameters
    from atoll.routers.registry import make_router

    for folder in folders:
        if folder.resolve().name.startswith(_NEVER_FITTED):
            raise DataError(f"{str(folder)!r} is for evaluation only: no router is fitted on {_NEVER_FITTED}")
    constraints: Mapping[str, Range] = getattr(router_type, "_parameter_constraints", {})
    parameters = _parameters(router_type.name, constraints, assignments)
    parameters |= {name: value for name, value in given.items() if value is not None}
    router = make_router(router_type.name, **parameters)
    check_parameters(router, constraints)
    model = load_embedder(embedder)
    with _progress(is_shown=not as_json) as progress:
        datasets = [load_dataset(folder) for folder in folders]
        embeddings = [_embed(model, dataset, progress) for dataset in datasets]
        _, table = joined(datasets, embeddings)
        # Most can tell how far they are, none has to.
        options: dict[str, Any] = {}
        if "progress" in inspect.signature(router.fit_table).parameters:
            options["progress"] = _bar(progress, f"fitting {router.name}")
        router.fit_table(table, candidates_of(datasets), space=model.space, **options)
    router.save(out)
    summary = {
        **router.summary(),
        "prompts": len(table),
        "outcomes": table.n_outcomes,
        "datasets": [dataset.name for dataset in datasets],
        "candidates": len(router.candidates_),
        **_validated(router, table),
        "out": str(out),
    }
    if as_json:
        echo_json(summary)
    else:
        _echo_summary(summary)


def _validated(router: Router, table: OutcomeTable) -> dict[str, Any]:
    """How cross-validation went, for those that tell."""
    from atoll.routers.kernel_cv import picks
    from atoll.routers.knn import KNNRouter

    if not isinstance(router, KNNRouter) or router.validation_ is None:
        return {}
    return {
        "squared_error": router.validation_.squared_error,
        "squared_error_of_means": router.validation_.squared_error_of_means,
        "quality_of_choice": asdict(picks(router.validation_, table, router.quality_means_)),
    }


def _parameters(router: str, constraints: Mapping[str, Range], assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` as numbers; raises RouterError for a key that is none and a value that is not allowed."""
    parameters: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in constraints:
            allowed = ", ".join(constraints) or "none"
            raise RouterError(f"--set {assignment}: {router} has no parameter {name!r}. It has: {allowed}")
        try:
            value: Any = json.loads({"none": "null"}.get(text.lower(), text.lower()))
        except ValueError:
            value = text
        if not constraints[name].allows(value):
            raise RouterError(f"--set {assignment}: {name} must be {constraints[name]}")
        parameters[name] = value
    return parameters


def _embed(model: Embedder, dataset: Dataset, progress: Progress) -> Matrix:
    import numpy as np

    task = progress.add_task(f"embedding {dataset.name}", total=len(dataset))
    vectors = np.empty((len(dataset), model.dimension), dtype=np.float32)
    for start in range(0, len(dataset), _TEXTS_AT_ONCE):
        part = slice(start, start + _TEXTS_AT_ONCE)
        vectors[part] = model.embed(dataset.texts[part])
        progress.update(task, completed=min(part.stop, len(dataset)))
    return vectors


def _progress(is_shown: bool) -> Progress:
    """Bars on standard error, for people who look at them."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True, disable=not is_shown)


def _bar(progress: Progress, what: str) -> Callable[[float], None]:
    task = progress.add_task(what, total=1.0)
    return lambda share: progress.update(task, completed=share)


def _echo_summary(summary: dict[str, Any]) -> None:
    click.echo(
        f"Learned from {summary['outcomes']} outcomes of {summary['candidates']} models "
        f"on {summary['prompts']} prompts ({', '.join(summary['datasets'])})."
    )
    if "quality_of_choice" in summary:
        _echo_validation(summary)
    click.echo(f"Written to {summary['out']} (space {summary['space']}, version {summary['version']}).")


def _echo_validation(summary: dict[str, Any]) -> None:
    kernel, choice = summary["kernel"], summary["quality_of_choice"]
    click.echo(
        f"k = {kernel['k']}, bandwidth {kernel['bandwidth']:g}, prior strength {kernel['prior_strength']:g}: "
        f"squared error {number(summary['squared_error'], 4)}, "
        f"of the models' means {number(summary['squared_error_of_means'], 4)}."
    )
    click.echo(
        f"Quality of the choice when only quality counts (leave-one-out): {number(choice['router'], 4)}; "
        f"best single model {number(choice['best_single'], 4)}, random {number(choice['random'], 4)}, "
        f"oracle {number(choice['oracle'], 4)}."
    )
