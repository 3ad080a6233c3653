"""Calls of Next on the event loop: those that wait are asked for together, and occupy no thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.jobserver.job_core import JobCore
from nfdt.jobserver.job_slot import NextAnswer
from nfdt.jobserver.mailbox import POLL_S
from nfdt.jobserver.worker_calls import MAX_WAIT_S, WorkerCalls

AT_ONCE = 64  # calls that are asked for in one message
REST = 19.0  # pause after a look at all calls that found no answer, in times of its duration
BUSY_S = 0.001  # pause while another message is handled

_WAIT = NextAnswer(ins.Wait())
_Waiting = tuple["asyncio.Future[NextAnswer]", pb.NextRequest]


class WaitingCalls:
    """The calls of Next of one job. Used only on the event loop, but for :meth:`stir`.

    Args:
        core: Core of the job.
        calls: Handler of the calls.
    """

    def __init__(self, core: JobCore, calls: WorkerCalls) -> None:
        self._mailbox, self._calls = core.mailbox, calls
        self._waiting: dict[asyncio.Future[NextAnswer], pb.NextRequest] = {}
        self._messages = 0  # brought by others
        self._stirred: asyncio.Event | None = None  # set: all calls are asked for soon; None: none waits
        self._looks: asyncio.Task[None] | None = None
        core.mailbox.listen(self.stir)

    async def next(self, request: pb.NextRequest) -> bytes:
        """Process a worker's report and wait for its next instruction, as :meth:`WorkerCalls.next`; return its bytes.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        # Results may be written to the disk, and states are merged: other calls do not wait for these.
        slow = request.HasField("epoch_state") or request.HasField("evaluated") or bool(request.summary_json)
        check = self._calls.check
        report = await asyncio.to_thread(check, request) if slow else check(request)
        answer: NextAnswer | None = None
        messages = 0

        def message() -> bool:
            nonlocal answer, messages
            self._calls.receive(request, report)
            answer, messages = self._calls.ask(request), self._messages
            return not self._calls.is_plain(answer)

        if slow or not self._mailbox.attempt(message):
            await asyncio.to_thread(self._mailbox.handle, message)
        if self._waiting:
            self.stir()
        wait_s = min(request.wait_s, MAX_WAIT_S)
        if answer is None and wait_s > 0:
            answer = await self._wait(request, wait_s, missed=messages != self._messages)
        return self._calls.encode(answer or _WAIT)

    async def _wait(self, request: pb.NextRequest, wait_s: float, *, missed: bool) -> NextAnswer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[NextAnswer] = loop.create_future()
        self._waiting[future] = request
        timer = loop.call_later(wait_s, _resolve, future, _WAIT)
        if self._looks is None:
            self._stirred = asyncio.Event()
            self._looks = loop.create_task(self._look_while_any_waits(self._stirred))
        if missed:
            self.stir()
        try:
            return await future
        finally:
            timer.cancel()
            del self._waiting[future]

    def stir(self) -> None:
        """Ask for the answers of all waiting calls soon; any thread may call."""
        self._messages += 1
        stirred, looks = self._stirred, self._looks
        if stirred is not None and looks is not None and not stirred.is_set():
            looks.get_loop().call_soon_threadsafe(stirred.set)

    async def _look_while_any_waits(self, stirred: asyncio.Event) -> None:
        everyone_at = time.monotonic() + POLL_S
        while self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stirred.wait(), max(0.0, everyone_at - time.monotonic()))
            stirred.clear()
            began = time.monotonic()
            everyone = began >= everyone_at
            found = await self._look(everyone=everyone)
            took_s = time.monotonic() - began
            if everyone:
                everyone_at = began + max(POLL_S, REST * took_s)
            if took_s > BUSY_S:
                await asyncio.sleep(took_s if found else min(POLL_S, REST * took_s))
        self._looks = self._stirred = None

    async def _look(self, *, everyone: bool) -> bool:
        """Ask for the answers of the waiting calls; return whether there was any.

        Unless ``everyone``, the first one speaks for all where all waiting workers are alike.
        """
        found, calls = False, iter(list(self._waiting.items()))
        while some := list(itertools.islice(calls, AT_ONCE)):
            look = _Look(self._calls, some, everyone=everyone)
            while not self._mailbox.attempt(look):
                await asyncio.sleep(BUSY_S)
            for future, answer in look.answers:
                _resolve(future, answer)
            found = found or bool(look.answers)
            if look.speaks_for_all:
                break
            await asyncio.sleep(0)
        return found


class _Look:
    """Message that asks for the answers of some waiting calls."""

    def __init__(self, calls: WorkerCalls, some: Sequence[_Waiting], *, everyone: bool) -> None:
        self._calls, self._some, self._everyone = calls, some, everyone
        self.answers: list[tuple[asyncio.Future[NextAnswer], NextAnswer]] = []
        self.speaks_for_all = False

    def __call__(self) -> bool:
        for future, request in self._some:
            if (answer := self._calls.ask(request)) is not None:
                self.answers.append((future, answer))
            elif not self._everyone and self._calls.waits_as_others(request):
                self.speaks_for_all = True
                break
        return not all(self._calls.is_plain(answer) for _, answer in self.answers)


def _resolve(future: asyncio.Future[NextAnswer], answer: NextAnswer) -> None:
    if not future.done():
        future.set_result(answer)
