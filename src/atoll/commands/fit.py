"""`atoll fit`: train a router on outcome tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from atoll.commands.options import json_option
from atoll.commands.output import echo_json, number

if TYPE_CHECKING:
    from rich.progress import Progress

    from atoll.routers.datasets import Dataset
    from atoll.routers.embedding.base import Embedder
    from atoll.routers.table import Matrix

_TEXTS_AT_ONCE: Final = 128


@click.group()
def fit() -> None:
    """Train a router on outcomes."""


@fit.command(
    epilog="""
\b
Examples:
  atoll fit knn --data outcomes/mmlupro --out my-router
  atoll fit knn --data outcomes/a --data outcomes/b --embedder minilm --out my-router.safetensors

A data folder holds prompts.parquet (prompt_id, text) and outcomes.parquet (prompt_id, model, quality and, where
known, input_tokens, output_tokens, cost_usd). Serve with it by naming what was written under `routing.router` in the
configuration, with the same embedder.
"""
)
@click.option(
    "--data",
    "folders",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    multiple=True,
    required=True,
    help="A folder with outcomes; may be given several times.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Where the router goes: a folder, or one file if it ends in .safetensors.",
)
@click.option("--embedder", type=click.Choice(["static", "minilm"]), default="static", show_default=True)
@click.option("--k", type=click.IntRange(min=1), help="Neighbours.  [default: chosen by cross-validation]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@json_option
def knn(folders: Sequence[Path], out: Path, embedder: str, k: int | None, seed: int, as_json: bool) -> None:
    """Train a k-nearest-neighbours router."""
    from atoll.routers.datasets import candidates_of, joined, load_dataset
    from atoll.routers.embedding.load import load_embedder
    from atoll.routers.knn import KNNRouter

    model = load_embedder(embedder)
    with _progress(is_shown=not as_json) as progress:
        datasets = [load_dataset(folder) for folder in folders]
        embeddings = [_embed(model, dataset, progress) for dataset in datasets]
        _, table = joined(datasets, embeddings)
        router = KNNRouter(k, seed=seed).fit_table(
            table, candidates_of(datasets), space=model.space, progress=_bar(progress, "choosing k")
        )
    router.save(out)
    assert router.validation_ is not None
    from atoll.routers.kernel_cv import picks

    summary = {
        **router.summary(),
        "prompts": len(table),
        "outcomes": table.n_outcomes,
        "datasets": [dataset.name for dataset in datasets],
        "candidates": len(router.candidates_),
        "squared_error": router.validation_.squared_error,
        "squared_error_of_means": router.validation_.squared_error_of_means,
        "quality_of_choice": asdict(picks(router.validation_, table, router.quality_means_)),
        "out": str(out),
    }
    if as_json:
        echo_json(summary)
    else:
        _echo_summary(summary)


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
    kernel, choice = summary["kernel"], summary["quality_of_choice"]
    click.echo(
        f"Learned from {summary['outcomes']} outcomes of {summary['candidates']} models "
        f"on {summary['prompts']} prompts ({', '.join(summary['datasets'])})."
    )
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
    click.echo(f"Written to {summary['out']} (space {summary['space']}, version {summary['version']}).")
