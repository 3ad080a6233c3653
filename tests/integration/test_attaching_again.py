"""Fits that go on although their server, or their script, was killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading

import pytest
from nfdt_client.connection import JobsClient

from tests.support.scripts import DEADLINE_S, NFDT, environment, start_server, start_workers, stop

pytestmark = pytest.mark.processes

EPOCHS = 6
FIT = """
import json, sys
import keras
import numpy as np
import nfdt

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(1024, 16)).astype("float32")
y = (x[:, 0] > 0).astype("int32")

class Calls(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.rates = [], [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append(epoch)
        self.rates.append(float(self.model.optimizer.learning_rate))
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.0

def build():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(2, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return model

def report(history, calls):
    print(json.dumps(dict(history=history.history, epochs=history.epoch, begun=calls.begun, ended=calls.ended,
                          rates=calls.rates, samples=sum(row["samples"] for row in history.nfdt.values()))))
"""
ARRAYS = f"""{FIT}
calls, model = Calls(), build()
job = sys.argv[1] if len(sys.argv) > 1 else None
with nfdt.session(workers=2, options={{"emulate.step_ms": 25, "job": job}}):
    history = model.fit(x, y, batch_size=32, epochs={EPOCHS}, validation_data=(x, y), callbacks=[calls], verbose=2)
report(history, calls)
"""


def first_job(link: JobsClient) -> str:
    """Wait for the first job of a server and return its id."""
    while not (jobs := link.list()):
        threading.Event().wait(0.05)
    return jobs[0].job_id


class Restarts:
    """Server that is killed once its only job has begun an epoch, and started again at the same address."""

    def __init__(self, directory, *options: str) -> None:
        self._directory, self._options = directory, options
        self.server = start_server(directory, *options)
        self.workers = start_workers(self.server, 2)

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the only job has begun this epoch."""
        link = JobsClient(self.server.address, self.server.token_file.read_text())
        for event in link.watch(first_job(link)):
            if event.kind == "epoch_begin" and event.data["epoch"] == epoch:
                break
        link.close()

    def restart_in_epoch(self, epoch: int) -> None:
        """Kill the server in this epoch, and start the next server."""
        self.wait_for_epoch(epoch)
        os.kill(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait(DEADLINE_S)
        self.server = start_server(self._directory, "--listen", self.server.address, *self._options)

    def close(self) -> None:
        stop(self.workers, self.server.process)


@pytest.fixture
def restarts(tmp_path):
    made = []

    def make(*options: str) -> Restarts:
        made.append(Restarts(tmp_path, *options))
        return made[0]

    yield make
    for one in made:
        one.close()


def finish(script) -> tuple[dict, str]:
    """Return what a script reports, and its terminal."""
    out, err = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0, err[-4000:]
    return json.loads(out.strip().splitlines()[-1]), out + err


def stays_after_the_second_epoch(losses: list[float]) -> None:
    """Assert that the learning rate stayed 0, as its callback has set it; workers' parts are summed in any order."""
    assert losses[1:] == pytest.approx([losses[1]] * (EPOCHS - 1), rel=1e-6)


@pytest.mark.feature("The server is killed and started again", area="Failures")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_fit_goes_on_when_its_server_was_killed(restarts, start_script):
    cluster = restarts()
    script = start_script(ARRAYS, **cluster.server.env())
    cluster.restart_in_epoch(3)
    done, terminal = finish(script)
    assert done["epochs"] == done["begun"] == done["ended"] == list(range(EPOCHS))
    assert {name: len(values) for name, values in done["history"].items()} == {"loss": EPOCHS, "val_loss": EPOCHS}
    assert done["rates"] == [0.5, 0.5, *[0.0] * (EPOCHS - 2)]
    assert done["samples"] == EPOCHS * 1024
    stays_after_the_second_epoch(done["history"]["val_loss"])
    assert "Server restarted: training goes on" in terminal


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("preset", ["local-ddc", "diloco"])
def test_local_steps_go_on_when_the_server_was_killed_in_a_round(restarts, start_script, preset):
    cluster = restarts()
    options = f'"emulate.step_ms": 25, "algorithm": "{preset}", "local_steps": 4'
    script = start_script(ARRAYS.replace('"emulate.step_ms": 25', options), **cluster.server.env())
    cluster.restart_in_epoch(3)
    done, terminal = finish(script)
    assert done["epochs"] == done["begun"] == done["ended"] == list(range(EPOCHS))
    assert done["samples"] == EPOCHS * 1024
    assert "Server restarted: training goes on" in terminal


@pytest.mark.feature("A script that was killed goes on with its job (`--job`)", area="Detached jobs")
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_script_that_was_killed_goes_on_with_its_job(restarts, start_script):
    cluster = restarts()
    script = start_script(ARRAYS, "digits", **cluster.server.env())
    cluster.wait_for_epoch(3)
    script.kill()
    done, terminal = finish(start_script(ARRAYS, "digits", **cluster.server.env()))
    assert "Attached to job-" in terminal
    assert done["epochs"] == done["begun"] == done["ended"] == list(range(EPOCHS))
    assert {name: len(values) for name, values in done["history"].items()} == {"loss": EPOCHS, "val_loss": EPOCHS}
    assert done["rates"] == [0.5, 0.5, *[0.0] * (EPOCHS - 2)]
    stays_after_the_second_epoch(done["history"]["val_loss"])


CHANGED = f"""{FIT}
level = keras.Variable(0.0)

class Batches(keras.utils.PyDataset):
    shift = 0.0

    def __len__(self):
        return 32

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * index + 32)
        return x[rows], y[rows] * 0 + self.shift

class Change(Calls):
    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch)
        level.assign(epoch + 1.0)
        data.shift = 10.0 * (epoch + 1)

calls, model, data = Change(), build(), Batches()
model.compile(model.optimizer, lambda y, p: keras.ops.mean(y) + keras.ops.mean(p) * 0.0 + level)
job = sys.argv[1] if len(sys.argv) > 1 else None
with nfdt.session(workers=2, options={{"emulate.step_ms": 25, "job": job}}):
    history = model.fit(data, epochs={EPOCHS}, callbacks=[calls], verbose=2)
report(history, calls)
"""


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_what_callbacks_change_reaches_the_workers_of_a_restarted_server(restarts, start_script):
    cluster = restarts("--allow-code")
    script = start_script(CHANGED, **cluster.server.env())
    cluster.restart_in_epoch(3)
    done, _ = finish(script)
    assert done["history"]["loss"] == pytest.approx([11.0 * (epoch + 1) for epoch in range(EPOCHS)])


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_what_callbacks_change_reaches_the_workers_when_the_script_was_killed(restarts, start_script):
    cluster = restarts("--allow-code")
    script = start_script(CHANGED, "changed", **cluster.server.env())
    cluster.wait_for_epoch(3)
    script.kill()
    done, _ = finish(start_script(CHANGED, "changed", **cluster.server.env()))
    assert done["history"]["loss"] == pytest.approx([11.0 * (epoch + 1) for epoch in range(EPOCHS)])


TWO_FITS = f"""{FIT}
model, histories = build(), []
for epochs in (2, 3):
    histories.append(model.fit(x, y, batch_size=32, epochs=epochs, verbose=0).history)
print(json.dumps(histories))
"""


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_the_fits_of_a_script_that_is_run_again_return_their_results_at_once(restarts, tmp_path):
    cluster = restarts()
    script = tmp_path / "script.py"
    script.write_text(TWO_FITS)
    command = [*NFDT, "run", "--job", "digits", "--workers", "2", str(script)]
    env = environment(**cluster.server.env())
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert second.stdout == first.stdout
    assert "Attached to job-" in second.stderr
    assert "(digits-2)" in second.stderr
    listed = subprocess.run([*NFDT, "jobs", "list"], env=env, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1:3] for line in listed.splitlines()[1:]] == [
        ["digits", "succeeded"],
        ["digits-2", "succeeded"],
    ]


FED = f"""{FIT}
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * index + 32)
        return x[rows], y[rows]

def generated():
    while True:
        for index in range(32):
            yield Batches()[index]

calls, model = Calls(), build()
data = dict(x=Batches(), shuffle=False) if sys.argv[1] == "dataset" else dict(x=generated(), steps_per_epoch=32)
job = sys.argv[2] if len(sys.argv) > 2 else None
with nfdt.session(workers=2, options={{"emulate.step_ms": 25, "data": "client", "job": job}}):
    history = model.fit(**data, epochs={EPOCHS}, callbacks=[calls], verbose=2)
report(history, calls)
"""


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_fit_feeds_a_dataset_again_when_its_server_was_killed(restarts, start_script):
    cluster = restarts()
    script = start_script(FED, "dataset", **cluster.server.env())
    cluster.restart_in_epoch(3)
    done, _ = finish(script)
    assert done["epochs"] == done["begun"] == done["ended"] == list(range(EPOCHS))


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_fit_whose_generator_cannot_begin_again_names_the_reason(restarts, start_script):
    cluster = restarts()
    script = start_script(FED, "generator", **cluster.server.env())
    cluster.restart_in_epoch(3)
    _, err = script.communicate(timeout=DEADLINE_S)
    assert script.returncode != 0
    assert "a generator are read only once" in err


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_script_that_was_killed_feeds_its_job_again(restarts, start_script):
    cluster = restarts()
    script = start_script(FED, "dataset", "digits", **cluster.server.env())
    cluster.wait_for_epoch(3)
    script.kill()
    done, terminal = finish(start_script(FED, "dataset", "digits", **cluster.server.env()))
    assert "Attached to job-" in terminal
    assert done["epochs"] == done["begun"] == done["ended"] == list(range(EPOCHS))
    with contextlib.closing(JobsClient(cluster.server.address, cluster.server.token_file.read_text())) as link:
        events = link.recorded(first_job(link))
        samples = [event.data["samples"] for event in events if event.kind == "epoch_end"]
    assert samples == [1024] * EPOCHS, "the batches that the job has are not fed again"
