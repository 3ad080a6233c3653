"""Jobs on described clusters: one program and one data set, trained with any preset, rate, seed and cluster."""

from __future__ import annotations

import hashlib
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nfdt.core.arrays.pytree import flatten_structure
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.model.program.pack import pack
from nfdt.model.training.data import encode_npy
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.job import SimulatedJob
from nfdt.simulate.record import Point, Record
from nfdt.simulate.trainer import Trainer

Nest = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """Result of one simulated training.

    Attributes:
        record: Record of the simulated job.
        wall_s: Real duration in seconds, without start-up and evaluation.
        gradient_s: Part of ``wall_s`` spent on gradients.
        shard_s: Part of ``wall_s`` spent on update rules and optimizers.
        workers: Totals of each worker at the end, as in ``history.nfdt``.
    """

    record: Record
    wall_s: float
    gradient_s: float
    shard_s: float
    workers: Mapping[str, Any]

    @property
    def epochs(self) -> list[Point]:
        """Points at the end of each epoch, whose logs include those of the evaluation as ``val_*``."""
        return [point for point in self.record.points if point.ends_epoch]


@dataclass
class VirtualTraining:
    """Simulated trainings whose gradient graphs are traced once.

    Attributes:
        build: Function that makes a compiled model from a seed, a learning rate and the number of updates.
        train: Images and labels for training.
        test: Images and labels evaluated after every epoch.
        batch: Size of a local batch.
        epochs: Number of epochs of each training.
        lanes: Most gradients that are computed in one call; None: as many as are best on this machine.
    """

    build: Callable[[int, float, int], Any]
    train: Nest
    test: Nest
    batch: int
    epochs: int
    lanes: int | None = None
    _artifacts: dict[str, bytes] = field(default_factory=dict)
    _trainers: dict[tuple[tuple[float, float] | None, float], Trainer] = field(default_factory=dict)

    def run(
        self,
        preset: str,
        cluster: ClusterDescription,
        *,
        seed: int,
        rate: float,
        merged: float = 1.0,
        overrides: Mapping[str, Any] | None = None,
    ) -> Trained:
        """Simulate one training.

        Args:
            preset: Name of the row.
            cluster: Simulated machines.
            seed: Seed of the weights and of the order of samples.
            rate: Learning rate of the model.
            merged: Local batches per update, which determines the number of updates in a schedule.
            overrides: Algorithm options of the row.
        """
        updates = self.epochs * -(-len(self.train[0]) // self.batch)
        model = self.build(seed, rate, max(1, round(updates / merged)))
        algorithm = resolve_algorithm(preset, **(overrides or {}))
        outer = algorithm.outer_optimizer
        packed = pack(model, tuple(a[: self.batch] for a in self.train), outer=outer)
        program = packed.manifest.to_bytes()
        own = {**packed.artifacts, sha256_of(program): program}
        spec = JobSpec(
            program=sha256_of(program),
            algorithm=algorithm,
            cluster=ClusterSpec(workers=cluster.count),
            fit=FitSpec(epochs=self.epochs, batch_size=self.batch, seed=seed, validation_batch_size=1000),
            train=self._data(self.train),
            validation=self._data(self.test),
            code=packed.manifest.carries_code,
        )
        read = ChainMap(own, self._artifacts).__getitem__
        key = outer, algorithm.local_rate
        trainer = self._trainers.get(key) or Trainer(spec, packed.manifest, read, lanes=self.lanes)
        self._trainers[key] = trainer
        job = SimulatedJob(spec, packed.manifest, read, cluster, trainer)
        gradient_s, evaluate_s, began = trainer.gradient_s, trainer.evaluate_s, time.perf_counter()
        record = job.run()
        wall_s = time.perf_counter() - began - (trainer.evaluate_s - evaluate_s)
        gradient_s = trainer.gradient_s - gradient_s
        return Trained(record, wall_s, gradient_s, job.shards.seconds, job.worker_statistics())

    def _put(self, content: bytes) -> str:
        name = sha256_of(content)
        self._artifacts[name] = content
        return name

    def _data(self, tree: Sequence[np.ndarray]) -> DataSpec:
        structure, arrays = flatten_structure(tuple(tree))
        names = tuple(self._named(array) for array in arrays)
        return DataSpec(kind="arrays", structure=structure, arrays=names, samples=len(arrays[0]))

    def _named(self, array: np.ndarray) -> str:
        """Return the name of the array's artifact, hashed once."""
        known = self.__dict__.setdefault("_names", {})
        if id(array) not in known:
            known[id(array)] = self._put(encode_npy(array))
        return str(known[id(array)])


def sha256_of(content: bytes) -> str:
    """Return the name of an artifact."""
    return hashlib.sha256(content).hexdigest()
