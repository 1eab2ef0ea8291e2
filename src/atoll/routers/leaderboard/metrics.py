"""Every metric of the leaderboard in one list; each file beside this one holds those of one idea."""

from __future__ import annotations

from atoll.routers.leaderboard.arena import arena_score, opt_acc, opt_cost, opt_sel, robustness, utility_flip
from atoll.routers.leaderboard.calibration import Reliability, brier, ece, ece_per_model, reliability, token_r2
from atoll.routers.leaderboard.categories import category_rates, difficulty_gap, flip_rate
from atoll.routers.leaderboard.curves import (
    Curve,
    best_single,
    curve_of,
    nauc,
    operating_point,
    peak,
    picked,
    qnc,
    single_models,
)
from atoll.routers.leaderboard.hull import aiq, hull, mixed, zero_router
from atoll.routers.leaderboard.pairwise import apgr, cpt, pgr, strong_share
from atoll.routers.leaderboard.relative import gain_at_best, gap_at_oracle, rci
from atoll.routers.leaderboard.supervision import sa_bep, sa_cr

__all__ = [
    "Curve",
    "Reliability",
    "aiq",
    "apgr",
    "arena_score",
    "best_single",
    "brier",
    "category_rates",
    "cpt",
    "curve_of",
    "difficulty_gap",
    "ece",
    "ece_per_model",
    "flip_rate",
    "gain_at_best",
    "gap_at_oracle",
    "hull",
    "mixed",
    "nauc",
    "operating_point",
    "opt_acc",
    "opt_cost",
    "opt_sel",
    "peak",
    "pgr",
    "picked",
    "qnc",
    "rci",
    "reliability",
    "robustness",
    "sa_bep",
    "sa_cr",
    "single_models",
    "strong_share",
    "token_r2",
    "utility_flip",
    "zero_router",
]
