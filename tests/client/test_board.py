"""Metrics for TensorBoard, read back with its own reader."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from nfdt_client.board import Board
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import nfdt
from nfdt.core.errors import UsageError

EPOCHS = 3


def read(folder) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Return the steps and values of each tag of a run."""
    found = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
    found.Reload()
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto)) for event in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


def values(found, tag: str) -> list[float]:
    assert [step for step, _ in found[tag]] == list(range(EPOCHS))
    return [float(value) for _, value in found[tag]]


def fit():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    x, y = np.random.default_rng(0).random((320, 4), "float32"), np.ones((320, 1), "float32")
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.01 / 2**epoch)
    return model.fit(x, y, batch_size=8, epochs=EPOCHS, validation_split=0.2, verbose=0, callbacks=[halve])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board") / "runs"
    with nfdt.session(workers=2, tensorboard=str(folder)):
        return folder, fit(), fit()


def test_metrics_have_the_tags_of_keras_and_the_numbers_of_the_history(trained):
    folder, history, _ = trained
    logs = history.history
    train, validation = read(folder / "train"), read(folder / "validation")
    assert set(train) == {"epoch_loss", "epoch_mae", "epoch_learning_rate"}
    assert set(validation) == {"epoch_loss", "epoch_mae"}
    for name in ("loss", "mae"):
        assert values(train, f"epoch_{name}") == list(np.float32(logs[name]))
        assert values(validation, f"epoch_{name}") == list(np.float32(logs[f"val_{name}"]))
    assert values(train, "epoch_learning_rate") == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
def test_each_worker_has_its_speed_batches_and_staleness(trained, name):
    folder, history, _ = trained
    found = read(folder / "workers" / name)
    assert min(values(found, "samples_per_s")[:1]) >= 0
    assert sum(values(found, "samples_per_s")) > 0
    assert {float(value) for _, value in found["batch_size"]} == {8.0}
    pushes = sum(buckets[:, 2].sum() for _, buckets in found["staleness"])
    assert pushes == sum(history.nfdt[name]["staleness"].values())


def test_a_further_fit_has_a_folder_of_its_own(trained):
    folder, _, second = trained
    assert values(read(folder / "fit-2" / "train"), "epoch_loss") == list(np.float32(second.history["loss"]))


def test_a_file_in_place_of_the_folder_is_refused_before_training(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="tensorboard: expected a folder that can be written"):
        Board(tmp_path / "runs")


def test_a_folder_that_cannot_be_written_any_more_is_warned_of_once(tmp_path, caplog):
    board = Board(tmp_path / "runs")
    (tmp_path / "runs" / "train").write_text("")  # in place of the folder of the run
    for epoch in range(2):
        board.write_epoch(epoch, {"loss": 1.0}, None, {}, 1.0)
    board.close()
    assert sum("cannot be written any more" in record.message for record in caplog.records) == 1
