"""Task policies: the distribution of an epoch's tasks to workers over time, one file per policy."""

from nfdt.schedulers.task_policies.base import EpochView, LeaseHolder, TaskPolicy
from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.task_policies.registry import TASK_POLICIES, make_task_policy

__all__ = ["TASK_POLICIES", "DynamicTasks", "EpochView", "LeaseHolder", "TaskPolicy", "make_task_policy"]
