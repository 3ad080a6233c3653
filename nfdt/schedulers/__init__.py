"""Who gets which samples: pure, no clock, no thread."""

from nfdt.core.order import order_crc, sample_order
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import FedTasks, PlannedTasks, TaskSource
from nfdt.schedulers.tasks import Position, Task, TaskPlan
from nfdt.schedulers.throughput import TaskSeconds, lease_size

__all__ = [
    "FedTasks",
    "LeaseBook",
    "PlannedTasks",
    "Position",
    "Task",
    "TaskPlan",
    "TaskSeconds",
    "TaskSource",
    "lease_size",
    "order_crc",
    "sample_order",
]
