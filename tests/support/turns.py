"""Threads of which one runs at a time: where one waits, the test decides which goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nfdt.core.clock import Clock
from nfdt.jobserver.mailbox import Mailbox

DEADLINE_S = 60.0  # for hangs


class Abandoned(BaseException):
    """End of a thread that the test needs no more."""


class Turns:
    """Threads that take turns.

    Attributes:
        changed: Condition with which they wait; the lock of every mailbox made by :meth:`mailbox`.
        threads: Live threads, in the order in which they began.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.threads: list[threading.Thread] = []
        self._parked: list[threading.Thread] = []
        self._turn: threading.Thread | None = None
        self._closed = False

    def mailbox(self, clock: Clock) -> Mailbox:
        return _SteppedMailbox(clock, self)

    def start(self, work: Callable[[], object], name: str) -> None:
        thread = threading.Thread(target=self._live, args=(work,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def lives(self, name: str) -> bool:
        return any(thread.name == name for thread in self.threads)

    def run(self, number: int) -> None:
        """Let a thread go on until it waits or ends."""
        with self.changed:
            self._turn = self.threads[number % len(self.threads)]
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self._turn is None, DEADLINE_S), f"{self._turn} does not wait"

    def finish(self, name: str) -> None:
        """Let a thread go on to its end."""
        while self.lives(name):
            self.run([thread.name for thread in self.threads].index(name))

    def park(self) -> None:
        """Let no thread that lives now go on, as if its process were killed."""
        with self.changed:
            self._parked += self.threads
            self.threads.clear()

    def give_way(self) -> None:
        """Wait for the next turn; the test's own thread goes on at once."""
        with self.changed:
            if threading.current_thread() in (*self.threads, *self._parked):
                self._end_turn()
                self._await_turn()

    def close(self) -> None:
        """End all threads."""
        with self.changed:
            threads, self._closed = [*self.threads, *self._parked], True
            self.changed.notify_all()
        for thread in threads:
            thread.join(DEADLINE_S)

    def _live(self, work: Callable[[], object]) -> None:
        try:
            with self.changed:
                self._await_turn()
            work()
        except Abandoned:
            pass
        finally:
            with self.changed:
                self.threads = [thread for thread in self.threads if thread is not threading.current_thread()]
                self._end_turn()

    def _end_turn(self) -> None:
        self._turn = None
        self.changed.notify_all()

    def _await_turn(self) -> None:
        me = threading.current_thread()
        self.changed.wait_for(lambda: self._turn is me or self._closed)
        if self._closed:
            raise Abandoned


class TurnLock:
    """Lock whose holder may give way; a replacement of ``threading.Lock``."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._held = turns, False

    def __enter__(self) -> None:
        while self._held:
            self._turns.give_way()
        self._held = True

    def __exit__(self, *error: object) -> None:
        self._held = False


class _SteppedMailbox(Mailbox):
    """Mailbox whose waiting threads give way, and whose slow calls take turns."""

    def __init__(self, clock: Clock, turns: Turns) -> None:
        super().__init__(clock)
        self._changed, self._turns = turns.changed, turns

    def _pause(self, seconds: float) -> None:
        self._turns.give_way()

    def start(self, slow: Callable[[], None], name: str) -> None:
        self._turns.start(slow, name)
