"""``nfdt jobs`` against a real server and real workers: one job, shown by every subcommand."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from datetime import datetime

import keras
import numpy as np
import pytest

import nfdt
from tests.support.scripts import DEADLINE_S, NFDT, environment, start_server, start_workers, stop, submitted

pytestmark = pytest.mark.processes

SUBMIT = """
import sys
sys.modules.update(dict.fromkeys(("cryptography", "grpc_health", "psutil")))  # a client needs none of them
import keras, nfdt, numpy as np

def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.random.rand(320, 4).astype("float32"), np.random.rand(320, 1), batch_size=32, epochs=3)

print(nfdt.submit(main, workers=1).job_id)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("jobs"))
    workers = start_workers(cluster, 1, "--log-dir", str(cluster.state_dir.parent / "slots"))
    yield cluster
    stop(workers, cluster.process)


@pytest.fixture(scope="module")
def job(cluster):
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        env=environment(**cluster.env()),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    job_id = done.stdout.strip().splitlines()[-1]
    nfdt.attach(job_id, server=cluster.address, token_file=str(cluster.token_file)).result(timeout_s=DEADLINE_S)
    return job_id


@pytest.fixture
def jobs(cluster, job):
    def command(*arguments: str):
        return subprocess.run(
            [*NFDT, "jobs", *(job if a == "ID" else a for a in arguments)],
            env=environment(**cluster.env()),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    return command


def test_attach_follows_the_job_to_its_end(jobs):
    done = jobs("attach", "ID")
    assert done.returncode == 0, done.stderr
    assert "epoch 3 ends loss=" in done.stdout
    assert done.stdout.strip().endswith("succeeded")


def test_show_lists_the_work_of_each_worker(jobs):
    shown = json.loads(jobs("show", "ID", "--format", "json").stdout)
    assert shown["state"] == "succeeded"
    assert shown["worker_statistics"]["worker-0"]["samples"] == 3 * 320
    text = jobs("show", "ID").stdout
    assert "3 of 3" in text
    assert "worker-0      960     30" in text


def test_list_and_logs_know_the_job(jobs, job):
    listed = jobs("list").stdout.splitlines()
    assert [line.split()[2] for line in listed if line.startswith(job)] == ["succeeded"]
    assert "epoch 1 begins" in jobs("logs", "ID").stdout


def test_logs_are_limited_by_number_level_and_age(jobs):
    every = jobs("logs", "ID", "--level", "debug").stdout.splitlines()
    assert jobs("logs", "ID", "--tail", "2").stdout.splitlines() == every[-2:]
    assert jobs("logs", "ID", "--tail", "2", "--follow").stdout.splitlines() == every[-2:]
    assert jobs("logs", "ID", "--tail", "0").stdout == ""
    informed = jobs("logs", "ID").stdout.splitlines()
    assert jobs("logs", "ID", "--tail", "9").stdout.splitlines() == informed[-9:]
    assert informed == [line for line in every if line.split()[2] not in ("progress", "speed")]
    assert jobs("logs", "ID", "--level", "error").stdout == ""
    assert jobs("logs", "ID", "--since", "1d").stdout.splitlines() == informed
    assert jobs("logs", "ID", "--since", "0s").stdout == ""
    assert datetime.fromisoformat(" ".join(every[0].split()[:2])) <= datetime.now()


def test_the_latest_job_is_meant_where_none_is_named(jobs, job, cluster, tmp_path):
    assert jobs("show").stdout == jobs("show", "ID").stdout
    assert jobs("logs").stdout == jobs("logs", "ID").stdout
    assert jobs("attach").stdout.strip().endswith("succeeded")
    assert jobs("plot", "-o", str(tmp_path / "j.png")).returncode == 0
    command = [*NFDT, "trace", "-o", str(tmp_path / "t.json")]
    done = subprocess.run(command, env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_plot_is_a_picture(jobs, tmp_path):
    assert jobs("plot", "ID", "-o", str(tmp_path / "j.png")).returncode == 0
    assert (tmp_path / "j.png").read_bytes().startswith(b"\x89PNG")
    refused = jobs("plot", "ID", "-o", str(tmp_path / "j.txt"))
    assert refused.returncode == 2
    assert ".svg" in refused.stderr


def test_top_shows_the_last_job_once_where_there_is_no_terminal(cluster, job):
    done = subprocess.run(
        [*NFDT, "top"], env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert f"{job}  succeeded  ddc-asgd on 1 worker  epoch 3 of 3" in done.stdout
    assert "worker-0" in done.stdout


def test_the_result_is_a_keras_model_that_can_go_on_training(jobs, tmp_path):
    model_file, weights_file = tmp_path / "m.keras", tmp_path / "m.npz"
    assert jobs("result", "ID", "--output", str(model_file)).returncode == 0
    assert jobs("result", "ID", "--output", str(weights_file)).returncode == 0
    model = keras.models.load_model(model_file)
    weights = np.load(weights_file)
    assert int(model.optimizer.iterations) == 30
    for variable, name in zip(model.trainable_variables, weights.files, strict=True):
        np.testing.assert_array_equal(variable.numpy(), weights[name])


def test_a_plan_is_made_of_what_a_job_has_measured(cluster, job):
    command = [*NFDT, "plan", "--job", job, "--algorithm", "bsp,ddc-asgd", "--format", "json"]
    done = subprocess.run(command, env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    tables = {"weights": 0, "state_bytes": 0, "row_bytes": 0}
    assert result["work"] == {
        **{"batch_size": 32, "samples": 320, "weights": 0, "profile": None},
        **{"state_bytes": 0, "tables": tables},
    }
    assert all(each["samples_per_s"] > 0 for each in result["forecasts"])


def test_cancelling_a_job_that_has_ended_changes_nothing(jobs, job):
    done = jobs("cancel")
    assert (done.returncode, done.stderr) == (0, f"job {job} has ended already: succeeded\n")
    assert json.loads(jobs("show", "ID", "--format", "json").stdout)["state"] == "succeeded"


def test_an_unknown_job_is_named(jobs):
    done = jobs("show", "job-that-never-was")
    assert done.returncode == 2
    assert "job-that-never-was" in done.stderr


SCRIPT = """
import keras, numpy as np
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(np.random.rand(320, 4).astype("float32"), np.random.rand(320, 1), batch_size=32, epochs=12)
raise AssertionError("the script goes on after its fit")
"""


@pytest.fixture(scope="module")
def resumed(cluster, tmp_path_factory):
    """Submit a script, cancel its job after an epoch, resume it; return both jobs."""
    script = tmp_path_factory.mktemp("script") / "slow_train.py"
    script.write_text(SCRIPT)

    with submitted(cluster, "--workers", "1", "--set", "emulate.step_ms=50", str(script)) as job:
        handle = nfdt.attach(job, server=cluster.address, token_file=str(cluster.token_file))
        next(event for event in handle.events() if event.kind == "epoch_end")
        handle.cancel()
    list(handle.events())
    command = [*NFDT, "jobs", "resume", job]
    done = subprocess.run(command, env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return job, done.stdout.strip()


def test_a_detached_script_prints_its_job_which_is_listed_with_user_and_script(jobs, resumed):
    listed = json.loads(jobs("list", "--format", "json").stdout)
    entry = next(entry for entry in listed if entry["job_id"] == resumed[0])
    assert (entry["user"], entry["script"], entry["state"]) == (getpass.getuser(), "slow_train.py", "cancelled")
    assert entry["ended_at"] > entry["started_at"] >= entry["submitted_at"]
    (line,) = [line for line in jobs("list").stdout.splitlines() if line.startswith(resumed[0])]
    assert "slow_train.py" in line


@pytest.mark.long
@pytest.mark.feature("`nfdt jobs resume`", area="Detached jobs")
def test_a_resumed_job_trains_as_many_steps_as_one_that_was_never_cancelled(jobs, resumed, tmp_path):
    assert jobs("attach", resumed[1]).returncode == 0
    assert jobs("result", resumed[1], "--output", str(tmp_path / "m.keras")).returncode == 0
    assert int(keras.models.load_model(tmp_path / "m.keras").optimizer.iterations) == 12 * 10


def test_a_deleted_job_is_not_listed_any_more(jobs, resumed):
    assert "are free" in jobs("delete", resumed[0]).stderr
    assert resumed[0] not in jobs("list").stdout
    assert jobs("delete", resumed[0]).returncode == 2


def test_an_age_without_a_unit_is_refused(jobs):
    done = jobs("prune", "--older-than", "soon")
    assert done.returncode == 2
    assert "12h" in done.stderr


def test_workers_lists_the_slots_of_each_machine(cluster, job):
    command = [*NFDT, "workers"]
    text = subprocess.run(command, env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S)
    assert text.stdout.splitlines()[0].split()[:4] == ["machine", "role", "slot", "doing"]
    command += ["--format", "json"]
    done = subprocess.run(command, env=environment(**cluster.env()), capture_output=True, text=True, timeout=DEADLINE_S)
    slots = json.loads(done.stdout)
    assert {slot["role"] for slot in slots} == {"worker", "shard"}
    assert {slot["machine"] for slot in slots} == {socket.gethostname()}
    assert {slot["versions"]["keras"] for slot in slots} == {keras.__version__}
