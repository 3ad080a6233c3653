"""Simulated workers that push the change of several steps of the user's own optimizer: local SGD, DiLoCo."""

from __future__ import annotations

from collections import Counter, defaultdict

import keras
import numpy as np
import pytest

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.work import instructions as ins
from tests.support.simulated_jobs import BATCH, ROWS, X, Y, as_text, build, cluster, simulate

pytestmark = pytest.mark.processes


def compiled(optimizer):
    model = build()
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def flat(model):
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.7)


@pytest.fixture
def tasks(monkeypatch):
    """Provide the tasks of each worker, each of them several steps, of the jobs that the test simulates."""
    found, plain = defaultdict(list), Coordinator.next

    def noted(self, name, *reports):
        instruction = plain(self, name, *reports)
        if isinstance(instruction, ins.Work):
            found[name].extend(instruction.tasks)
        return instruction

    monkeypatch.setattr(Coordinator, "next", noted)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.002, momentum=0.9),
        lambda: keras.optimizers.SGD(decaying(), clipnorm=1.0),
        lambda: keras.optimizers.AdamW(decaying(), weight_decay=0.01),
    ],
)
@pytest.mark.parametrize("local_steps", [1, 4])
def test_one_machine_is_keras_and_its_optimizer_comes_back(make, local_steps):
    plain, ours = compiled(make()), compiled(make())
    for model in (plain, ours):
        model.fit(X[:32], Y[:32], batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    options = {"local_steps": local_steps, "codec": "identity"}
    simulate(cluster({}), "local-ddc", model=ours, epochs=2, shuffle=False, **options)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    for found, wanted in zip(ours.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5, err_msg=wanted.path)


@pytest.mark.parametrize("algorithm", ["local-ddc", "diloco"])
def test_a_learning_rate_that_a_callback_sets_reaches_the_workers_with_their_next_epoch(algorithm):
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch: (0.02, 0.005, 0.01)[epoch])]

    plain, ours = build(), build()
    plain.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks())
    options = {"local_steps": 1, "codec": "identity"}
    options |= {"outer_lr": 1.0, "outer_momentum": 0} if algorithm == "diloco" else {}
    simulate(cluster({}), algorithm, model=ours, epochs=3, shuffle=False, callbacks=callbacks(), **options)
    np.testing.assert_allclose(flat(ours), flat(plain), rtol=1e-4, atol=1e-5)
    assert float(ours.optimizer.learning_rate) == pytest.approx(0.01)


def test_two_equal_workers_in_rounds_are_diloco_written_in_numpy(tasks):
    rate, inner, outer_rate, outer, steps = 0.02, 0.5, 0.7, 0.8, 2
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate, momentum=inner), "mse")
    served, moved = flat(model).astype(float), np.zeros(6)
    job, _, _ = simulate(cluster({"count": 2}), "diloco", model=model, shuffle=False, local_steps=steps)
    slots = {name: np.zeros(6) for name in tasks}
    for round_ in zip(*tasks.values(), strict=True):
        difference = np.zeros(6)
        for name, task in zip(tasks, round_, strict=True):
            assert task.stop - task.start == steps * BATCH
            own = served.copy()
            for start in range(task.start, task.stop, BATCH):
                x, y = np.c_[X, np.ones(ROWS)][start : start + BATCH], Y[start : start + BATCH, 0]
                slots[name] = inner * slots[name] - rate * 2 / BATCH * x.T @ (x @ own - y)
                own += slots[name]
            difference += (served - own) / 2
        moved = outer * moved - outer_rate * difference
        served = served + outer * moved - outer_rate * difference
    np.testing.assert_allclose(job.snapshot().weights, served, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["local-ddc", "diloco"])
def test_a_worker_pushes_once_for_several_steps(algorithm, tasks):
    options = {"local_steps": 4, "codec": "identity"}
    job, _, history = simulate(cluster({"count": 3}), algorithm, epochs=3, **options)
    weights = 4 * build().count_params()
    for name, counts in history.nfdt.items():
        samples = [task.stop - task.start for task in tasks[name]]
        assert counts["batch_sizes"] == {str(size): n for size, n in Counter(samples).items()}
        assert sum(counts["staleness"].values()) == len(samples) < counts["steps"] == counts["samples"] / BATCH
        assert counts["bytes_sent"] == len(samples) * weights
    assert sum(counts["samples"] for counts in history.nfdt.values()) == job.record.samples == 3 * ROWS
    assert sum(use.samples for use in job.record.machines.values()) == 3 * ROWS


def test_a_link_carries_one_difference_for_several_steps():
    size = 4 * build().count_params()
    described = cluster({"bandwidth_mbit": 8 * size / 1e6})
    _, _, history = simulate(described, "local-ddc", local_steps=4, codec="identity", overlap=0)
    pull, push_and_reply, step = 1.0, 2.0, 0.1
    counts = history.nfdt["worker-0"]
    assert counts["seconds"] == pytest.approx(pull + 3 * (4 * step + push_and_reply))
    assert counts["exchange_s"] == pytest.approx(pull + 3 * push_and_reply)


@pytest.mark.parametrize("algorithm", ["local-ddc", "diloco"])
def test_unequal_workers_train_every_sample_the_same_way_every_time(algorithm):
    described = cluster({"count": 3, "jitter": 0.1}, {"step_ms": 300})
    options = {"local_steps": 2, "epochs": 4}
    first, again = (simulate(described, algorithm, model=build(rate=0.002), **options)[0] for _ in range(2))
    assert first.record.samples == 4 * ROWS
    assert as_text(first) == as_text(again)


def test_a_worker_whose_weights_are_lost_goes_on_from_the_shards():
    bad = X.copy()
    bad[:BATCH] = np.nan
    options = {"local_steps": 1, "codec": "identity", "shuffle": False, "overlap": 0}
    job, _, _ = simulate(cluster({}), "local-ddc", x=bad, model=build(momentum=0.0), **options)
    assert job.record.dropped == 1
    assert np.isfinite(job.snapshot().weights).all()


def test_workers_begin_the_next_epoch_while_the_last_pushes_travel(tasks):
    size = 4 * len(flat(build())) + 16
    described = cluster(*[{"bandwidth_mbit": 4 * 8 * size / 1e6, "step_ms": ms} for ms in (100, 100, 200)])
    options = {"local_steps": 8, "codec": "identity", "epochs": 4, "batch_size": 2}
    early, _, history = simulate(described, "local-ddc", model=build(rate=0.0005), **options)
    parts = Counter(task.task for found in tasks.values() for task in found)
    waiting, _, waited = simulate(described, "local-ddc", model=build(rate=0.0005), epoch_overlap=False, **options)
    assert sum(count > 1 for count in parts.values()) >= 6, "tasks that are begun before their epoch"
    ends = [[point.at_s for point in job.record.points if point.ends_epoch] for job in (early, waiting)]
    took, waited_s = (each[-1] - each[0] for each in ends)  # no speed is known in the first epoch
    assert took < 0.9 * waited_s
    assert early.record.samples == waiting.record.samples == 4 * ROWS
    for losses in (history.history["loss"], waited.history["loss"]):
        assert losses[-1] < 0.5 * losses[0]
