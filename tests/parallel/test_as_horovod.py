"""Behaviour that Horovod's own tests of its Keras wrapper check, on Keras 3: see docs/horovod_tests.md."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from hfdt.keras.optimizer import distributed_apply
from nfdt.core.errors import UsageError
from tests.support.rank_training import dense_model


def own() -> float:
    return hvd.rank() + 1.0


def mean_over_ranks() -> float:
    return (hvd.size() + 1) / 2


class Climb(keras.Optimizer):
    """Optimizer of a script: adds the gradient."""

    def __init__(self, learning_rate=1.0, **options):
        super().__init__(learning_rate=learning_rate, **options)

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_add(gradient)


class OwnMomentum(keras.optimizers.SGD):
    """Optimizer of a script: SGD under another name."""


def sequence_model() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.RepeatVector(3), layers.Dense(3)])
    return model


def rows(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank())
    return rng.random((number, 3)).astype("float32"), rng.random((number, 3, 3)).astype("float32")


# ---- learning rates


def test_a_warm_up_and_three_schedules_take_turns():
    base, seen = 0.1 * hvd.size(), []
    model = sequence_model()
    model.compile(hvd.DistributedOptimizer("adam"), loss="mse", metrics=["categorical_accuracy"])
    schedule = hvd.callbacks.LearningRateScheduleCallback
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=base, warmup_epochs=2),
        schedule(initial_lr=base, multiplier=0.1, start_epoch=2, end_epoch=4),
        schedule(initial_lr=base, multiplier=0.01, start_epoch=4, end_epoch=6),
        schedule(initial_lr=base, multiplier=lambda epoch: epoch, start_epoch=6, end_epoch=8),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["lr"])),
    ]
    history = model.fit(*rows(10), batch_size=2, epochs=8, verbose=0, callbacks=callbacks).history
    warm = [base / hvd.size() * (epoch * (hvd.size() - 1) / 2 + 1) for epoch in (1, 2)]
    np.testing.assert_allclose(seen, [*warm, base, base * 0.1, base, base * 0.01, base * 6, base * 7], rtol=1e-5)
    for values in history.values():
        np.testing.assert_allclose(np.asarray(hvd.broadcast(values, root_rank=0)), values)


# ---- accumulation


def test_a_table_that_is_made_dense_moves_with_each_second_batch():
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 2)])
    options = {"sparse_as_dense": True, "backward_passes_per_step": 2}
    model.compile(hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.01), **options), loss="mse")
    rng = np.random.default_rng(hvd.rank())
    moved = []
    for _ in range(3):
        before = model.get_weights()[0]
        model.train_on_batch(rng.integers(0, 9, (8, 4)), rng.random((8, 4, 2)))
        moved.append(bool((model.get_weights()[0] != before).any()))
    assert moved == [False, True, False]
    assert int(model.optimizer.iterations) == 3


def test_an_infinite_gradient_does_not_outlast_its_step():
    variable = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for gradient, value in ((float("inf"), 0.0), (1.0, -float("inf"))):
        optimizer.apply([tf.constant(gradient)], [variable])
        assert variable.numpy() == value
    variable.assign(0.0)
    for value in (0.0, -2.0):
        optimizer.apply([tf.constant(1.0)], [variable])
        assert variable.numpy() == value


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_dense_and_sparse_gradients_of_four_passes_in_a_graph(average):
    shared, local = ([tf.Variable([0.0]), tf.Variable([1.0, 2.0])] for _ in range(2))
    variables = [*shared, *local]
    optimizer = hvd.DistributedOptimizer(
        Climb(), backward_passes_per_step=4, average_aggregated_gradients=average, sparse_as_dense=True
    )
    for variable in local:
        optimizer.register_local_var(variable)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = sum(x[0] - own() * tf.gather(y, [0])[0] for x, y in (shared, local))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for batch in range(1, 11):
        step()
        passes = batch // 4 * (1 if average else 4)
        np.testing.assert_allclose(shared[0], [passes])
        np.testing.assert_allclose(shared[1], [1 - passes * mean_over_ranks(), 2])
        np.testing.assert_allclose(local[0], [passes / hvd.size()])
        np.testing.assert_allclose(local[1], [1 - passes * own() / hvd.size(), 2])
        assert int(optimizer.iterations) == batch


@pytest.mark.parametrize("passes", [1, 2])
def test_batches_of_a_generator(passes):
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    model = sequence_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.01), **options), loss="mse")
    before = model.get_weights()
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit((rows(1) for _ in range(9)), steps_per_epoch=4, verbose=0, callbacks=start)
    assert int(model.optimizer.iterations) == 4
    assert any((old != new).any() for old, new in zip(before, model.get_weights(), strict=True))
    for weight in model.get_weights():
        np.testing.assert_array_equal(np.asarray(hvd.broadcast(weight, root_rank=0)), weight)


# ---- files and configurations


def test_a_configuration_makes_an_equal_optimizer():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.3))
    config = optimizer.get_config()
    assert optimizer.from_config(config).get_config() == config
    assert type(optimizer).from_config(config).get_config() == config


def saved(folder, optimizer: keras.Optimizer) -> tuple[keras.Model, str]:
    """Train a model for one batch, and return it with the name of its file."""
    model = sequence_model()
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", metrics=["categorical_accuracy"])
    model.train_on_batch(*rows(1))
    model.save(folder / "m.keras")
    return model, str(folder / "m.keras")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (keras.optimizers.RMSprop, {}),
        (OwnMomentum, {"custom_optimizers": [OwnMomentum]}),
        (OwnMomentum, {"custom_objects": {"OwnMomentum": OwnMomentum}}),
    ],
    ids=["of Keras", "custom_optimizers", "custom_objects"],
)
def test_a_loaded_optimizer_has_class_rate_and_state_of_the_saved_one(tmp_path, kind, options):
    model, file = saved(tmp_path, kind(0.0625, momentum=0.9))
    loaded = hvd.load_model(file, **options).optimizer
    assert type(loaded) is kind
    assert float(loaded.learning_rate.numpy()) == 0.0625
    for old, new in zip(model.optimizer.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(old.numpy(), new.numpy())
    assert distributed_apply(loaded) is not None


def test_ranks_without_the_file_get_the_optimizer_state_of_the_rank_that_loads_it(tmp_path):
    optimizer = keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)
    model, file = saved(tmp_path, optimizer)
    if hvd.rank() == 0:
        model = hvd.load_model(file)
    else:
        model = sequence_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)), loss="mse")
    assert model.optimizer.built == (hvd.rank() == 0)
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit((rows(1) for _ in range(9)), steps_per_epoch=2, verbose=0, callbacks=start)
    assert int(model.optimizer.iterations) == 3  # the file's batch, and two
    for variable in [*model.weights, *model.optimizer.variables]:
        np.testing.assert_array_equal(np.asarray(hvd.broadcast(variable, root_rank=0)), variable.numpy())


# ---- who takes part


def test_fit_sends_the_last_rank_s_weights_except_local_ones():
    root = hvd.size() - 1
    start = keras.initializers.Constant(hvd.rank())
    frozen = [keras.layers.Dense(3, "relu", True, start, start, trainable=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((3,)), *frozen])
    model.compile(loss="mse")
    local = frozen[0].variables
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=root, local_variables=local)
    model.fit(np.ones((2, 3)), np.ones((2, 3)), verbose=0, callbacks=[callback])
    for number, layer in enumerate(frozen):
        for weight in layer.get_weights():
            assert set(weight.ravel()) == {hvd.rank() if number == 0 else root}


def test_a_process_set_reduces_its_gradients_and_other_ranks_apply_their_own(even_ranks):
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(Climb(), process_set=even_ranks)
    optimizer.apply_gradients([(tf.constant([own()]), variable)])
    members = [rank + 1 for rank in range(0, hvd.size(), 2)]
    assert variable.numpy()[0] == (np.mean(members) if hvd.rank() % 2 == 0 else own())


def test_a_process_set_that_only_this_rank_knows_is_refused():
    with pytest.raises(UsageError, match=r"init\(process_sets="):
        hvd.DistributedOptimizer("sgd", process_set=hvd.ProcessSet([0, 1]))


def test_a_state_of_another_optimizer_is_synchronized_restored_and_committed():
    model = dense_model()
    model.set_weights([np.full_like(weight, own()) for weight in model.get_weights()])
    state = hvd.elastic.KerasState(model, keras.optimizers.Adam(), batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    state.sync()
    assert (state.batch, state.epoch) == (20, 10)
    for action, kept in ((state.restore, 1.0), (lambda: (state.commit(), state.restore()), 5.0)):
        model.set_weights([np.full_like(weight, 5.0) for weight in model.get_weights()])
        state.batch, state.epoch = 21, 11
        action()
        assert {float(value) for weight in model.get_weights() for value in weight.ravel()} == {kept}
        assert (state.batch, state.epoch) == ((20, 10) if kept == 1.0 else (21, 11))
