"""Files that remain of a fit that failed on the server of its own script."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
from nfdt_client import kept_state

import nfdt
from nfdt.model.program.state import load_state

pytestmark = pytest.mark.processes

X, Y = np.ones((256, 4), "float32"), np.ones((256, 1), "float32")


class Fail(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("enough")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(kept_state, "failures_folder", lambda: tmp_path)
    return tmp_path


def test_logs_and_the_last_state_are_kept_and_the_error_tells_where(folder):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with nfdt.session(workers=1, warm=False), pytest.raises(RuntimeError, match="enough") as raised:
        model.fit(X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[Fail()])
    (kept,) = folder.iterdir()
    assert f"Logs and the last stored weights of the failed job are in {kept}" in raised.value.__notes__
    assert load_state(kept / "state.safetensors").weights.shape == (5,)
    assert "epoch 2 ends" in (kept / "events.log").read_text()
    names = {path.name.partition("-")[0] for path in kept.glob("*.log")}
    assert {"events.log", "local", "server.log"} <= names
    assert not any(path.stat().st_mode & 0o077 for path in kept.iterdir())


def test_only_the_newest_are_kept(folder):
    for number in range(15):
        (folder / f"job-{number}").mkdir()
        os.utime(folder / f"job-{number}", (number, number))
    kept_state._remove_old(folder / "job-14")
    names = {path.name for path in folder.iterdir()}
    assert names == {f"job-{number}" for number in range(5, 15)}
