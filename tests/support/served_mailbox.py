"""Mailbox of a job whose own thread only handles its timers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nfdt.core.clock import Clock
from nfdt.jobserver.mailbox import Mailbox

DEADLINE_S = 30.0


class ServedMailbox(Mailbox):
    """Mailbox with a thread that handles the timers until :meth:`close`; ``failures`` has the causes of the end."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.failures: list[BaseException] = []
        self._closed = False
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def _serve(self) -> None:
        self.claim_thread()
        while self.wait(lambda: self._closed or None, DEADLINE_S) is None:
            pass

    def _call_timers(self) -> float:
        pause_s = super()._call_timers()
        if self._thread == threading.get_ident():
            self._changed.notify_all()  # a test waits for what a timer does
        return pause_s

    def end(self, cause: BaseException) -> None:
        self.handle(lambda: self.failures.append(cause))
        super().end(cause)

    def wait_until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S)

    def close(self) -> None:
        def close() -> None:
            self._closed = True

        self.handle(close)
        self._serving.join(DEADLINE_S)
