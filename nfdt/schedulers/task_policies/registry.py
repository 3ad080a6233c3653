"""The task policies by name."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.schedulers.task_policies.base import TaskPolicy
from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.task_policies.finish_together import FinishTogetherTasks
from nfdt.schedulers.task_policies.proportional import ProportionalTasks
from nfdt.schedulers.task_policies.static import StaticTasks

TASK_POLICIES: dict[str, Callable[[], TaskPolicy]] = {
    "static": StaticTasks,
    "proportional": ProportionalTasks,
    "dynamic": DynamicTasks,
    "finish-together": FinishTogetherTasks,
}


def make_task_policy(name: str) -> TaskPolicy:
    """Return a new task policy of this name on the axis."""
    return TASK_POLICIES[name]()
