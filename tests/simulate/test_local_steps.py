"""Simulated groups that push the change of several steps of the user's own optimizer: local SGD, DiLoCo."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.work import instructions as ins
from nfdt.model.program import unpack
from nfdt.model.program.state import State, load_state
from nfdt.model.training.data import ArraySource, decode_npy
from nfdt.shard.building import build_store, served_program
from nfdt.shard.in_process import InProcessClient
from tests.support.simulated_jobs import BATCH, ROWS, X, Y, as_text, build, cluster, simulate

pytestmark = pytest.mark.processes

LOCAL_SGD = {"outer": "delta", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0}


def compiled(optimizer):
    model = build()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def flat(model):
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.7)


@pytest.fixture
def leases(monkeypatch):
    """Provide the tasks of each lease, by worker, of the jobs that the test simulates."""
    found, plain = defaultdict(list), Coordinator.next

    def noted(self, name, *reports):
        instruction = plain(self, name, *reports)
        if isinstance(instruction, ins.Work):
            found[name].append(instruction.tasks)
        return instruction

    monkeypatch.setattr(Coordinator, "next", noted)
    return found


def rounds_of(leases, local_steps):
    """Divide leases into the steps of each push: a lease ends a round."""
    return [lease[i : i + local_steps] for lease in leases for i in range(0, len(lease), local_steps)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.002, momentum=0.9),
        lambda: keras.optimizers.SGD(decaying(), clipnorm=1.0),
        lambda: keras.optimizers.AdamW(decaying(), weight_decay=0.01),
    ],
)
@pytest.mark.parametrize("local_steps", [1, 4])
def test_one_machine_whose_differences_are_applied_as_they_are_is_keras(make, local_steps):
    plain, ours = compiled(make()), compiled(make())
    for model in (plain, ours):
        model.fit(X[:32], Y[:32], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    began = int(ours.optimizer.iterations)
    plain.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    options = {**LOCAL_SGD, "local_steps": local_steps}
    simulate(cluster({}), "group-sync", model=ours, epochs=2, shuffle=False, **options)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    assert int(ours.optimizer.iterations) == began, "the model's own optimizer stays as it was"


def test_a_learning_rate_that_a_callback_sets_reaches_the_group_with_its_next_epoch():
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch: (0.02, 0.005, 0.01)[epoch])]

    plain, ours = build(), build()
    plain.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks())
    simulate(cluster({}), "group-sync", model=ours, epochs=3, shuffle=False, callbacks=callbacks(), **LOCAL_SGD)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    assert float(ours.optimizer.learning_rate) == pytest.approx(0.01)


class OneRank:
    """The communicator of a group with one rank."""

    @staticmethod
    def gather(data):
        return [data]

    @staticmethod
    def sum(tensor, name):
        return tensor

    @staticmethod
    def broadcast_vector(size, weights, version):
        return np.array(weights), version


class RealGroup:
    """A real group of one rank, whose shards are in this process; Horovod need not be installed for it."""

    def __init__(self, monkeypatch, session, client, share, leases):
        monkeypatch.setitem(sys.modules, "hfdt.runtime.communicator", SimpleNamespace(Communicator=OneRank))
        from hfdt.runtime.outer import DeltaOuter, GroupExchange

        manifest, self.share = session.manifest, share
        model = unpack.unpack(manifest, session.read, allow_code=False)
        self.exchange = GroupExchange(OneRank(), manifest.layout.size, 0, shards=2)
        self.exchange.client = client
        state = load_state(session.read(manifest.state))
        self.outer = DeltaOuter(model, manifest, state, OneRank(), self.exchange)
        self.outer.local_steps = share["local_steps"]
        self.rounds = iter(rounds_of(leases, share["local_steps"]))

    def pull(self):
        self.outer.step.load(State(self.exchange.pull(), optimizer={}))

    def push(self, spec, source):
        for task in next(self.rounds):
            rows = spec.sample_order(task.pass_index)[task.start : task.stop]
            self.outer(source.batch(rows), 1.0, lambda s: None, samples=len(rows), rate=self.share["rate"], task=task)
        self.outer.push_pending()


def test_groups_train_as_real_groups_do_in_the_same_order(monkeypatch, leases):
    options = {"groups": "0;1,2", "outer": "delta", "local_steps": 3, "batch": "fixed"}
    described = cluster({}, {"step_ms": 150, "count": 2}, shards={"count": 2})
    job, session, _ = simulate(described, "group-sync", model=build(rate=0.002), epochs=2, **options)
    spec, manifest, (_, formed) = job.spec, session.manifest, job.record.groups[0]
    assert [share["local_steps"] for share in formed["groups"]] == [3, 2]
    program = served_program(manifest, load_state(session.read(manifest.state)), spec.algorithm)
    stores = [build_store(*program, i, 2, workers=2) for i in range(2)]
    real = {}
    for number, share in enumerate(formed["groups"]):
        client = InProcessClient(stores, manifest.layout, name := f"worker-{number}")
        real[name] = RealGroup(monkeypatch, session, client, share, leases[name])
    source = ArraySource(spec.train.structure, [decode_npy(session.read(n)) for n in spec.train.arrays])
    for kind, name in job.shards.stores[0].order:
        real[name].pull() if kind == "pull" else real[name].push(spec, source)
    weights = np.concatenate([store.read()[0] for store in stores])
    np.testing.assert_allclose(job.snapshot().weights, weights, rtol=1e-4, atol=1e-5)
    for name, counts in job.worker_statistics().items():
        for count in ("staleness", "batch_sizes"):
            expected = getattr(real[name].exchange.counts, count)
            assert {int(value): n for value, n in counts[count].items()} == dict(expected), (name, count)


def test_two_equal_groups_are_diloco_written_in_numpy(leases):
    rate, inner, outer_rate, outer, steps = 0.02, 0.5, 0.7, 0.9, 3
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate, momentum=inner), "mse")
    served, moved = flat(model).astype(float), np.zeros(6)
    options = {"groups": 2, "outer": "delta", "local_steps": steps, "batch": "fixed", "update_rule": "plain"}
    job, _, _ = simulate(cluster({"count": 2}), "group-sync", model=model, shuffle=False, **options)
    order = [name for kind, name in job.shards.stores[0].order if kind == "push"]
    held = {name: served for name in order}
    slots = {name: np.zeros(6) for name in order}
    rounds = {name: iter(rounds_of(leases[name], steps)) for name in order}
    for name in order:
        own = held[name].copy()
        for task in next(rounds[name]):
            x, y = np.c_[X, np.ones(ROWS)][task.start : task.stop], Y[task.start : task.stop, 0]
            slots[name] = inner * slots[name] - rate * 2 / len(x) * x.T @ (x @ own - y)
            own += slots[name]
        step = outer_rate / 2 * (held[name] - own)  # each of two equal groups counts half
        moved = outer * moved - step
        served = held[name] = served + outer * moved - step
    np.testing.assert_allclose(job.snapshot().weights, served, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", ["0;1;2;3", 4])
def test_every_machine_may_be_a_group_and_pushes_once_in_a_round(groups, leases):
    options = {"groups": groups, "outer": "delta", "local_steps": 4, "batch": "fixed"}
    job, _, history = simulate(cluster({"count": 4}), "group-sync", epochs=3, **options)
    assert [share["members"] for share in job.record.groups[0][1]["groups"]] == [[0], [1], [2], [3]]
    weights = 4 * build().count_params()
    for name, counts in history.nfdt.items():
        rounds = [sum(task.stop - task.start for task in steps) for steps in rounds_of(leases[name], 4)]
        assert counts["batch_sizes"] == {str(samples): n for samples, n in Counter(rounds).items()}
        assert sum(counts["staleness"].values()) == len(rounds) < counts["steps"] == counts["samples"] / BATCH
        assert counts["bytes_sent"] == len(rounds) * weights
    assert sum(counts["samples"] for counts in history.nfdt.values()) == job.record.samples == 3 * ROWS
    assert sum(use.samples for use in job.record.machines.values()) == 3 * ROWS


def test_a_link_carries_one_difference_in_a_round():
    size = 4 * build().count_params()
    described = cluster({"bandwidth_mbit": 8 * size / 1e6})
    _, _, history = simulate(described, "group-sync", outer="delta", local_steps=4)
    pull, push_and_reply, step = 1.0, 2.0, 0.1
    counts = history.nfdt["worker-0"]
    assert counts["seconds"] == pytest.approx(pull + 3 * (4 * step + push_and_reply))
    assert counts["exchange_s"] == pytest.approx(pull + 3 * push_and_reply)


def test_groups_form_again_and_train_every_sample_the_same_way_every_time():
    drift = [{"at_s": 3.0, "slowdown": 4}]
    described = cluster({"step_ms": 1000, "count": 3, "jitter": 0.1}, {"step_ms": 1000, "drift": drift})
    options = {"outer": "delta", "local_steps": 2, "outer_momentum": 0, "epochs": 12}
    first, again = (simulate(described, "group-sync", model=build(rate=0.002), **options)[0] for _ in range(2))
    assert len(first.record.groups) > 1
    assert first.record.samples == 12 * ROWS
    assert as_text(first) == as_text(again)


def test_a_group_whose_weights_are_lost_in_a_round_goes_on_from_the_shards(monkeypatch):
    bad = X.copy()
    bad[:BATCH] = np.nan
    job, _, _ = simulate(cluster({}), "group-sync", x=bad, shuffle=False, model=build(momentum=0.0), **LOCAL_SGD)
    assert job.record.dropped == 1
    assert np.isfinite(job.snapshot().weights).all()
