"""The plainest contextual router: a model is as good on a prompt as on prompts of its group.

Groups are found by k-means; means are drawn to the model's own (`group_table.py`). What other routers add to this is
what their ideas are worth: most of what routing gains is said to be the kind of task (arXiv 2608.23023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from atoll.routers.columns import ColumnRouter
from atoll.routers.parameters import Range
from atoll.routers.table import OutcomeTable


class GroupMeansRouter(ColumnRouter):
    """All of it is what routers with one column per model have in common."""

    name: ClassVar[str] = "group_means"
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {"seed": Range(0, 2**31 - 1, is_integer=True)}

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def _learn(self, table: OutcomeTable) -> None:
        """Nothing beyond groups and their means."""
