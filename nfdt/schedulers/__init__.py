"""Distribution of samples to workers: pure, without clock or thread."""

from nfdt.core.order import order_crc
from nfdt.schedulers.batch_policies import BatchSizes, Bounds
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.proportions import (
    Runner,
    equal_time_split,
    largest_remainder,
    proportional_split,
    steps_to_share,
    water_fill,
)
from nfdt.schedulers.sized_tasks import SizedTasks
from nfdt.schedulers.sources import FedTasks, PlannedTasks, TaskSource
from nfdt.schedulers.tasks import Position, Task, TaskPlan
from nfdt.schedulers.throughput import Speeds, StepTime, Throughput, lease_size

__all__ = [
    "BatchSizes",
    "Bounds",
    "SizedTasks",
    "FedTasks",
    "LeaseBook",
    "PlannedTasks",
    "Position",
    "Runner",
    "Speeds",
    "StepTime",
    "Task",
    "TaskPlan",
    "TaskSource",
    "Throughput",
    "equal_time_split",
    "largest_remainder",
    "lease_size",
    "order_crc",
    "proportional_split",
    "steps_to_share",
    "water_fill",
]
