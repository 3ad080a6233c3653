"""A session that simulates its jobs in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from nfdt_client.feed import Feeder
from nfdt_client.job import InteractiveJob, Submission
from nfdt_client.options import Options
from nfdt_client.session import Session

from nfdt.cli.profiling import not_alone
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import ClusterSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.training.data import encode_batch
from nfdt.model.training.host_batches import rows_of
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.job import SimulatedJob


class VirtualFeeder:
    """Feeder of a stream's batches to a simulated job; replaces :class:`nfdt_client.feed.Feeder`."""

    error: Exception | None = None

    def __init__(self, job: SimulatedJob, epoch: Callable[[], Iterator[Any]]) -> None:
        self._job, self._epoch = job, epoch

    def start_epoch(self, epoch: int, *, again: bool = False) -> None:
        """Feed this epoch."""
        self._job.feed(epoch, ((encode_batch(batch), rows_of(batch)) for batch in self._epoch()))

    def close(self) -> None:
        """Do nothing; the user's iterator keeps its position."""


class SimulatedSession(Session):
    """Context manager in which ``keras.Model.fit`` trains on a described cluster under a virtual clock.

    Args:
        options: Options of the session; no server is used.
        cluster: The machines and links.

    Attributes:
        jobs: All jobs so far, each ended.

    Raises:
        UsageError: workers have a speed and no step time, or ``batch_hooks`` is ``exact``.
    """

    warns_if_idle = False

    def __init__(self, options: Options, cluster: ClusterDescription) -> None:
        if cluster.is_relative:  # so that the same file and seed give the same bytes everywhere
            raise UsageError(
                "workers: expected step_ms in the simulator. Received: speed. nfdt plan measures the script's steps "
                "with the same file, and prints the step_ms to write into it."
            )
        if options.batch_hooks == "exact":
            raise UsageError(
                "batch_hooks: expected 'auto' or 'approximate' in the simulator, whose epochs do not stand still. "
                "Received: 'exact'."
            )
        given = replace(options, data="client", evaluate="false", fallback="error", keep_runs=0)
        super().__init__(replace(given, batch_hooks="approximate"))
        self.jobs: list[SimulatedJob] = []
        self._described = cluster

    def _open(self, undo: ExitStack) -> None:
        """Do nothing; there is no server."""

    def place(self, code: bool) -> ClusterSpec:
        """Return the cluster with the simulated numbers of workers and shards."""
        size = {"workers": self._described.count, "shards": self._described.shards.count}
        return self.options.cluster.model_copy(update=size)

    def start(self, submission: Submission, manifest: Manifest) -> InteractiveJob:
        """Simulate the job.

        Raises:
            UsageError: the model trains on one worker, and the cluster has several.
        """
        if (workers := submission.spec.cluster.workers) != self._described.count:
            raise not_alone(workers, self._described.count)

        def read(name: str) -> bytes:
            return b"".join(content for _, content in submission.blobs[name].chunks())

        self.jobs.append(SimulatedJob(submission.spec, manifest, read, self._described))
        return cast(InteractiveJob, self.jobs[-1])  # has all methods that the client uses

    def make_feeder(
        self, job: InteractiveJob, epoch: Callable[[], Iterator[Any]], rewind: Callable[[], None]
    ) -> Feeder:
        """Return a feeder of the simulated job."""
        return cast(Feeder, VirtualFeeder(self.jobs[-1], epoch))
