"""Group of all ranks of this world, without servers: rank 0 has the shards in its own process."""

from __future__ import annotations

import hashlib

import keras
import numpy as np
import pytest

import hfdt.keras as hvd
from hfdt.runtime.artifacts import RankArtifacts
from hfdt.runtime.group_job import GroupJob
from hfdt.runtime.tensorflow_ranks import HorovodRanks
from nfdt.core.sharding import make_plan
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.model.training.data import encode_batch
from nfdt.shard.in_process import InProcessClient
from nfdt.shard.keras_engine import KerasEngine
from nfdt.shard.optimizer import build_optimizer
from nfdt.shard.store import ShardStore
from nfdt.update_rules import make_rule
from tests.support.rank_training import CLASSES, FEATURES, assert_equal_on_all_ranks, dense_model

ROWS = 7  # of rank 0; every further rank has one more
TASKS = 6


def shares() -> list[int]:
    return [ROWS + rank for rank in range(hvd.size())]


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    count = TASKS * sum(shares())
    return rng.normal(size=(count, FEATURES)).astype("float32"), rng.integers(0, CLASSES, size=count)


def compiled(optimizer) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = dense_model()
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


class Group:
    """Group job on this rank."""

    def __init__(self, folder, optimizer, **options):
        self.folder = folder
        x, y = data()
        packed = pack(compiled(optimizer), (x[:4], y[:4]))
        for content in packed.artifacts.values():
            self.put(content)
        names = []
        for array in (x, y):
            np.save(folder / "array.npy", array)
            names.append(self.put((folder / "array.npy").read_bytes()))
        self.spec = JobSpec(
            program=self.put(packed.manifest.to_bytes()),
            algorithm=resolve_algorithm("group-sync", **options),
            cluster=ClusterSpec(workers=hvd.size()),
            fit=FitSpec(epochs=1, batch_size=ROWS, shuffle=False),
            train=DataSpec(kind="arrays", structure=[0, 1, None], arrays=tuple(names), samples=len(x)),
            validation=DataSpec(kind="arrays", structure=[0, 1, None], arrays=tuple(names), samples=len(x)),
        )
        self.manifest = packed.manifest
        communicator = HorovodRanks()
        members = range(hvd.size())
        self.job = GroupJob(self.spec, communicator, RankArtifacts(folder), members)
        if communicator.rank == 0:
            self.job.exchange.client = self.connect(self.job.step.layout)

    def put(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        (self.folder / name).write_bytes(content)
        return name

    def connect(self, layout) -> InProcessClient:
        state = load_state(self.folder / self.manifest.state)
        built = build_optimizer(self.manifest, make_plan(self.manifest, 0, 1), state.weights)
        stores = [ShardStore(KerasEngine(built, make_rule(self.spec.algorithm, built.traits)))]
        self.others = InProcessClient(stores, layout, "another group")
        return InProcessClient(stores, layout, "group")

    def others_push(self) -> None:
        """Change the weights as another group would."""
        weights = self.others.pull().weights
        self.others.push(np.ones_like(weights), samples=1)

    def train(self, *, fed=False, lease=None, meanwhile=None) -> np.ndarray:
        """Train all tasks, three per lease, named or fed; return the weights that the group then holds.

        ``meanwhile`` is called before each lease, on rank 0. ``lease`` are fields of its instruction.
        """
        self.job.execute(ins.BeginEpoch(0, b"", 0, ins.StepShare(tuple(shares()), 1.0)))
        batch = sum(shares())
        tasks = [Task(i, i * batch, (i + 1) * batch) for i in range(TASKS)]
        if fed:
            tasks = [Task(i, 0, batch, data=encode_batch(b)) for i, b in enumerate(batches())]
        for leased in (tasks[:3], tasks[3:]):
            if meanwhile is not None and not hvd.rank():
                meanwhile()
            report = self.job.execute(ins.Work(0, tuple(leased), **(lease or {})))
            assert list(report.finished) == [task.task for task in leased]
        return np.array(self.job.exchange.current_weights())


def flat(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def batches():
    x, y = data()
    size = sum(shares())
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


@pytest.mark.parametrize(("batch", "fed"), [("fixed", True), ("dbs", False)])
def test_one_group_equals_one_process_with_its_batch(tmp_path, batch, fed):
    together = Group(tmp_path, keras.optimizers.SGD(0.1, momentum=0.9), batch=batch).train(fed=fed)
    assert_equal_on_all_ranks(together)
    alone = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
    for x, y in batches():
        alone.train_on_batch(x, y)
    np.testing.assert_allclose(together, flat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lease", "staleness"), [({}, {0: 5, 1: 1}), ({"pull": True}, {0: 6}), ({"no_weights": True}, {0: 6})]
)
def test_a_group_computes_on_weights_as_old_as_its_lease_allows(tmp_path, lease, staleness):
    group = Group(tmp_path, keras.optimizers.SGD(0.1), consistency="ssp")
    group.train(lease=lease, meanwhile=group.others_push)
    assert hvd.rank() or dict(group.job.exchange.counts.staleness) == staleness


def test_a_group_validates_on_the_weights_of_the_epoch_s_end_and_reports_each_batch(tmp_path):
    group, advanced, results = Group(tmp_path, keras.optimizers.SGD(0.1)), [], []
    group.train()
    group.job.advanced = lambda: advanced.append(len(advanced))
    tasks = tuple(Task(i, 2 * i, 2 * i + 2) for i in range(3))
    for epoch in (0, 0, 1):
        report = group.job.execute(ins.Evaluate(epoch, tasks, b""))
        results.append(report.evaluated.metrics)
        if not hvd.rank():
            group.others_push()
    assert results[0] == results[1] != results[2]
    assert len(advanced) == 9


def test_measuring_moves_nothing_and_times_every_member_s_steps(tmp_path):
    group = Group(tmp_path, keras.optimizers.SGD(0.1))
    before = np.array(group.job.exchange.current_weights())
    group.job.measure()
    group.job.exchange.weights = None
    np.testing.assert_array_equal(group.job.exchange.current_weights(), before)
    assert set(group.job.speeds) == {str(rank) for rank in range(hvd.size())}
    for steps, recent in group.job.speeds.values():
        assert steps == len(recent) == 18
        assert {rows for rows, _ in recent} == {ROWS, ROWS // 4}
        assert all(seconds > 0 for _, seconds in recent)
