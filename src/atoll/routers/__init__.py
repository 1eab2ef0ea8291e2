"""Which model answers, and how good that choice was."""

from atoll.routers.base import Estimates, Router
from atoll.routers.decision import decide
from atoll.routers.eligibility import Exclusion, NoneEligible, Reason, Requirements, exclude
from atoll.routers.knn import KNNRouter
from atoll.routers.prior import PriorRouter
from atoll.routers.registry import load_router, make_router
from atoll.routers.stickiness import Conversation, stay_or_leave

__all__ = [
    "Conversation",
    "Estimates",
    "Exclusion",
    "KNNRouter",
    "NoneEligible",
    "PriorRouter",
    "Reason",
    "Requirements",
    "Router",
    "decide",
    "exclude",
    "load_router",
    "make_router",
    "stay_or_leave",
]
