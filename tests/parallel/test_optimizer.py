"""Type of the wrapped optimizer, and arguments that it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from nfdt.core.errors import UsageError
from tests.support.rank_training import FEATURES, dense_model


def gradient_of_rank() -> tf.Tensor:
    return tf.constant([float(hvd.rank() + 1)])


def mean_over_ranks() -> float:
    return (hvd.size() + 1) / 2


def test_the_user_s_object_comes_back():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert type(optimizer) is keras.optimizers.SGD
    assert isinstance(optimizer, keras.optimizers.Optimizer)


def test_a_name_gives_the_optimizer_of_that_name():
    assert type(hvd.DistributedOptimizer("adam")) is keras.optimizers.Adam


def test_the_configuration_is_the_optimizer_s_own():
    plain, wrapped = (keras.optimizers.Adam(0.3, beta_1=0.5, name="a") for _ in range(2))
    hvd.DistributedOptimizer(wrapped)
    assert wrapped.get_config() == plain.get_config()
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(restored) is keras.optimizers.Adam
    assert restored.get_config() == plain.get_config()


def test_state_that_was_there_stays():
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer.apply([tf.constant([8.0])], [variable])
    before = [v.numpy() for v in optimizer.variables]
    hvd.DistributedOptimizer(optimizer)
    for old, new in zip(before, optimizer.variables, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
    optimizer.apply([gradient_of_rank()], [variable])
    assert variable.numpy().tolist() == [-8.0 - (4.0 + mean_over_ranks())]


def test_the_same_number_of_variables_as_without():
    wrapped, plain = (
        hvd.DistributedOptimizer(keras.optimizers.Adam(), backward_passes_per_step=2),
        keras.optimizers.Adam(),
    )
    for optimizer in (wrapped, plain):
        variable = keras.Variable([0.0])
        optimizer.apply([tf.constant([1.0])], [variable])
    assert [v.shape for v in wrapped.variables] == [v.shape for v in plain.variables]


@pytest.mark.parametrize("call", ["apply", "apply_gradients"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_own_loops_reduce_too(call, graph):
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])

    def step(gradient):
        if call == "apply":
            optimizer.apply([gradient], [variable])
        else:
            optimizer.apply_gradients([(gradient, variable)])

    (tf.function(step) if graph else step)(gradient_of_rank())
    assert variable.numpy().tolist() == [-mean_over_ranks()]


def test_apply_without_variables_means_those_it_was_built_with():
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    optimizer.apply([gradient_of_rank()])
    assert variable.numpy().tolist() == [-mean_over_ranks()]


def test_a_variable_without_gradient_is_left_alone():
    with_gradient, without = keras.Variable([0.0]), keras.Variable([5.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([gradient_of_rank(), None], [with_gradient, without])
    assert (with_gradient.numpy()[0], without.numpy()[0]) == (-mean_over_ranks(), 5.0)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_gradients_of_several_passes_add_up(graph, average):
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )

    def step(gradient):
        optimizer.apply([gradient], [variable])

    run = tf.function(step) if graph else step
    update = mean_over_ranks() * (1 if average else 2)
    expected = [0.0, -update, -update, -2 * update, -2 * update]
    for passes, value in enumerate(expected, start=1):
        run(gradient_of_rank())
        assert variable.numpy().tolist() == [value]
        assert int(optimizer.iterations) == passes


@pytest.mark.parametrize("scale", [True, False])
def test_a_local_variable_keeps_the_gradient_of_its_rank(scale):
    shared, local = keras.Variable([0.0]), keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
    optimizer.register_local_var(local)
    optimizer.apply([gradient_of_rank(), gradient_of_rank()], [shared, local])
    assert shared.numpy()[0] == -mean_over_ranks()
    assert local.numpy()[0] == pytest.approx(-(hvd.rank() + 1) / (hvd.size() if scale else 1))


@pytest.mark.parametrize("passes", [1, 2])
def test_two_optimizers_work_in_one_step(passes):
    first, second = keras.Variable([0.0]), keras.Variable([0.0])
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options) for rate in (1.0, 2.0)]
    for optimizer, variable in zip(optimizers, (first, second), strict=True):
        optimizer.build([variable])

    @tf.function
    def step(gradient):
        optimizers[0].apply([gradient], [first])
        optimizers[1].apply([gradient], [second])

    for _ in range(passes):
        step(gradient_of_rank())
    assert (first.numpy()[0], second.numpy()[0]) == (-mean_over_ranks(), -2 * mean_over_ranks())


def test_ranks_that_have_made_other_optimizers_before_step_together():
    for _ in range(hvd.rank()):
        keras.optimizers.SGD()
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    tf.function(lambda gradient: optimizer.apply([gradient], [variable]))(gradient_of_rank())
    assert variable.numpy().tolist() == [-mean_over_ranks()]


def test_a_saved_model_loads_without_us(tmp_path):
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="sparse_categorical_crossentropy")
    x, y = np.ones((4, FEATURES), "float32"), np.zeros(4, int)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert "apply" not in vars(loaded.optimizer)
    for saved, found in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), found.numpy())


def test_a_loaded_model_goes_on_together(tmp_path):
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss="sparse_categorical_crossentropy")
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.normal(size=(8, FEATURES)).astype("float32"), rng.integers(0, 3, 8)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = hvd.load_model(tmp_path / "m.keras", compression="fp16")
    assert type(loaded.optimizer) is keras.optimizers.SGD
    for saved, found in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), found.numpy())
    loaded.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    weights = np.concatenate([np.ravel(w) for w in loaded.get_weights()])
    np.testing.assert_array_equal(np.asarray(hvd.allgather(weights[None])), [weights] * hvd.size())


class OwnSGD(keras.optimizers.SGD):
    pass


def test_a_custom_optimizer_is_loaded(tmp_path):
    model = dense_model()
    model.compile(OwnSGD(0.5), loss="sparse_categorical_crossentropy")
    model.save(tmp_path / "m.keras")
    loaded = hvd.load_model(tmp_path / "m.keras", custom_optimizers=[OwnSGD])
    assert type(loaded.optimizer) is OwnSGD
    assert "apply" in vars(loaded.optimizer)


def test_a_file_without_an_optimizer_is_refused(tmp_path):
    dense_model().save(tmp_path / "m.keras")
    with pytest.raises(UsageError, match="without an optimizer"):
        hvd.load_model(tmp_path / "m.keras")


def test_wrapping_twice_is_refused():
    with pytest.raises(UsageError, match="reduces its gradients already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": 12345}, "Average, Sum or Adasum"),
        ({"compression": "int3"}, "none, fp16, bf16"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": -1}, ">= 0"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)


def test_predividing_a_sum_is_refused():
    with pytest.raises(UsageError, match="op=Average"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)


def test_two_kinds_of_accumulation_are_refused():
    with pytest.raises(UsageError, match="choose one"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_loss_scaler_outside_is_refused_in_own_loops_instead_of_a_hang(graph):
    variable = keras.Variable([0.0])
    scaler = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    scaler.build([variable])

    def step(gradient):
        scaler.apply([gradient], [variable])

    with pytest.raises(Exception, match="the other order"):  # noqa: PT011, B017 - in a graph, Keras wraps it
        (tf.function(step) if graph else step)(gradient_of_rank())
