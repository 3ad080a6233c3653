"""The tasks of the convergence study, by name."""

from __future__ import annotations

from benchmarks.workloads.tasks.characters import NEXT_CHARACTER
from benchmarks.workloads.tasks.cifar10 import CIFAR10, CIFAR10_CNN16, CIFAR10_RESNET8, CIFAR10_RESNET20
from benchmarks.workloads.tasks.fashion_mnist import FASHION_MNIST
from benchmarks.workloads.tasks.housing import HOUSING
from benchmarks.workloads.tasks.mnist import MNIST
from benchmarks.workloads.tasks.sms import SMS
from benchmarks.workloads.tasks.task import StudyTask

TASKS: dict[str, StudyTask] = {
    task.name: task
    for task in (
        *(FASHION_MNIST, MNIST, CIFAR10, CIFAR10_CNN16, CIFAR10_RESNET20, CIFAR10_RESNET8),
        *(SMS, NEXT_CHARACTER, HOUSING),
    )
}
