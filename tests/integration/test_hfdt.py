"""Allreduce jobs with real launchers: equal to one process, without hanging or left-over processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from nfdt_client.run_history import read_runs, runs_folder

from tests.support.horovod_scripts import MODELS, left_behind
from tests.support.scripts import DIGITS, answer, descendants, start_server, stop

pytestmark = pytest.mark.horovod
MPIRUN = [shutil.which("mpirun") or "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def test_no_rank_of_hfdt_run_under_mpirun_prints_what_libraries_log(run_script, tmp_path):
    script = MODELS + "dense(keras.optimizers.SGD(0.1)).fit(x, y, verbose=0)\nprint('done', flush=True)\n"
    hfdt = Path(sys.executable).with_name("hfdt")
    done = run_script(script, command=(*MPIRUN, "-np", "2", hfdt, "run"), RING_TEST=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["done"]
    assert "oneDNN" not in done.stderr  # which TensorFlow announces where it is imported
    assert "absl" not in done.stderr


HOROVODRUN = [sys.executable, "-m", "hfdt.horovodrun", "--loopback", "--gloo"]


EQUALS = """
def momentum(): return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
def adam(): return keras.optimizers.AdamW(0.005, weight_decay=0.01, global_clipnorm=0.5)

CASES = dict(
    momentum=(dense, momentum, x), adam=(dense, adam, x), mixed=(mixed, momentum, x), large=(large, momentum, x),
    # Not with Adam: Keras squares the gradients of a word that occurs twice one by one, rings their sum.
    embedding=(embedding, momentum, words),
)

@hfdt.distribute(workers=RANKS, launcher="LAUNCHER")
def main():
    found = {}
    for name, (build, optimizer, data) in CASES.items():
        model = build(optimizer())
        history = model.fit(data, y, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_split=0.1)
        found[name] = model, history
    tiny = dense(keras.optimizers.SGD(0.1))
    few = tiny.fit(x[: RANKS - 1], y[: RANKS - 1], epochs=2, shuffle=False, verbose=0)  # one rank has no sample
    return found, (tiny, few.nfdt["worker-0"]["samples"])

trained, (tiny, few) = main()
alone = dense(keras.optimizers.SGD(0.1))
alone.fit(x[: RANKS - 1], y[: RANKS - 1], epochs=2, shuffle=False, verbose=0)
few = dict(difference=difference(tiny, alone), samples=few)
rows = 1003 - round(1003 * 0.1 + 0.499)
outcome = {}
for name, (model, history) in trained.items():
    build, optimizer, data = CASES[name]
    alone = build(optimizer())
    logs = alone.fit(
        data, y, batch_size=32 * RANKS, epochs=2, shuffle=False, verbose=0, validation_split=0.1
    ).history
    outcome[name] = dict(
        difference=difference(model, alone),
        logs=max(abs(a - b) for key in logs for a, b in zip(logs[key], history.history[key])),
        keys=sorted(history.history) == sorted(logs),
        iterations=int(model.optimizer.iterations) == int(alone.optimizer.iterations),
        slots=max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(own_variables(model), own_variables(alone))
        ),
        samples=history.nfdt["worker-0"]["samples"],
        ranks=history.nfdt["worker-0"]["ranks"],
    )
print()
print(json.dumps([outcome, few]))
"""


@pytest.mark.long
@pytest.mark.feature("`allreduce` on Horovod", area="Algorithms")
@pytest.mark.parametrize(("ranks", "launcher"), [(3, "mpirun"), (2, "horovodrun")])
def test_a_ring_equals_one_process_with_the_global_batch(run_script, ranks, launcher):
    source = MODELS + EQUALS.replace("RANKS", str(ranks)).replace("LAUNCHER", launcher)
    got, few = answer(run_script(source))
    assert set(got) == {"momentum", "adam", "embedding", "mixed", "large"}
    for name, case in got.items():
        limit = 2e-3 if name == "mixed" else 2e-5
        assert case["difference"] < limit, name
        assert case["slots"] < limit, name
        assert case["logs"] < limit, name
        assert case["keys"], name
        assert case["iterations"], name
        assert case["samples"] == 2 * 902, name
        assert case["ranks"] == ranks, name
    assert few["difference"] < 2e-5
    assert few["samples"] == 2 * (ranks - 1)
    assert read_runs(runs_folder())[-1].workers == ranks


@pytest.mark.long
def test_streams_callbacks_and_learning_rates_act_on_every_rank(run_script):
    got = answer(
        run_script(
            MODELS
            + """
rates = [0.1, 0.02, 0.3]

class Nudge(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.set_weights([w * 0.5 for w in self.model.get_weights()])

def callbacks():
    return [keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]), Nudge()]

def sgd(rate=0.1): return keras.optimizers.SGD(rate)

with hfdt.session(workers=2):
    controlled = dense(sgd())
    controlled.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks())
    fed = dense(sgd())
    fed.fit(generator(16), steps_per_epoch=16, epochs=2, verbose=0)
    odd = dense(sgd())
    odd.fit(generator(16), steps_per_epoch=15, epochs=2, verbose=0)
    normalised = build()
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: setattr(normalised, "stop_training", e == 2))
    history = normalised.fit(
        x[:800], y[:800], batch_size=16, epochs=50, verbose=0, validation_data=(x[800:], y[800:]), callbacks=[stop]
    )
with hfdt.session(workers=2, scale_lr="linear", emulate={"step_ms": [0, 50]}):
    scaled = dense(sgd())
    slow = scaled.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)

alone = [dense(sgd()), dense(sgd()), dense(sgd(0.2))]
alone[0].fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=callbacks())
alone[1].fit(generator(32), steps_per_epoch=8, epochs=2, verbose=0)
alone[2].fit(x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)
print(json.dumps(dict(
    controlled=difference(controlled, alone[0]), fed=difference(fed, alone[1]), scaled=difference(scaled, alone[2]),
    rate=float(scaled.optimizer.learning_rate), odd=int(odd.optimizer.iterations),
    seconds=slow.nfdt["worker-0"]["seconds"], epochs=len(history.epoch), val=history.history["val_accuracy"][-1],
    accuracy=float(normalised.evaluate(x[800:], y[800:], verbose=0)[1]),
)))
"""
        )
    )
    assert got["controlled"] < 2e-5
    assert got["fed"] < 2e-5
    assert got["scaled"] < 2e-5
    assert got["rate"] == pytest.approx(0.1)
    assert got["odd"] == 2 * 8
    assert got["seconds"] > 32 * 0.05
    assert got["epochs"] == 3, "a callback stops all ranks"
    assert got["accuracy"] == pytest.approx(got["val"], abs=1e-6), "the statistics of BatchNorm came together"
    assert got["accuracy"] > 0.7


RATES = """
from contextlib import closing
import nfdt
from nfdt_client.connection import JobsClient

schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=8, decay_rate=0.5, staircase=True)
with nfdt.LocalCluster(workers=2, algorithm="allreduce", scale_lr="linear") as cluster:
    with cluster.session():
        dense(keras.optimizers.SGD(schedule)).fit(x[:256], y[:256], batch_size=16, epochs=3, verbose=0)
    with closing(JobsClient(cluster.address, cluster._server.token, ca_file=cluster._server.ca_file)) as client:
        (job,) = client.list()
        ends = [event.data for event in client.watch(job.job_id) if event.kind == "epoch_end"]
print(json.dumps([end["learning_rate"] for end in ends]))
"""


def test_the_rates_of_a_ring_are_recorded_with_its_schedule_and_its_factor(run_script):
    assert answer(run_script(MODELS + RATES)) == pytest.approx([0.1, 0.05, 0.025])


FAILS = """
import hfdt, os

class Fails(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(10, "softmax")
    def call(self, inputs):
        return self.out(inputs)
    def train_step(self, data):
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")) == "1":
            raise RuntimeError("rank 1 has had enough")
        return super().train_step(data)

@hfdt.distribute(workers=2)
def main():
    model = Fails()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(x, y, verbose=0)
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.long)])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(run_script, launcher, tmp_path):
    done = run_script(DIGITS + FAILS, NFDT_LAUNCHER=launcher, RING_TEST=str(tmp_path))
    assert done.returncode == 1
    assert "RuntimeError: rank 1 has had enough" in done.stderr
    assert "Raised on rank-1 of job" in done.stderr
    assert "in train_step" in done.stderr
    assert left_behind(str(tmp_path)) == []


@pytest.mark.long
def test_in_a_world_a_rank_that_raises_ends_every_rank(run_script, tmp_path):
    done = run_script(DIGITS + FAILS, command=(*MPIRUN, "-np", "2", sys.executable), RING_TEST=str(tmp_path))
    assert done.returncode != 0
    assert "Raised on rank-1 of job" in done.stderr
    assert left_behind(str(tmp_path)) == []


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.long)])
def test_a_rank_that_is_killed_ends_the_job_and_is_named(run_script, launcher, tmp_path):
    done = run_script(
        DIGITS
        + """
import hfdt, time
from nfdt.core.errors import JobFailed
try:
    with hfdt.session(workers=2, emulate={"fail": "1@20"}):
        build().fit(x, y, epochs=50, verbose=0)
except JobFailed as error:
    print(json.dumps(dict(text=str(error))))
""",
        NFDT_LAUNCHER=launcher,
        RING_TEST=str(tmp_path),
    )
    text = answer(done)["text"]
    assert "ring of 2 ranks ended" in text
    assert {"mpirun": "rank 1", "horovodrun": "Process name: 1"}[launcher] in text
    assert {"mpirun": "signal 9", "horovodrun": "Exit code: 137"}[launcher] in text
    assert left_behind(str(tmp_path)) == []


@pytest.mark.long
def test_ctrl_c_leaves_nothing_running(start_script, tmp_path):
    process = start_script(
        DIGITS
        + """
import hfdt
class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
with hfdt.session(workers=2):
    build().fit(x, y, epochs=10000, verbose=0, callbacks=[Say()])
""",
        RING_TEST=str(tmp_path),
    )
    assert "epoch 0" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert left_behind(str(tmp_path)) == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("workers=2", id="static", marks=pytest.mark.long),
        pytest.param("workers=2, min_workers=1", id="elastic", marks=pytest.mark.long),
    ],
)
def test_a_server_that_is_killed_takes_its_ring_along(start_script, tmp_path, options):
    process = start_script(
        DIGITS
        + """
import hfdt
class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
with hfdt.session(OPTIONS):
    build().fit(x, y, epochs=10000, verbose=0, callbacks=[Say()])
""".replace("OPTIONS", options),
        RING_TEST=str(tmp_path),
    )
    assert "epoch 0" in process.stdout.readline()
    ours = psutil.Process(process.pid).children(recursive=True)
    server = next(p for p in ours if "nfdt.jobserver.main" in " ".join(p.cmdline()))
    server.kill()
    _, alive = psutil.wait_procs(ours, timeout=30)
    assert alive == []
    assert process.wait(60) == 1


WORLD = """
import hfdt
print("top level", flush=True)

@hfdt.distribute(workers=7)
def main():
    print("body", flush=True)
    model = dense(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    again = dense(keras.optimizers.SGD(0.1, momentum=0.9))
    again.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model, again, history.nfdt["worker-0"]["ranks"]

model, again, ranks = main()
alone = dense(keras.optimizers.SGD(0.1, momentum=0.9))
alone.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
print("ANSWER " + json.dumps(dict(difference=difference(model, alone), again=difference(again, model), ranks=ranks)))
"""


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(MPIRUN, id="mpirun"), pytest.param(HOROVODRUN, id="horovodrun", marks=pytest.mark.long)],
)
def test_a_script_under_a_launcher_joins_its_world(run_script, launcher, tmp_path):
    done = run_script(MODELS + WORLD, command=(*launcher, "-np", "2", sys.executable), RING_TEST=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("top level") == 2
    assert done.stdout.count("body") == 1
    got = json.loads(done.stdout.split("ANSWER ")[1].splitlines()[0])
    assert got["ranks"] == 2
    assert got["difference"] < 2e-5
    assert got["again"] == 0
    assert left_behind(str(tmp_path)) == []


@pytest.mark.feature("`hfdt run` with mpirun or horovodrun", area="Launchers and environments")
def test_an_unmodified_script_trains_with_hfdt_run_and_the_launcher_s_command_line_is_logged(run_script):
    hfdt = (sys.executable, "-c", "from nfdt.cli import hfdt_main; hfdt_main()")
    done = run_script(
        DIGITS + "history = build().fit(x, y, batch_size=32, epochs=2, verbose=0)\n"
        "print(json.dumps(dict(ranks=history.nfdt['worker-0']['ranks'], loss=history.history['loss'])))\n",
        command=(*hfdt, "run", "-np", "2", "-H", "localhost:2", "--log-level", "info"),
    )
    got = answer(done)
    assert got["ranks"] == 2
    assert got["loss"][1] < got["loss"][0]
    line = next(line for line in done.stderr.splitlines() if "ring of 2 ranks" in line)
    assert "-np 2" in line
    assert "-H localhost:2" in line
    assert "hfdt.runtime.rank" in line


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("shared"), "--workers", "2")
    yield cluster
    stop(cluster.process)


@pytest.mark.parametrize("launcher", ["auto", pytest.param("mpirun", marks=pytest.mark.long)])
def test_a_shared_server_starts_a_ring_for_the_job_and_ends_it_with_the_job(run_script, shared_server, launcher):
    done = run_script(
        DIGITS
        + """
import hfdt
with hfdt.session(workers=2):
    history = build().fit(x, y, batch_size=32, epochs=2, verbose=0)
print(json.dumps(dict(ranks=history.nfdt["worker-0"]["ranks"], samples=history.nfdt["worker-0"]["samples"])))
""",
        NFDT_LAUNCHER=launcher,
        **shared_server.env(),
    )
    assert answer(done) == {"ranks": 2, "samples": 2 * 1797}
    _, alive = psutil.wait_procs(descendants(shared_server.process.pid, "hfdt.runtime.rank"), timeout=20)
    assert alive == []


def test_a_shared_server_logs_in_nowhere_and_runs_and_writes_no_file_on_a_job_s_behalf(run_script, shared_server):
    done = run_script(
        DIGITS
        + """
import hfdt
from nfdt.core.errors import PolicyRefused
errors = {}
reach = dict(network_interfaces="eth0", max_workers=2)
for option in (dict(hosts="elsewhere:2"), reach, dict(timeline="t"), dict(host_discovery_script="true", min_workers=1)):
    try:
        with hfdt.session(workers=2, **option):
            build().fit(x, y, verbose=0)
    except PolicyRefused as error:
        errors.update(dict.fromkeys(option, str(error)))
print(json.dumps(errors))
""",
        **shared_server.env(),
    )
    errors = answer(done)
    assert set(errors) == {
        "hosts",
        "network_interfaces",
        "max_workers",
        "timeline",
        "host_discovery_script",
        "min_workers",
    }
    assert "runs and writes no file" in errors["host_discovery_script"]


@pytest.mark.long
def test_horovod_is_tuned_traced_and_its_stall_warnings_name_the_late_rank(run_script, tmp_path):
    got = answer(
        run_script(
            DIGITS
            + """
import hfdt, logging
messages = []
class Keep(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
logging.getLogger("nfdt_client").addHandler(Keep())
logging.getLogger("nfdt_client").setLevel("INFO")
options = dict(
    timeline="trace.json", autotune=True, autotune_log="tuned.csv", fusion_threshold_mb=8, cycle_time_ms=2.5,
    stall_warning_s=1, codec="fp16",
)
with hfdt.session(workers=2, emulate={"step_ms": [0, 3500]}, **options):
    history = build().fit(x[:128], y[:128], batch_size=32, epochs=1, verbose=0)  # the first step is traced
print(json.dumps(dict(messages=messages, loss=history.history["loss"], statistics=history.nfdt["worker-0"])))
"""
        )
    )
    stalls = [line for line in got["messages"] if "s for rank" in line]
    late = [line for line in stalls if re.search(r"\d+ s for rank 1 \(tensors: hfdt_gradient", line)]
    assert late, got["messages"]
    assert not [line for line in stalls if "rank 0" in line]
    names = {event.get("args", {}).get("name") for event in json.loads((tmp_path / "trace.json").read_text())}
    assert any("hfdt_gradient" in str(name) for name in names)
    assert got["statistics"]["codec"] == "fp16"
    assert (tmp_path / "tuned.csv").stat().st_size > 0
    command = next(line for line in got["messages"] if "ring of 2 ranks" in line)
    assert "HOROVOD_FUSION_THRESHOLD=8388608" in command
    assert "HOROVOD_CYCLE_TIME=2.5" in command
