"""Fits of scripts as runs on disk, after the script and its server have ended."""

from __future__ import annotations

import json
import subprocess

import pytest
from nfdt_client.run_history import read_runs, runs_folder

from nfdt.core.specs.job import parse_job
from tests.support.scripts import DIGITS

pytestmark = pytest.mark.processes

SCRIPT = f"""{DIGITS}
import nfdt

class Fails(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("no more\\nsecond line")

with nfdt.session(workers=2, overlap=2, token="secret") as session:
    build().fit(x, y, epochs=3, batch_size=64, validation_data=(x[:100], y[:100]), verbose=0)
    try:
        build().fit(x, y, epochs=2, verbose=0, callbacks=[Fails()])
    except RuntimeError:
        pass
with nfdt.session(workers=2, keep_runs=0):
    build().fit(x, y, epochs=1, verbose=0)
build().fit(x, y, epochs=1, verbose=0)
"""


@pytest.mark.feature("`nfdt runs`: fits are kept after script and server have ended", area="Fit, evaluate and predict")
def test_each_distributed_fit_is_kept_with_its_end(tmp_path, run_script, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    done = run_script(SCRIPT, "--rate", "0.1")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = read_runs(runs_folder())
    assert first.script == str(tmp_path / "script.py")
    assert first.arguments == ["--rate", "0.1"]
    assert first.commit == commit
    assert (first.ending, first.where, first.algorithm, first.workers) == ("finished", "cluster", "ddc-asgd", 2)
    assert first.options == {"workers": 2, "overlap": 2, "token": "(hidden)", "warm": "true"}
    assert [epoch["samples"] for epoch in first.epochs] == [1797] * 3
    assert {"accuracy", "loss", "val_accuracy", "val_loss"} == set(first.metrics)
    assert first.samples_per_s > 0
    assert first.mean_staleness > 0
    assert first.worker_s > 0
    assert set(first.per_worker) == {"worker-0", "worker-1"}
    assert len(first.jobs) == 1
    assert first.jobs != second.jobs
    assert first.versions["keras"]
    assert parse_job(json.dumps(first.spec)).fit.epochs == 3
    assert second.ending == "failed: RuntimeError: no more"
    assert len(second.epochs) == 1
