"""A slot: a process that becomes a worker, a shard or a rank of a job; forked, or ``python -m nfdt.worker.slot``.

It loads TensorFlow at once, so that jobs start fast. It is registered at the job server over one stream:
the server treats the end of the stream as the end of the process.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nfdt.core.errors import NfdtError, NotInstalled, ServerUnreachable
from nfdt.core.host.child_process import die_with_parent
from nfdt.core.host.code_user import become_code_user
from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE
from nfdt.core.host.logs import log_to_stderr
from nfdt.core.host.machine import give_back_memory
from nfdt.core.host.packages import install
from nfdt.core.host.startup import note_start, quick_imports, without_allocator_threads, worker_imports
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import LOOPBACK, open_channel
from nfdt.core.wire.status import translated
from nfdt.core.work.messages import read_move
from nfdt.core.work.slot_connection import GRACE_S, PATIENCE_S, SlotStream, describe_failure, make_hello
from nfdt.worker.assignment_context import AssignmentContext
from nfdt.worker.job_output import collected_output
from nfdt.worker.movable_client import ShardMoves
from nfdt.worker.planned_end import PlannedEnd
from nfdt.worker.span_sender import ClockEstimate, delivered_spans

logger = logging.getLogger(__name__)

IDLE_BYTES = 2**30  # memory that a slot may keep between two jobs
RANK_END_S = 5.0  # time for a dismissed rank to finish with the others
LEAVE_S = 5.0  # time for the server to receive the last messages
BLAME_S = 10.0  # time for the server to dismiss a rank that has failed


class SlotProcess:
    """One registered process, which executes assignments one after the other until dismissed.

    Args:
        address: ``HOST:PORT`` of the job server.
        token: Token of the server.
        role: ``"worker"`` or ``"shard"``.
        name: Name of the slot, unique among the server's slots.
        tls: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of :func:`nfdt.core.wire.channel.open_channel`.
        host: Address of this machine at which others reach the slot; shards listen on it.
        patience_s: Time limit for a server, or a shard, that does not answer, in seconds.
        end: Request to end this process; None: it will not come.
        give_up_root: Changes the user of this process, given its number, before code of a job runs; None: it is not
            changed.
    """

    def __init__(
        self,
        address: str,
        token: str,
        role: str,
        name: str,
        *,
        tls: Mapping[str, Any],
        host: str = LOOPBACK,
        patience_s: float = PATIENCE_S,
        end: PlannedEnd | None = None,
        give_up_root: Callable[[int], object] | None = None,
    ) -> None:
        self._end, self._give_up_root = end or PlannedEnd(), give_up_root
        self._address, self._token, self._role, self._name = address, token, role, name
        self._tls, self._host, self._patience_s = tls, host, patience_s
        self._channel = open_channel(address, token, **tls)
        self._stub: Any = workers_pb2_grpc.WorkersStub(self._channel)
        hello = make_hello(name, role, address=host, resumes=True, patience_s=patience_s)
        self._stream = SlotStream(self._stub, hello, address)
        self._inbox: queue.SimpleQueue[tuple[pb.Assignment, AssignmentContext] | None] = queue.SimpleQueue()
        self._current = self._context("")
        self._is_rank = self._ran_code = False
        self._built: Any = None  # what the last job leaves for the next one, see run_worker and run_shard

    def run(self) -> None:
        """Load TensorFlow, then register and serve assignments until dismissed.

        Raises:
            NotInstalled: TensorFlow or Keras cannot be imported.
            NfdtError: The server is gone or refuses this slot.
        """
        _require_modules(self._role)
        note_start(self._name, "has imported")
        if self._role == "worker":
            from nfdt.model.backends.contract import current  # imports Keras, which takes seconds

            current().share_gpus()
        listener = threading.Thread(target=self._listen, name="assignments", daemon=True)
        listener.start()
        self._end.call_on_request(self._drain)
        while (received := self._inbox.get()) is not None and not self._end.requested.is_set():
            if not self._serve(*received):
                break
        self._stream.close()
        listener.join(LEAVE_S)  # the server ends the stream when it has received everything
        self._channel.close()

    def _drain(self) -> None:
        """End in order: announce it, and wake the main thread if it waits for an assignment."""
        if self._is_rank:
            self._end.now("a rank does not end in order")
        self._stream.send(draining=pb.SlotDraining(grace_s=self._end.grace_s))
        self._inbox.put(None)

    def _listen(self) -> None:
        """Receive assignments; a stream that ends by itself ends this process, because the server is gone."""
        try:
            for assignment in self._stream.assignments():
                kind = assignment.WhichOneof("assignment")
                if kind == "move_shards":
                    if assignment.move_shards.job_id == self._current.job_id:
                        self._current.moves.announce(read_move(assignment.move_shards))
                elif kind == "leave_world":
                    if assignment.leave_world.job_id == self._current.job_id:
                        self._current.worlds.leave(at_commit=assignment.leave_world.at_commit)
                elif kind == "rank" and assignment.rank.ring == self._current.worlds.ring:
                    self._current.worlds.announce(assignment.rank)
                elif kind in ("release", "dismiss"):
                    self._current.stopped.set()
                    if self._ran_code and not assignment.release.job_id and kind == "release":
                        self._drain()  # a restarted server does not know which session it may serve
                elif kind is not None:
                    note_start(self._name, "has a job")
                    self._begin(assignment)
                if kind == "dismiss":
                    if self._is_rank:
                        self._end_rank(0.0 if assignment.dismiss.now else RANK_END_S)
                    break
        except NfdtError as error:
            if self._stream.closed:
                return
            if not self._current.stopped.is_set() or isinstance(error, ServerUnreachable):
                logger.error("%s: %s", self._name, error)
                logging.shutdown()
                os._exit(error.exit_code)
        self._inbox.put(None)

    def _begin(self, assignment: pb.Assignment) -> None:
        """Leave an assignment to the main thread; it supersedes the current one, if that is not over."""
        before, self._current = self._current, self._context(_job_of(assignment))
        self._current.worlds.ring = assignment.rank.ring
        self._inbox.put((assignment, self._current))
        before.stopped.set()

    def _end_rank(self, within_s: float) -> None:
        """End this process, whose main thread may wait for other ranks."""
        timer = threading.Timer(within_s, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def _serve(self, assignment: pb.Assignment, context: AssignmentContext) -> bool:
        """Run one assignment; return whether this process may serve another job afterwards."""
        job_id = context.job_id
        self._is_rank = assignment.HasField("rank")
        try:
            log = f"the log of slot {self._name} on {socket.gethostname()}"
            clock = ClockEstimate(context.read_clock)
            with (
                delivered_spans(context.spans, clock, context.send_spans),
                collected_output(context.send_output, log),
            ):
                self._run(assignment, context)
        except Exception as error:  # any exception of the user's code fails the job, not this process
            if context.stopped.is_set():
                logger.info("%s: job %s is over (%s)", self._name, job_id, error)
            else:
                logger.exception("%s: job %s failed", self._name, job_id)
                context.send(failed=self._describe(assignment, error))
                return self._may_serve_again()
        if self._is_rank:
            return False
        if context is not self._current:
            return True  # superseded: the server expects nothing of it any more
        if (kept := give_back_memory()) > IDLE_BYTES:
            # TensorFlow's allocator keeps its peak memory, many times the weights; the parent of this process
            # starts another one.
            logger.info("%s: keeps %d MB after job %s and ends", self._name, kept >> 20, job_id)
            return False
        context.send(finished=pb.SlotFinished(job_id=job_id))
        return True

    def _context(self, job_id: str) -> AssignmentContext:
        return AssignmentContext(
            job_id,
            self._name,
            self._address,
            self._stub,
            self._stream.sender(),
            threading.Event(),
            self._end.requested,
            ShardMoves(),
            host=self._host,
            tls=self._tls,
            patience_s=self._patience_s,
        )

    def _run(self, assignment: pb.Assignment, context: AssignmentContext) -> None:
        if assignment.HasField("code_user"):
            self._ran_code = True
            if self._give_up_root is not None:
                self._give_up_root(assignment.code_user)
                self._give_up_root = None
        built, self._built = self._built, None  # a job that fails leaves nothing
        if assignment.HasField("worker"):
            from nfdt.worker.run_worker import run_worker

            self._built = run_worker(assignment.worker, context, built)
        elif assignment.HasField("shard"):
            from nfdt.worker.run_shard import run_shard

            self._built = run_shard(assignment.shard, context, built)
        else:
            from nfdt.worker.run_rank import run_rank  # needs Horovod

            run_rank(assignment.rank, context, self._token)

    def _describe(self, assignment: pb.Assignment, error: Exception) -> pb.SlotFailed:
        if not self._is_rank:
            return describe_failure(_job_of(assignment), error)
        name = f"rank-{assignment.rank.rank}"
        return describe_failure(assignment.rank.job_id, error, failed_in=name, unquotes_keys=False)

    def _may_serve_again(self) -> bool:
        """Return whether this process may serve another job after a failure; a rank ends, in order or not."""
        if self._is_rank:
            self._current.stopped.wait(BLAME_S)
            logging.shutdown()
            os._exit(0)  # an orderly exit would wait for ranks that wait for this one
        return True


def _job_of(assignment: pb.Assignment) -> str:
    return str(getattr(assignment, assignment.WhichOneof("assignment") or "").job_id)


def load(role: str = "", *, serves_scripts: bool = False) -> None:
    """Import the modules of a role, with Keras and its backend; start none of their threads.

    Args:
        role: ``"worker"`` or ``"shard"``; "" for both.
        serves_scripts: Whether a script runs in this process too, and needs all of Keras: then also what workers do
            not use.
    """
    with quick_imports() if serves_scripts else worker_imports(), without_allocator_threads():
        import keras

        if keras.backend.backend() == TENSORFLOW:
            import tensorflow  # noqa: F401
        if role != "worker" and keras.backend.backend() == TENSORFLOW:
            import nfdt.worker.run_shard
        if role != "shard":
            import nfdt.worker.run_worker  # noqa: F401


def _require_modules(role: str) -> None:
    try:
        load(role)
    except ImportError as error:
        logger.info("the modules of a slot cannot be imported", exc_info=True)
        raise NotInstalled(
            f"A slot cannot import its modules with {sys.executable}: {error}. Expected: TensorFlow and Keras there. "
            f"Install them: {install('cpu')} (with GPUs {install('tensorflow')}). "
            "Then start the server, or `nfdt worker`, again."
        ) from error


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m nfdt.worker.slot``; the token comes from NFDT_TOKEN or ``--token-file``."""
    parser = argparse.ArgumentParser(prog="nfdt.worker.slot", description=__doc__)
    parser.add_argument("--server", required=True, help="HOST:PORT of the job server")
    parser.add_argument("--role", choices=("worker", "shard"), required=True)
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--token-file")
    for name in ("--ca-file", "--cert-file", "--key-file"):
        parser.add_argument(name)
    parser.add_argument("--insecure", action="store_true", help="send the token in plain text to another machine")
    parser.add_argument("--host", default=LOOPBACK, help="address of this machine at which others reach the slot")
    parser.add_argument("--wait", type=float, default=PATIENCE_S, metavar="SECONDS", help="for a server that is silent")
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="SECONDS", help="to end in order")
    parser.add_argument("--code-user", metavar="NAME", help="run code of jobs as this account, or `each-session`")
    parser.add_argument("--code-home", type=Path, metavar="DIR", help="to make for that account")
    parser.add_argument("--watch-stdin", action="store_true", help="exit when standard input closes; end at any input")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    log_to_stderr(options.log_level)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.role == "shard":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ[VARIABLE] = TENSORFLOW
    end = PlannedEnd(options.grace)
    end.watch_sigterm()
    if options.watch_stdin:
        die_with_parent(on_input=end.request)
    token = os.environ.pop("NFDT_TOKEN", "")
    if options.token_file:
        token = Path(options.token_file).read_text().strip()
    try:
        tls = {name: getattr(options, name) for name in ("ca_file", "cert_file", "key_file", "insecure")}
        place = (options.server, token, options.role, options.name)
        with translated(options.server):
            give_up_root = (
                partial(become_code_user, options.code_user, options.code_home) if options.code_user else None
            )
            patience = {"patience_s": options.wait, "end": end}
            SlotProcess(*place, tls=tls, host=options.host, give_up_root=give_up_root, **patience).run()
    except NfdtError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
