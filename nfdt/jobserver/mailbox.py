"""Messages of one job, handled one at a time. Slots, workers, clients, timers and slow calls bring them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from nfdt.core.clock import Clock
from nfdt.core.errors import ServerUnreachable
from nfdt.jobserver.outcome import SlotError

Answer = TypeVar("Answer")
Timer = Callable[[], float | None]
"""Does what is due, and returns the seconds until it must be called again; None: never."""

POLL_S = 1.0  # interval of questions and timers without messages
CAUSE_WAIT_S = 2.0  # time to wait for the process end that explains a broken connection


class ServerStopping(Exception):
    """Stop of the server: the end of the job is not written; the next server settles it."""


class Mailbox:
    """Messages of one job, and the reason for its end. Any thread may call.

    A message is a function that reads and changes the state of the job while no other message is handled.
    The thread that brings it handles it. A message that waits, in :meth:`wait`, lets others be handled meanwhile.

    The job's own thread calls the timers whenever it waits: after each message, and when they are due. It makes slow
    calls with :meth:`call`, so that timers do not wait for them.

    Args:
        clock: Clock of the server.

    Attributes:
        cause: First cause of the job's end; None: the job continues.
    """

    def __init__(self, clock: Clock) -> None:
        # The only lock of a job, and reentrant, as messages bring messages. A thread of its own for all messages would
        # cost each worker 17 us for a hop in every step; taking the lock costs 3 us (decision 71).
        self._changed = threading.Condition()
        self._clock = clock
        self._thread: int | None = None
        self._timers: list[Timer] = []
        self.cause: BaseException | None = None
        self._blame_until: float | None = None
        self._listeners: list[Callable[[], None]] = []

    # ---- messages

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a function after each message; it asks its questions elsewhere."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def attempt(self, message: Callable[[], bool]) -> bool:
        """Handle a message, unless another one is being handled at the moment; return whether it was handled.

        All questions are asked again if the message returns True: what it has changed is of interest to others.
        """
        if not self._changed.acquire(blocking=False):
            return False
        try:
            if message():
                self._notify()
        finally:
            self._changed.release()
        return True

    def handle(self, message: Callable[[], Answer]) -> Answer:
        """Handle a message; then all questions are asked again."""
        with self._changed:
            try:
                return message()
            finally:
                self._notify()

    def read(self, question: Callable[[], Answer]) -> Answer:
        """Return the answer to a question that changes nothing of interest to others."""
        with self._changed:
            return question()

    def wait(self, question: Callable[[], Answer | None], timeout_s: float, *, poll_s: float = POLL_S) -> Answer | None:
        """Return the first answer other than None to a question; None if there is none in time.

        The question is asked at once, after each message, and every ``poll_s`` seconds.
        """
        until = self._clock.now() + timeout_s
        with self._changed:
            while True:
                pause_s = min(self._call_timers(), poll_s)
                if (answer := question()) is not None:
                    return answer
                if (left_s := until - self._clock.now()) <= 0:
                    return None
                self._pause(min(pause_s, left_s))

    def _pause(self, seconds: float) -> None:
        """Let others bring messages, at most for so long."""
        self._changed.wait(seconds)

    # ---- the job's thread

    def claim_thread(self) -> None:
        """Make the current thread the job's own thread."""
        self._thread = threading.get_ident()

    def add_timer(self, timer: Timer) -> None:
        """Call a timer on the job's thread from now on; an error in it ends the job."""
        with self._changed:
            self._timers = [other for other in self._timers if other != timer] + [timer]
            self._changed.notify_all()

    def _call_timers(self) -> float:
        """Call the timers, on the job's thread; return the seconds until one is due."""
        pause_s = POLL_S
        if self._thread != threading.get_ident():
            return pause_s
        for timer in tuple(self._timers):
            try:
                due_s = timer()
            except Exception as error:
                self.end(error)
                due_s = None
            if due_s is None:
                self._timers.remove(timer)
            else:
                pause_s = min(pause_s, due_s)
        return pause_s

    def call(self, slow: Callable[[], Answer]) -> Answer:
        """Make a slow call and return its result; on the job's thread, messages and timers are handled meanwhile."""
        if self._thread != threading.get_ident():
            return slow()
        future: Future[Answer] = Future()

        def make() -> None:
            try:
                future.set_result(slow())
            except BaseException as error:
                future.set_exception(error)
            self.handle(lambda: None)

        self.start(make, "call")
        while self.wait(lambda: future.done() or None, POLL_S) is None:
            pass
        return future.result()

    def start(self, slow: Callable[[], None], name: str) -> None:
        """Make a slow call on a thread of its own; it brings its results as messages."""
        threading.Thread(target=slow, name=name, daemon=True).start()

    # ---- the end

    def end(self, cause: BaseException) -> None:
        """Add a cause of the end; a broken connection gives way to the reason why it broke."""
        with self._changed:
            # A process that lost its connection often reports before the end of the other process is known.
            vague = isinstance(cause, SlotError) and cause.lost_connection
            known = self.cause is not None and (vague or self._blame_until is None)
            if known and not isinstance(cause, ServerStopping):
                return
            self.cause = cause
            self._blame_until = self._clock.now() + CAUSE_WAIT_S if vague else None
            self._notify()

    def check(self) -> None:
        """Raise the cause, if there is one and no better one is expected."""
        if self.cause is not None and (self._blame_until is None or self._clock.now() >= self._blame_until):
            raise self.cause

    def reason_behind(self, error: BaseException) -> BaseException:
        """Return a better explanation of ``error``, after waiting for a possible one."""
        if not isinstance(error, ServerUnreachable):
            return error
        self.wait(lambda: (self.cause is not None and self._blame_until is None) or None, CAUSE_WAIT_S)
        return self.cause or error
