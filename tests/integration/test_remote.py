"""Server, workers and clients as separate programs: token, TLS, re-attach, cancel, policy, mpirun."""

from __future__ import annotations

import json
import select
import shutil
import socket
import subprocess
import sys

import pytest

from tests.support.certificates import self_signed
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, answer, environment, start_server, start_workers, stop

pytestmark = pytest.mark.processes

FIT = """
import nfdt
with nfdt.session(workers=2, {options}):
    model = build()
    history = model.fit(x[:1500], y[:1500], batch_size=32, epochs={epochs}, verbose=0)
print(json.dumps(dict(loss=history.history["loss"], samples=sum(w["samples"] for w in history.nfdt.values()))))
"""

ENTER = """
import nfdt
with nfdt.session(workers=2):
    raise AssertionError("the session was entered")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("cluster"))
    workers = start_workers(cluster, 2)
    yield cluster
    stop(workers, cluster.process)


def nfdt_command(cluster, *arguments):
    return subprocess.run(
        [*NFDT, *arguments], env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_script_trains_on_a_remote_server(run_script, cluster):
    got = answer(run_script(DIGITS + FIT.format(options="", epochs=2), **cluster.env()))
    assert got["samples"] == 3000
    assert got["loss"][1] < got["loss"][0]


def test_a_wrong_token_is_refused_in_one_sentence(run_script, cluster):
    done = run_script(ENTER, NFDT_SERVER=cluster.address, NFDT_TOKEN="wrong")
    assert done.returncode != 0
    assert "AuthenticationFailed" in done.stderr
    assert "token" in done.stderr.strip().splitlines()[-1]


def test_an_unreachable_server_is_named(run_script):
    done = run_script(ENTER, NFDT_SERVER="127.0.0.1:1", NFDT_TOKEN="t")
    assert "ServerUnreachable" in done.stderr
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.feature(
    "Code of a script on a server without `--allow-code`", area="Launchers and environments", status="refused"
)
def test_custom_code_is_refused_by_a_shared_server(run_script, cluster):
    source = DIGITS + FIT.format(options="", epochs=1).replace(
        "model = build()",
        "model = build(); model.add(keras.layers.Lambda(lambda t: t)); "
        "model.compile('sgd', 'sparse_categorical_crossentropy')",
    )
    done = run_script(source, **cluster.env())
    assert "PolicyRefused" in done.stderr
    assert "--allow-code" in done.stderr


@pytest.mark.feature("`nfdt.submit` and `nfdt.attach`", area="Detached jobs")
def test_a_submitted_job_is_attached_to_and_its_result_fetched(run_script, cluster, tmp_path):
    done = run_script(
        DIGITS
        + """
import nfdt
def train():
    build().fit(x, y, batch_size=32, epochs=3, validation_split=0.1)
handle = nfdt.submit(train, workers=2)
print(json.dumps(dict(job=handle.job_id)))
""",
        **cluster.env(),
    )
    job = answer(done)["job"]
    done = run_script(
        f"""
import json, nfdt
handle = nfdt.attach({job!r})
result = handle.result(timeout_s=100)
print(json.dumps(dict(history=result.history, state=handle.status().state, logs=list(handle.logs())[:1])))
""",
        **cluster.env(),
    )
    got = answer(done)
    assert got["state"] == "succeeded"
    assert len(got["history"]["val_accuracy"]) == 3
    listed = nfdt_command(cluster, "jobs", "list", "--format", "json")
    assert any(j["job_id"] == job and j["state"] == "succeeded" for j in json.loads(listed.stdout))


def test_a_job_is_cancelled_from_the_command_line(run_script, cluster):
    source = (
        DIGITS
        + """
import nfdt, subprocess, sys
class Cancel(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            subprocess.check_call([sys.executable, "-m", "nfdt.cli", "jobs", "cancel"])  # the one that runs
with nfdt.session(workers=2):
    build().fit(x, y, epochs=1000, verbose=0, callbacks=[Cancel()])
"""
    )
    done = run_script(source, **cluster.env())
    assert done.returncode != 0
    assert "JobCancelled" in done.stderr
    assert "cancelled job job-" in done.stderr
    got = answer(run_script(DIGITS + FIT.format(options="", epochs=1), **cluster.env()))
    assert got["samples"] == 1500, "the slots of a cancelled job serve the next one"


@pytest.mark.feature("Server, workers and script over TLS", area="Launchers and environments")
def test_a_tls_server_with_workers_and_client_trains(run_script, tmp_path):
    cert, key = self_signed(tmp_path, "server")
    cluster = start_server(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key))
    workers = start_workers(cluster, 2, "--ca-file", str(cert))
    try:
        got = answer(run_script(DIGITS + FIT.format(options="", epochs=1), **cluster.env(), NFDT_CA_FILE=str(cert)))
        assert got["samples"] == 1500
    finally:
        stop(workers, cluster.process)


def test_a_public_address_without_tls_is_refused(tmp_path):
    done = subprocess.run(
        [*NFDT, "server", "--listen", "0.0.0.0:0", "--state-dir", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 5
    assert "--insecure" in done.stderr


@pytest.mark.parametrize("words", [["jobs", "list"], ["worker"], ["run"]], ids=" ".join)
def test_no_command_sends_its_token_in_plain_text_to_another_machine(tmp_path, words):
    (script := tmp_path / "script.py").write_text("raise AssertionError('the script has begun')")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        address = f"0.0.0.0:{listener.getsockname()[1]}"  # reaches this machine, but is no loopback address
        done = subprocess.run(
            [*NFDT, *words, "--server", address, *([str(script)] if words == ["run"] else [])],
            env=environment(NFDT_TOKEN="secret"),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert not select.select([listener], [], [], 0)[0], "a connection was made"
    assert done.returncode == 5
    assert "--insecure" in done.stderr


@pytest.mark.long
def test_who_insists_trains_in_plain_text(run_script, tmp_path):
    cluster = start_server(tmp_path, "--listen", "0.0.0.0:0", "--insecure")
    workers = start_workers(cluster, 2, "--insecure")
    try:
        got = answer(run_script(DIGITS + FIT.format(options="insecure=True", epochs=1), **cluster.env()))
        assert got["samples"] == 1500
        done = nfdt_command(cluster, "jobs", "list", "--insecure")
        assert done.returncode == 0, done.stderr
        assert "succeeded" in done.stdout
    finally:
        stop(workers, cluster.process)


@pytest.mark.feature("`mpirun ... nfdt mpi`", area="Launchers and environments")
def test_mpirun_starts_a_server_and_workers_around_the_script(tmp_path):
    assert shutil.which("mpirun"), "scripts/setup installs Open MPI"
    script = tmp_path / "script.py"
    script.write_text(
        DIGITS
        + """
model = build()
history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=2, verbose=0)
samples = sum(w["samples"] for w in history.nfdt.values())
print(json.dumps(dict(loss=history.history["loss"], workers=len(history.nfdt), samples=samples)))
"""
    )
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", *NFDT, "mpi", str(script)],
        cwd=tmp_path,
        env=environment(HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert got["workers"] == 2
    assert got["samples"] == 3000


@pytest.mark.feature("`nfdt run` of an unmodified script", area="Launchers and environments")
def test_nfdt_run_trains_an_unmodified_script_with_its_arguments(run_script):
    done = run_script(
        DIGITS
        + """
model = build()
history = model.fit(x[:1500], y[:1500], batch_size=int(sys.argv[1]), epochs=1, verbose=2)
assert __name__ == "__main__"
print(json.dumps(dict(iterations=int(model.optimizer.iterations), name=__name__)))
""",
        "50",
        command=(*NFDT, "run", "--workers", "2", "--algorithm", "asgd"),
    )
    assert answer(done)["iterations"] == 30
    assert "worker-0" in done.stderr


PACKAGE = {
    "app/__init__.py": "",
    "app/config.py": "SCALE = 0.5",
    "app/layers.py": """
import keras
from .config import SCALE

class Scaled(keras.layers.Layer):
    def call(self, x):
        return x * SCALE
""",
    "plain/shift.py": "SHIFT = 1.0",
    "app/train.py": """
import json, sys
import keras, numpy as np
import plain.shift
from .layers import Scaled

class Shifted(keras.layers.Layer):
    def call(self, x):
        return x + plain.shift.SHIFT

def loss(y, p):
    return keras.ops.mean((y - p) ** 2)

model = keras.Sequential([keras.Input((4,)), Scaled(), Shifted(), keras.layers.Dense(1)])
model.compile("sgd", loss)
x = np.random.default_rng(0).random((256, 4), "f4")
history = model.fit(x, x.sum(1, keepdims=True), epochs=int(sys.argv[2]), verbose=0)
print(json.dumps(dict(losses=history.history["loss"], workers=len(history.nfdt))))
""",
}


@pytest.mark.feature("`nfdt run -m` of a module", area="Launchers and environments")
def test_a_module_s_own_layers_and_its_packages_train_on_workers(tmp_path):
    for name, source in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    done = subprocess.run(
        [*NFDT, "run", "--workers", "2", "-m", "app.train", "--workers", "3"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["workers"] == 2
    assert len(got["losses"]) == 3
    assert got["losses"][-1] < got["losses"][0]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("--algorithm", "adsg"), "ddc-asgd"),
        (("--set", "dc_lamda=1"), "dc_lambda"),
        (("--workers", "0"), "workers"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_the_valid_ones(run_script, arguments, needle):
    done = run_script("print('ran')", command=(*NFDT, "run", *arguments))
    assert done.returncode == 2
    assert needle in done.stderr
    assert "ran" not in done.stdout


def test_the_exit_code_of_the_script_passes_through(run_script):
    assert run_script("import sys; sys.exit(7)", command=(*NFDT, "run")).returncode == 7
    done = run_script("raise ValueError('mine')", command=(*NFDT, "run"))
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert sys.version_info >= (3, 11)


def test_an_emulated_link_and_its_effect_on_an_adaptive_job_are_logged(run_script, cluster):
    done = run_script(
        """
        import json
        import keras, numpy as np
        import nfdt

        def main():
            keras.utils.set_random_seed(1)
            x = np.random.default_rng(0).normal(size=(640, 64)).astype("float32")
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)

        handle = nfdt.submit(main, workers=1, codec="adaptive", options={"emulate.bandwidth_mbit": 4})
        events = [(e.kind, e.data) for e in handle.events()]
        print(json.dumps([data for kind, data in events if kind in ("codec", "result")]))
        """,
        **cluster.env(),
    )
    *decisions, result = answer(done)
    worker = result["workers"]["worker-0"]
    assert [d["worker"] for d in decisions] == ["worker-0"] * len(decisions)
    assert [d["push"] for d in decisions] == [d["push"] for d in worker["codecs"]["decisions"]]
    assert decisions[-1]["push"] in ("int8", "int4")
    assert worker["codec"] == "adaptive"
    assert sum(use["messages"] for use in worker["codecs"]["push"].values()) == worker["steps"] == 80
    assert worker["seconds"] >= worker["bytes_sent"] * 8 / 4e6, "the link was as slow as it should be"
