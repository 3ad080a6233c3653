"""Another user of a soak's server, who tries to reach the job of the script all the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from nfdt_client.connection import JobsClient

from nfdt.chaos.accounting import RecordedJobs
from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.wire import jobs_pb2 as pb

PAUSE_S = 1.0


class SharedServer(Protocol):
    """What a stranger knows of a server.

    Attributes:
        address: Its address.
        ca_file: Certificate of its authority; None without TLS.
        state_dir: Its state directory, in which the name of the job is read.
        listens: Whether it listens now.
    """

    address: str
    ca_file: str | None
    state_dir: Path

    @property
    def listens(self) -> bool: ...


class Stranger:
    """Holder of a token of its own, on a thread while the block lasts.

    Args:
        cluster: The server.
        secret: The token.

    Attributes:
        refused: Names of the calls that were refused.
        problems: What the server has shown or done, and must not; or that it was never asked.
    """

    def __init__(self, cluster: SharedServer, secret: str) -> None:
        self._cluster, self._secret = cluster, secret
        self._recorded = RecordedJobs(cluster.state_dir)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stranger", daemon=True)
        self.refused: set[str] = set()
        self.problems: list[str] = []

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._recorded.jobs and not self.refused:
            self.problems.append("no call of another user for the job was answered")

    def _work(self) -> None:
        while not self._over.wait(PAUSE_S):
            self.attack()

    def attack(self) -> None:
        """Try everything once, if there is a job."""
        self._recorded.read()
        if self._recorded.jobs and self._cluster.listens:
            with closing(JobsClient(self._cluster.address, self._secret, ca_file=self._cluster.ca_file)) as client:
                self._try_all(client, self._recorded.jobs[0].job_id)

    def _try_all(self, client: JobsClient, job: str) -> None:
        attempts: dict[str, Callable[[], Any]] = {
            "show": lambda: client.show(job),
            "logs and attach": lambda: list(client.recorded(job)),  # nothing in time from a server that stands still
            "resume": lambda: client.resume(job),
            "weights": lambda: client.snapshot(job, "weights"),
            "cancel": lambda: client.control(job, cancel=pb.Cancel(reason="by another user")),
            "delete": lambda: client.delete(job),
        }
        try:
            if client.list():
                self.problems.append("the list of another user had the job")
            for name, attempt in attempts.items():
                try:
                    if attempt() == []:
                        continue
                except UsageError as error:
                    if "No job" in str(error):
                        self.refused.add(name)
                        continue
                    raise
                self.problems.append(f"{name} of another user's job was not refused")
        except NfdtError as error:  # the server is away, or slow: faults are under way
            if isinstance(error, UsageError):
                self.problems.append(f"another user was answered: {error}")
