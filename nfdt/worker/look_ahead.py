"""Request for a worker's next lease, made while it computes the last task of the present one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction


class LookAhead:
    """At most one call of ``Workers.Next`` on a thread of its own; the methods belong to the worker's thread.

    Any answer but work is dropped: the worker asks again once it has finished its task, and gets the same answer.

    Args:
        ask: Function for one call of ``Workers.Next``.
        name: Name of the worker, for its thread.
    """

    def __init__(self, ask: Callable[[pb.NextRequest], pb.NextReply], name: str) -> None:
        self._ask = ask
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name} looks ahead")
        self._call: Future[pb.NextReply] | None = None

    def begin(self, request: pb.NextRequest) -> None:
        """Send a request; the answer to the one before has been taken."""
        self._call = self._thread.submit(self._ask, request)

    @property
    def arrived(self) -> ins.Work | None:
        """The work that has arrived and is not taken yet; None: there is none so far."""
        call = self._call
        if call is None or not call.done() or call.exception() is not None:
            return None
        instruction = read_instruction(call.result())
        return instruction if isinstance(instruction, ins.Work) else None

    def take(self) -> ins.Work | None:
        """Wait for the answer to the request, if there is one, and return it if it is work.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        call, self._call = self._call, None
        instruction = read_instruction(call.result()) if call is not None else None
        return instruction if isinstance(instruction, ins.Work) else None

    def close(self) -> None:
        """Wait for a call that is under way; its time limit is that of the calls of ``ask``."""
        self._thread.shutdown()
