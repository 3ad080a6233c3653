"""``nfdt simulate`` as users type it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nfdt.cli import cli

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
import keras
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activation="softmax")])
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
x, y = images[:320] / 16, labels[:320]
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y))
print("trained", round(history.history["loss"][-1], 6), sys.argv[1:])
sys.exit(0)
"""
CLUSTER = "[[workers]]\ncount = 2\nstep_ms = 10\njitter = 0.1\n[[workers]]\nstep_ms = 30\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("cluster.toml").write_text(CLUSTER)
    return tmp_path


@pytest.mark.feature("`nfdt simulate`", area="Algorithms")
def test_a_script_is_simulated_once_per_algorithm_the_same_way_every_time(folder):
    command = [sys.executable, "-c", "from nfdt.cli import main; main()", "simulate", "--cluster", "cluster.toml"]
    texts = []
    for out in ("one", "two"):
        arguments = ["--algorithm", "asgd,bsp", "--output", out, "train.py", "--flag"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained") == 2
        assert "['--flag']" in done.stdout
        assert "of limit  " in done.stdout
        assert "of bound  " in done.stdout
        texts.append(Path(out, "results.json").read_text())
    assert texts[0] == texts[1]
    results = json.loads(texts[0])["results"]
    assert [r["algorithm"] for r in results] == ["asgd", "bsp"]
    assert all(r["samples"] == 640 and 0 < r["of_limit"] <= 1.05 for r in results)
    asgd, bsp = (r["of_lower_bound"] for r in results)
    assert all(0 < bsp[noise] < asgd[noise] <= 1.05 for noise in ("1", "10", "100"))
    assert results[1]["staleness"] == {"0": 40}
    curves = list(csv.DictReader(Path("one", "curves.csv").open()))
    assert {row["algorithm"] for row in curves} == {"asgd", "bsp"}
    assert float(curves[-1]["val_accuracy"]) > 0.3
    assert sum(int(row["gradients"]) for row in csv.DictReader(Path("one", "staleness.csv").open())) == 80


def test_speeds_are_refused_because_they_would_have_to_be_measured(folder):
    Path("relative.toml").write_text("[[workers]]\nspeed = 1\n")
    done = CliRunner().invoke(cli, ["simulate", "--cluster", "relative.toml", "train.py"])
    assert done.exit_code == 2
    assert "expected step_ms in the simulator. Received: speed. nfdt plan measures" in done.output
    assert "trained" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "none.toml", "train.py"), "cannot be read"),
        (("--cluster", "cluster.toml", "--algorithm", "sgd", "train.py"), "Unknown algorithm 'sgd'"),
        (("--cluster", "cluster.toml", "--set", "batch_hooks=exact", "train.py"), "Received: 'exact'"),
        (
            ("--cluster", "cluster.toml", "--algorithm", "group-sync", "--set", "groups=0;1", "train.py"),
            "workers 0 to 2",
        ),
        (("train.py",), "--cluster"),
    ],
)
def test_mistakes_are_reported_before_the_script_runs(folder, arguments, message):
    done = CliRunner().invoke(cli, ["simulate", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert "trained" not in done.output


@pytest.mark.parametrize("name", ["workers", "shards", "emulate.step_ms"])
def test_values_of_the_cluster_s_file_are_no_options(tmp_path, name):
    (tmp_path / "c.toml").write_text(CLUSTER)
    arguments = ["simulate", "--cluster", str(tmp_path / "c.toml"), "--set", f"{name}=3", __file__]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert f"--set {name}: no effect in a simulation" in done.output


@pytest.mark.long
def test_auto_takes_local_steps_over_slow_links_as_a_second_job(folder):
    Path("train.py").write_text(SCRIPT.replace("epochs=2", "epochs=60"))
    Path("cluster.toml").write_text("[[workers]]\ncount = 2\nstep_ms = 5\nbandwidth_mbit = 0.1\n")
    command = [sys.executable, "-c", "from nfdt.cli import main; main()", "simulate", "--cluster", "cluster.toml"]
    arguments = ["--algorithm", "auto", "--output", "out", "train.py"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(Path("out", "results.json").read_text())["results"]
    assert (first["name"], second["name"]) == ("auto (job 1)", "auto (job 2)")
    assert first["samples"] + second["samples"] == 60 * 320
    assert first["samples"] <= 3 * 320, "all workers are measured by then"
    assert second["samples_per_s"] > 2 * first["samples_per_s"]
