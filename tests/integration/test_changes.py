"""Changes of callbacks outside the model are seen by the workers, as in plain Keras, or stop the fit."""

from __future__ import annotations

import json

import pytest

from tests.support.scripts import DEADLINE_S, answer

pytestmark = pytest.mark.processes

CHANGES = """
import json, logging, sys
import keras
import numpy as np
import tensorflow as tf
import nfdt

x, y = np.random.default_rng(0).normal(size=(128, 8)).astype("float32"), np.zeros((128, 1), "float32")
ops, Variable, Callback = keras.ops, keras.Variable, keras.callbacks.Callback

def build(loss="mse", *layers, **options):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="zeros"), *layers])
    model.compile(keras.optimizers.SGD(0.0), loss, **options)
    return model

def each_epoch(change):
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: change(epoch + 1.0))

def losses(model, change, *data, epochs=3, callbacks=(), **options):
    data = data or (x, y)
    history = model.fit(*data, epochs=epochs, verbose=0, callbacks=[each_epoch(change), *callbacks], **options)
    return history.history

class Weighted(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.weight = Variable(0.0)
        self.factor = 1.0

    def call(self, y, p):
        return ops.mean(p - y, axis=-1) * 0.0 + self.weight * self.factor

def closure():
    level = Variable(0.0)
    return losses(build(lambda y, p: ops.mean(p - y) * 0.0 + level), level.assign)

def closure_of_tensorflow():
    level = tf.Variable([0.0, 1.0])
    return losses(build(lambda y, p: ops.mean(p - y) * 0.0 + level[0]), lambda to: level.assign([to, 1.0]))

def loss_object():
    loss = Weighted()
    return losses(build(loss), loss.weight.assign)

def schedule():
    level = Variable(0.0)
    def rate(epoch, now):
        level.assign(epoch + 1.0)
        return now
    model = build(lambda y, p: ops.mean(p - y) * 0.0 + level)
    history = model.fit(x, y, epochs=3, verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(rate)])
    return {"loss": history.history["loss"]}

class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.level, self.targets, self.parts = 0.0, np.zeros((2**18, 1)), {"far": [0.0]}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * index + 32)
        return x[rows], self.targets[rows] + self.level + self.parts["far"][0]

class Counting(Batches):
    def on_epoch_end(self):
        self.level += 100.0

def dataset():
    data = Batches()
    def change(to):
        data.level = to
        if to == 2:
            data.targets[:] = 10.0
        if to == 3:
            data.parts["far"][0] = 100.0
    return losses(build(), change, data, validation_data=data)

def dataset_with_hooks():
    data = Counting()
    def change(to):
        data.targets = np.full((128, 1), to)
    return losses(build(), change, data)

def pipeline():
    level = tf.Variable(0.0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).map(lambda x, y: (x, y + level))
    return losses(build(), level.assign, data)

class Shift(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.shift, self.kind = 0, "plain"

    def call(self, x):
        return x * 0.0 + self.shift + (0.5 if self.kind == "shifted" else 0.0)

def attributes(**options):
    layer = Shift()
    def change(to):
        layer.shift, layer.kind = to, "plain" if to == 1 else "shifted"
    return losses(build("mae", layer, **options), change)

def attributes_of_an_eager_model():
    return attributes(run_eagerly=True)

def attributes_of_a_graph():
    return attributes()

def attribute_of_a_loss():
    loss = Weighted()
    loss.weight.assign(1.0)
    return losses(build(loss, run_eagerly=True), lambda to: setattr(loss, "factor", to))

def second_fit():
    level = Variable(1.0)
    model = build(lambda y, p: ops.mean(p - y) * 0.0 + level)
    first = losses(model, lambda to: None, epochs=1)
    level.assign(7.0)
    return [first, losses(model, lambda to: None, epochs=1)]

CASES = [closure, closure_of_tensorflow, loss_object, schedule, dataset, dataset_with_hooks, pipeline,
         attributes_of_an_eager_model, attributes_of_a_graph, attribute_of_a_loss, second_fit]

def batches(epochs=2):
    level, seen = Variable(0.0), []
    class Step(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            level.assign(level.value + 1.0)
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["loss"]))
    model = build(lambda y, p: ops.mean(p - y) * 0.0 + level)
    losses(model, lambda to: None, epochs=epochs, callbacks=[Step()], batch_size=32)
    return [seen, float(level.value)]

def counted_by_the_step():
    class Count(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.calls = Variable(0.0)
        def call(self, y, p):
            self.calls.assign(self.calls.value + 1.0)
            return ops.mean(p - y, axis=-1) * 0.0 + self.calls
    loss = Count()
    return [losses(build(loss), lambda to: None, epochs=2, batch_size=32), float(loss.calls.value)]
"""
PLAIN = "out = {'plain': {case.__name__: case() for case in CASES}}\n"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, script_fork_server):
    script = tmp_path_factory.mktemp("changes") / "script.py"
    script.write_text(
        CHANGES
        + PLAIN
        + """
out["batches"] = [batches(), counted_by_the_step()]
targets = np.ones((128, 1), "float32")
written = lambda from_epoch: lambda epoch: targets.fill(epoch) if epoch >= from_epoch else None
with nfdt.session(workers=1):
    out["written later"] = losses(build(), written(2.0), x, targets)["loss"]
    try:
        losses(build(), written(1.0), x, targets)
    except Exception as error:
        out["written first"] = str(error)
for algorithm in ("ddc-asgd", "bsp"):
    with nfdt.session(workers=2, algorithm=algorithm):
        out[algorithm] = {case.__name__: case() for case in CASES}
with nfdt.session(workers=2, batch_hooks="exact"):
    out["exact"] = [batches(), counted_by_the_step()]
with nfdt.session(workers=1, batch_hooks="approximate"):
    out["approximate"], out["one worker"] = batches(), counted_by_the_step()
print(json.dumps(out))
"""
    )
    done = script_fork_server.run(script)
    return {**answer(done), "terminal": done.stderr}


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.feature("Variables of a loss, or in its closure, that a callback sets", area="Callbacks")
@pytest.mark.feature("`PyDataset` whose attributes a callback sets", area="Callbacks")
@pytest.mark.feature(
    "`tf.Variable` of a tf.data pipeline that a callback sets", area="Callbacks", note="read in the script"
)
@pytest.mark.feature("Attributes of layers that a callback sets under `run_eagerly`", area="Callbacks")
@pytest.mark.parametrize("algorithm", ["ddc-asgd", "bsp"])
def test_workers_see_what_callbacks_change_between_epochs(outcome, algorithm):
    for name, plain in outcome["plain"].items():
        assert json.dumps(outcome[algorithm][name]) == json.dumps(plain), name


def test_the_cases_differ_from_epoch_to_epoch_in_plain_keras(outcome):
    still = [name for name, logs in outcome["plain"].items() if "loss" in logs and len(set(logs["loss"])) < 3]
    assert still == ["attributes_of_a_graph"]


@pytest.mark.feature("Variables of a loss that a batch hook sets", area="Callbacks", note='`batch_hooks="exact"`')
def test_with_exact_hooks_workers_see_changes_between_batches(outcome):
    assert outcome["exact"] == outcome["batches"]


def test_with_approximate_hooks_they_see_them_in_the_next_epoch_and_that_is_said(outcome):
    (seen, level), (plain, wanted) = outcome["approximate"], outcome["batches"][0]
    assert level == wanted
    assert seen == [plain[0]] * 4 + [plain[4]] * 4
    assert "changed between batches; the workers see it from the next epoch on" in outcome["terminal"]


@pytest.mark.feature(
    "Arrays that a callback writes to as `fit` begins", area="Callbacks", status="refused", note="later: as in Keras"
)
def test_arrays_are_those_at_the_beginning_of_fit_or_are_refused(outcome):
    assert outcome["written later"] == [1.0, 1.0, 1.0]
    assert "expected arrays that stay as they are" in outcome["written first"]


def test_a_variable_of_a_loss_that_the_step_counts_up_comes_back(outcome):
    assert outcome["one worker"] == outcome["batches"][1]


@pytest.mark.long
@pytest.mark.horovod
@pytest.mark.timeout(DEADLINE_S)
def test_ranks_see_what_callbacks_change(run_script):
    found = answer(
        run_script(
            CHANGES
            + PLAIN
            + """
with nfdt.session(workers=2, algorithm="allreduce"):
    out["ranks"] = {case.__name__: case() for case in CASES}
print(json.dumps(out))
"""
        )
    )
    assert found["ranks"] == found["plain"]


REFUSED = (
    CHANGES
    + """
hidden = {}

def pipeline_with_a_hidden_variable():
    hidden["level"] = tf.Variable(0.0)
    level = hidden["level"]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).map(lambda x, y: (x, y + level))
    return losses(build(), lambda to: eval("hidden")["level"].assign(to), data)

def dataset_of_another_length():
    data = Batches()
    return losses(build(), lambda to: setattr(Batches, "__len__", lambda self: int(4 - to)), data)

def rate_of_a_schedule():
    rate = Variable(0.1)
    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return rate * 1.0
        def get_config(self):
            return {}
    model = build()
    model.compile(keras.optimizers.SGD(Schedule()), "mse")
    return losses(model, rate.assign)

factor = 1.0

def global_of_an_eager_model():
    def change(to):
        global factor
        factor = to
    return losses(build(lambda y, p: ops.mean(p - y) * 0.0 + factor, run_eagerly=True), change)

for case in (pipeline_with_a_hidden_variable, dataset_of_another_length, rate_of_a_schedule, global_of_an_eager_model):
    try:
        with nfdt.session(workers=1):
            out = case()
    except nfdt.errors.NfdtError as error:
        out = str(error)
    print(json.dumps([case.__name__, out]))
"""
)


@pytest.mark.timeout(DEADLINE_S)
def test_a_change_that_cannot_travel_stops_the_fit_with_its_name_and_the_remedy(run_script):
    done = run_script(REFUSED)
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(json.loads(line) for line in done.stdout.strip().splitlines() if line.startswith("["))
    wanted = {
        "pipeline_with_a_hidden_variable": ("Variable:0", "data='client'"),
        "dataset_of_another_length": ("Batches", "data='client'"),
        "rate_of_a_schedule": ("variable", "LearningRateScheduler"),
        "global_of_an_eager_model": ("'factor' in <lambda>()", "keras.Variable"),
    }
    for name, parts in wanted.items():
        assert all(part in found[name] for part in parts), found[name]
