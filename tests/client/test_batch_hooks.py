"""Train-batch hooks of callbacks: the times of their calls, the values they see, and the effect of values they set."""

from __future__ import annotations

import logging
import threading
import warnings

import numpy as np
import pytest
from nfdt_client import decorator, feed, mirror
from nfdt_client.batch_hooks import BatchHooks, choose_mode, plan_pauses
from nfdt_client.options import resolve

from nfdt.core.arrays.safetensors_io import dump_arrays
from nfdt.core.errors import NotStored, ServerUnreachable, UsageError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire import jobs_pb2 as pb
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")
callbacks = keras.callbacks

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
DDC = resolve_algorithm("ddc-asgd")


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return model


@pytest.fixture
def session(fake):
    with decorator.session(server=fake.address, token=TOKEN) as session:
        yield session


@pytest.fixture
def approximate(fake):
    with decorator.session(server=fake.address, token=TOKEN, batch_hooks="approximate") as session:
        yield session


@pytest.fixture
def exact(fake):
    with decorator.session(server=fake.address, token=TOKEN, batch_hooks="exact") as session:
        yield session


def asked(fake, kind):
    return [value for name, value in fake.jobs.job.asked if name == kind]


class BatchHookLog(callbacks.Callback):
    """Callback that records the batch hooks with the model's first weight."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch, float(self.model.get_weights()[0][0, 0])))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, float(self.model.get_weights()[0][0, 0])))

    @property
    def order(self):
        return [(hook, batch) for hook, batch, _ in self.calls]


class Stop(BatchHookLog):
    """Callback that stops training after so many batches."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.model.stop_training = len(self.calls) // 2 >= self.after


class Rate(callbacks.Callback):
    """Callback that sets a learning rate for each batch before it begins."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 1.0 + batch


# ---- exact


def test_exact_hooks_see_the_weights_of_their_moment(exact, fake, model):
    recorder, before = BatchHookLog(), float(model.get_weights()[0][0, 0])
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[recorder])
    assert recorder.order == [(hook, batch) for batch in range(4) for hook in ("begin", "end")] * 2
    moved = [(weight - before, weight - before) for _, _, weight in recorder.calls]
    assert [round(m[0]) for m in moved] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]
    assert asked(fake, "proceed") == [(e, n) for e in (0, 1) for n in (1, 2, 3, 4, 5)]


def test_exact_hooks_are_not_called_before_training_stands_still(exact, fake, model):
    recorder = BatchHookLog()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[recorder])
    ends = [weight for hook, _, weight in recorder.calls if hook == "end"]
    assert np.diff(ends) == pytest.approx([1, 1, 1])


def test_an_exact_rate_is_sent_before_its_batch_is_let_through(exact, fake, model):
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Rate()])
    assert fake.jobs.job.asked == [
        ("proceed", (0, 1)),  # the rate of the first batch is in the job's program
        *(word for batch in (1, 2, 3) for word in (("set_learning_rate", 1.0 + batch), ("proceed", (0, batch + 1)))),
        ("proceed", (0, 5)),
    ]


def test_exact_hooks_stop_training_at_their_batch(exact, fake, model):
    stop = Stop(after=2)
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[stop])
    assert stop.order == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    assert fake.jobs.job.asked == [("proceed", (0, 1)), ("proceed", (0, 2)), ("stop_training", None)]


def test_weights_that_an_exact_hook_sets_are_trained_on(exact, fake, model):
    class Reset(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.set_weights([np.zeros((3, 1)), np.zeros(1)])

    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Reset()])
    assert len(asked(fake, "set_weights")) == 1
    assert np.allclose(model.get_weights()[0], 2.0)


def test_exact_hooks_follow_steps_per_execution(exact, fake, model):
    model.compile("sgd", "mse", steps_per_execution=3)
    recorder = BatchHookLog()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[recorder])
    assert recorder.order == [("begin", 0), ("end", 2), ("begin", 3), ("end", 5)]
    assert asked(fake, "proceed") == [(0, 3), (0, 6), (0, 7)]


# ---- approximate


def test_the_rate_of_the_first_batch_counts_from_the_first_step_on(approximate, fake, model):
    class Freeze(callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.0

        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.25

    model.fit(X, Y, epochs=3, verbose=0, callbacks=[Freeze()])
    assert asked(fake, "set_learning_rate") == []


def test_an_approximate_rate_is_sent_with_the_news_of_its_batch(approximate, fake, model):
    fake.jobs.progress = lambda steps: [1, 2, 3, 4]
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Rate()])
    assert asked(fake, "set_learning_rate") == [2.0, 3.0, 4.0]


def test_no_batch_begins_that_does_not_come(approximate, fake, model):
    recorder = BatchHookLog()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[recorder])
    assert recorder.order == [(hook, batch) for batch in range(4) for hook in ("begin", "end")] * 2


def test_no_batch_of_a_stream_begins_before_it_is_known_to_come(approximate, fake, model):
    recorder, batches = BatchHookLog(), ((X, Y) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(batches, epochs=1, steps_per_epoch=4, verbose=0, shuffle=False, callbacks=[recorder])
    assert fake.jobs.job.spec.train.batches == 4
    assert recorder.order == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


def test_the_weights_of_the_moment_are_fetched_in_a_tenth_of_the_time(approximate, fake, model, monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            self.now += 1.0
            return self.now

    monkeypatch.setattr(mirror, "time", Clock())
    fake.jobs.steps, fake.jobs.progress = 60, lambda steps: list(range(1, steps + 1))
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[BatchHookLog()])
    assert fake.jobs.snapshots == 7  # a clock of one second per reading: one second of work, nine without


def test_weights_that_find_no_room_on_the_servers_disk_are_skipped_with_a_warning(approximate, fake, model, caplog):
    real = fake.jobs.keep

    def keep(data):
        if fake.jobs.snapshots == 1:
            raise NotStored("the disk is full.")
        return real(data)

    fake.jobs.keep = keep
    fake.jobs.progress = lambda steps: [1, 2, 3, 4]
    recorder = BatchHookLog()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[recorder])
    assert [batch for hook, batch in recorder.order if hook == "end"] == [0, 1, 2, 3]
    texts = [record.getMessage() for record in caplog.records if record.name == "nfdt_client.mirror"]
    assert texts == ["The callbacks between batches see older weights: the disk is full."]


def test_a_stopped_epoch_does_not_go_on(approximate, fake, model):
    fake.jobs.progress = lambda steps: [1, 2, 3, 4]
    stop, begun = Stop(after=2), []

    class Epochs(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            begun.append(epoch)

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False  # too late: the cluster has been instructed

    epochs = Epochs()
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[stop, epochs])
    assert len(stop.calls) == 4
    assert begun == history.epoch == [0]
    assert asked(fake, "proceed") == [0]
    assert len(asked(fake, "stop_training")) == 1


def test_an_epoch_end_that_is_reported_again_is_not_replayed(approximate, fake, model):
    fake.jobs.repeats_epoch_ends = True
    seen = []
    ends = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[ends])
    assert seen == history.epoch == [0, 1, 2]
    assert history.history["loss"] == [1.0, 1.0 / 2, 1.0 / 3]
    assert asked(fake, "proceed") == [0, 1, 2]


@pytest.mark.parametrize(("batches", "size"), [(7, 3), (6, 3), (2, 5), (4, 1)])
def test_hooks_have_the_numbers_of_keras_also_where_an_execution_is_cut_short(batches, size, model):
    model.compile("sgd", "mse", steps_per_execution=size)
    plain, ours = BatchHookLog(), BatchHookLog()
    model.fit(np.zeros((batches, 3)), np.zeros((batches, 1)), batch_size=1, verbose=0, callbacks=[plain])
    ours.set_model(model)
    hooks = BatchHooks(ours, model, size, {})
    for steps in range(batches + 1):
        hooks.advance(steps, {"loss": 1.0}, flush=steps == batches)
    assert ours.order == plain.order


def test_approximate_hooks_wait_for_the_first_logs(model):
    seen = []
    hooks = BatchHooks(callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs)), model, 1, {})
    hooks.advance(2, {})
    assert seen == []
    hooks.advance(3, {"loss": 1.0})
    assert seen == [{"loss": 1.0}] * 3


# ---- choice between exact and approximate


def planned(given, mode="auto", algorithm=DDC, size=1):
    return plan_pauses(mode, algorithm, given, size, set())


def test_a_session_logs_once_which_hooks_are_late(session, fake, model, caplog):
    for _ in range(3):
        model.fit(X, Y, verbose=0, callbacks=[BatchHookLog()])
    model.fit(X, Y, verbose=0, callbacks=[callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)])
    late = [record.getMessage() for record in caplog.records if "some steps late" in record.getMessage()]
    assert [line.partition(":")[0] for line in late] == ["BatchHookLog", "LambdaCallback"]


def checkpoint(folder, **options):
    return callbacks.ModelCheckpoint(folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, **options)


def test_training_stands_still_where_keras_saves(tmp_path, caplog):
    saver = checkpoint(tmp_path, save_freq=4)
    pauses = planned([saver, callbacks.BackupAndRestore(tmp_path / "backup", save_freq=10)])
    assert [pauses(0), pauses(3)] == [4, 7]
    saver._batches_seen_since_last_saving = 3
    assert pauses(3) == 4
    assert planned([saver], size=3)(0) == 3
    assert "ModelCheckpoint, BackupAndRestore" in caplog.text


def test_checkpoints_between_batches_hold_different_weights(session, fake, model, tmp_path):
    before = float(model.get_weights()[0][0, 0])
    fake.jobs.steps = 6
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint(tmp_path, save_freq=4)])
    saved = {}
    for file in sorted(tmp_path.glob("*.weights.h5")):
        model.load_weights(file)
        saved[file.name.removesuffix(".weights.h5")] = round(float(model.get_weights()[0][0, 0]) - before)
    assert saved == {"1-4": 4, "2-2": 8, "2-6": 12}


def test_a_callback_made_of_one_that_saves_counts_as_one(tmp_path):
    class Mine(callbacks.ModelCheckpoint):
        pass

    assert planned([Mine(tmp_path / "x.keras", save_freq=2)])(0) == 2


@pytest.mark.parametrize(
    "given",
    [
        lambda folder: callbacks.ProgbarLogger(),
        lambda folder: callbacks.History(),
        lambda folder: callbacks.CSVLogger(folder / "log.csv"),
        lambda folder: callbacks.TerminateOnNaN(),
        lambda folder: callbacks.EarlyStopping(),
        lambda folder: callbacks.TensorBoard(folder),
        lambda folder: callbacks.ModelCheckpoint(folder / "x.keras"),
        lambda folder: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ],
)
def test_no_warning_for_callbacks_that_need_no_exact_hooks(tmp_path, caplog, given):
    assert planned([given(tmp_path)]) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (lambda folder: BatchHookLog(), "BatchHookLog"),
        (lambda folder: callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), "LambdaCallback"),
        (lambda folder: callbacks.TensorBoard(folder, update_freq="batch"), "TensorBoard"),
    ],
)
def test_the_warning_of_approximate_hooks_names_the_remedy(tmp_path, caplog, given, name):
    callback = given(tmp_path)
    assert planned([callback, callback]) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{name}: ")
    assert "batch_hooks='exact'" in record.getMessage()


@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_no_warning_for_an_explicit_choice_of_hooks(caplog, tmp_path, mode):
    pauses = planned([BatchHookLog(), checkpoint(tmp_path, save_freq=4)], mode)
    assert caplog.records == []
    assert (pauses(2) if pauses else None) == {"exact": 3, "approximate": None}[mode]


@pytest.mark.feature("Batch hooks of the script that read batches, logs or the model are exact", area="Callbacks")
def test_hooks_that_read_batches_are_exact_and_a_line_states_it(session, fake, model, caplog):
    recorder = BatchHookLog()
    model.fit(X, Y, epochs=1, verbose=0, callbacks=[recorder])
    assert asked(fake, "proceed") == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert np.diff([weight for hook, _, weight in recorder.calls if hook == "end"]) == pytest.approx([1, 1, 1])
    (record,) = [record for record in caplog.records if "hooks" in record.name]
    assert record.getMessage().startswith("BatchHookLog: ")
    assert "batch_hooks='approximate'" in record.getMessage()


class Count(callbacks.Callback):
    """Callback that does not look at what it is given."""

    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1


@pytest.mark.parametrize(
    ("mode", "preset", "data", "callback", "chosen"),
    [
        ("auto", "ddc-asgd", "auto", BatchHookLog, "exact"),
        ("auto", "bsp", "client", BatchHookLog, "exact"),
        ("auto", "ddc-asgd", "auto", Count, "auto"),
        ("auto", "group-sync", "auto", BatchHookLog, "auto"),
        ("auto", "dbs-sgd", "auto", BatchHookLog, "auto"),
        ("auto", "ddc-asgd", "workers", BatchHookLog, "auto"),
        ("approximate", "ddc-asgd", "auto", BatchHookLog, "approximate"),
        ("exact", "ddc-asgd", "auto", Count, "exact"),
    ],
)
def test_only_auto_is_replaced_and_only_where_it_may_be(mode, preset, data, callback, chosen):
    assert choose_mode(mode, resolve_algorithm(preset), data, [callbacks.History(), callback()], set()) == chosen


def test_one_warning_per_fit(session, fake, model, caplog):
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[BatchHookLog(), Rate()])
    assert [r.getMessage().split(":")[0] for r in caplog.records if "hooks" in r.name] == ["BatchHookLog, Rate"]


@pytest.mark.feature('Exact batch hooks with groups or `batch="dbs"`', area="Callbacks", status="refused")
@pytest.mark.parametrize("preset", ["group-sync", "dbs-sgd", "auto"])
def test_exact_hooks_are_refused_where_a_step_is_no_batch(preset):
    with pytest.raises(UsageError, match="batch_hooks='exact'.*" + preset):
        decorator.distribute(algorithm=preset, batch_hooks="exact")
    assert resolve({"algorithm": preset, "batch_hooks": "auto"}).batch_hooks == "auto"


@pytest.mark.parametrize("preset", ["group-sync", "dbs-sgd", "auto"])
def test_a_save_that_cannot_be_exact_is_reported(tmp_path, caplog, preset):
    assert planned([checkpoint(tmp_path, save_freq=4)], algorithm=resolve_algorithm(preset)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("ModelCheckpoint: ")
    assert preset in record.getMessage()


@pytest.mark.parametrize("value", ["lockstep", True, 1, ""])
def test_a_mode_that_is_none_is_refused(value):
    with pytest.raises(UsageError, match="auto, exact, approximate"):
        resolve({"batch_hooks": value})


def test_the_mode_is_an_option_like_others(tmp_path):
    found = resolve({}, environ={"NFDT_BATCH_HOOKS": "exact"}, directory=tmp_path)
    assert found.batch_hooks == "exact"
    assert found.settings["batch_hooks"].origin == "environment NFDT_BATCH_HOOKS"
    assert resolve({}, environ={}, directory=tmp_path).settings["batch_hooks"].value == "auto"


# ---- calls


def test_a_callback_that_stops_before_a_batch_still_gets_its_end():
    class Early(Stop):
        def on_train_batch_begin(self, batch, logs=None):
            super().on_train_batch_begin(batch, logs)
            self.model.stop_training = True

        def on_train_batch_end(self, batch, logs=None):
            BatchHookLog.on_train_batch_end(self, batch, logs)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    early = Early(9)
    early.set_model(model)
    model.stop_training = False
    hooks = BatchHooks(early, model, 1, {})
    hooks.begin()
    hooks.advance(3, {"loss": 1.0})
    assert early.order == [("begin", 0), ("end", 0)]
    assert hooks.stopped


# ---- metrics


def counted(*variables):
    sums = {f"sum/{index}": np.float32(value) for index, value in enumerate(variables)}
    return dump_arrays({"steps": np.asarray(4), **sums})


def test_the_metrics_of_the_model_are_those_of_the_epoch(session, fake, model):
    fake.jobs.metrics = counted(6.0, 4.0, 1.0, 2.0)
    seen = []
    look = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_metrics_result()))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[look])
    assert [{k: float(v) for k, v in result.items()} for result in seen] == [{"loss": 1.5, "mae": 0.5}] * 2


def test_exact_logs_are_the_model_s_metrics(exact, fake, model):
    fake.jobs.metrics = counted(6.0, 4.0, 1.0, 2.0)
    fake.jobs.logs = lambda epoch: {"loss": 9.0, "mae": 9.0}
    seen = []

    class Look(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs)

    model.fit(X, Y, epochs=1, verbose=0, callbacks=[Look()])
    assert seen == [{"loss": 1.5, "mae": 0.5}] * 4


def test_dictionaries_in_the_logs_of_a_step_have_the_order_of_keras(fake):
    class Grouped(keras.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            return {"loss": logs["loss"], "compiled": {"mae": logs["mae"]}}

    def train():
        inputs, seen = keras.Input((3,)), []
        model = Grouped(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
        look = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(list(logs)))
        history = model.fit(X, Y, epochs=1, verbose=0, callbacks=[look])
        return list(history.history), seen[-1]

    plain = train()
    fake.jobs.logs = lambda epoch: {"loss": 1.0, "mae": 2.0}
    with decorator.session(server=fake.address, token=TOKEN, batch_hooks="approximate"):
        assert train() == plain == (["mae", "loss"], ["mae", "loss"])


def test_metrics_of_another_model_are_left_alone(session, fake, model):
    fake.jobs.metrics = counted(6.0)
    model.fit(X, Y, epochs=1, verbose=0)
    assert float(model.get_metrics_result()["loss"]) == 0.0


# ---- feed


def test_no_more_batches_are_made_than_there_are_credits(monkeypatch):
    waits, pulled = threading.Event(), []

    class Condition(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            if pulled and not predicate():
                waits.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(feed.threading, "Condition", Condition)

    def batches():
        for number in range(3):
            pulled.append(number)
            if number == 2:
                waits.set()
            yield X, Y

    class Stub:
        def Feed(self, messages):
            return Credits()

    class Credits:
        def __iter__(self):
            return iter([pb.FeedCredit(epoch=0, batches=2)])

        def cancel(self):
            pass

    class Job:
        job_id, connection = "job", type("Connection", (), {"stub": Stub(), "address": "there"})()

    feeder = feed.Feeder(Job(), batches)
    feeder.start_epoch(0)
    assert waits.wait(30)
    feeder.close()
    assert pulled == [0, 1]


def test_a_broken_stream_of_batches_is_the_error_of_the_script(session, fake, model):
    fake.jobs.break_feed = "the cable was pulled"
    with pytest.raises(ServerUnreachable, match="the cable was pulled"):
        model.fit(((X, Y) for _ in range(4)), verbose=0, shuffle=False)
    assert "stream of training data broke" in asked(fake, "cancel")[0]
