"""When a conversation changes its model.

A model that has read a conversation bills its beginning as cached input. Leaving forfeits that, and users have seen
cache hit rates fall from 95 % to nothing when a router let conversations bounce between models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from atoll.routers.decision import ACCEPTABLE_SHARE
from atoll.routers.utility import COST_WEIGHT, typical_cost_usd, weights
from atoll.types import TOKENS_PER_PRICE_UNIT, Candidate, Decision

MARGIN: Final = 0.02
"""How much better, in quality (and likewise in costs), another model has to be before a conversation moves."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where a session stands."""

    candidate: Candidate
    """Who has answered so far."""
    context_tokens: int
    """What that candidate has read of the conversation, and may have cached."""
    is_in_tool_loop: bool = False
    """Whether the last message is a tool's result."""


def stay_or_leave(decision: Decision, conversation: Conversation, *, margin: float = MARGIN) -> Decision:
    """The decision for a conversation that is under way; `decision` is what would be chosen for a new one, unexplored.

    Stays with the conversation's candidate where that is still eligible and acceptable, unless another's score is
    better by more than `margin` and the price of reading the conversation anew: (input price - cached input price) x
    context tokens. Inside a tool loop it stays whenever it may. Scores are those of `decide`, so at preference 1 money
    does not matter here either.
    """
    current = conversation.candidate.name
    if decision.candidate == current or current not in decision.alternatives:
        return decision
    if conversation.is_in_tool_loop:
        return _stay(decision, current, "the conversation is inside a tool loop")
    index = {estimate.candidate: position for position, estimate in enumerate(decision.estimates)}
    qualities = [decision.estimates[index[name]].quality for name in (decision.candidate, *decision.alternatives)]
    if decision.estimates[index[current]].quality < ACCEPTABLE_SHARE * max(qualities):
        return decision
    gain = decision.scores[index[decision.candidate]] - decision.scores[index[current]]
    for_quality, for_cost = weights(decision.preference.quality_weight)
    typical_usd = typical_cost_usd([estimate.cost_usd for estimate in decision.estimates])
    cache_usd = lost_cache_usd(conversation)
    hurdle = margin * (for_quality + for_cost / COST_WEIGHT) + for_cost * cache_usd / typical_usd
    if gain > hurdle:
        return decision
    why = f"moving to {decision.candidate} gains less than it costs"
    if cache_usd > 0.0:
        why += f" (reading {conversation.context_tokens} cached tokens anew: ${cache_usd:.6f})"
    return _stay(decision, current, why)


def lost_cache_usd(conversation: Conversation) -> float:
    """What the conversation's candidate saves on its next turn because it has read the conversation before."""
    candidate = conversation.candidate
    if candidate.cached_input_usd_per_mtok is None:
        return 0.0
    saved_usd_per_mtok = max(candidate.input_usd_per_mtok - candidate.cached_input_usd_per_mtok, 0.0)
    return saved_usd_per_mtok * conversation.context_tokens / TOKENS_PER_PRICE_UNIT


def _stay(decision: Decision, current: str, why: str) -> Decision:
    others = (decision.candidate, *(name for name in decision.alternatives if name != current))
    return replace(
        decision,
        candidate=current,
        alternatives=others,
        reason=f"{current}: this conversation stays with it, since {why}",
        propensity=1.0,
    )
