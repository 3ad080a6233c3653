"""The convergence study: its trainings, tasks, clusters and rows."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks.reports.study_results import ResultFile, Training, read_lines
from benchmarks.run.convergence import Study
from benchmarks.workloads.clusters import expected_seconds, machines
from benchmarks.workloads.convergence_rows import MAIN, ROWS, batches_per_update
from benchmarks.workloads.reference_rules import reference_rules
from benchmarks.workloads.study_plan import Plan, options_of, plan_of, setting_of
from benchmarks.workloads.tasks import TASKS
from benchmarks.workloads.tasks.augmentation import ShiftAndFlip
from benchmarks.workloads.tasks.cifar10 import at_half_size, resnet20
from benchmarks.workloads.tasks.sms import balanced_accuracy
from nfdt.update_rules import RULES
from tests.support.scripts import environment
from tests.support.study import made_up

pytestmark = pytest.mark.processes

PLAN = Plan(
    rows=("sequential", "ddc-asgd"), workers=(2,), speeds=("unequal",), rates=(0.1,), seeds=(0,), epochs=2, batch=8
)
LONG = {"cifar10-resnet20"}


def run(plan, results, data):
    study = Study(plan, results, data)
    study.run()
    return results.lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the file of a study of two trainings."""
    file = tmp_path_factory.mktemp("study") / "results.jsonl"
    run(PLAN, ResultFile(file), made_up("fashion-mnist", 32))
    return file


def test_every_training_adds_a_line_to_the_file(trained):
    lines = read_lines([trained])
    assert [(line["row"], line["workers"], line["speeds"]) for line in lines] == [
        ("sequential", 1, "equal"),
        ("ddc-asgd", 2, "unequal"),
    ]
    for line in lines:
        assert line["updates"] == 8
        assert line["score"] == line["curve"][-1][1]
        assert [at for at, _ in line["curve"]][-1] == line["virtual_s"]
        assert sum(line["staleness"].values()) == 8
        assert line["backend"] == "tensorflow"
    assert lines[0]["mean_staleness"] == 0 < lines[1]["mean_staleness"]


def test_trainings_in_the_file_are_not_repeated(trained):
    before = trained.read_text()
    run(PLAN, ResultFile(trained), made_up("fashion-mnist", 32))
    assert trained.read_text() == before
    longer = ResultFile(trained)
    assert Training.from_json({**longer.lines[0], "epochs": 9}) not in longer


def test_a_line_that_was_cut_off_is_named(tmp_path):
    (tmp_path / "cut.jsonl").write_text('{"task": "ho')
    with pytest.raises(ValueError, match=r"cut.jsonl, line 1: expected a JSON object.*Remove the line"):
        ResultFile(tmp_path / "cut.jsonl")


def test_a_training_that_fails_is_a_line_with_the_error():
    plan = Plan(task="sms", rows=("dana-dc",), workers=(2,), speeds=("equal",), seeds=(0,), epochs=1, batch=8)
    (line,) = run(plan, ResultFile(None), made_up("sms", 8))
    assert "expected SGD" in line["error"]
    assert "score" not in line


@pytest.mark.parametrize("task", [pytest.param(t, marks=[pytest.mark.long] * (t in LONG)) for t in TASKS])
def test_every_task_trains(task):
    plan = Plan(task=task, rows=("sequential",), seeds=(0,), epochs=1, batch=8)
    (line,) = run(plan, ResultFile(None), made_up(task, 16))
    assert "error" not in line
    assert line["metric"] == ("R2" if task == "housing" else "accuracy")
    assert line["loss"] > 0
    assert ("balanced_accuracy" in line) == (task == "sms")


@pytest.mark.long
def test_a_study_runs_on_jax(tmp_path):
    file = tmp_path / "results.jsonl"
    options = ["--quick", "--rows", "sequential,dana-dc,bsp", "--workers", "2", "--results", str(file)]
    command = [sys.executable, "-m", "benchmarks.run.convergence", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(KERAS_BACKEND="jax"))
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["row"], line["backend"]) for line in lines] == [(r, "jax") for r in ("sequential", "dana-dc", "bsp")]
    assert lines[0]["score"] > 0.4


def test_options_change_the_defaults_of_the_task():
    plan = plan_of(options_of("--task sms --rates 0.1,0.01 --speeds slowed --seeds 2 --optimizer sgd".split()))
    assert (plan.rates, plan.speeds, plan.seeds) == ((0.1, 0.01), ("slowed",), (0, 1))
    setting = setting_of(plan, "sms", 40)
    assert (setting.optimizer, setting.momentum, setting.epochs) == ("sgd", 0.9, 10)
    assert setting_of(Plan(task="sms"), "sms", 40).momentum is None
    quick = plan_of(options_of(["--quick", "--epochs", "5"]))
    assert (quick.epochs, quick.workers) == (5, (8,))


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        options_of(["--rows", "asgd,sync"])
    assert "Received: sync." in capsys.readouterr().err


def test_validation_samples_are_a_tenth_of_those_for_training():
    data = made_up("housing", 50)
    split = data.split("validation")
    assert (len(split.train[0]), len(split.test[0])) == (72, 8)
    both = np.concatenate([split.train[0], split.test[0]])
    np.testing.assert_array_equal(np.sort(both, 0), np.sort(data.train[0], 0))
    assert data.split("test") is data


def test_r2_compares_the_error_with_that_of_the_mean():
    targets = np.array([-1.0, 1.0, -1.0, 1.0])
    scores = [TASKS["housing"].score({"val_loss": loss}, targets) for loss in (0.25, 7.0, np.nan)]
    assert scores == [0.75, 0.0, 0.0]


def test_balanced_accuracy_counts_both_classes_alike():
    logs = {"val_recall": 0.5, "val_accuracy": 0.8}  # of 10: 2 spam, of which 1 is found, and 7 of 8 others
    assert balanced_accuracy(logs, np.array([1.0] * 2 + [0.0] * 8)) == {"balanced_accuracy": (0.5 + 7 / 8) / 2}


def test_resnet20_has_the_published_number_of_weights():
    trainable = sum(int(np.prod(v.shape)) for v in resnet20().trainable_variables)
    assert trainable == 269_722  # 19 convolutions, 2 weights a channel of BatchNorm, one dense layer


def test_images_are_shifted_and_mirrored_in_training_only():
    image = np.arange(1, 17, dtype=np.float32).reshape(1, 4, 4, 1)
    images, layer = np.repeat(image, 64, axis=0), ShiftAndFlip(1)
    padded = np.pad(image[0], ((1, 1), (1, 1), (0, 0)))
    crops = [padded[y : y + 4, x : x + 4] for y in range(3) for x in range(3)]
    expected = {each.tobytes() for crop in crops for each in (crop, crop[:, ::-1].copy())}
    found = [np.array(each).tobytes() for each in keras.ops.convert_to_numpy(layer(images, training=True))]
    assert set(found) <= expected
    assert len(set(found)) > 10
    np.testing.assert_array_equal(layer(images, training=False), images)


def test_an_image_at_half_size_has_the_means_of_four_pixels():
    np.testing.assert_allclose(
        at_half_size(np.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0], [[2.5, 4.5], [10.5, 12.5]]
    )


@pytest.mark.parametrize(("workers", "counts"), [(8, [4, 2, 2]), (4, [2, 1, 1])])
def test_unequal_machines_are_a_half_a_quarter_and_a_quarter(workers, counts):
    described = machines(workers, "unequal")
    assert [(w.count, w.step_ms) for w in described.workers] == list(zip(counts, (100, 200, 500), strict=True))
    assert machines(workers, "equal").count == workers


def test_each_worker_is_slowed_in_turn():
    described = machines(4, "slowed", expected_s=100.0).each()
    assert [[(d.at_s, d.slowdown) for d in worker.drift] for worker in described] == [
        [(pytest.approx(at), 3.0), (pytest.approx(at + 10), 1.0)] for at in (0, 30, 60, 90)
    ]


@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_at_most_a_quarter_of_many_workers_is_away_at_the_same_time(workers):
    described = machines(workers, "changing", expected_s=100.0).each()
    away = [(w.fails_at_s, w.fails_at_s + w.returns_after_s) for w in described if w.fails_at_s is not None]
    at_once = max(sum(begin <= time < end for begin, end in away) for time in np.arange(0.5, 100))
    assert len(described) == workers
    assert len(away) == max(2, workers // 2)
    assert at_once == max(1, workers // 4)


def test_the_expected_time_is_that_of_workers_which_never_wait():
    assert expected_seconds(1407, 1) == pytest.approx(140.7)
    assert expected_seconds(1407, 32) == pytest.approx(140.7 / 32)


def test_every_row_has_an_algorithm():
    assert set(MAIN) < set(ROWS)
    with reference_rules():
        algorithms = {name: row.algorithm for name, row in ROWS.items()}
    assert {name: batches_per_update(algorithms[name], 8) for name in ("asgd", "bsp", "n-softsync", "diloco")} == {
        "asgd": 1,
        "bsp": 8,
        "n-softsync": 8,
        "diloco": 1,
    }
    assert algorithms["diloco"].exchange_facts.local
    assert ROWS["sync-scaled"].rate(0.1, 8) == pytest.approx(0.8)
    assert ROWS["bsp"].rate(0.1, 8) == 0.1
    assert "dana-dc" not in RULES, "the rules are there within the context only"
