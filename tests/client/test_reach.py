"""Whether the code of a callback can reach the model."""

import logging
import time

import keras
import numpy as np
import pytest
from keras import callbacks
from nfdt_client.callbacks import contents_for
from nfdt_client.reach import reaches_model

net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
net.compile("sgd", "mse")
kernel = net.weights[0]
log = logging.getLogger(__name__)
started = time.time()


def say(*what):
    print(f"{time.time() - started:.1f}", *what)


def passed_on(value):
    return value


class Counts(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses, self.best = [], np.inf

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.losses.append(logs["loss"])
        [self.note(value) for value in self.losses]
        if logs["loss"] < self.best:
            self.best = logs["loss"]

    def note(self, value):
        log.info("%s %s", np.mean(value), self.params)
        say(value)


class Stops(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch > 2


class Holds(callbacks.Callback):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def on_epoch_end(self, epoch, logs=None):
        self.held.use()


class Holder:
    def __init__(self, value):
        self.value = value

    def use(self):
        return self.value


class Rate(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1


class Saves(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save("model.keras")


class UsesGlobal(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        net.save("model.keras")


class LooksAtVariable(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(kernel)


class PassesItself(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        passed_on(self)


class Attribute(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        return getattr(self, "mod" + "el")


class Collects(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        import gc

        gc.get_objects()


class ByMethod(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.look()

    def look(self):
        return self.model.get_weights()


class Inner(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        def look():
            return self.model

        look()


class Imports(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        from tests.support import clocks

        clocks.look()


class CountsItself(callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        super().on_train_batch_end(batch, logs)


class CopiesItself(callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        one = other = self
        return one, other


class Prints(callbacks.ModelCheckpoint):
    def on_epoch_begin(self, epoch, logs=None):
        print(epoch)


class Waits(callbacks.EarlyStopping):
    def on_epoch_begin(self, epoch, logs=None):
        print(epoch)


def ready(callback):
    callback.set_model(net)
    return callback


@pytest.mark.parametrize(
    "callback",
    [
        Counts(),
        CountsItself(),
        Stops(),
        Holds(Holder([1, {"a": 2}])),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: say(epoch, logs)),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_code_that_only_reads_logs_needs_no_weights(callback):
    assert not reaches_model(ready(callback))
    assert contents_for([callback]) is None


@pytest.mark.parametrize(
    "callback",
    [
        Saves(),
        CopiesItself(),
        UsesGlobal(),
        LooksAtVariable(),
        PassesItself(),
        Attribute(),
        Collects(),
        ByMethod(),
        Inner(),
        Imports(),
        Holds(Holder(net)),
        Holds(net),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: net.get_weights()),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_code_that_may_reach_the_model_gets_everything(callback):
    assert reaches_model(ready(callback), rate_is_known=True)
    assert contents_for([callback]) == "everything"


def test_the_learning_rate_does_not_count_where_it_is_a_number():
    assert contents_for([ready(Rate())]) is None
    assert contents_for([ready(Rate())], rates_are_state=True) == "everything"
    scheduled = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    scheduled.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), "mse")
    callback = Rate()
    callback.set_model(scheduled)
    assert contents_for([callback]) == "everything"


@pytest.mark.parametrize(
    ("callback", "contents"),
    [
        (callbacks.CSVLogger("log.csv"), None),
        (callbacks.EarlyStopping("loss"), None),
        (callbacks.EarlyStopping("loss", restore_best_weights=True), "weights"),
        (callbacks.TensorBoard("logs"), None),
        (callbacks.TensorBoard("logs", histogram_freq=1), "weights"),
        (callbacks.TensorBoard("logs", write_steps_per_second=True), "everything"),
        (callbacks.ModelCheckpoint("model.keras"), "everything"),
        (Prints("model.keras"), "everything"),
        (Waits("loss"), None),
        (Waits("loss", restore_best_weights=True), "weights"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_of_keras_get_what_they_read(callback, contents, tmp_path):
    assert contents_for([ready(callback)]) == contents


class ReadsBatches(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.model.save("model.keras")


class SavesBatches(ReadsBatches):
    def on_train_batch_end(self, batch, logs=None):
        self.on_epoch_end(batch)


class PrintsAndSaves(callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        print(batch)


@pytest.mark.parametrize(
    ("callback", "contents"),
    [
        (Counts(), None),
        (Saves(), None),
        (ReadsBatches(), None),
        (SavesBatches(), "everything"),
        (callbacks.ModelCheckpoint("model.keras"), None),
        (PrintsAndSaves("model.keras"), None),
        (PrintsAndSaves("model.keras", save_freq=3), "everything"),
        (callbacks.ModelCheckpoint("model.keras", save_freq=3), "everything"),
        (callbacks.BackupAndRestore("folder"), None),
        (callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: net.get_weights()), None),
        (callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: net.get_weights()), "everything"),
        (callbacks.TensorBoard("logs", histogram_freq=1, update_freq=2), "weights"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_between_batches_only_the_hooks_there_count(callback, contents):
    assert contents_for([ready(callback)], between_batches=True) == contents


def test_the_most_that_one_of_several_needs_counts():
    several = [ready(Counts()), ready(callbacks.EarlyStopping("loss", restore_best_weights=True))]
    assert contents_for(several) == "weights"
