"""Who works for a simulated job: workers come, their machines fail, others take their place."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.simulate.events import Activity, Agenda
from nfdt.simulate.machines import Machine
from nfdt.simulate.worker import Post, SimulatedWorker

Make = Callable[[str, int, Post], SimulatedWorker]
"""A worker of this name and number for a post."""


class Attendance:
    """The workers of one job, dead or alive.

    Args:
        agenda: The virtual clock.
        coordinator: Told who comes and who is gone.
        make: Makes workers.
        topology: Of the job: a lost machine of a ring ends the job, one of a group ends the group for good.
        changed: Called after somebody came or went.

    Attributes:
        everybody: By name, the lost ones too.
    """

    def __init__(
        self, agenda: Agenda, coordinator: Coordinator, make: Make, topology: str, changed: Callable[[], None]
    ) -> None:
        self.everybody: dict[str, SimulatedWorker] = {}
        self._agenda, self._coordinator, self._make, self._changed = agenda, coordinator, make, changed
        self._topology = topology
        self._alive: dict[str, Activity] = {}
        self._returning = 0

    def seat(self, post: Post) -> None:
        """A worker begins to live, with its machines' failures ahead of it."""
        index = len(self.everybody)
        name = f"worker-{index}"
        worker = self.everybody[name] = self._make(name, index, post)
        self._coordinator.joined(name, index)
        self._alive[name] = Activity(self._agenda, worker.run())
        for machine in post.crew.machines:
            fails_at_s = machine.described.fails_at_s
            if fails_at_s is not None and fails_at_s >= self._agenda.clock.now():
                self._agenda.at(fails_at_s, lambda machine=machine: self._fail(machine, name, post))  # type: ignore[misc]

    def lose(self, name: str, reason: str) -> None:
        """A worker is gone, with all that it has sent and that has not arrived; a second call does nothing."""
        if name not in self._alive:
            return
        self._alive.pop(name).end()
        self.everybody[name].client.lose()
        self._coordinator.left(name, reason)
        if not self._alive and not self._returning:
            self._coordinator.fail("All workers have failed.")
        self._changed()

    def _fail(self, machine: Machine, name: str, post: Post) -> None:
        if name not in self._alive:
            return
        if self._topology == "ring":
            self._coordinator.fail(
                f"Machine {machine.number} has failed, and with it the ring. Elastic rings are real."
            )
        returns_after_s = machine.described.returns_after_s
        if returns_after_s is not None and self._topology == "flat":
            self._returning += 1
            self._agenda.after(returns_after_s, lambda: self._return(post))
        self.lose(name, "its machine failed")

    def _return(self, post: Post) -> None:
        self._returning -= 1
        self.seat(post)
        self._changed()
