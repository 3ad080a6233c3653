"""Which callbacks read batches, by the code of their hooks."""

import functools
import time

import keras
import pytest
from keras import callbacks
from nfdt_client.callbacks import reads_batches

net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


class Quick(callbacks.Callback):
    """Callback that counts and times, and whose other hooks read everything."""

    def __init__(self):
        super().__init__()
        self.count, self.times = 0, []

    def on_train_begin(self, logs=None):
        self.count = self.model.count_params() + len(logs or {})

    def on_train_batch_begin(self, batch, logs=None):
        self.note()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        super().on_train_batch_end(logs=logs, batch=self.count)

    def on_epoch_end(self, epoch, logs=None):
        print(epoch, logs, self.model)

    def note(self):
        self.times.append(time.time())


class Number(Quick):
    def on_train_batch_end(self, batch, logs=None):
        if batch % 100 == 0:
            print("another hundred")


class Logs(callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        self.losses = [(lambda: logs["loss"])()]


class Anything(callbacks.Callback):
    def on_train_batch_end(self, *given, **named):
        self.last = named


class Rate(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1


class Inside(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.look()

    def look(self):
        return self.weights

    @property
    def weights(self):
        return self.model.get_weights()


class Held(callbacks.Callback):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def on_train_batch_end(self, batch, logs=None):
        self.held.summary()


class Heir(Number):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)


class Callable:
    def __call__(self, batch, logs):
        """Do nothing that can be seen."""


def look():
    return net.get_weights()


def in_closure():
    model = keras.Sequential([keras.layers.Dense(1)])

    def end(batch, logs):
        return model.get_weights()

    return callbacks.LambdaCallback(on_train_batch_end=end)


def ending(function):
    return callbacks.LambdaCallback(on_train_batch_end=function)


@pytest.mark.parametrize(
    "make",
    [
        Number,
        Logs,
        Anything,
        Rate,
        Inside,
        lambda: Held(net),
        Heir,
        in_closure,
        lambda: ending(lambda batch, logs: print(batch)),
        lambda: ending(lambda batch, logs: look()),
        lambda: ending(functools.partial(lambda what, batch, logs: print(logs), "x")),
        lambda: ending(Callable()),
    ],
)
def test_hooks_that_read_are_found(make):
    assert reads_batches(make())


@pytest.mark.parametrize(
    "make",
    [
        Quick,
        lambda: Held("text"),
        lambda: ending(lambda batch, logs: None),
        lambda: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs)),
        callbacks.ProgbarLogger,
        callbacks.TerminateOnNaN,
        lambda: callbacks.TensorBoard("unused", update_freq="batch"),
        lambda: callbacks.ModelCheckpoint("unused.keras", save_freq=4),
    ],
)
def test_hooks_that_do_not_read_and_those_of_packages_are_quick(make):
    assert not reads_batches(make())
