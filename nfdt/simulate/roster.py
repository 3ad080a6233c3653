"""The workers of a simulated job: they start, their machines fail and return, they are regrouped, and they wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.group_plan import SHRINK_S, groups_event
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

    The loss of a machine of an allreduce ring ends the job. A group that loses a machine is formed again: with all its
    machines if they are back in time, else with the others, and with more of them between two epochs, as on a server.

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
        self._away: set[int] = set()  # numbers of the machines that have failed and not returned
        self._returning: set[int] = set()  # those of them that return
        self._forming = 0  # groups that are formed again
        for post in plan.posts:
            for machine in post.machines:
                if machine.described.fails_at_s is not None:
                    agenda.at(machine.described.fails_at_s, partial(self._fail, machine))

    def start_all(self, reason: str) -> None:
        """Start a worker for every post."""
        for post in self._plan.posts:
            self._start(post)
        self._plan.seated()
        self._announce(reason)

    def _announce(self, reason: str) -> None:
        if shares := self._plan.shares:
            self._emit("groups", groups_event(shares, reason))
        self._changed()

    def _start(self, post: Post) -> None:
        """Start a worker; it is lost at once if one of its machines has failed meanwhile."""
        index = len(self.workers)
        name = post.worker = f"worker-{index}"
        worker = self.workers[name] = self._make(name, index, post)
        self._coordinator.joined(name, index)
        self._alive[name] = Activity(self._agenda, worker.run())
        if any(machine.number in self._away for machine in post.machines):
            self._agenda.after(0.0, partial(self._lose_machine, name))

    def lose(self, name: str, reason: str) -> None:
        """Remove a lost worker, with its pushes that have not arrived; a second call does nothing."""
        if name not in self._alive:
            return
        self._alive.pop(name).end()
        self.workers[name].client.lose()
        self._coordinator.left(name, reason)
        self._look()

    def _look(self) -> None:
        """Fail the job if nobody is left and nobody comes back; report the change."""
        if not (self._alive or self._returning or self._forming):
            self._coordinator.fail("All workers have failed.")
        self._changed()

    def regroup(self) -> None:
        """Form other workers after an epoch, by the servers' own planner, if that saves time."""
        coordinator, plan, living = self._coordinator, self._plan, [self.workers[name] for name in self._alive]
        remaining_s = coordinator.epoch_s * (plan.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase != "hold" or remaining_s <= 0 or self._forming:
            return
        if grown := plan.grown(living, self._away, remaining_s):
            for name, post in grown.items():
                coordinator.retire(name)
                self._end(name)
                self._form(post)
            if rest := [self.workers[name] for name in self._alive]:
                plan.settle(rest)
        elif plan.review(living, remaining_s):
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
        self._coordinator.retire_all()
        for name in list(self._alive):
            self._end(name)
        self._agenda.after(WORLDS_S, lambda: self.start_all(reason))

    def _end(self, name: str) -> None:
        """End a worker that others replace."""
        self._alive.pop(name).end()
        self.workers[name].client.lose()  # its replies in flight must not arrive at a worker that has ended

    # ---- machines that fail and return

    def _fail(self, machine: Machine) -> None:
        self._away.add(machine.number)
        if machine.described.returns_after_s is not None:
            self._returning.add(machine.number)
            self._agenda.after(machine.described.returns_after_s, partial(self._return, machine))
        for name in list(self._alive):
            if machine in self.workers[name].post.machines:
                self._lose_machine(name)

    def _lose_machine(self, name: str) -> None:
        """Remove a worker one of whose machines has failed; form its group again."""
        post = self.workers[name].post
        topology = self._plan.spec.algorithm.topology_facts
        if topology.allreduce:
            lost = next(machine.number for machine in post.machines if machine.number in self._away)
            self._coordinator.fail(f"Machine {lost} has failed, and with it the ring. Elastic rings are real.")
        elif not topology.flat and name in self._alive:
            self._forming += 1
            self._agenda.after(SHRINK_S, partial(self._form_again, post))
        self.lose(name, "its machine failed")

    def _form_again(self, post: Post) -> None:
        """Form a lost group of the machines that are there, or wait for one; give it up if none returns."""
        self._forming -= 1
        if rest := self._plan.rest(post, self._away):
            self._form(rest)
        elif any(number in self._returning for number in post.members):
            self._forming += 1
            self._agenda.after(SHRINK_S, partial(self._form_again, post))
        self._look()

    def _form(self, post: Post) -> None:
        self._forming += 1
        self._agenda.after(WORLDS_S, partial(self._formed, post))

    def _formed(self, post: Post) -> None:
        self._forming -= 1
        self._start(post)
        self._plan.settle([self.workers[name] for name in self._alive])
        self._announce("a group was formed again")

    def _return(self, machine: Machine) -> None:
        self._away.remove(machine.number)
        self._returning.discard(machine.number)
        if self._plan.spec.algorithm.topology_facts.flat:
            self._start(next(post for post in self._plan.posts if machine in post.machines))
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
