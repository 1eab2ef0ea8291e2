"""From predictions to a choice: preference, hard cap, eligibility, ties and exploration.

`decide` knows nothing of how estimates were made, so every router is judged and served by the same rules:

1. A candidate that cannot answer, or whose estimated cost is over `max_cost_usd`, is out. When nobody is left,
   NoneEligible says why for each: a hard cap is never quietly exceeded.
2. Of the others, those with an estimated quality under `ACCEPTABLE_SHARE` of the best are not acceptable, however
   cheap.
3. The score (`utility.py`) trades quality against money as the preference says.
4. All acceptable candidates whose score is within the uncertainty of the best score are as good as equal, and the
   cheapest of them is chosen. Without this, small errors of prediction send most prompts to the most expensive model
   ("routing collapse", EquiRouter, arXiv 2602.03478).
5. With probability `exploration` the choice is drawn evenly from everybody eligible instead, and the propensity kept.

As the preference falls, the estimated cost of the choice for a prompt never rises, and neither does its estimated
quality: acceptability does not depend on the preference, the tolerance of step 4 is one number per prompt, and it only
grows. Proof: if `a` is chosen, every dearer candidate scores at most a tolerance better; weighing cost more only
lowers the dearer ones against `a`, so they cannot be chosen; and a cheaper one that was not chosen scored less than
`a` at a lower cost, so its quality is lower.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError
from atoll.routers.base import EstimateRow
from atoll.routers.eligibility import Exclusion, NoneEligible, over_cap
from atoll.routers.utility import weights
from atoll.types import Decision, Estimate, Preference

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

ACCEPTABLE_SHARE: Final = 0.4
"""Of the best eligible candidate's estimated quality. Below it an answer is not worth having at any price."""
TIE_STDS: Final = 0.5
"""Standard deviations of the best candidate's quality within which another counts as equal; half as many at
preference 1, where the caller pays for small differences too."""
MAX_TIE: Final = 0.03
"""The most quality that is ever given away as uncertain: what is known badly must not always go to the cheapest."""

_BALANCED: Final = Preference()
_RANDOM: Final = random.Random()  # noqa: S311  # exploration needs no secrecy


def decide(
    estimates: Sequence[Estimate],
    preference: Preference = _BALANCED,
    *,
    router: str,
    router_version: str,
    excluded: Mapping[str, object] | None = None,
    scores: Sequence[float] | None = None,
    exploration: float = 0.0,
    rng: random.Random = _RANDOM,
) -> Decision:
    """Choose among `estimates`, one per candidate of the router's pool.

    `excluded` names those that must not answer (what `eligibility.exclude` gives, or any mapping by name). `scores`
    takes the place of the utility for routers that rank by themselves; ties are then not looked for. `exploration` in
    [0, 1] is the share of requests that try somebody at random, with `rng`.

    Raises NoneEligible when nobody may answer, RouterError for a preference or an estimate that makes no sense.
    """
    row = EstimateRow.of(estimates)
    quality_weight = preference.quality_weight
    for_quality, for_cost = weights(quality_weight)
    eligible = _eligible(row, excluded, preference.max_cost_usd)
    qualities = row.quality[eligible]
    best = int(eligible[qualities.argmax()])
    if scores is None:
        ranks = for_quality * row.quality - (for_cost / _typical_usd(row.cost_usd)) * row.cost_usd
        unsure = TIE_STDS * (1.0 - 0.5 * quality_weight) * float(row.quality_std[best])
        tolerance = for_quality * min(MAX_TIE, unsure)
    else:
        ranks, tolerance = np.asarray(scores, dtype=np.float64), 0.0
    is_acceptable = qualities >= ACCEPTABLE_SHARE * row.quality[best]
    acceptable = eligible[is_acceptable]
    chosen = _cheapest_of_the_best(row, ranks, acceptable, tolerance)
    order = _ranked(row, ranks, acceptable, eligible[~is_acceptable], chosen)
    propensity, reason = 1.0, ""
    if exploration > 0.0 and len(eligible) > 1:
        drawn = rng.choice(eligible.tolist()) if rng.random() < exploration else chosen
        propensity = exploration / len(eligible)
        if drawn == chosen:
            propensity += 1.0 - exploration
        else:
            order.remove(drawn)
            order.insert(0, drawn)
            reason = _explored(row[drawn], row[chosen])
    names = [row.names[index] for index in order]
    return Decision(
        candidate=names[0],
        alternatives=tuple(names[1:]),
        router=router,
        router_version=router_version,
        reason=reason or _explain(row, eligible, acceptable, chosen, quality_weight if scores is None else None),
        estimates=row,
        scores=ranks.tolist(),
        propensity=propensity,
        preference=preference,
    )


def _typical_usd(cost_usd: Floats) -> float:
    """`utility.typical_cost_usd` of an array."""
    paid = cost_usd[cost_usd > 0.0]
    return math.exp(float(np.add.reduce(np.log(paid))) / len(paid)) if len(paid) else 1.0


def _eligible(row: EstimateRow, excluded: Mapping[str, object] | None, max_cost_usd: float | None) -> Indices:
    """Indices of those that may answer."""
    cap = math.inf if max_cost_usd is None else max_cost_usd
    if not cap >= 0.0:
        raise RouterError(f"max_cost_usd {max_cost_usd!r} makes no sense; give an amount in US dollars, at least 0")
    quality, cost_usd = row.quality, row.cost_usd
    # Written so that NaN fails too.
    may = (quality >= 0.0) & (quality <= 1.0) & (cost_usd >= 0.0) & (cost_usd < math.inf)
    if not may.all():
        raise RouterError(f"the router's estimate makes no sense: {row[int(may.argmin())]!r}")
    if cap < math.inf:
        may &= cost_usd <= cap
    if excluded:
        may &= [name not in excluded for name in row.names]
    eligible = may.nonzero()[0]
    if not len(eligible):
        raise NoneEligible(_why_nobody(row, excluded or {}, cap))
    return eligible


def _why_nobody(estimates: Sequence[Estimate], excluded: Mapping[str, object], cap: float) -> list[Exclusion]:
    exclusions = []
    for estimate in estimates:
        why = excluded.get(estimate.candidate)
        if isinstance(why, Exclusion):
            exclusions.append(why)
        elif why is None:
            exclusions.append(over_cap(estimate.candidate, estimate.cost_usd, cap))
    return exclusions


def _cheapest_of_the_best(row: EstimateRow, ranks: Floats, acceptable: Indices, tolerance: float) -> int:
    its = ranks[acceptable]
    best_enough = acceptable[its >= its.max() - tolerance].tolist()
    if len(best_enough) == 1:
        return int(best_enough[0])
    return int(min(best_enough, key=lambda index: (row.cost_usd[index], -ranks[index], -row.quality[index])))


def _ranked(row: EstimateRow, ranks: Floats, acceptable: Indices, rest: Indices, chosen: int) -> list[int]:
    """The fallback order: the choice, the other acceptable ones by score, then the rest by quality."""
    order: list[int] = acceptable[(-ranks[acceptable]).argsort(kind="stable")].tolist()
    order.remove(chosen)
    order.insert(0, chosen)
    if len(rest):
        order += rest[(-row.quality[rest]).argsort(kind="stable")].tolist()
    return order


def _explain(
    row: EstimateRow, eligible: Indices, acceptable: Indices, chosen: int, quality_weight: float | None
) -> str:
    """`quality_weight` is None where a policy has ranked: what moved it is not in the estimates."""
    name, quality, cost_usd = row.names[chosen], float(row.quality[chosen]), float(row.cost_usd[chosen])
    if len(eligible) == 1:
        return f"{name}: the only candidate that can answer this request"
    best_quality = float(row.quality[eligible].max())
    if quality >= best_quality:
        return f"{name}: best estimated quality ({quality:.2f}) of {len(eligible)} candidates"
    best = _best(row, eligible)
    lead = f"{name}: estimated quality {quality:.2f}"
    if quality_weight is None:
        return f"{lead}, ranked first of {len(eligible)} candidates by the router's policy"
    # Cheaper than the best, or the best would have been chosen: so the best costs something.
    at_cost = f"at {_percent(cost_usd, float(row.cost_usd[best]))} of its cost" if cost_usd > 0.0 else "at no cost"
    if best_quality - quality <= min(MAX_TIE, TIE_STDS * float(row.quality_std[best])):
        return f"{lead} is within the uncertainty of the best ({best_quality:.2f} {row.names[best]}) {at_cost}"
    if cost_usd <= float(row.cost_usd[acceptable].min()):
        return f"{lead}; the best has {best_quality:.2f} ({row.names[best]}), but nothing acceptable is cheaper"
    trade = f"the better trade at preference {quality_weight:g}"
    return f"{lead} against {best_quality:.2f} of {row.names[best]}, {at_cost}: {trade}"


def _best(row: EstimateRow, eligible: Indices) -> int:
    """The cheapest of those with the highest quality."""
    qualities = row.quality[eligible]
    equal = eligible[qualities == qualities.max()]
    return int(equal[row.cost_usd[equal].argmin()])


def _percent(part: float, whole: float) -> str:
    percent = 100.0 * part / whole
    return f"{percent:.0f} %" if percent >= 1.0 else f"{percent:.1g} %"


def _explored(drawn: Estimate, greedy: Estimate) -> str:
    return (
        f"{drawn.candidate}: tried so that the router keeps learning, where {greedy.candidate} would have been chosen"
    )
