"""Models with several optimizers, or one that steps several times: one worker trains them as Keras alone does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from nfdt_client import callbacks, program_checks

from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.pack import pack
from tests.support.several_optimizers import actor_critic, diffusion, divided, gan, optimizers_of, points, wasserstein
from tests.support.simulated_jobs import cluster, simulate

pytestmark = pytest.mark.processes

BATCH, EPOCHS = 8, 3
FIT = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
X = points()


def distributed(model, workers=1, algorithm="ddc-asgd", **fit):
    job, session, history = simulate(cluster({"count": workers}), algorithm, model=model, x=X, y=None, **{**FIT, **fit})
    return job, session, history


def same(model, plain):
    for mine, theirs in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6, err_msg=mine.path)
    mine, theirs = optimizers_of(model), optimizers_of(plain)
    assert mine.keys() == theirs.keys()
    for name, optimizer in mine.items():
        for one, other in zip(optimizer.variables, theirs[name].variables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"{name} {one.path}")


@pytest.mark.feature("`MultiOptimizer`", area="Optimizers")
@pytest.mark.feature(
    "Optimizers applied several times in a step, moving averages of weights (WGAN-GP, DDIM)", area="Models"
)
@pytest.mark.parametrize(
    ("make", "algorithm"),
    [
        (gan, "ddc-asgd"),
        (wasserstein, "bsp"),
        (actor_critic, "ddc-asgd"),
        (diffusion, "bsp"),
        (divided, "ddc-asgd"),
        *(pytest.param(make, "asgd", marks=pytest.mark.long) for make in (gan, wasserstein, actor_critic, diffusion)),
    ],
)
def test_one_worker_trains_as_keras_does(make, algorithm):
    plain, model = make(), make()
    expected = plain.fit(X, verbose=0, **FIT)
    _, _, history = distributed(model, algorithm=algorithm)
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
    same(model, plain)


def apart(model):
    """Return the greatest difference of a weight and its moving average."""
    pairs = zip(model.ema_network.weights, model.network.weights, strict=True)
    return max(np.abs(np.asarray(average) - np.asarray(weight)).max() for average, weight in pairs)


def updates(model):
    return {name: int(optimizer.iterations) for name, optimizer in optimizers_of(model).items()}


@pytest.mark.parametrize("algorithm", ["ddc-asgd", "bsp"])
def test_several_workers_train_a_moving_average_with_its_network(algorithm):
    model = diffusion()
    _, _, history = distributed(model, 4, algorithm, epochs=12)
    losses = history.history["noise_loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert apart(model) < 0.3 * apart(diffusion()), "the average follows the network"
    assert updates(model) == {"own": 12 * len(X) // BATCH // (4 if algorithm == "bsp" else 1)}


def test_the_updates_of_all_workers_are_counted():
    model = wasserstein()
    distributed(model, 2)
    steps = EPOCHS * len(X) // BATCH
    assert updates(model) == {"d": 3 * steps, "g": steps}
    assert np.isfinite(model.generator(np.zeros((1, 3)))).all()


def test_the_state_of_optimizers_is_merged_as_if_one_worker_had_made_all_steps():
    model = wasserstein()
    manifest = pack(model, X[:BATCH]).manifest
    entries = manifest.untrained[-sum(len(optimizer.variables) for optimizer in optimizers_of(model).values()) :]
    decays = {entry["path"].rpartition("_")[2]: entry["decay"] for entry in entries if entry["rule"] == "ema"}
    assert decays == {"momentum": 0.9, "velocity": pytest.approx(0.9**3)}, "the discriminator steps three times"
    rules = [entry["rule"] for entry in entries if entry["path"].endswith(("iteration", "learning_rate"))]
    assert rules == ["sum", "mean", "sum", "mean"]


def test_the_state_of_the_parts_of_a_divided_optimizer_is_merged_part_by_part():
    model = divided()
    manifest = pack(model, X[:BATCH]).manifest
    entries = manifest.untrained[-len(model.optimizer.variables) :]
    rules = {"iteration": "sum", "learning_rate": "mean", "momentum": "ema", "velocity": "ema"}
    for entry in entries:
        name = next(name for name in rules if entry["path"].endswith(name))
        assert entry["rule"] == rules[name], entry["path"]
    assert {entry["decay"] for entry in entries if entry["rule"] == "ema"} == {0.9, 0.999}


class Rates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.g_optimizer.learning_rate = 0.02 / (epoch + 1)


@pytest.mark.parametrize(
    ("make", "callback"),
    [(gan, Rates), (diffusion, lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 / (epoch + 1)))],
)
def test_callbacks_set_the_rates_of_the_next_epoch(make, callback):
    plain, model = make(), make()
    plain.fit(X, verbose=0, callbacks=[callback()], **FIT)
    distributed(model, callbacks=[callback()])
    same(model, plain)


@pytest.mark.long
def test_a_second_fit_goes_on_with_the_state_of_the_optimizers():
    plain, model = wasserstein(), wasserstein()
    for _ in range(2):
        plain.fit(X, verbose=0, **FIT)
        distributed(model)
    same(model, plain)


@pytest.mark.parametrize("algorithm", ["allreduce", "group-sync"])
def test_ranks_refuse_a_model_whose_optimizers_step_on_workers(algorithm):
    with pytest.raises(UsageError, match=r"expected one whose workers push.*Gan 'gan"):
        distributed(gan(), 2, algorithm)


def test_a_detached_job_refuses_callbacks_that_set_the_rate_of_the_shards():
    manifest = pack(gan(), X[:BATCH]).manifest
    found = callbacks.schedulers([keras.callbacks.ReduceLROnPlateau(), keras.callbacks.History()])
    with pytest.raises(UsageError, match=r"submit: expected no callback.*ReduceLROnPlateau\."):
        program_checks.check_local_optimizers(gan(), manifest, resolve_algorithm("asgd"), found)


def test_auto_does_not_turn_to_groups():
    auto, manifest = resolve_algorithm("auto"), pack(gan(), X[:BATCH]).manifest
    assert auto.plan == "topology"
    assert program_checks.algorithm_for(manifest, auto).plan == "overlap"


def test_a_state_that_no_message_holds_is_refused(monkeypatch):
    monkeypatch.setattr(program_checks, "MAX_REPORT_BYTES", program_checks.OTHER_FIELDS_BYTES)
    with pytest.raises(CaptureError, match="0 MiB of variables of its optimizers"):
        distributed(gan())
