"""The virtual clock: a queue of timed events, and activities that wait without a thread.

Nothing here reads a real clock or draws a random number: the same calls give the same order of events. Events of the
same time happen in the order in which they were planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any

Action = Callable[[], None]


class Agenda:
    """Future events, in order; a :class:`~nfdt.core.clock.Clock` whose time is constant between two events.

    Attributes:
        events: Number of events that have happened.
    """

    def __init__(self) -> None:
        self.events = 0
        self._now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def now(self) -> float:
        """Return the virtual seconds since the simulation began."""
        return self._now

    def at(self, when: float, action: Action) -> None:
        """Plan an action for virtual second ``when``; if that is past, for now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(when, self._now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        """Plan an action for ``seconds`` from now."""
        self.at(self._now + seconds, action)

    def step(self) -> bool:
        """Execute the next event; return False if there is none."""
        if not self._queue:
            return False
        when, _, action = heapq.heappop(self._queue)
        self._now = when
        self.events += 1
        action()
        return True


class Signal:
    """One-time event; an activity that yields it resumes when it fires, with the value passed to :meth:`fire`."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: Callable[[Any], None] | None = None
        self._fired = False
        self._value: Any = None

    def fire(self, value: Any = None) -> None:
        """Fire the signal now; a second call does nothing."""
        if self._fired:
            return
        self._fired, self._value = True, value
        self._release()

    def wait(self, resume: Callable[[Any], None]) -> None:
        """Call ``resume`` with the value when the signal fires, or at once if it has fired."""
        self._waiting = resume
        self._release()

    def _release(self) -> None:
        resume, value = self._waiting, self._value
        if self._fired and resume is not None:
            self._agenda.after(0.0, lambda: resume(value))


ActivitySteps = Generator["float | Signal", Any, Any]
"""The generator of an activity: it yields virtual seconds to let pass, or a signal to wait for."""


class Activity:
    """A generator that runs along the virtual clock, from now on.

    Args:
        agenda: Event queue in which it waits.
        steps: Generator of its steps.
    """

    def __init__(self, agenda: Agenda, steps: ActivitySteps) -> None:
        self._agenda = agenda
        self._steps = steps
        self._ended = False
        agenda.after(0.0, lambda: self._resume(None))

    def end(self) -> None:
        """End the activity; its remaining steps are not run."""
        self._ended = True

    def _resume(self, value: Any) -> None:
        if self._ended:
            return
        try:
            wanted = self._steps.send(value)
        except StopIteration:
            self._ended = True
            return
        if isinstance(wanted, Signal):
            wanted.wait(self._resume)
        else:
            self._agenda.after(wanted, lambda: self._resume(None))
