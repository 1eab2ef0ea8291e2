"""Pictures are drawn, repeat to the byte, and refuse what they cannot show."""

from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import Curve, Reliability, reliability
from atoll.routers.leaderboard.plots import calibration_png, cost_quality_png, regret_png

COSTS = np.geomspace(4e-3, 1e-4, 8)
CURVES = {f"router {n}": Curve(COSTS, np.linspace(0.9, 0.6, 8) - n / 100) for n in range(13)}
SINGLES = {"cheap": (1e-4, 0.5), "middling": (1e-3, 0.7), "dear": (5e-3, 0.85), "hopeless": (2e-3, 0.01)}


def drawn(path: Path) -> bytes:
    """The file's bytes, checked to hold a picture of some size."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 700
    assert height > 500
    assert b"Software" not in data
    return data


def test_cost_quality_curves_are_drawn_and_repeat(tmp_path: Path) -> None:
    one, again, other = (tmp_path / f"{name}.png" for name in ("one", "again", "other"))
    cost_quality_png(one, "made up", CURVES, SINGLES)
    cost_quality_png(again, "made up", CURVES, SINGLES)
    cost_quality_png(other, "made up", CURVES, SINGLES, highlighted=["router 12"])
    assert drawn(one) == drawn(again) != drawn(other)


def test_one_free_setting_and_one_unknown_model_are_no_hindrance(tmp_path: Path) -> None:
    free = {"local": Curve(np.array([1e-3, 0.0]), np.array([0.8, 0.4]))}
    cost_quality_png(
        tmp_path / "free.png", "made up", free, SINGLES | {"unknown": (float("nan"), 0.5), "own": (0.0, 0.4)}
    )
    drawn(tmp_path / "free.png")


def test_calibration_is_drawn_and_repeats(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    predicted = rng.uniform(size=500)
    diagrams: dict[str, Reliability] = {
        f"router {n}": reliability(predicted ** (1 + n / 5), rng.uniform(size=500) < predicted) for n in range(12)
    }
    for name in ("one.png", "again.png"):
        calibration_png(tmp_path / name, "made up", diagrams)
    assert drawn(tmp_path / "one.png") == drawn(tmp_path / "again.png")


def test_regret_is_drawn_and_repeats(tmp_path: Path) -> None:
    regrets = {f"router {n}": np.cumsum(np.full(3000, 0.1 + n / 100)) for n in range(12)}
    for name in ("one.png", "again.png"):
        regret_png(tmp_path / name, "made up", regrets, events={1000: "a model gets worse", 2900: "a price doubles"})
    assert drawn(tmp_path / "one.png") == drawn(tmp_path / "again.png")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    with pytest.raises(DataError, match="cost above zero"):
        cost_quality_png(path, "made up", CURVES, {"free": (0.0, 0.5)})
    with pytest.raises(DataError, match="highlight for 'nobody'"):
        cost_quality_png(path, "made up", CURVES, SINGLES, highlighted=["nobody"])
    with pytest.raises(DataError, match="predicts qualities"):
        calibration_png(path, "made up", {})
    with pytest.raises(DataError, match="at least one"):
        regret_png(path, "made up", {"router": np.array([])})
    assert not path.exists()
