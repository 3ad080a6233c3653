"""Jobs under the virtual clock: reproducible, with times as computed by hand and the weights of real shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from nfdt.core.errors import JobFailed, UsageError
from nfdt.model.backends.tensorflow_step import GradientStep
from nfdt.model.program import unpack
from nfdt.model.program.state import load_state
from nfdt.model.training.data import ArraySource, decode_npy
from nfdt.schedulers.tasks import TaskPlan
from nfdt.shard.building import build_store
from nfdt.shard.in_process import InProcessClient
from nfdt.simulate.job import SimulatedJob
from nfdt.transport.base import Pulled
from tests.support.simulated_jobs import BATCH, ROWS, X, Y, as_text, build, cluster, simulate

UNEQUAL = ({"jitter": 0.2}, {"step_ms": 130, "jitter": 0.2}, {"step_ms": 310})


def test_the_same_seed_gives_the_same_run_in_an_order_that_no_update_rule_changes():
    first, second, other = (simulate(cluster(*UNEQUAL), name)[0] for name in ("ddc-asgd", "ddc-asgd", "asgd"))
    assert as_text(first) == as_text(second)
    assert first.record.answered == other.record.answered


@pytest.mark.parametrize("algorithm", ["asgd", "ddc-asgd"])
def test_a_second_job_of_a_trainer_compiles_no_engine_and_gives_the_same(algorithm):
    described = cluster(*UNEQUAL)
    first, session, _ = simulate(described, algorithm)
    expected, engine = as_text(first), first.shards.stores[0].store._engine
    second = SimulatedJob(first.spec, session.manifest, session.read, described, first.trainer)
    second.run()
    assert second.shards.stores[0].store._engine is engine
    assert as_text(second) == expected


def test_the_weights_are_those_of_the_servers_shards_given_the_same_order():
    job, session, _ = simulate(cluster(*UNEQUAL, shards={"count": 2}), "ddc-asgd")
    spec, manifest = job.spec, session.manifest
    state, layout = load_state(session.read(manifest.state)), manifest.layout
    stores = [build_store(manifest, state, spec.algorithm, i, 2, workers=3) for i in range(2)]
    names = {worker for _, worker in job.shards.stores[0].order}
    clients = {name: InProcessClient(stores, layout, name) for name in names}
    step = GradientStep(unpack.unpack(manifest, session.read, allow_code=False), layout)
    source = ArraySource(spec.train.structure, [decode_npy(session.read(n)) for n in spec.train.arrays])
    tasks = {name: iter([t for w, t in job.record.answered if w == name]) for name in names}
    plan, held = TaskPlan(ROWS, BATCH), {}
    for kind, name in job.shards.stores[0].order:
        if kind == "pull":
            held[name] = clients[name].pull()
            continue
        (task,) = plan.round(next(tasks[name]))
        rows = spec.sample_order(0)[task.start : task.stop]
        weights = held[name]
        gradient = np.asarray(step(weights.weights, source.batch(rows), version=weights.versions[0]).gradient)
        pushed = clients[name].push(gradient, samples=BATCH, computed_on=weights.sequence)
        held[name] = Pulled(pushed.weights, pushed.versions, pushed.sequence)
    np.testing.assert_allclose(
        np.concatenate([store.read()[0] for store in stores]), job.snapshot().weights, rtol=1e-6, atol=1e-7
    )


# 12 batches: the fast workers do 4 each while the slow ones do 2; or 3 rounds at the speed of the slowest.
@pytest.mark.parametrize(("algorithm", "seconds"), [("asgd", 0.4), ("bsp", 0.6), ("allreduce", 0.6)])
def test_an_epoch_takes_what_was_computed_by_hand(algorithm, seconds):
    job, _, _ = simulate(cluster({"count": 2}, {"step_ms": 200, "count": 2}), algorithm)
    assert job.record.seconds == pytest.approx(seconds)
    assert job.record.samples == ROWS


def test_links_and_shards_take_their_time():
    size = 4 * build().count_params()
    described = cluster({"bandwidth_mbit": 8 * size / 1e6, "latency_ms": 10}, shards={"apply_ms": 5})
    job, _, history = simulate(described, "asgd", steps_per_epoch=3)
    pull, exchange, request = 1.02, 2.025, 0.02
    steps = pull + 3 * (0.1 + exchange)
    measured = history.nfdt["worker-0"]
    assert measured["seconds"] == pytest.approx(steps)
    assert steps < job.record.seconds < steps + 12 * request
    assert (measured["bytes_sent"], measured["bytes_received"]) == (3 * size, 4 * size)


def test_a_barrier_and_a_ring_train_the_same():
    described = cluster({"count": 2}, {"step_ms": 170})
    results = [simulate(described, name)[0].snapshot().weights for name in ("bsp", "allreduce")]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_one_worker_is_keras():
    plain, ours = build(), build()
    fit = {"epochs": 2, "validation_data": (X[:16], Y[:16]), "shuffle": False}
    expected = plain.fit(X, Y, batch_size=BATCH, verbose=0, **fit)
    _, _, history = simulate(cluster({}), "ddc-asgd", model=ours, **fit)
    assert set(history.history) == set(expected.history)
    np.testing.assert_allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-3)
    for left, right in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5)


def test_a_lost_worker_s_samples_are_trained_by_others_and_another_takes_its_place():
    described = cluster({}, {"fails_at_s": 0.25, "returns_after_s": 0.2})
    job, _, history = simulate(described, "ddc-asgd", epochs=2)
    assert job.record.samples == 2 * ROWS
    assert {name for name, _ in job.record.answered} == {"worker-0", "worker-1", "worker-2"}
    assert set(history.nfdt) == {"worker-0", "worker-1", "worker-2"}


@pytest.mark.parametrize("algorithm", ["asgd", "allreduce"])
def test_a_job_without_workers_fails(algorithm):
    with pytest.raises(JobFailed, match="failed|ring"):
        simulate(cluster({"fails_at_s": 0.25, "count": 2}), algorithm)


@pytest.mark.parametrize(
    ("algorithm", "options"), [("n-softsync", {}), ("auto", {}), ("asgd", {"codec": "int8", "overlap": 1})]
)
def test_other_rows_train_every_sample(algorithm, options):
    described = cluster({"count": 2, "bandwidth_mbit": 100, "latency_ms": 1}, {"step_ms": 300, "count": 2})
    job, _, history = simulate(described, algorithm, epochs=2, **options)
    assert job.record.samples == 2 * ROWS
    assert sum(use.samples for use in job.record.machines.values()) == 2 * ROWS
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize("overlap", [0, 1])
def test_ssp_keeps_its_bound_among_workers_whose_steps_vary(overlap):
    workers, bound = 4, 1
    x = np.random.default_rng(0).normal(size=(800, 5)).astype("float32")
    described = cluster({"count": workers, "jitter": 0.8})
    job, _, _ = simulate(
        described, "ssp", x=x, y=x[:, :1], epochs=2, staleness_bound=bound, overlap=overlap, model=build(rate=1e-4)
    )
    assert job.record.staleness.total() == 2 * 100
    assert job.record.most_staleness <= (workers - 1) * (2 * bound + 1) + overlap


def test_untrained_state_is_each_worker_s_own_and_merged():
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = build(layers)
    job, _, _ = simulate(cluster({}, {"step_ms": 150}), "asgd", model=model, epochs=2)
    moving = model.layers[0].moving_mean
    assert np.abs(np.asarray(moving)).max() > 0
    assert job.record.samples == 2 * ROWS


def test_batches_of_a_generator_are_fed():
    def batches():
        while True:
            yield X[:BATCH], Y[:BATCH]

    job, _, _ = simulate(cluster({"count": 2}), "asgd", x=batches(), y=None, steps_per_epoch=5, epochs=2)
    assert job.record.samples == 2 * 5 * BATCH


def test_callbacks_decide_as_they_do_on_a_cluster():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    _, _, history = simulate(cluster({"count": 2}), epochs=5, callbacks=[Stop()])
    assert len(history.history["loss"]) == 1


def test_an_elastic_ring_is_refused():
    with pytest.raises(UsageError, match="min_workers.*expected.*Received"):
        simulate(cluster({"count": 2}), "allreduce", min_workers=1)
