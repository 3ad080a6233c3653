"""The workers of a simulated job that wait for an instruction."""

from __future__ import annotations

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.work import instructions as ins
from nfdt.simulate.events import Agenda, Signal


class WaitingWorkers:
    """The waiting workers, and repeated requests to the coordinator for their instructions.

    Args:
        agenda: The virtual clock and its events.
        coordinator: Source of the instructions.
        alike: Whether, while tasks are handed out, either all waiting workers may continue or none.
    """

    def __init__(self, agenda: Agenda, coordinator: Coordinator, *, alike: bool) -> None:
        self._agenda, self._coordinator, self._alike = agenda, coordinator, alike
        self._signals: dict[str, Signal] = {}

    def add(self, worker: str) -> Signal:
        """Return the signal that fires with the worker's next instruction."""
        signal = self._signals[worker] = Signal(self._agenda)
        return signal

    def remove(self, worker: str) -> None:
        """Remove a lost worker."""
        self._signals.pop(worker, None)

    def wake(self) -> bool:
        """Pass an instruction to every worker that has one now; return whether there was any."""
        woken = False
        alike = self._coordinator.handed_out or (self._alike and self._coordinator.phase == "train")
        for worker, signal in list(self._signals.items()):
            instruction = self._coordinator.next(worker)
            if not isinstance(instruction, ins.Wait):
                del self._signals[worker]
                signal.fire(instruction)
                woken = True
            elif alike:
                break
        return woken
