"""The metrics of one epoch: the states that workers report, merged so that every task counts once."""

from __future__ import annotations

from collections.abc import Collection

from nfdt.coordinator.membership import Member
from nfdt.core.work.instructions import Report
from nfdt.model.training.metric_states import merge_metric_states


class EpochMetrics:
    """The newest state of each worker's metrics, and those of single tasks.

    A worker that computes a task of a late one counts it apart, as the late one may compute it too. That count is used
    unless a state of another worker has it.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[int, str], bytes] = {}  # by number and name of the worker
        self._shared: dict[str, set[int]] = {}  # tasks in these states that other workers have had too
        self._in_flight: dict[str, frozenset[int]] = {}  # tasks in these states that were not finished
        self._unseen: dict[str, set[int]] = {}  # shared tasks that a worker has finished since its state
        self._apart: dict[int, bytes] = {}

    def reported(self, member: Member, report: Report, shared: Collection[int]) -> None:
        """Record a report of the epoch.

        Args:
            member: The worker.
            report: Its report.
            shared: Those of the finished tasks that other workers have had too.
        """
        name, state = member.name, report.epoch_state.metrics if report.epoch_state else report.metrics
        for task, metrics in report.apart.items():
            self._apart.setdefault(task, metrics)
        unseen = self._unseen.setdefault(name, set())
        unseen.update(task for task in shared if task not in report.apart)
        if state or report.epoch_state:
            self._states[member.index, name], self._in_flight[name] = state, report.counted
            self._shared.setdefault(name, set()).update(unseen)
            unseen.clear()

    def repeated(self, worker: str, tasks: Collection[int]) -> None:
        """Drop the state of a lost worker if it counts some of these tasks, which others compute again."""
        if not self._in_flight.get(worker, frozenset()).isdisjoint(tasks):
            self._states = {key: state for key, state in self._states.items() if key[1] != worker}
            self._in_flight.pop(worker)
            self._shared.pop(worker, None)

    def merged(self) -> bytes:
        """Return the merge of all states, in the order of the workers; empty if there is none."""
        counted = set[int]().union(*self._shared.values(), *self._in_flight.values())
        apart = [metrics for task, metrics in sorted(self._apart.items()) if task not in counted]
        return merge_metric_states([*(self._states[key] for key in sorted(self._states)), *apart])
