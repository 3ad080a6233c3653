"""Complete fits through the real client, with a server that only simulates training."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from nfdt_client import decorator
from nfdt_client.connection import JobsClient
from nfdt_client.handle import JobHandle, attach, describe_log, describe_stall
from nfdt_client.job import start_line
from nfdt_client.program_checks import check_rows

from nfdt.core.errors import (
    AuthenticationFailed,
    CaptureError,
    JobCancelled,
    PolicyRefused,
    ServerUnreachable,
    UsageError,
    WorkerFailed,
)
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse", metrics=["mae"])
    return model


@pytest.fixture
def session(fake):
    with decorator.session(server=fake.address, token=TOKEN, batch_hooks="approximate") as session:
        yield session


def asked(fake, kind):
    return [value for name, value in fake.jobs.job.asked if name == kind]


class EpochHookLog(keras.callbacks.Callback):
    """Callback that records every hook, and the model's first weight at the ends of epochs."""

    def __init__(self):
        super().__init__()
        self.calls, self.weights, self.logs = [], [], []

    def on_train_begin(self, logs=None):
        self.calls.append("train begin")

    def on_train_end(self, logs=None):
        self.calls.append("train end")
        self.end_logs = logs

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} begin")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} end")
        self.weights.append(float(self.model.get_weights()[0][0, 0]))
        self.logs.append(logs)

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(f"batch {batch} begin")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(f"batch {batch} end")


def test_the_first_line_says_how_to_look_at_a_job_of_a_server(session, fake, model, capsys, tmp_path):
    model.fit(X, Y, epochs=1, verbose=0)
    line = capsys.readouterr().err.splitlines()[0]
    assert line == f"nfdt: job job-0, ddc-asgd on 2 workers, look at it with `nfdt top --server {fake.address}`"


def test_the_first_line_names_the_logs_only_where_they_are(tmp_path):
    spec = JobSpec(
        name="m",
        algorithm=resolve_algorithm("asgd"),
        cluster=ClusterSpec(workers=2),
        fit=FitSpec(epochs=1),
        program="0" * 64,
        train=DataSpec(kind="stream"),
    )
    here = pb.ServerDescription(state_dir=str(tmp_path))
    assert "logs in" not in start_line("job-1", spec, here, "")
    (tmp_path / "logs").mkdir()
    assert f"asgd on 2 workers, logs in {tmp_path / 'logs'}, page http://x" in start_line(
        "job-1", spec, here, "http://x"
    )


@pytest.mark.feature("Callbacks of the script, in Keras' order", area="Callbacks")
def test_callbacks_see_what_they_see_in_keras(session, fake, model):
    fake.jobs.logs = lambda epoch: {"loss": 1.0 - epoch / 10, "mae": 2.0}
    ours, theirs = EpochHookLog(), EpochHookLog()
    before = float(model.get_weights()[0][0, 0])
    history = model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[ours])
    reference = keras.models.clone_model(model)
    reference.compile("sgd", "mse", metrics=["mae"])
    local = keras.src.backend.tensorflow.trainer.TensorFlowTrainer.fit(
        reference, X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[theirs]
    )
    assert ours.calls == theirs.calls
    assert set(history.history) == set(local.history)
    assert history.params == local.params
    assert history.epoch == local.epoch
    assert history.history["loss"] == [1.0, 0.9]
    assert ours.weights == pytest.approx([before + 1, before + 2])
    assert ours.end_logs == {"loss": 0.9, "mae": 2.0}
    assert history.nfdt == {"worker-0": {"samples": 7}}
    assert session.fits == [history.nfdt]
    assert history is model.history


@pytest.mark.feature("Trained weights in the script's own model", area="Fit, evaluate and predict")
def test_the_result_is_in_the_same_objects(session, fake, model):
    optimizer, kernel = model.optimizer, model.layers[0].kernel
    before = np.asarray(kernel).copy()
    model.fit(X, Y, epochs=3, verbose=0)
    assert model.optimizer is optimizer
    assert model.layers[0].kernel is kernel
    assert np.allclose(np.asarray(kernel).copy(), before + 3)


@pytest.mark.feature("`validation_data` of arrays, on the workers", area="Fit, evaluate and predict")
def test_validation_of_the_workers_reaches_history_and_hooks(session, fake, model):
    fake.jobs.val_logs = lambda epoch: {"loss": 5.0, "mae": 6.0}
    steps = []
    hook = keras.callbacks.LambdaCallback()
    hook.on_epoch_end = lambda epoch, logs: steps.append(logs)
    history = model.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[hook])
    assert history.history["val_loss"] == [5.0, 5.0]
    assert steps[0]["val_mae"] == 6.0
    assert fake.jobs.job.spec.validation is not None


@pytest.mark.feature(
    "`validation_data` of generators and datasets", area="Fit, evaluate and predict", note="evaluated in the script"
)
def test_other_validation_data_are_evaluated_here_on_each_epoch_s_weights(session, fake, model):
    def endless():
        while True:
            yield X, Y

    before = model.get_weights()
    history = model.fit(X, Y, epochs=2, verbose=0, validation_data=endless(), validation_steps=2)
    assert fake.jobs.job.spec.validation is None
    for epoch, loss in enumerate(history.history["val_loss"]):
        model.set_weights([w + epoch + 1 for w in before])
        assert loss == pytest.approx(model.evaluate(X, Y, verbose=0)[0])


@pytest.mark.feature("`validation_freq`", area="Fit, evaluate and predict")
def test_validation_freq_is_kept(session, fake, model):
    data = keras.src.utils.module_utils.tensorflow.data.Dataset.from_tensors((X, Y))
    history = model.fit(X, Y, epochs=4, verbose=0, validation_data=data, validation_freq=2)
    assert len(history.history["val_loss"]) == 2


def test_the_record_counts_what_restored_shards_made_redo(session, fake, model, caplog):
    def logs(epoch):
        fake.jobs.emit(fake.jobs.job, "shard_lost", {"shard": "shard-0", "reason": "its process was ended by SIGKILL"})
        fake.jobs.emit(fake.jobs.job, "shards_restored", {"seconds": 1.5, "redone_samples": 64})
        return {"loss": 1.0}

    fake.jobs.logs = logs
    fake.jobs.steps = 1
    history = model.fit(X, Y, epochs=2, verbose=0)
    lost = [record.message for record in caplog.records if "shard-0 is lost" in record.message]
    assert lost
    assert history.nfdt.redone_samples == 64 * len(lost)


def test_early_stopping_stops_the_cluster_and_restores_the_best(session, fake, model):
    fake.jobs.logs = lambda epoch: {"loss": [3.0, 1.0, 2.0, 2.0, 2.0][epoch]}
    before = model.get_weights()[0]
    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    history = model.fit(X, Y, epochs=5, verbose=0, callbacks=[stop])
    assert history.epoch == [0, 1, 2, 3]
    assert asked(fake, "proceed") == [0, 1, 2, 3]
    assert len(asked(fake, "stop_training")) == 1
    assert np.allclose(model.get_weights()[0], before + 2)


def test_terminate_on_nan_stops_in_the_middle_of_an_epoch(session, fake, model):
    fake.jobs.logs = lambda epoch: {"loss": float("nan")}
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(asked(fake, "stop_training")) == 1
    assert history.epoch == [0]
    assert fake.jobs.job.ended == "succeeded"


def test_learning_rate_callbacks_reach_the_shards(session, fake, model):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 if epoch == 0 else rate / 2)
    history = model.fit(X, Y, epochs=3, verbose=0, callbacks=[schedule])
    assert asked(fake, "set_learning_rate") == [0.25, 0.125]
    assert history.history["learning_rate"] == [0.5, 0.25, 0.125]
    assert asked(fake, "set_weights") == []


def test_weights_changed_by_a_callback_are_sent(session, fake, model):
    class Reset(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.set_weights([np.zeros((3, 1)), np.zeros(1)])

    model.fit(X, Y, epochs=3, verbose=0, callbacks=[Reset()])
    (state,) = asked(fake, "set_weights")
    assert np.all(state.weights == 0)
    assert np.allclose(model.get_weights()[0], 2.0)


def test_weights_changed_before_the_first_epoch_are_what_is_trained(session, fake, model):
    class Prepare(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                self.model.set_weights([np.full((3, 1), 7.0), np.zeros(1)])
                self.model.optimizer.learning_rate = 0.125

    model.fit(X, Y, epochs=2, verbose=0, callbacks=[Prepare()])
    assert fake.jobs.job.asked == [("proceed", 0), ("proceed", 1)]
    assert np.allclose(model.get_weights()[0], 9.0)


def test_weights_changed_in_the_last_epoch_stay(session, fake, model):
    class Reset(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.model.set_weights([np.zeros((3, 1)), np.zeros(1)])

    model.fit(X, Y, epochs=2, verbose=0, callbacks=[Reset()])
    assert np.all(model.get_weights()[0] == 0)


def test_checkpoints_hold_the_weights_of_their_epoch(session, fake, model, tmp_path):
    before = model.get_weights()[0]
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
    for epoch in (1, 2):
        model.load_weights(tmp_path / f"{epoch}.weights.h5")
        assert np.allclose(model.get_weights()[0], before + epoch)


def test_backup_and_restore_goes_on_where_it_was(session, fake, model, tmp_path):
    class Crash(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)

    before = model.get_weights()[0]
    with pytest.raises(RuntimeError, match="power cut"):
        model.fit(X, Y, epochs=4, verbose=0, callbacks=[backup(), Crash()])
    assert fake.jobs.job.ended == "cancelled"
    model.set_weights([np.zeros((3, 1)), np.zeros(1)])
    history = model.fit(X, Y, epochs=4, verbose=0, callbacks=[backup()])
    assert history.epoch == [2, 3]
    assert np.allclose(model.get_weights()[0], before + 4)


@pytest.mark.feature("`CSVLogger`", area="Callbacks")
def test_log_files_are_written(session, fake, model, tmp_path):
    fake.jobs.val_logs = lambda epoch: {"loss": 5.0}
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    model.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[logger])
    assert (tmp_path / "log.csv").read_text().splitlines() == ["epoch,loss,val_loss", "0,1.0,5.0", "1,0.5,5.0"]


@pytest.mark.feature("`TensorBoard`", area="Callbacks")
def test_tensorboard_gets_its_summaries(session, fake, model, tmp_path):
    pytest.importorskip("tensorboard")
    fake.jobs.val_logs = lambda epoch: {"loss": 5.0}
    board = keras.callbacks.TensorBoard(tmp_path / "board", histogram_freq=1)
    model.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[board])
    assert sorted(path.name for path in (tmp_path / "board").iterdir()) == ["train", "validation"]


@pytest.mark.feature("Progress bar (`verbose`)", area="Fit, evaluate and predict")
def test_the_progress_bar_counts_the_steps_of_the_cluster(session, fake, model, capsys):
    fake.jobs.steps = 6
    model.fit(X, Y, batch_size=2, epochs=2)
    out = capsys.readouterr().out
    assert "Epoch 2/2" in out
    assert "6/6" in out


@pytest.mark.feature("`steps_per_execution`", area="Fit, evaluate and predict")
def test_steps_per_execution_groups_the_batch_hooks(session, fake, model):
    model.compile("sgd", "mse", steps_per_execution=3)
    recorder = EpochHookLog()
    model.fit(X, Y, verbose=0, callbacks=[recorder])
    assert [c for c in recorder.calls if "batch" in c] == [
        "batch 0 begin",
        "batch 2 end",
        "batch 3 begin",
        "batch 5 end",
    ]


@pytest.mark.feature("`initial_epoch`, and one `fit` after the other", area="Fit, evaluate and predict")
def test_initial_epoch_and_two_fits_in_a_row(session, fake, model):
    before = model.get_weights()[0]
    assert model.fit(X, Y, initial_epoch=1, epochs=3, verbose=0).epoch == [1, 2]
    model.evaluate(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    assert np.allclose(model.get_weights()[0], before + 3)
    assert len(fake.jobs.jobs) == 2


def test_no_epochs_need_no_cluster(session, fake, model):
    assert model.fit(X, Y, epochs=0, verbose=0).history == {}
    assert fake.jobs.jobs == {}


def test_batches_are_fed_with_credits(session, fake, model):
    def batches():
        for i in range(100):
            yield np.full((2, 3), i, "float32"), np.zeros((2, 1), "float32")

    model.fit(batches(), steps_per_epoch=7, epochs=2, verbose=0, shuffle=False)
    got = {epoch: [int(b[0][0, 0]) for b in fed] for epoch, fed in fake.jobs.job.fed.items()}
    assert got == {0: list(range(7)), 1: list(range(7, 14))}


def test_what_the_data_iterator_raises_is_raised(session, fake, model):
    def batches():
        yield X, Y
        yield X, Y
        raise LookupError("disk on fire")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LookupError, match="disk on fire"):
            model.fit(batches(), verbose=0)
    assert "disk on fire" in fake.jobs.job.feed_error


def test_a_failed_job_raises_the_worker_s_exception(session, fake, model):
    error = {
        "module": "builtins",
        "type": "ZeroDivisionError",
        "message": "boom",
        "traceback": "T",
        "worker": "worker-1",
    }
    fake.jobs.failure = {"state": "failed", "reason": "boom", "error": error}
    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        model.fit(X, Y, verbose=0)
    assert isinstance(caught.value.__cause__, WorkerFailed)
    assert asked(fake, "cancel") == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_interrupt_cancels_the_job(session, fake, model, kind):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise kind("now")

    with pytest.raises(kind):
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[Interrupt()])
    assert kind.__name__ in asked(fake, "cancel")[0]


def test_a_job_cancelled_by_another_client(session, fake, model):
    fake.jobs.failure = {"state": "cancelled", "reason": "by hand"}
    with pytest.raises(JobCancelled, match="by hand"):
        model.fit(X, Y, verbose=0)


def test_all_workers_of_a_server_are_used_unless_a_number_is_given(session, fake, model):
    fake.jobs.slots = 5
    model.fit(X, Y, verbose=0)
    assert fake.jobs.job.spec.cluster.workers == 5


def test_code_is_refused_before_the_upload(session, fake, model):
    fake.jobs.allow_code = False
    model.compile("sgd", lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1))
    with pytest.raises(PolicyRefused, match="--allow-code"):
        model.fit(X, Y, verbose=0)
    assert fake.jobs.artifacts == {}


def test_a_norm_over_all_variables_needs_one_shard(fake, model):
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse")
    with (
        decorator.session(server=fake.address, token=TOKEN, shards=2),
        pytest.raises(UsageError, match="global_clipnorm"),
    ):
        model.fit(X, Y, verbose=0)
    assert fake.jobs.artifacts == {}


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.RMSprop(0.1), keras.optimizers.AdamW(0.1), keras.optimizers.SGD(0.1, momentum=0.9)]
)
def test_lazy_rows_need_an_optimizer_with_a_lazy_form(fake, model, optimizer):
    model.compile(optimizer, "mse")
    with (
        decorator.session(server=fake.address, token=TOKEN, sparse="lazy"),
        pytest.raises(UsageError, match=f"sparse='lazy': expected SGD.*Received: {type(optimizer).__name__}; "),
    ):
        model.fit(X, Y, verbose=0)
    assert fake.jobs.artifacts == {}


def test_lazy_rows_without_a_large_table_have_no_effect(caplog):
    entries = {"layout": [["a", [4, 4]]], "divisible": True, "tables": [0], "optimizer": {"class_name": "Adam"}}
    manifest = Manifest(entries)
    check_rows(manifest, resolve_algorithm("asgd", sparse="lazy"))
    assert "sparse='lazy' has no effect" in caplog.text
    check_rows(manifest.replaced(optimizer={"class_name": "RMSprop"}), resolve_algorithm("asgd"))
    with pytest.raises(UsageError, match="TensorFlow"):
        check_rows(manifest.replaced(versions={"jax": "0.4"}), resolve_algorithm("asgd", sparse="lazy"))


def test_a_wrong_address_or_token_is_reported_before_the_script_works(fake):
    for options, kind in (({"server": "127.0.0.1:1"}, ServerUnreachable), ({"token": "no"}, AuthenticationFailed)):
        done = []
        with (
            pytest.raises(kind),
            decorator.session(**{"server": fake.address, "token": TOKEN, **options}),
        ):
            done.append("work")
        assert done == []
        assert unpatched()


@pytest.mark.feature(
    "Models made under `tf.distribute`, but for `MirroredStrategy`",
    area="Models",
    status="refused",
    note="remove the strategy's scope",
)
def test_a_model_under_a_strategy_is_refused(session, fake):
    tf = pytest.importorskip("tensorflow")
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(CaptureError, match="tf.distribute"):
        model.fit(X, Y, verbose=0)


def unpatched():
    return "fit" not in vars(keras.Model)


def test_the_patch_is_undone_also_when_the_function_raises(fake):
    @decorator.distribute(server=fake.address, token=TOKEN)
    def raises():
        assert not unpatched()
        with decorator.session(server=fake.address, token=TOKEN):
            pass
        assert not unpatched()
        raise RuntimeError("mine")

    assert unpatched()
    with pytest.raises(RuntimeError, match="mine"):
        raises()
    assert unpatched()


def test_the_decorator_keeps_name_and_result_and_works_both_ways(fake, monkeypatch, model):
    monkeypatch.setenv("NFDT_SERVER", fake.address)
    monkeypatch.setenv("NFDT_TOKEN", TOKEN)

    @decorator.distribute
    def bare(a, b=2):
        """Doc."""
        return model.fit(X, Y, verbose=0).nfdt, a, b

    assert (bare.__name__, bare.__doc__) == ("bare", "Doc.")
    assert bare(1, b=3) == ({"worker-0": {"samples": 7}}, 1, 3)
    assert decorator.distribute(workers=1)(lambda: 5)() == 5


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ({"wokers": 2}, "workers"),
        ({"algorithm": "x"}, "ddc-asgd"),
        ({"options": 3}, "mapping"),
        ({"fn": "bsp"}, "function"),
    ],
)
def test_bad_options_fail_at_decoration(arguments, needle):
    with pytest.raises(UsageError, match=needle):
        decorator.distribute(**arguments)


def test_functions_that_run_later_are_refused():
    with pytest.raises(UsageError, match="plain function"):
        decorator.distribute(workers=1)(lambda: (yield))


def submit(fake, fn):
    return decorator.submit(fn, server=fake.address, token=TOKEN, workers=3)


def test_submit_leaves_the_function_at_its_first_fit(fake, model):
    after = []

    def main():
        try:
            model.fit(X, Y, epochs=2, validation_split=0.25)
        except Exception:
            after.append("caught")
        finally:
            after.append("finally")
        after.append("after")

    before = model.get_weights()[0]
    fake.jobs.val_logs = lambda epoch: {"loss": 2.0}
    handle = submit(fake, main)
    assert after == ["finally"]
    assert unpatched()
    assert fake.jobs.job.spec.attended is False
    assert fake.jobs.job.spec.cluster.workers == 3
    result = handle.result(timeout_s=10)
    assert result.history == {"loss": [1.0, 0.5], "val_loss": [2.0, 2.0]}
    assert np.allclose(result.weights[0], before + 2)
    result.apply_to(model)
    assert np.allclose(model.get_weights()[0], before + 2)
    assert handle.status().ended
    assert any("epoch 2 ends" in line for line in handle.logs())
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(UsageError, match="shapes"):
        result.apply_to(other)


class OwnLogs(keras.Sequential):
    def test_step(self, data):
        logs = super().test_step(data)
        return {**logs, "own": logs["loss"] + 1.0}


@pytest.fixture
def own_logs():
    model = OwnLogs([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


@pytest.mark.feature(
    "`test_step` with logs that are no metrics", area="Losses and metrics", note="validated in the script"
)
def test_a_test_step_with_logs_of_its_own_is_validated_here(session, fake, own_logs, caplog):
    history = own_logs.fit(X, Y, validation_data=(X, Y), verbose=0).history
    assert fake.jobs.job.spec.validation is None
    assert "no results of metrics: own" in caplog.text
    evaluated = own_logs.evaluate(X, Y, verbose=0, return_dict=True)
    assert {name: values[-1] for name, values in history.items() if name != "loss"} == {
        f"val_{name}": value for name, value in evaluated.items()
    }


def test_submit_refuses_a_validation_that_needs_the_script(fake, own_logs):
    with pytest.raises(UsageError, match=r"own\..*keras.metrics.Mean"):
        submit(fake, lambda: own_logs.fit(X, Y, validation_data=(X, Y)))


def test_lists_in_logs_are_arrays_in_history_as_keras_has_them(session, fake, model):
    fake.jobs.logs = lambda epoch: {"loss": 1.0, "f1": [0.25, 0.5], "wide": [0.1, 1e300], "counts": [[1, 2]]}
    fake.jobs.val_logs = lambda epoch: {"f1": [0.5, float("nan")]}
    recorder = EpochHookLog()
    history = model.fit(X, Y, validation_data=(X, Y), verbose=2, callbacks=[recorder]).history
    arrays = {name: values[0] for name, values in history.items() if name != "loss"}
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "f1": (np.float32, (2,)),
        "wide": (np.float64, (2,)),
        "counts": (np.int64, (1, 2)),
        "val_f1": (np.float32, (2,)),
    }
    np.testing.assert_array_equal(arrays["f1"], [0.25, 0.5])
    assert isinstance(recorder.logs[0]["f1"], np.ndarray)


@pytest.mark.feature(
    "Generators and other data that only the script can read",
    area="Detached jobs",
    status="refused",
    note="use `nfdt.distribute`",
)
@pytest.mark.parametrize(
    ("fit", "needle"),
    [
        ({"x": ((X, Y) for _ in range(3)), "shuffle": False}, "arrays"),
        ({"x": X, "y": Y, "epochs": 0}, "epochs"),
    ],
)
def test_submit_refuses_what_needs_the_script(fake, model, fit, needle):
    with pytest.raises(UsageError, match=needle):
        submit(fake, lambda: model.fit(**fit))


def test_submit_needs_a_server_and_a_fit(fake):
    with pytest.raises(UsageError, match="NFDT_SERVER"):
        decorator.submit(lambda: None)
    with pytest.raises(UsageError, match="returned without"):
        submit(fake, lambda: None)


def test_attach_finds_a_job_by_its_id(fake, model):
    handle = submit(fake, lambda: model.fit(X, Y))
    assert attach(handle.job_id, fake.address, token=TOKEN).status().state == "succeeded"
    with pytest.raises(UsageError, match="job-9"):
        attach("job-9", fake.address, token=TOKEN)
    with pytest.raises(UsageError, match="NFDT_SERVER"):
        attach(handle.job_id)


def test_a_result_that_is_not_there_in_time(fake, connection, model):
    with decorator.session(server=fake.address, token=TOKEN) as session:
        captured = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                handle = JobHandle("job-0", JobsClient(fake.address, TOKEN))
                with pytest.raises(TimeoutError, match="It goes on"):
                    handle.result(timeout_s=0)
                handle.cancel()
                captured.append(json.dumps(handle.status().logs))

        with pytest.raises(JobCancelled):
            model.fit(X, Y, epochs=2, verbose=0, callbacks=[Look()])
    assert captured == ["{}"]
    assert session.fits == []


def test_a_log_is_described_in_one_line():
    assert describe_log(0.123456) == "0.1235"
    assert describe_log([0.123456, 2.0]) == "[0.1235 2.    ]"
    assert "..." in describe_log(list(range(1000)))
    assert "\n" not in describe_log([[float(i)] * 9 for i in range(9)])


@pytest.mark.parametrize(
    ("workers", "named"),
    [
        (1, "worker-0"),
        (4, "worker-0, worker-1, worker-2, worker-3"),
        (16, "worker-0, worker-1, worker-2 and 13 others"),
    ],
)
def test_a_stall_names_some_workers_in_order(workers, named):
    data = {"waiting_for": [f"worker-{i}" for i in reversed(range(workers))], "since_s": 15.2}
    assert describe_stall(data) == f"Training has waited 15 s for {named}"
