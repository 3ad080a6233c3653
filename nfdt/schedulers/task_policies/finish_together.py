"""Finish-together tasks: dynamic, but the end of an epoch is divided so that all workers end at the same time."""

from __future__ import annotations

from nfdt.schedulers.finish_together import Runner, steps_to_share
from nfdt.schedulers.task_policies.base import EpochView, LeaseHolder
from nfdt.schedulers.task_policies.dynamic import DynamicTasks

STALE_STEPS = 20  # age of a measured speed, in step times of its worker, after which it is always measured again


class FinishTogetherTasks(DynamicTasks):
    """Dynamic tasks in which a worker gets only as many steps as it finishes before all others have finished theirs."""

    name = "finish-together"
    ends_together = True
    depends_on_speed = True

    def limit(self, size: int, worker: LeaseHolder, epoch: EpochView) -> int:
        """Return the worker's part of the rest if the rest is small."""
        return min(size, _steps_left_for(worker, epoch)) if self._ends_soon(worker.name, size, epoch) else size

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return False: a slow worker may wait while a fast one gets a step."""
        return False

    def _ends_soon(self, worker: str, size: int, epoch: EpochView) -> bool:
        """Whether the worker's part of the rest may be under ``size`` steps, if speeds double before the next sum."""
        step_s = epoch.speeds.now(worker)
        if step_s is None or not epoch.samples_per_s:
            return True
        least_s = epoch.book.remaining * epoch.reference / (2 * epoch.samples_per_s)
        return least_s < (size + 1) * step_s.seconds(epoch.size_of(worker))


def _steps_left_for(worker: LeaseHolder, epoch: EpochView) -> int:
    """Return the worker's steps if the rest of the epoch is divided so that all end together."""
    runners = {w.name: runner for w in epoch.workers if (runner := _runner(w, w is worker, epoch))}
    if worker.name not in runners:
        return 1
    steps = steps_to_share(epoch.book.remaining * epoch.reference, list(runners.values()))
    own = dict(zip(runners, steps, strict=True))[worker.name]
    stale_s = STALE_STEPS * runners[worker.name].step_s
    return own or int(epoch.now - worker.leased_at > stale_s)  # occasional steps detect a speed-up


def _runner(worker: LeaseHolder, asks: bool, epoch: EpochView) -> Runner | None:
    line = epoch.speeds.now(worker.name)
    if line is None:
        return None
    held = epoch.book.held(worker.name, begun=worker.in_flight)
    if held:
        left_s = worker.leased_at + sum(line.seconds(task.samples) for task in held) - epoch.now
        free_in_s = abs(left_s)  # assume that a late worker needs as long again
    else:
        computing_s = max(0.0, worker.free_at - epoch.now)
        silent_s = max(0.0, epoch.now - max(worker.free_at, worker.seen_at))
        free_in_s = computing_s if asks else computing_s + silent_s  # so is a silent one
    size = epoch.size_of(worker.name)
    return Runner(free_in_s, line.seconds(size), size)
