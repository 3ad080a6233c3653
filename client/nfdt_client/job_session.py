"""A session's job server, and the jobs that it submits there. Importing this imports no Keras."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nfdt.core.errors import PolicyRefused, ServerUnreachable, UsageError
from nfdt.core.host.startup import note_start
from nfdt.core.specs.job import ClusterSpec, JobSpec
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest
from nfdt_client import ring
from nfdt_client.connection import JobsClient
from nfdt_client.embedded import StartedServer, embedded_server
from nfdt_client.feed import Feeder
from nfdt_client.job import InteractiveJob, Submission, job_names, start_line
from nfdt_client.layers import ARGUMENT
from nfdt_client.options import Options
from nfdt_client.upload import find_missing, upload

logger = logging.getLogger(__name__)


class JobSession:
    """Access to a job server, which is started here and stopped at the end unless the options name one.

    Args:
        options: The options.
        server: A server that the caller started for this session and stops after it; the options name none then.
        names: Names of the jobs of this session and of others; by default those of the option ``job``.

    Attributes:
        options: As given.
        names: Names of the next fits' jobs.
        fits: ``history.nfdt`` of every fit so far.
        submitted: Name and specification of each job so far.
        logged: Lines in the log that would repeat from fit to fit.
    """

    def __init__(
        self, options: Options, server: StartedServer | None = None, names: Iterator[str] | None = None
    ) -> None:
        self.options, self._given = options, server
        self.names = names or job_names(options.job)
        self.fits: list[dict[str, Any]] = []
        self.submitted: list[tuple[str, JobSpec]] = []
        self.logged: set[str] = set()
        self._id = uuid.uuid4().hex
        self._link: JobsClient | None = None
        self._embedded: StartedServer | None = None
        self._outer: JobSession | None = None  # the session in whose block this one was opened
        self._idle = True

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Start or connect to a server, until ``undo``."""
        if not self.options.algorithm.topology_facts.flat and self.options.server is None:
            ring.require_horovod(self.options.algorithm.name)
        if self.options.world is not None and self.options.world.rank:
            ring.follow(self.options.cluster)
        self._embedded = self._given
        if self._given is None and self.options.server is None:
            self._embedded = undo.enter_context(embedded_server(self.options))
        undo.callback(self._disconnect)
        if self._embedded is None:
            self._describe(waits=self.options.job is not None)  # reports a wrong address before the script's own work

    def connection(self) -> JobsClient:
        """Return the connection to the session's server; wait for the embedded one to start."""
        if self._link is None:
            if self._embedded is not None:
                server = self._embedded
                self._link = JobsClient(server.address(), server.token, ca_file=server.ca_file, check=server.check)
            else:
                self._link = JobsClient(str(self.options.server), self.options.token(), **self.options.tls)
        return self._link

    def _describe(self, *, waits: bool = True) -> pb.ServerDescription:
        """Return the description of the session's server; ``waits``: it may be restarted just now."""
        link = self.connection()
        return link.persist(link.describe) if waits else link.describe()

    def release_connection(self) -> JobsClient:
        """Return the connection; from now on the caller closes it."""
        link, self._link = self.connection(), None
        return link

    def own_state_dir(self) -> Path | None:
        """Return the directory of a server that ends with this session; None for others."""
        if self._embedded is None:
            return None
        state_dir = self._describe(waits=False).state_dir
        return Path(state_dir) if state_dir else None

    def explained(self, error: Exception) -> Exception:
        """Return the error; for an embedded server that has ended, with the reason."""
        if isinstance(error, ServerUnreachable) and self._embedded is not None:
            try:
                self._embedded.check()
            except ServerUnreachable as precise:
                for note in getattr(error, "__notes__", ()):
                    precise.add_note(note)
                return precise
        return error

    def mark_used(self) -> None:
        """Record that this session, or one nested in it, has distributed something: it is not idle."""
        self._idle = False
        if self._outer is not None:
            self._outer.mark_used()

    def allows_code(self) -> bool:
        """Whether the session's server takes code."""
        return self._embedded is not None or self._describe().allow_code

    def has_free_workers(self) -> bool:
        """Whether a job can start now: its server is this session's own, or has enough free slots."""
        if self._embedded is not None:
            return True
        server, wanted = self._describe(), self.options.cluster.workers
        return server.free_slots >= (wanted if self.options.workers_given else server.slots) > 0

    def place(self, code: bool) -> ClusterSpec:
        """Return the cluster with its numbers of workers and shards; ``code``: the job carries code of the script."""
        server = self._describe()
        if code and not server.allow_code:
            raise PolicyRefused(
                "The job carries code of the script (custom layers, losses, functions). Expected: a server started "
                f"with --allow-code, or Keras' own parts only. Received: {self.connection().address}, which takes none."
            )
        cluster = self.options.cluster
        flat = self.options.algorithm.topology_facts.flat
        if flat and not self.options.workers_given and self.options.server is not None and server.slots:
            cluster = cluster.model_copy(update={"workers": server.slots})
        return cluster

    def start(self, submission: Submission, manifest: Manifest) -> InteractiveJob:
        """Submit the job, or attach to the one of its name; ``manifest`` is that of its program."""
        note_start("script", "has packed the model")
        reply, name = self.send(submission), submission.name
        note_start("script", "has submitted the job")
        self.submitted.append((reply.job_id, submission.spec))
        server = self._describe()
        link = self.connection().open_page(reply.job_id) if server.page else ""
        warm = self._embedded is not None and self._embedded.is_warm
        asked = () if self._embedded is not None else self._server_arguments()
        print(start_line(reply.job_id, submission.spec, server, link, asked, warm=warm), file=sys.stderr)
        if reply.cursor:
            print(f"Attached to {reply.job_id} ({name}): its epochs so far are replayed.", file=sys.stderr)
        return InteractiveJob(self.connection(), reply.job_id, self._id, name, reply.cursor, manifest)

    def _server_arguments(self) -> Iterator[str]:
        """Yield the arguments with which a command reaches the session's server, where it does not find it itself."""
        for name in ("server", "token_file", "ca_file"):
            setting = self.options.settings.get(name)
            if setting is not None and setting.origin == ARGUMENT:
                yield f"--{name.replace('_', '-')} {shlex.quote(str(setting.value))}"

    def make_feeder(
        self, job: InteractiveJob, epoch: Callable[[], Iterator[Any]], rewind: Callable[[], None]
    ) -> Feeder:
        """Return a feeder of a job; simulated sessions replace it."""
        return Feeder(job, epoch, rewind)

    def send(self, submission: Submission) -> pb.SubmitReply:
        """Upload missing artifacts and submit the job.

        With a name, find the job that has it; as a second call finds the job of the first, it is made again while the
        server is away or its disk is full.
        """
        connection, spec, name = self.connection(), submission.spec.model_dump_json(), submission.name
        stored = set(submission.spec.artifacts) - submission.blobs.keys()
        if stored and find_missing(connection, stored):
            raise UsageError(
                f"nfdt.Embedding: expected trained tables on {connection.address}. Received: ones that another server "
                "has, or had until its session ended. Write them with nfdt.save_tables in the session that trains "
                "them, and read them with nfdt.load_tables in this one."
            )
        sent = upload(connection, submission.blobs, waits=bool(name))
        submit = partial(connection.submit, spec, self._id, name)
        reply = connection.persist(submit, stores=True) if name else submit()
        logger.info("Submitted job %s (%d bytes uploaded)", reply.job_id, sent)
        return reply

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
