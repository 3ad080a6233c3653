"""The workers of a simulated job: they start, their machines fail and return, they are regrouped, and they wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.group_plan import groups_event
from nfdt.coordinator.online_planner import WORLDS_S, plan_event
from nfdt.coordinator.topology_view import view_of
from nfdt.core.work import instructions as ins
from nfdt.simulate.events import Activity, Agenda, Signal
from nfdt.simulate.machines import Machine, Post, VirtualNetwork
from nfdt.simulate.post_plan import PostPlan
from nfdt.simulate.worker import SimulatedWorker

Make = Callable[[str, int, Post], SimulatedWorker]
"""A worker of this name and number for a post."""


class WorkerRoster:
    """The live and lost workers of one job.

    The loss of a machine of an allreduce ring ends the job; the loss of one of a group ends the group permanently.

    Args:
        agenda: The virtual clock and its events.
        coordinator: Coordinator of the job; decides when flat workers become groups.
        plan: Plan of the posts; decides which machines work together.
        network: Network with the load of the shards.
        make: Creates workers.
        changed: Called after a worker has joined or left.
        emit: Appends an event.

    Attributes:
        workers: All workers by name, including lost ones.
    """

    def __init__(
        self,
        agenda: Agenda,
        coordinator: Coordinator,
        plan: PostPlan,
        network: VirtualNetwork,
        make: Make,
        changed: Callable[[], None],
        emit: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self._agenda, self._coordinator, self._plan, self._network = agenda, coordinator, plan, network
        self._make, self._changed, self._emit = make, changed, emit
        self._alive: dict[str, Activity] = {}
        self._returning = 0

    def start_all(self, reason: str, since: float | None = None) -> None:
        """Start a worker for every post; its machines may have failed from virtual second ``since`` on."""
        for post in self._plan.posts:
            self._start(post, since)
        self._plan.seated()
        if shares := self._plan.shares:
            self._emit("groups", groups_event(shares, reason))
        self._changed()

    def _start(self, post: Post, since: float | None = None) -> None:
        """Start a worker and schedule its machines' failures from virtual second ``since`` on; None: from now on."""
        index = len(self.workers)
        name = post.worker = f"worker-{index}"
        worker = self.workers[name] = self._make(name, index, post)
        self._coordinator.joined(name, index)
        self._alive[name] = Activity(self._agenda, worker.run())
        for machine in post.machines:
            fails_at_s = machine.described.fails_at_s
            if fails_at_s is not None and fails_at_s >= (self._agenda.now() if since is None else since):
                self._agenda.at(fails_at_s, lambda machine=machine: self._fail(machine, name, post))  # type: ignore[misc]

    def lose(self, name: str, reason: str) -> None:
        """Remove a lost worker, with its pushes that have not arrived; a second call does nothing."""
        if name not in self._alive:
            return
        self._alive.pop(name).end()
        self.workers[name].client.lose()
        self._coordinator.left(name, reason)
        if not self._alive and not self._returning:
            self._coordinator.fail("All workers have failed.")
        self._changed()

    def regroup(self) -> None:
        """Form other workers after an epoch, by the servers' own planner, if that saves time."""
        coordinator, plan, living = self._coordinator, self._plan, [self.workers[name] for name in self._alive]
        remaining_s = coordinator.epoch_s * (plan.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase != "hold" or remaining_s <= 0:
            return
        if plan.review(living, remaining_s):
            self._replace_all("speeds have changed")
            coordinator.expect(len(plan.posts))
        elif view_of(plan.spec).may_form_groups(plan.spec) and len(living) == len(self.workers):
            load = replace(self._network.load, weights=plan.weights)
            choice = coordinator.plan_groups(load, remaining_s, plan.machines_of(living))
            if choice is not None:
                plan.turn(choice.preset.groups)
                self._emit("plan", plan_event(choice))
                self._replace_all("planned")
                coordinator.renew(plan.seen, plan.sizes)

    def _replace_all(self, reason: str) -> None:
        """Replace all workers; no worker trains while the worlds of the groups start."""
        since = self._agenda.now()
        self._coordinator.retire_all()
        for name, activity in self._alive.items():
            activity.end()
            self.workers[name].client.lose()  # its replies in flight must not arrive at a worker that has ended
        self._alive.clear()
        self._agenda.after(WORLDS_S, lambda: self.start_all(reason, since))

    def _fail(self, machine: Machine, name: str, post: Post) -> None:
        if name not in self._alive:
            return
        topology = self.workers[name].spec.algorithm.topology_facts
        if topology.allreduce:
            self._coordinator.fail(
                f"Machine {machine.number} has failed, and with it the ring. Elastic rings are real."
            )
        returns_after_s = machine.described.returns_after_s
        if returns_after_s is not None and topology.flat:
            self._returning += 1
            self._agenda.after(returns_after_s, lambda: self._return(post))
        self.lose(name, "its machine failed")

    def _return(self, post: Post) -> None:
        self._returning -= 1
        self._start(post)
        self._changed()


class WaitingWorkers:
    """The waiting workers, and repeated requests to the coordinator for their instructions.

    Args:
        agenda: The virtual clock and its events.
        coordinator: Source of the instructions.
    """

    def __init__(self, agenda: Agenda, coordinator: Coordinator) -> None:
        self._agenda, self._coordinator = agenda, coordinator
        self._signals: dict[str, Signal] = {}

    def add(self, worker: str) -> Signal:
        """Return the signal that fires with the worker's next instruction."""
        signal = self._signals[worker] = Signal(self._agenda)
        return signal

    def remove(self, worker: str) -> None:
        """Remove a lost worker."""
        self._signals.pop(worker, None)

    def wake(self) -> bool:
        """Pass an instruction to every worker that has one now; return whether there was any.

        Where all waiting workers are alike, no more are asked than get one, and one besides.
        """
        woken, alike = [], self._coordinator.wait_alike
        for worker, signal in self._signals.items():  # never a copy: there may be thousands after each report
            instruction = self._coordinator.next(worker)
            if not isinstance(instruction, ins.Wait):
                woken.append(worker)
                signal.fire(instruction)
            elif alike:
                break
        for worker in woken:
            del self._signals[worker]
        return bool(woken)
