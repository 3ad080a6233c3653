"""Sessions without a server: one simulates its jobs in this process, one captures and profiles the first fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from nfdt_client.capture import Capture, capture
from nfdt_client.feed import Feeder
from nfdt_client.job import InteractiveJob, Submission
from nfdt_client.local_fit import Fallback
from nfdt_client.options import Options
from nfdt_client.program_checks import cluster_for
from nfdt_client.session import Session
from nfdt_client.training_data import Arrays

from nfdt.cli.profiling import RepeatedBatch, plain_epochs, profile, worker_epochs
from nfdt.cli.script import Script, run_script
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import ClusterSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.pack import PackedProgram, pack
from nfdt.model.program.unpack import unpack
from nfdt.model.training.data import encode_batch
from nfdt.model.training.host_batches import rows_of
from nfdt.planning.calibration import Profile, ProfiledWork
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
        super().__init__(replace(options, batch_hooks="approximate", data="client", evaluate="false", fallback="error"))
        self.jobs: list[SimulatedJob] = []
        self._described = cluster

    def _open(self, undo: contextlib.ExitStack) -> None:
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
            raise _not_alone(workers, self._described.count)

        def read(name: str) -> bytes:
            return b"".join(content for _, content in submission.blobs[name].chunks())

        self.jobs.append(SimulatedJob(submission.spec, manifest, read, self._described))
        return cast(InteractiveJob, self.jobs[-1])  # has all methods that the client uses

    def make_feeder(
        self, job: InteractiveJob, epoch: Callable[[], Iterator[Any]], rewind: Callable[[], None]
    ) -> Feeder:
        """Return a feeder of the simulated job."""
        return cast(Feeder, VirtualFeeder(self.jobs[-1], epoch))


def _not_alone(expected: int, received: int) -> UsageError:
    return UsageError(f"workers: expected {expected}, for the reason above. Received: {received}.")


class FitCaptured(BaseException):
    """Exception that leaves the user's script at its first fit; ``except Exception`` does not catch it."""

    def __init__(self, work: ProfiledWork) -> None:
        super().__init__("the first fit is seen")
        self.work = work


class FitProbe(Session):
    """A session that only captures the first fit.

    Args:
        options: Options of the session; no server is used.
        profiled: Whether to measure the duration of the model's steps on this machine.
    """

    warns_if_idle = False

    def __init__(self, options: Options, *, profiled: bool) -> None:
        super().__init__(replace(options, data="client", evaluate="false", fallback="error"))
        self._profiled = profiled

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Do nothing; there is no server."""

    def fit(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture the fit; ``original`` is Keras' own."""
        self._original = original
        return super().fit(original, model, args, kwargs)

    def _fit(self, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
        captured = capture(model, arguments, self.options)
        batch = captured.train.first()
        asked = self.options.cluster
        if (cluster := cluster_for(model, self.options.algorithm, asked)).workers != asked.workers:
            raise _not_alone(cluster.workers, asked.workers)
        program = pack(model, batch)  # builds the model
        weights = sum(int(math.prod(v.shape)) for v in model.trainable_variables)
        samples = self._samples(captured, batch)
        measured = self._measured(model, program, batch, samples) if self._profiled else None
        raise FitCaptured(ProfiledWork(rows_of(batch), samples, weights, measured))

    def _measured(self, model: Any, program: PackedProgram, batch: Any, samples: int) -> Profile:
        found = profile(program, batch)
        rows = rows_of(batch)
        data = RepeatedBatch.of(batch, -(-samples // rows), found.step.seconds(rows))
        if data is None:
            return found
        copy = unpack(program.manifest, program.artifacts.__getitem__, allow_code=True)
        before = plain_epochs(self._original, copy, data)
        worker = worker_epochs(self._original, model, data, self.options, found.step)
        after = plain_epochs(self._original, copy, data)  # other load may come and go
        return replace(found, plain=before + after, worker=worker)

    @staticmethod
    def _samples(captured: Capture, batch: Any) -> int:
        if not isinstance(captured.train, Arrays):
            if captured.train.batches is None:
                raise UsageError("plan: expected data whose length is known. Received: an endless stream.")
            return captured.train.batches * rows_of(batch)
        train, steps = captured.train, captured.steps_per_epoch
        return train.samples if steps is None else min(train.samples, steps * train.batch_size)


def first_fit(script: Script, options: Options, *, profiled: bool = False) -> ProfiledWork | None:
    """Run a script up to its first ``fit``, and if ``profiled`` a few of its steps; return None without a ``fit``."""
    try:
        with FitProbe(options, profiled=profiled):
            run_script(script)
    except FitCaptured as captured:
        return captured.work
    return None
