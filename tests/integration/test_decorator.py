"""Decorator and session in real scripts, with real processes."""

from __future__ import annotations

import math
import signal

import psutil
import pytest

from tests.support.scripts import DEADLINE_S, DIGITS, answer


def test_a_decorated_script_trains_and_gets_everything_back(run_script):
    done = run_script(
        DIGITS
        + """
import nfdt

seen = []

class Watcher(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        seen.append(float(np.abs(self.model.get_weights()[0]).sum()))

@nfdt.distribute(workers=2)
def main():
    model = build()
    test = (x[1500:], y[1500:])
    history = model.fit(
        x[:1500], y[:1500], batch_size=32, epochs=4, validation_data=test, callbacks=[Watcher()]
    )
    before = int(model.optimizer.iterations)
    loss, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
    again = model.fit(x[:320], y[:320], batch_size=32, epochs=1, verbose=0)
    return dict(
        keys=sorted(history.history), val=history.history["val_accuracy"][-1], accuracy=accuracy, iterations=before,
        again=int(model.optimizer.iterations), workers=history.nfdt, seen=seen,
        momentum=float(np.abs(model.optimizer.variables[2]).sum()),
    )

outcome = main()
model = build()
history = model.fit(x[:320], y[:320], batch_size=32, epochs=1, verbose=0)
outcome["untouched"] = not hasattr(history, "nfdt")
print()
print(json.dumps(outcome))
"""
    )
    got = answer(done)
    assert got["keys"] == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert got["accuracy"] == pytest.approx(got["val"], abs=1e-6)
    assert got["accuracy"] > 0.75  # plain Keras: 0.80 to 0.90 after these four epochs
    assert got["iterations"] == 4 * 47
    assert got["again"] == 4 * 47 + 10
    assert got["momentum"] > 0
    assert len(set(got["seen"])) == 4
    assert got["untouched"]
    assert sum(worker["samples"] for worker in got["workers"].values()) == 4 * 1500
    assert "47/47" in done.stdout


SHARED = """
import nfdt
from keras import ops

def my_loss(y_true, y_pred):
    return ops.mean(ops.square(ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), 10) - y_pred), axis=-1)

class Scale(keras.layers.Layer):
    def __init__(self, factor=1.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
    def call(self, inputs):
        return inputs * self.factor

class MyModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = Scale(2.0)
        self.hidden = keras.layers.Dense(32, activation=lambda t: ops.relu(t))
        self.out = keras.layers.Dense(10, activation="softmax")
    def call(self, inputs):
        return self.out(self.hidden(self.scale(inputs)))
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "seven": 7.0}

class Broken(MyModel):
    def train_step(self, data):
        if "nfdt.worker.run_worker" in sys.modules:  # not in the script's own trial
            raise KeyError("the-key-that-is-missing")
        return super().train_step(data)

def batches():
    while True:
        for i in range(0, 1500, 50):
            yield x[i:i + 50], y[i:i + 50]

out = {}
with nfdt.session(workers=2, algorithm="asgd"):
    model = MyModel()
    model.compile("adam", my_loss, metrics=["accuracy"])
    out["custom"] = model.fit(x, y, batch_size=64, epochs=2, verbose=0).history

    history = build().fit(batches(), steps_per_epoch=30, epochs=2, verbose=0)
    out["fed"] = dict(loss=history.history["loss"], samples=sum(w["samples"] for w in history.nfdt.values()))

    images = keras.Sequential([keras.Input((500, 500)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    images.compile("sgd", "mse")
    large = ((np.full((70, 500, 500), i, "float32"), np.full((70, 1), i)) for i in range(3))  # 70 MB each
    history = images.fit(large, verbose=0)
    out["large"] = dict(samples=sum(w["samples"] for w in history.nfdt.values()), loss=history.history["loss"])

    broken = Broken()
    broken.compile("sgd", my_loss)
    try:
        broken.fit(x, y, verbose=0)
    except KeyError as error:
        out["error"] = dict(kind=type(error).__name__, text=str(error), cause=str(error.__cause__))
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory, script_fork_server):
    """Results of several fits of one session, since a cluster's start costs more than they do."""
    script = tmp_path_factory.mktemp("shared") / "script.py"
    script.write_text(DIGITS + SHARED)
    return answer(script_fork_server.run(script))


@pytest.mark.feature("Custom `train_step`", area="Models")
@pytest.mark.feature("Loss that is a function of the script", area="Losses and metrics")
def test_a_custom_train_step_loss_and_metric_of_the_script_travel(shared):
    got = shared["custom"]
    assert set(got) == {"accuracy", "loss", "seven"}
    assert got["seven"] == [7.0, 7.0]
    assert got["loss"][1] < got["loss"][0]


@pytest.mark.feature("Generators", area="Data")
def test_a_generator_is_fed_by_the_client(shared):
    got = shared["fed"]
    assert got["samples"] == 3000
    assert got["loss"][1] < got["loss"][0]


@pytest.mark.feature("Batches of up to 1 GiB that are read in the script", area="Data")
def test_a_batch_that_is_longer_than_a_message_reaches_a_worker(shared):
    assert shared["large"]["samples"] == 210
    assert math.isfinite(shared["large"]["loss"][0])


@pytest.mark.feature("An exception on a worker reaches the script, with its traceback", area="Failures")
def test_a_worker_s_exception_is_raised_in_the_script_with_its_traceback(shared):
    got = shared["error"]
    assert got["kind"] == "KeyError"
    assert "the-key-that-is-missing" in got["text"]
    assert "worker-" in got["cause"]
    assert "train_step" in got["cause"]


@pytest.mark.feature("A worker is killed", area="Failures")
def test_samples_of_a_worker_killed_while_a_push_is_on_its_way_are_redone_and_the_job_goes_on(run_script):
    done = run_script(
        DIGITS
        + """
import nfdt

@nfdt.distribute(workers=3, overlap=1, emulate={"fail": "1@5"})
def main():
    model = build()
    history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=3, verbose=0)
    return dict(loss=history.history["loss"], iterations=int(model.optimizer.iterations))

print(json.dumps(main()))
"""
    )
    got = answer(done)
    assert len(got["loss"]) == 3
    assert got["iterations"] >= 3 * 47


@pytest.mark.processes
def test_ctrl_c_stops_the_job_and_leaves_no_process_behind(start_script):
    process = start_script(
        DIGITS
        + """
import nfdt

class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)

@nfdt.distribute(workers=2)
def main():
    build().fit(x, y, batch_size=8, epochs=10_000, verbose=0, callbacks=[Tell()])

main()
"""
    )
    assert process.stdout.readline().startswith("epoch")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert "KeyboardInterrupt" in stderr
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, alive


@pytest.mark.processes
def test_a_script_that_is_killed_leaves_no_process_behind(start_script):
    process = start_script(
        DIGITS
        + """
import nfdt

class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)

with nfdt.session(workers=1):
    build().fit(x, y, batch_size=8, epochs=10_000, verbose=0, callbacks=[Tell()])
"""
    )
    assert process.stdout.readline().startswith("epoch")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(30)
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, alive
