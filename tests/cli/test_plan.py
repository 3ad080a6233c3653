"""``nfdt plan`` as users type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner

from nfdt.cli import cli
from nfdt.cli.plan import PlanReport, _forecasts, _memory_of
from nfdt.core.specs.job import resolve_algorithm
from nfdt.planning.calibration import ProfiledWork
from nfdt.simulate.cluster import parse_cluster
from nfdt.simulate.machines import costs_of

pytestmark = pytest.mark.processes

SCRIPT = """
import keras, numpy as np
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
try:
    model.fit(np.ones((64, 3)), np.ones((64, 2)), batch_size=8, epochs=5)
except Exception:
    pass
print("never")
"""

SPARSE = """
import keras, numpy as np, scipy.sparse
model = keras.Sequential([keras.Input((3,), sparse=True), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(scipy.sparse.csr_matrix(np.ones((64, 3))), np.ones((64, 2)), batch_size=8)
"""

STATEFUL = """
import keras, numpy as np
layers = [keras.Input(batch_shape=(8, 3, 2)), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("sgd", "mse")
model.fit(np.ones((64, 3, 2)), np.ones((64, 1)), batch_size=8, shuffle=False)
"""


NO_TABLES = {"weights": 0, "state_bytes": 0, "row_bytes": 0}
TABLES = """
import keras, numpy as np
import nfdt
layer = nfdt.Embedding(4_000_000, 16)
model = keras.Sequential([keras.Input((4,), dtype="int32"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adagrad(0.1), "mse")
x = np.arange(64 * 4, dtype="int32").reshape(64, 4) // 2
model.fit(x, np.ones(64), batch_size=8)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("c.toml").write_text("[[workers]]\ncount = 4\nstep_ms = 10\n")


def planned(*arguments):
    done = CliRunner().invoke(cli, ["plan", *arguments])
    assert done.exit_code == 0, done.output
    assert "never" not in done.output
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--job", "j", "--cluster", "c.toml"),
        ("--job", "j", "--workers", "2"),
        ("--job", "j", "train.py"),
        ("--workers", "2", "--cluster", "c.toml", "train.py"),
        ("--cluster", "c.toml"),
    ],
)
def test_a_plan_needs_a_script_with_a_cluster_or_workers_or_a_job(arguments):
    done = CliRunner().invoke(cli, ["plan", *arguments])
    assert done.exit_code == 2
    assert "--job ID" in done.output


def test_a_described_cluster_is_planned_without_measuring():
    result = json.loads(planned("--cluster", "c.toml", "--format", "json", "train.py"))
    assert result["workers"] == 4
    alone = {"name": "the fastest worker alone", "samples_per_s": 800, "epoch_s": 0.08, "sum_of_speeds": 3200}
    assert result["one_machine"] == alone
    assert result["work"] == {
        "batch_size": 8,
        "samples": 64,
        "weights": 8,
        "profile": None,
        "state_bytes": 32,
        "tables": NO_TABLES,
    }
    assert result["recommended"] in result["reason"]
    found = {each["algorithm"]: each for each in result["forecasts"]}
    assert found["asgd"]["samples_per_s"] == pytest.approx(4 * 800, rel=0.3)
    assert found["ddc-asgd"]["loss"]["low"] > 0
    text = planned("--cluster", "c.toml", "--algorithm", "bsp,ddc-asgd", "train.py")
    assert "take ddc-asgd" in text
    assert "accuracy lost: points of test accuracy below one machine" in text
    assert "no link is described: exchanging 2 x 32 B per step is taken as free" in text
    assert "measured here" not in text


def test_a_plan_states_the_memory_of_each_machine():
    workers = '[[workers]]\ncount = 2\nstep_ms = 10\nmachine = "a"\n[[workers]]\ncount = 3\nstep_ms = 10\n'
    Path("c.toml").write_text(f"{workers}[shards]\ncount = 2\n")
    arguments = ("--cluster", "c.toml", "--algorithm", "ddc-asgd")
    text = planned(*arguments, "train.py")
    size = r"[\d.]+ [MG]B"
    assert re.search(
        rf"memory besides data and activations: script, server, 2 shards: {size}; 1 worker: {size} each; 2 workers: "
        rf"{size}; all on one machine: {size}\. This one has {size}",
        text,
    )
    memory = json.loads(planned(*arguments, "--format", "json", "train.py"))["memory"]
    assert [one["count"] for one in memory] == [1, 3, 1, 1]
    assert memory[2]["peak"] == 2 * memory[1]["peak"]
    assert memory[3]["peak"] > sum(one["peak"] for one in memory[:1])


LARGE = """
import keras, numpy as np, re
model = keras.Sequential([keras.Input((5000,)), keras.layers.Dense(6000, use_bias=False)])
model.compile("adam", "mse")
print("before", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], flush=True)
model.fit(np.ones((8, 5000), "f4"), np.ones((8, 6000), "f4"), batch_size=8)
"""
MEASURED = """
import re, sys
from nfdt.cli import cli
cli(["plan", "--cluster", "c.toml", "--algorithm", "asgd", "large.py"], standalone_mode=False)
print("after", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_a_described_cluster_is_planned_without_a_copy_of_the_model_or_an_optimizer():
    Path("large.py").write_text(LARGE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    before, after = (int(re.search(rf"{word} (\d+)", done.stdout)[1]) for word in ("before", "after"))
    assert "30,000,000 weights" in done.stdout
    assert after - before < 0.5 * 4 * 30_000_000 / 1024, "less than half a vector, in kB"


def test_a_model_of_a_billion_weights_is_planned_at_once():
    work = ProfiledWork(32, 100_000, 10**9, state_bytes=12 * 10**9)
    cluster = parse_cluster({"workers": [{"count": 8, "step_ms": 900.0}], "shards": {"count": 4}})
    algorithms = [resolve_algorithm(name) for name in ("asgd", "ddc-asgd", "bsp", "allreduce")]
    tracemalloc.start()
    try:
        costs = costs_of(cluster, work.batch_size, work.exchanged_bytes)
        report = PlanReport(work, 8, *_forecasts(work, costs, algorithms), [], _memory_of(work, algorithms[1], cluster))
        text = report.text()
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert "1,000,000,000 weights" in text
    assert report.memory[0].peak > 12e9


def test_groups_are_checked_against_the_described_workers():
    settings = ("--algorithm", "group-sync", "--set", "groups=0,1;2,3")
    assert "group-sync" in planned("--cluster", "c.toml", *settings, "train.py")


def test_a_script_alone_is_measured_and_planned_for_machines_like_this_one():
    result = json.loads(planned("--workers", "4", "--algorithm", "asgd", "--format", "json", "train.py"))
    profile, alone, (found,) = result["work"]["profile"], result["one_machine"], result["forecasts"]
    worker, plain = profile["worker"], profile["plain"]
    assert worker["epochs"]["steps"] == plain["steps"] == 8
    whole_s = median(worker["epochs"]["seconds"]) / 8
    assert 0 < worker["exchange_s"] < worker["step_s"] <= whole_s
    assert found["staleness"] == 3
    assert found["epoch_s"] >= 8 * whole_s - 8 * worker["step_s"]  # the end of an epoch is not divided among workers
    assert alone["sum_of_speeds"] == pytest.approx(4 * alone["samples_per_s"])
    assert found["range"][0] <= found["speed_up"] <= found["range"][1] <= 4


def test_a_plan_of_short_steps_states_the_measured_share_of_overhead():
    text = planned("--workers", "2", "--algorithm", "asgd", "train.py")
    assert "measured here: step_ms = " in text
    assert "2 machines like this one, each to itself" in text
    (share,) = re.findall(r"overhead rules: (\d+) % of a worker's time here", text)
    assert f"{share} % of these are not computation" in text
    assert int(share) >= 25


@pytest.mark.long
def test_one_worker_is_offered_nothing_that_needs_several():
    text = planned("--workers", "1", "train.py")
    assert "left out, because they are for several workers: bsp, ssp, n-softsync, dbs-sgd, h-ps, auto" in text
    rows = [line.split()[0] for line in text.splitlines()]
    assert not {"allreduce", "group-sync", "h-ps"} & set(rows)
    assert "take plain Keras: no row of workers is expected to be faster." in text
    done = CliRunner().invoke(cli, ["plan", "--workers", "1", "--algorithm", "allreduce", "train.py"])
    assert done.exit_code == 2
    assert "expected one that one worker can use, as ddc-asgd. Received: allreduce." in done.output


def test_a_model_for_one_worker_is_planned_for_no_more():
    Path("stateful.py").write_text(STATEFUL)
    done = CliRunner().invoke(cli, ["plan", "--workers", "2", "stateful.py"])
    assert done.exit_code == 2
    assert "workers: expected 1, for the reason above. Received: 2." in done.output
    assert "take plain Keras" in planned("--workers", "1", "stateful.py")


def test_data_that_are_not_dense_are_planned_without_a_measured_worker():
    Path("sparse.py").write_text(SPARSE)
    text = planned("--workers", "2", "--algorithm", "asgd", "sparse.py")
    assert "no worker and no fit of Keras were measured, because the data are not dense arrays" in text
    assert "the fastest worker alone" in text


def test_a_worker_of_half_the_speed_takes_twice_the_measured_time():
    Path("c.toml").write_text("[[workers]]\nspeed = 1\n[[workers]]\nspeed = 0.5\n[shards]\napply_ms = 0\n")
    arguments = ("--cluster", "c.toml", "--algorithm", "allreduce", "--format", "json", "train.py")
    result = json.loads(planned(*arguments))
    worker, alone = result["work"]["profile"]["worker"], result["one_machine"]
    compute_s = worker["step_s"] - worker["exchange_s"]
    end_s = median(worker["epochs"]["seconds"]) - 8 * worker["step_s"]
    expected_s = 4 * (2 * compute_s + worker["exchange_s"]) + end_s
    assert result["forecasts"][0]["epoch_s"] == pytest.approx(max(expected_s, alone["epoch_s"] / 1.5))
    assert alone["sum_of_speeds"] == pytest.approx(1.5 * alone["samples_per_s"])


def test_plain_keras_is_the_first_row_and_table_json_and_page_agree():
    arguments = ("--workers", "2", "--algorithm", "asgd,bsp", "--html", "plan.html")
    text = planned(*arguments, "train.py").splitlines()
    heads = next(number for number, line in enumerate(text) if line.startswith("algorithm"))
    assert text[heads + 1].startswith("plain Keras")
    page = Path("plan.html").read_text()
    cells = re.split(" {2,}", text[heads + 2])
    assert re.fullmatch(r"[\d.]+ - [\d.]+", cells[3])
    for cell in cells[:5]:
        assert f"<td>{cell}</td>" in page
    assert "<script" not in page
    speed_up = float(text[heads + 2].split()[2])
    assert f">{speed_up:.2f}</text>" in page
    assert "times as fast as plain Keras; bottleneck: " in text[-1]
    result = json.loads(planned("--workers", "2", "--algorithm", "asgd", "--format", "json", "train.py"))
    (found,), alone = result["forecasts"], result["one_machine"]
    assert alone["samples_per_s"] == pytest.approx(8 * 8 / median(result["work"]["profile"]["plain"]["seconds"]))
    assert found["speed_up"] == pytest.approx(alone["epoch_s"] / found["epoch_s"])


def test_a_page_that_cannot_be_written_is_reported():
    done = CliRunner().invoke(cli, ["plan", "--cluster", "c.toml", "--html", "nowhere/plan.html", "train.py"])
    assert done.exit_code == 2
    assert "--html: expected a file that can be written" in done.output


def test_tables_that_shards_make_are_memory_of_the_shards_and_travel_by_rows():
    workers = "[[workers]]\ncount = 2\nstep_ms = 10\nbandwidth_mbit = 100\n[shards]\ncount = 2\n"
    Path("c.toml").write_text(workers)
    Path("train.py").write_text(TABLES)
    arguments = ("--cluster", "c.toml", "train.py")
    result, text = json.loads(planned("--format", "json", *arguments)), planned(*arguments)
    table, rows = 4_000_000 * 16, 16
    assert result["work"]["weights"] == table + 64 + 1
    assert result["work"]["tables"] == {"weights": table, "state_bytes": 8 * table, "row_bytes": 4 * rows * 17}
    found = {each["algorithm"]: each for each in result["forecasts"]}
    assert found["asgd"]["samples_per_s"] > 0.5 * 2 * 800, "dense, a push and its reply would take 40 s"
    assert not {"allreduce", "group-sync", "h-ps"} & found.keys()
    assert re.search("travel by rows only: .*group-sync", text)
    script, worker, _ = (one["peak"] for one in result["memory"])
    assert script > 8 * table
    assert worker < 4 * table


@pytest.mark.long
def test_a_model_with_tables_that_shards_make_is_measured_on_a_worker():
    Path("train.py").write_text(TABLES)
    result = json.loads(planned("--workers", "2", "--algorithm", "asgd", "--format", "json", "train.py"))
    assert result["work"]["profile"]["plain"] is None
    assert result["work"]["profile"]["worker"]["step_s"] > 0
    assert result["forecasts"][0]["samples_per_s"] > 0
