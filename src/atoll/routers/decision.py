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

from atoll.errors import RouterError
from atoll.routers.eligibility import Exclusion, NoneEligible, over_cap
from atoll.routers.utility import typical_cost_usd, weights
from atoll.types import Decision, Estimate, Preference

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
    quality_weight = preference.quality_weight
    for_quality, for_cost = weights(quality_weight)
    eligible = _eligible(estimates, excluded, preference.max_cost_usd)
    is_policy = scores is not None
    if scores is None:
        cost_weight = for_cost / typical_cost_usd([estimate.cost_usd for estimate in estimates])
        scores = [for_quality * each.quality - cost_weight * each.cost_usd for each in estimates]
        best = max(eligible, key=lambda index: estimates[index].quality)
        tolerance = for_quality * min(MAX_TIE, TIE_STDS * (1.0 - 0.5 * quality_weight) * estimates[best].quality_std)
    else:
        tolerance = 0.0
    acceptable = _acceptable(estimates, eligible)
    chosen = _cheapest_of_the_best(estimates, scores, acceptable, tolerance)
    order = _ranked(estimates, scores, eligible, acceptable, chosen)
    propensity, reason = 1.0, ""
    if exploration > 0.0 and len(eligible) > 1:
        drawn = rng.choice(eligible) if rng.random() < exploration else chosen
        propensity = exploration / len(eligible)
        if drawn == chosen:
            propensity += 1.0 - exploration
        else:
            order.remove(drawn)
            order.insert(0, drawn)
            reason = _explored(estimates[drawn], estimates[chosen])
    names = [estimates[index].candidate for index in order]
    return Decision(
        candidate=names[0],
        alternatives=tuple(names[1:]),
        router=router,
        router_version=router_version,
        reason=reason or _explain(estimates, eligible, acceptable, chosen, None if is_policy else quality_weight),
        estimates=tuple(estimates),
        scores=tuple(scores),
        propensity=propensity,
        preference=preference,
    )


def _eligible(
    estimates: Sequence[Estimate], excluded: Mapping[str, object] | None, max_cost_usd: float | None
) -> list[int]:
    """Indices of those that may answer."""
    cap = math.inf if max_cost_usd is None else max_cost_usd
    if not cap >= 0.0:
        raise RouterError(f"max_cost_usd {max_cost_usd!r} makes no sense; give an amount in US dollars, at least 0")
    eligible = []
    for index, estimate in enumerate(estimates):
        # Written so that NaN fails too.
        if not (0.0 <= estimate.quality <= 1.0 and 0.0 <= estimate.cost_usd < math.inf):
            raise RouterError(f"the router's estimate makes no sense: {estimate!r}")
        if estimate.cost_usd <= cap and (not excluded or estimate.candidate not in excluded):
            eligible.append(index)
    if not eligible:
        raise NoneEligible(_why_nobody(estimates, excluded or {}, cap))
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


def _acceptable(estimates: Sequence[Estimate], eligible: list[int]) -> list[int]:
    floor = ACCEPTABLE_SHARE * max(estimates[index].quality for index in eligible)
    return [index for index in eligible if estimates[index].quality >= floor]


def _cheapest_of_the_best(
    estimates: Sequence[Estimate], scores: Sequence[float], acceptable: list[int], tolerance: float
) -> int:
    enough = max(scores[index] for index in acceptable) - tolerance
    best_enough = [index for index in acceptable if scores[index] >= enough]
    return min(best_enough, key=lambda index: (estimates[index].cost_usd, -scores[index], -estimates[index].quality))


def _ranked(
    estimates: Sequence[Estimate],
    scores: Sequence[float],
    eligible: list[int],
    acceptable: list[int],
    chosen: int,
) -> list[int]:
    """The fallback order: the choice, the other acceptable ones by score, then the rest by quality."""
    others = sorted((index for index in acceptable if index != chosen), key=lambda index: -scores[index])
    if len(acceptable) < len(eligible):
        rest = set(eligible).difference(acceptable)
        others += sorted(rest, key=lambda index: (-estimates[index].quality, index))
    return [chosen, *others]


def _explain(
    estimates: Sequence[Estimate], eligible: list[int], acceptable: list[int], chosen: int, quality_weight: float | None
) -> str:
    """`quality_weight` is None where a policy has ranked: what moved it is not in the estimates."""
    choice = estimates[chosen]
    if len(eligible) == 1:
        return f"{choice.candidate}: the only candidate that can answer this request"
    best = estimates[max(eligible, key=lambda index: (estimates[index].quality, -estimates[index].cost_usd))]
    if choice.quality >= best.quality:
        return f"{choice.candidate}: best estimated quality ({choice.quality:.2f}) of {len(eligible)} candidates"
    lead = f"{choice.candidate}: estimated quality {choice.quality:.2f}"
    if quality_weight is None:
        return f"{lead}, ranked first of {len(eligible)} candidates by the router's policy"
    # Cheaper than the best, or the best would have been chosen: so the best costs something.
    at_cost = f"at {_percent(choice.cost_usd, best.cost_usd)} of its cost" if choice.cost_usd > 0.0 else "at no cost"
    lost = best.quality - choice.quality
    if lost <= min(MAX_TIE, TIE_STDS * best.quality_std):
        return f"{lead} is within the uncertainty of the best ({best.quality:.2f} {best.candidate}) {at_cost}"
    if all(choice.cost_usd <= estimates[index].cost_usd for index in acceptable):
        return f"{lead}; the best has {best.quality:.2f} ({best.candidate}), but nothing acceptable is cheaper"
    trade = f"the better trade at preference {quality_weight:g}"
    return f"{lead} against {best.quality:.2f} of {best.candidate}, {at_cost}: {trade}"


def _percent(part: float, whole: float) -> str:
    percent = 100.0 * part / whole
    return f"{percent:.0f} %" if percent >= 1.0 else f"{percent:.1g} %"


def _explored(drawn: Estimate, greedy: Estimate) -> str:
    return (
        f"{drawn.candidate}: tried so that the router keeps learning, where {greedy.candidate} would have been chosen"
    )
