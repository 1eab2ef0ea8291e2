"""The report's pictures: cost-quality curves, calibration, regret. PNG, drawn without a display.

The same data give the same bytes under one version of matplotlib: no date and no program name is written. At most
`MAX_HIGHLIGHTED` routers of a picture are coloured and named; the others are thin grey lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, MissingExtraError
from atoll.routers.leaderboard.calibration import Reliability
from atoll.routers.leaderboard.curves import Curve
from atoll.routers.leaderboard.hull import hull

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

MAX_HIGHLIGHTED: Final = 10
_MAX_LABELLED: Final = 12
"""Single models named in a picture: the hull's corners first, then the best ones that stand free."""
_SIZE_INCHES: Final = (10.0, 5.6)
_DPI: Final = 110
_GREY: Final = "#b8b8b8"
_COLOURS: Final = (
    "#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#393b79",
)  # fmt: skip
_DASHES: Final = ("-", "--")


def cost_quality_png(
    path: Path,
    dataset: str,
    curves: Mapping[str, Curve],
    singles: Mapping[str, tuple[float, float]],
    *,
    highlighted: Sequence[str] = (),
) -> None:
    """Each router's frontier over a logarithmic cost axis, the single models as points, their hull as a line.

    `curves` by router, one sweep each; `singles` mean (cost_usd, quality) by model. `highlighted` routers are coloured
    and listed in this order, the first drawn boldest; the first ten of `curves` where none is named. Raises DataError
    where no point has a cost above zero.
    """
    points = {name: at for name, at in singles.items() if at[0] > 0.0 and np.isfinite(at).all()}
    if not points:
        raise DataError(f"no single model of {dataset!r} has a cost above zero; there is nothing to draw")
    names = _highlighted(curves, highlighted)
    figure, axes = _figure(f"{dataset}: quality against cost")
    axes.set_xscale("log")
    of_hull = _draw_hull(axes, points)
    for name in curves:
        if name not in names:
            _draw_frontier(axes, curves[name], color=_GREY, linewidth=0.9, zorder=1)
    for rank, name in reversed(list(enumerate(names))):
        look: dict[str, Any] = {
            "color": _COLOURS[rank],
            "linestyle": _DASHES[rank % 2],
            "zorder": 4 + len(names) - rank,
        }
        _draw_frontier(axes, curves[name], label=name, linewidth=2.4 if rank == 0 else 1.5, **look)
    cost_usd, quality = zip(*points.values(), strict=True)
    axes.set_xlim(min(cost_usd) / 1.5, max(cost_usd) * 1.8)
    low = _set_quality_limits(axes, list(curves.values()), quality)
    n_below = sum(each < low for each in quality)
    of_singles = f"single models ({n_below} below)" if n_below else "single models"
    axes.scatter(cost_usd, quality, s=22, color="black", zorder=20, label=of_singles)
    axes.set_xlabel("mean cost of one prompt (USD, logarithmic)")
    axes.set_ylabel("mean quality (0 to 1)")
    axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.6)
    _legend(axes, [*names, "hull of single models", of_singles], n_more=len(curves) - len(names))
    # Last: where names fit is known once everything else has its place.
    _label_points(figure, axes, points, of_hull)
    _write(figure, path)


def calibration_png(
    path: Path, dataset: str, reliabilities: Mapping[str, Reliability], *, highlighted: Sequence[str] = ()
) -> None:
    """Mean outcome against mean prediction of each bin, by router, with the expected calibration error in the legend.

    Dots grow with the share of predictions in their bin. Bins of under 0.1 % of the predictions are left out.
    """
    if not reliabilities:
        raise DataError(f"no router of {dataset!r} predicts qualities; there is nothing to draw")
    names = _highlighted(reliabilities, highlighted)
    figure, axes = _figure(f"{dataset}: calibration of predicted quality", size_inches=(8.4, 6.0))
    axes.plot([0, 1], [0, 1], color="black", linewidth=1.0, linestyle=":", label="calibrated")
    labels = [f"{name} (ECE {reliabilities[name].ece:.3f})" for name in names]
    for rank, (name, label) in enumerate(zip(names, labels, strict=True)):
        bins = reliabilities[name]
        share = bins.count / max(int(bins.count.sum()), 1)
        shown = share >= 0.001
        axes.plot(
            bins.predicted[shown],
            bins.actual[shown],
            color=_COLOURS[rank],
            linestyle=_DASHES[rank % 2],
            linewidth=2.2 if rank == 0 else 1.3,
            zorder=3 + len(names) - rank,
            label=label,
        )
        axes.scatter(
            bins.predicted[shown], bins.actual[shown], s=8 + 160 * share[shown], color=_COLOURS[rank], zorder=14
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("predicted quality (mean of bin)")
    axes.set_ylabel("measured quality (mean of bin)")
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    _legend(axes, [*labels, "calibrated"], n_more=len(reliabilities) - len(names))
    _write(figure, path)


def regret_png(
    path: Path,
    title: str,
    regrets: Mapping[str, Floats],
    *,
    events: Mapping[int, str] | None = None,
    highlighted: Sequence[str] = (),
) -> None:
    """Cumulative regret over a stream of prompts, by router, the final value in the legend.

    `regrets` are arrays of shape (n_steps,), cumulative, in quality against the best choice of each prompt. `events`
    names what happened before a step (a model got worse, a price changed): drawn as vertical lines.
    """
    if not regrets or any(each.ndim != 1 or not each.size for each in regrets.values()):
        raise DataError(f"regrets of {title!r} must be arrays of shape (n_steps,), at least one")
    names = _highlighted(regrets, highlighted)
    figure, axes = _figure(f"{title}: cumulative regret")
    for name in regrets:
        if name not in names:
            axes.plot(*_thinned(regrets[name]), color=_GREY, linewidth=0.9, zorder=1)
    labels = [f"{name} ({regrets[name][-1]:,.0f})" for name in names]
    for rank, (name, label) in enumerate(zip(names, labels, strict=True)):
        look: dict[str, Any] = {"color": _COLOURS[rank], "linestyle": _DASHES[rank % 2], "label": label}
        axes.plot(*_thinned(regrets[name]), linewidth=2.4 if rank == 0 else 1.5, zorder=3 + len(names) - rank, **look)
    n_steps = max(len(each) for each in regrets.values())
    axes.set_xlim(0, n_steps)
    axes.set_ylim(bottom=min(0.0, *(float(each.min()) for each in regrets.values())))
    axes.set_xlabel("prompts answered")
    axes.set_ylabel("regret (quality lost to the best choices, summed)")
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    for step, text in sorted((events or {}).items()):
        axes.axvline(step, color="#555555", linewidth=1.0, linestyle=":")
        is_late = step > 0.7 * n_steps
        at = (step - 0.006 * n_steps) if is_late else (step + 0.006 * n_steps)
        axes.text(
            at,
            0.985,
            text,
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            va="top",
            ha="right" if is_late else "left",
        )
    _legend(axes, labels, n_more=len(regrets) - len(names))
    _write(figure, path)


def _figure(title: str, *, size_inches: tuple[float, float] = _SIZE_INCHES) -> tuple[Figure, Axes]:
    """A figure of its own, outside pyplot's global state, so that threads and jobs may draw at once."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing the leaderboard's curves", "train") from error
    figure = Figure(figsize=size_inches, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _write(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", metadata={"Software": None})


def _highlighted(every: Mapping[str, object], wanted: Sequence[str]) -> list[str]:
    missing = [name for name in wanted if name not in every]
    if missing:
        raise DataError(f"there is nothing to highlight for {missing[0]!r}; drawn are {', '.join(every)}")
    return list(wanted or every)[:MAX_HIGHLIGHTED]


def _draw_frontier(axes: Axes, curve: Curve, **look: Any) -> None:
    """Steps, as `nauc` counts them; a short tick where the curve begins."""
    frontier = curve.frontier()
    seen = (frontier.cost_usd > 0.0) & np.isfinite(frontier.quality)
    axes.plot(frontier.cost_usd[seen], frontier.quality[seen], drawstyle="steps-post", **look)


def _draw_hull(axes: Axes, points: Mapping[str, tuple[float, float]]) -> set[tuple[float, float]]:
    """The straight lines between corners, which bend on a logarithmic axis; flat right of the last. The corners."""
    cost_usd, quality = (np.array(values) for values in zip(*points.values(), strict=True))
    corners = hull(Curve(cost_usd, quality))
    along = np.geomspace(cost_usd.min(), cost_usd.max() * 1.8, 400)
    along = np.unique(np.concatenate([along, corners.cost_usd]))
    heights = np.interp(along, corners.cost_usd, corners.quality)
    axes.plot(along, heights, color="black", linewidth=1.2, linestyle=":", label="hull of single models", zorder=3)
    return set(zip(corners.cost_usd.tolist(), corners.quality.tolist(), strict=True))


def _set_quality_limits(axes: Axes, curves: Sequence[Curve], single_quality: Sequence[float]) -> float:
    """From just under the median single model or the curves' own start, whichever is lower, to just over the best.

    A few models that fail altogether would otherwise squeeze what is compared into a thin band. Returns the lower end.
    """
    high = max([*single_quality, *(float(np.nanmax(each.quality)) for each in curves)])
    low = min([float(np.median(single_quality)), *(float(np.nanmin(each.frontier().quality)) for each in curves)])
    margin = 0.06 * max(high - low, 0.02)
    axes.set_ylim(low - margin, high + 1.5 * margin)
    return low - margin


def _label_points(
    figure: Figure, axes: Axes, points: Mapping[str, tuple[float, float]], of_hull: set[tuple[float, float]]
) -> None:
    """Name corners of the hull, then models from the best on, wherever the name hits no other name and no point."""
    figure.draw_without_rendering()
    to_pixels = axes.transData.transform
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    frame = axes.get_window_extent(renderer)
    dots = [to_pixels(at) for at in points.values()]
    taken: list[Any] = []
    n_named = 0
    for name in sorted(points, key=lambda each: (points[each] not in of_hull, -points[each][1], each)):
        at = to_pixels(points[name])
        if n_named == _MAX_LABELLED or not frame.contains(*at):
            continue
        for align, across, up in (("left", 5, -9), ("right", -5, -9), ("left", 5, 4), ("right", -5, 4)):
            text = axes.annotate(
                name, points[name], (across, up), textcoords="offset points", ha=align, fontsize=7, zorder=21
            )
            text.set_in_layout(False)
            text.set_bbox({"facecolor": "white", "alpha": 0.65, "edgecolor": "none", "pad": 0.4})
            box = text.get_window_extent(renderer).padded(2.0)
            is_inside = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            hits = any(box.overlaps(other) for other in taken) or any(box.padded(4.0).contains(*dot) for dot in dots)
            if is_inside and not hits:
                taken.append(box)
                n_named += 1
                break
            text.remove()


def _legend(axes: Axes, order: Sequence[str], *, n_more: int) -> None:
    """Right of the axes, in the given order; the grey lines counted."""
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    title = f"{n_more} more in grey" if n_more > 0 else None
    axes.legend(
        [by_label[label] for label in order],
        order,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=9,
        title=title,
        title_fontsize=8,
    )


def _thinned(values: Floats, n_points: int = 1000) -> tuple[npt.NDArray[np.int64], Floats]:
    """Steps (from 1) and values, at most about `n_points` of them, the last among them."""
    at = np.unique(np.linspace(0, len(values) - 1, min(n_points, len(values))).round().astype(np.int64))
    return at + 1, values[at]
