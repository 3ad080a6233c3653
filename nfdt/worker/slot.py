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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from nfdt.core.errors import NfdtError, NotInstalled, ServerUnreachable
from nfdt.core.host.fast_imports import quick_imports
from nfdt.core.host.machine import give_back_memory
from nfdt.core.host.parent import die_with_parent
from nfdt.core.program.manifest import Manifest
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import LOOPBACK, open_channel
from nfdt.core.work.artifacts import ArtifactReader, default_cache
from nfdt.core.work.slot_connection import PATIENCE_S, NextCalls, Patience, SlotStream, describe_failure, make_hello

logger = logging.getLogger(__name__)

IDLE_BYTES = 2**30  # memory that a slot may keep between two jobs
RANK_END_S = 5.0  # time for a dismissed rank to finish with the others
BLAME_S = 10.0  # time for the server to dismiss a rank that has failed


class SlotProcess:
    """One registered process, which executes assignments one after the other until dismissed.

    Args:
        address: ``HOST:PORT`` of the job server.
        token: Token of the server.
        role: ``"worker"`` or ``"shard"``.
        name: Name of the slot, unique among the server's slots.
        tls: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
        host: Address of this machine at which others reach the slot; shards listen on it.
        patience_s: Time limit for a server, or a shard, that does not answer, in seconds.
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
    ) -> None:
        self._address, self._token, self._role, self._name = address, token, role, name
        self._tls, self._host, self._patience_s = tls, host, patience_s
        self._channel = open_channel(address, token, **tls)
        self._stub: Any = workers_pb2_grpc.WorkersStub(self._channel)
        hello = make_hello(name, role, address=host, resumes=True, patience_s=patience_s)
        self._stream = SlotStream(self._stub, hello, address)
        self._inbox: queue.SimpleQueue[pb.Assignment | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._is_rank = False

    def run(self) -> None:
        """Load TensorFlow, then register and serve assignments until dismissed.

        Raises:
            NotInstalled: TensorFlow or Keras cannot be imported.
            NfdtError: The server is gone or refuses this slot.
        """
        _require_modules()
        if self._role == "worker":
            _share_gpus()
        threading.Thread(target=self._listen, name="assignments", daemon=True).start()
        while (assignment := self._inbox.get()) is not None:
            kind = assignment.WhichOneof("assignment")
            if kind == "dismiss":
                break
            if kind in ("shard", "worker", "rank") and not self._serve(assignment, kind):
                break
        self._stream.close()
        self._channel.close()

    def _listen(self) -> None:
        """Receive assignments; a stream that ends by itself ends this process, because the server is gone."""
        try:
            for assignment in self._stream.assignments():
                kind = assignment.WhichOneof("assignment")
                if kind in ("release", "dismiss"):
                    self._stopped.set()
                else:
                    self._stopped.clear()
                self._inbox.put(assignment)
                if kind == "dismiss":
                    if self._is_rank:
                        self._end_rank(0.0 if assignment.dismiss.now else RANK_END_S)
                    return
        except NfdtError as error:
            if self._stream.closed:
                return
            if not self._stopped.is_set() or isinstance(error, ServerUnreachable):
                logger.error("%s: %s", self._name, error)
                logging.shutdown()
                os._exit(error.exit_code)
        self._inbox.put(None)

    def _end_rank(self, within_s: float) -> None:
        """End this process, whose main thread may wait for other ranks."""
        timer = threading.Timer(within_s, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def _serve(self, assignment: pb.Assignment, kind: str) -> bool:
        """Run one assignment; return whether this process may serve another job afterwards."""
        job_id = _job_of(assignment)
        self._is_rank = kind == "rank"
        try:
            if kind == "worker":
                self._run_worker(assignment.worker)
            elif kind == "rank":
                self._run_rank(assignment.rank)
            else:
                self._run_shard(assignment.shard)
        except Exception as error:  # any exception of the user's code fails the job, not this process
            if self._stopped.is_set():
                logger.info("%s: job %s is over (%s)", self._name, job_id, error)
            else:
                logger.exception("%s: job %s failed", self._name, job_id)
                self._stream.send(failed=self._describe(assignment, error))
                return self._may_serve_again()
        if self._is_rank:
            return False
        if (kept := give_back_memory()) > IDLE_BYTES:
            # TensorFlow's allocator keeps its peak memory, many times the weights; the parent of this process
            # starts another one.
            logger.info("%s: keeps %d MB after job %s and ends", self._name, kept >> 20, job_id)
            return False
        self._stream.send(finished=pb.SlotFinished(job_id=job_id))
        return True

    def _describe(self, assignment: pb.Assignment, error: Exception) -> pb.SlotFailed:
        if not self._is_rank:
            return describe_failure(_job_of(assignment), error)
        name = f"rank-{assignment.rank.rank}"
        return describe_failure(assignment.rank.job_id, error, failed_in=name, unquotes_keys=False)

    def _may_serve_again(self) -> bool:
        """Return whether this process may serve another job after a failure; a rank ends, in order or not."""
        if self._is_rank:
            self._stopped.wait(BLAME_S)
            logging.shutdown()
            os._exit(0)  # an orderly exit would wait for ranks that wait for this one
        return True

    def _reader(self, job_id: str, shared: str, spec: JobSpec) -> ArtifactReader:
        whole_bytes = spec.cluster.fetch_whole_mb * 2**20
        return ArtifactReader(self._stub, job_id, shared, default_cache(), self._address, whole_bytes)

    def _run_worker(self, assignment: pb.WorkerAssignment) -> None:
        _limit_threads(assignment.threads)
        from nfdt.core.sharding import sparse_tables
        from nfdt.transport.choice import make_choice
        from nfdt.transport.emulated_link import make_link
        from nfdt.transport.stream import StreamClient
        from nfdt.worker.worker import Worker

        spec = parse_job(assignment.spec_json)
        reader = self._reader(assignment.job_id, assignment.artifact_dir, spec)
        manifest = Manifest.from_bytes(reader.read(spec.program))
        layout = manifest.layout
        addresses = list(assignment.shards)
        tables = sparse_tables(manifest, spec.algorithm, len(addresses))
        job = (assignment.job_id, assignment.job_token)
        calls = NextCalls(self._stub, job, self._address, self._patience_s, self._stopped)
        client = StreamClient(
            addresses,
            layout,
            assignment.worker,
            assignment.job_token,
            timeout_s=spec.step_timeout_s,
            patience=Patience(self._patience_s, self._stopped),
            overlap=spec.algorithm.overlap,
            choice=make_choice(spec.algorithm, layout.size),
            tables=tables,
            emulated=make_link(spec.cluster.emulate, assignment.index, self._stopped),
            ca_file=assignment.shard_ca or None,
        )
        try:
            worker = Worker(
                spec,
                assignment.worker,
                assignment.index,
                manifest,
                read=reader.read,
                open_array=reader.open_array,
                open_rows=reader.open_rows,
                client=client,
                ask=calls.ask,
                take_rows=calls.take_rows,
                stopped=self._stopped,
                tables=tables,
            )
            self._stream.send(ready=pb.SlotReady(job_id=assignment.job_id))
            worker.run()
            logger.info("%s: fetched %d bytes for job %s", self._name, reader.fetched_bytes, assignment.job_id)
        finally:
            client.close()

    def _run_rank(self, assignment: pb.RankAssignment) -> None:
        from hfdt.runtime.slot_rank import ServerAccess, run_rank

        job_id = assignment.job_id
        server = ServerAccess(self._address, self._token, self._tls, self._host, self._stub)

        def open_artifacts(spec: JobSpec, folder: str) -> ArtifactReader:
            return self._reader(job_id, assignment.artifact_dir, spec)

        run_rank(assignment, server, open_artifacts, lambda: self._stream.send(ready=pb.SlotReady(job_id=job_id)))

    def _run_shard(self, assignment: pb.ShardAssignment) -> None:
        from nfdt.core.program.code import load_code
        from nfdt.core.program.state import load_state
        from nfdt.shard.servicer import start_shard

        spec = parse_job(assignment.spec_json)
        reader = self._reader(assignment.job_id, assignment.artifact_dir, spec)
        manifest = Manifest.from_bytes(reader.read(spec.program))
        shard = start_shard(
            manifest,
            load_state(reader.path(manifest.state)),
            spec.algorithm,
            assignment.index,
            assignment.shards,
            workers=spec.cluster.workers,
            token=assignment.job_token,
            custom_objects=load_code(manifest, reader.read, allow_code=spec.code).objects,
            host=self._host,
            cert=assignment.tls_cert or None,
            key=assignment.tls_key or None,
            insecure=not self._tls.get("ca_file"),  # a server that is reached in plain text was started as insecure
        )
        try:
            logger.info("%s: shard %d serves at %s", self._name, assignment.index, shard.address)
            self._stream.send(ready=pb.SlotReady(job_id=assignment.job_id, address=shard.address))
            self._stopped.wait()
        finally:
            shard.stop()


def _job_of(assignment: pb.Assignment) -> str:
    return str(getattr(assignment, assignment.WhichOneof("assignment") or "").job_id)


def load() -> None:
    """Import the modules of workers and shards, with TensorFlow and Keras; start none of their threads."""
    with quick_imports():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401

        import nfdt.core.program.code
        import nfdt.core.program.state
        import nfdt.shard.servicer
        import nfdt.transport.choice
        import nfdt.transport.emulated_link
        import nfdt.transport.stream
        import nfdt.worker.worker  # noqa: F401


def _require_modules() -> None:
    try:
        load()
    except ImportError as error:
        logger.info("the modules of a slot cannot be imported", exc_info=True)
        raise NotInstalled(
            f"A slot cannot import its modules with {sys.executable}: {error}. Expected: TensorFlow and Keras there. "
            "Install them, in NFDT's checkout: pip install '.[cpu]' (with GPUs '.[tensorflow]'). "
            "Then start the server, or `nfdt worker`, again."
        ) from error


def _share_gpus() -> None:
    """Leave unused GPU memory to other processes."""
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def _limit_threads(threads: int) -> None:
    """Limit TensorFlow to this worker's share of the cores; only the first job of a process can set it."""
    import tensorflow as tf

    if threads:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError:
            logger.debug("TensorFlow runs already; its thread count stays")


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m nfdt.worker.slot``; the token comes from NFDT_TOKEN or ``--token-file``."""
    parser = argparse.ArgumentParser(prog="nfdt.worker.slot", description=__doc__)
    parser.add_argument("--server", required=True, help="HOST:PORT of the job server")
    parser.add_argument("--role", choices=("worker", "shard"), required=True)
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--token-file")
    for name in ("--ca-file", "--cert-file", "--key-file"):
        parser.add_argument(name)
    parser.add_argument("--host", default=LOOPBACK, help="address of this machine at which others reach the slot")
    parser.add_argument("--wait", type=float, default=PATIENCE_S, metavar="SECONDS", help="for a server that is silent")
    parser.add_argument("--watch-stdin", action="store_true", help="exit when standard input closes")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.role == "shard":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if options.watch_stdin:
        die_with_parent()
    token = os.environ.pop("NFDT_TOKEN", "")
    if options.token_file:
        token = Path(options.token_file).read_text().strip()
    try:
        tls = {name: getattr(options, name) for name in ("ca_file", "cert_file", "key_file")}
        place = (options.server, token, options.role, options.name)
        SlotProcess(*place, tls=tls, host=options.host, patience_s=options.wait).run()
    except (NfdtError, grpc.RpcError) as error:
        logger.error("%s", error)
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
