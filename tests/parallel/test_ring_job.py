"""Job of all ranks of this world, without servers."""

from __future__ import annotations

import hashlib
import threading

import keras
import numpy as np
import pytest

import hfdt.keras as hvd
from hfdt.runtime.artifacts import RankArtifacts
from hfdt.runtime.job import RingJob
from hfdt.runtime.tensorflow_ranks import HorovodRanks
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.program.pack import pack
from tests.support.rank_training import CLASSES, FEATURES, assert_equal_on_all_ranks, dense_model

ROWS = 6  # of one rank
SAMPLES = 100  # the last batches have one row or a part of the others' rows
MODES = {"a graph": False, "eager": True}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, FEATURES)).astype("float32"), rng.integers(0, CLASSES, size=SAMPLES)


def tasks() -> list[Task]:
    batch = ROWS * hvd.size()
    borders = [*range(0, SAMPLES - 1, batch), SAMPLES - 1, SAMPLES]  # one row: not every rank has one
    return [Task(i, *border) for i, border in enumerate(zip(borders, borders[1:], strict=False))]


def compiled(*, run_eagerly: bool = False) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", run_eagerly=run_eagerly)
    return model


def ring_job(folder, *, run_eagerly: bool = False) -> RingJob:
    def put(content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        (folder / name).write_bytes(content)
        return name

    x, y = data()
    packed = pack(compiled(run_eagerly=run_eagerly), (x[:4], y[:4]))
    for content in packed.artifacts.values():
        put(content)
    names = []
    for array in (x, y):
        np.save(folder / "array.npy", array)
        names.append(put((folder / "array.npy").read_bytes()))
    spec = JobSpec(
        program=put(packed.manifest.to_bytes()),
        algorithm=resolve_algorithm("allreduce"),
        cluster=ClusterSpec(workers=hvd.size()),
        fit=FitSpec(epochs=1, batch_size=ROWS, shuffle=False),
        train=DataSpec(kind="arrays", structure=[0, 1, None], arrays=tuple(names), samples=SAMPLES),
    )
    return RingJob(spec, HorovodRanks(), RankArtifacts(folder))


def train(job: RingJob) -> np.ndarray:
    """Train all tasks in two leases; return the weights."""
    job.execute(ins.BeginEpoch(0, b"", 0))
    every = tasks()
    for leased in (every[:3], every[3:]):
        report = job.execute(ins.Work(0, tuple(leased)))
        assert list(report.finished) == [task.task for task in leased]
    return job.step.weights()


@pytest.mark.parametrize("mode", MODES)
def test_a_job_equals_one_process_with_the_same_global_batches(tmp_path, mode):
    together = train(ring_job(tmp_path, run_eagerly=MODES[mode]))
    assert_equal_on_all_ranks(together)
    alone, (x, y) = compiled(), data()
    for task in tasks():
        alone.train_on_batch(x[task.start : task.stop], y[task.start : task.stop])
    flat = np.concatenate([np.asarray(v).reshape(-1) for v in alone.trainable_variables])
    np.testing.assert_allclose(together, flat, atol=1e-5, rtol=1e-5)


def test_the_batches_of_a_lease_behind_the_first_are_prepared_beside_its_steps(tmp_path, monkeypatch):
    job, threads = ring_job(tmp_path), []
    prepare = job.step.prepare

    def recorded(batch):
        threads.append(threading.current_thread())
        return prepare(batch)

    monkeypatch.setattr(job.step, "prepare", recorded)
    job.execute(ins.BeginEpoch(0, b"", 0))
    job.execute(ins.Work(0, tuple(tasks()[:4])))
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False, False]
    assert not any(thread.is_alive() for thread in threads[1:])


def test_rows_that_cannot_be_read_fail_the_lease_on_every_rank(tmp_path, monkeypatch):
    job, before = ring_job(tmp_path), threading.active_count()
    prepare, calls = job.step.prepare, []

    def failing(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise OSError("these rows are gone")
        return prepare(batch)

    monkeypatch.setattr(job.step, "prepare", failing)
    job.execute(ins.BeginEpoch(0, b"", 0))
    with pytest.raises(OSError, match="these rows are gone"):
        job.execute(ins.Work(0, tuple(tasks()[:5])))
    assert job.steps == 2
    assert threading.active_count() == before
