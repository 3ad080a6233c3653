"""``scripts/conformance``: verdicts, and real scripts that run plain and distributed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.support.conformance.__main__ import main
from tests.support.conformance.horovod_suite import judge_ranks
from tests.support.conformance.keras3_spelling import as_keras3, reason_not_comparable
from tests.support.conformance.outcome_file import read_outcomes, write_collected, write_outcome
from tests.support.conformance.script_suite import difference, error_line
from tests.support.conformance.verdicts import Outcome, Row, judge, table
from tests.support.horovod_scripts import needs_horovod
from tests.support.scripts import DEADLINE_S

PASSED, FAILED = Outcome(True), Outcome(False, line="ValueError: x")

SCRIPT = """
import sys
import keras
import numpy as np

x = np.arange(64, dtype="float32").reshape(32, 2) / 64
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
if {distributed}:
    model.fit(x, x[:, :1], epochs=2, verbose=0)
if "nfdt_client" in sys.modules and {fails}:
    raise RuntimeError("another result")
"""

THREAD = SCRIPT.format(distributed=True, fails=False).replace(
    "    model.fit(x, x[:, :1], epochs=2, verbose=0)",
    "    import threading\n    thread = threading.Thread(target=lambda: model.fit(x, x[:, :1], verbose=0))\n"
    "    thread.start()\n    thread.join()",
)


def test_a_distributed_run_is_judged_by_the_plain_one():
    plain = {"a": PASSED, "b": PASSED, "c": PASSED, "d": PASSED, "e": FAILED, "f": Outcome(False, skipped=True)}
    refused = Outcome(False, refused=True, line="CaptureError: y")
    rows = judge(plain, {"a": PASSED, "b": refused, "c": FAILED, "e": PASSED})
    assert [row.verdict for row in rows] == ["pass", "refused", "wrong", "wrong", *2 * ["not comparable"]]
    text = table("these", rows)
    assert text.startswith("these: 1 of 4 pass, 1 refused, 2 wrong; 2 not comparable\n")
    assert "  refused        b: CaptureError: y" in text


def test_a_test_without_a_distributed_fit_shows_nothing():
    (row,) = judge({"a": PASSED}, {"a": Outcome(True, fits=0)})
    assert row == Row("a", "not comparable", "no fit is distributed")


def test_a_table_without_problems_is_one_line():
    assert table("these", [Row("a", "pass")]) == "these: 1 of 1 pass, 0 refused, 0 wrong"


def fit(loss=1.0, epochs=2, **logs):
    return {"epochs": epochs, "logs": {"loss": loss, **logs}}


@pytest.mark.parametrize(
    ("received", "text"),
    [
        ([fit(1.1, val_loss=0.6)], ""),
        ([fit(3.0, val_loss=0.5)], "fit 1: loss 1 plain, 3 distributed"),
        ([fit(val_loss=9.0)], "fit 1: val_loss 0.5 plain, 9 distributed"),
        ([fit(epochs=1)], "fit 1: 2 epochs plain, 1 distributed"),
        ([fit(accuracy=0.5)], "fit 1: logs"),
        ([], "1 fits plain, 0 distributed"),
    ],
)
def test_histories_are_compared(received, text):
    found = difference([fit(val_loss=0.5)], received)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_the_line_of_an_error_is_found_before_notes_and_tables():
    error = "nfdt.core.errors.CaptureError: GAN 'gan': no"
    table_of_workers = "worker    samples\nworker-0     2000"
    assert (
        error_line(f"Traceback\n  File x: y\n{error}\nWith fallback='local' it would.\n{table_of_workers}\n") == error
    )
    assert error_line("at\nlast") == "last"
    assert error_line("") == ""


@pytest.mark.long
@pytest.mark.timeout(4 * DEADLINE_S)
def test_scripts_of_a_folder_run_plain_and_distributed(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "good.py").write_text(SCRIPT.format(distributed=True, fails=False))
    (folder / "other.py").write_text(SCRIPT.format(distributed=True, fails=True))
    (folder / "thread.py").write_text(THREAD)
    (folder / "none.py").write_text("print('no model is trained')")
    rows = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(main, ["--json", str(rows), "examples", "--workers", "1", str(folder)])
    assert done.output.startswith("scripts of scripts: 1 of 3 pass, 0 refused, 2 wrong"), done.output
    found = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert found["good.py"]["verdict"] == "pass"
    assert found["other.py"]["verdict"] == "wrong"
    assert found["thread.py"]["line"] == "0 of 1 fits distributed"
    assert "another result" in found["other.py"]["line"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import horovod.tensorflow.keras as hvd", "import hfdt.keras as hvd"),
        ("import horovod.keras as hvd_keras", "import hfdt.keras as hvd_keras"),
        ("import horovod.tensorflow as hvd", "import horovod.tensorflow as hvd"),
        ("keras.optimizers.RMSprop(lr=0.1)", "keras.optimizers.RMSprop(learning_rate=0.1)"),
        ("f(initial_lr=0.1)", "f(initial_lr=0.1)"),
        ("self.model.optimizer.lr.numpy()", "self.model.optimizer.learning_rate.numpy()"),
        ("compile(optimizer=opt,\n    experimental_run_tf_function=False)", "compile(optimizer=opt)"),
        ("[var.ref() for var in local]", "[id(var) for var in local]"),
    ],
)
def test_keras_2_is_spelled_as_keras_3(source, expected):
    assert as_keras3(source) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("AttributeError: 'SGD' object has no attribute '_compute_gradients'", "Keras 2: _compute_gradients"),
        ("ImportError: `keras.optimizers.legacy` is not supported in Keras 3.", "Keras 2: keras.optimizers.legacy"),
        ("AttributeError: module 'hfdt.keras' has no attribute 'PartialDistributedOptimizer'.", ""),
        ("AssertionError: 1 != 2", ""),
    ],
)
def test_only_known_names_of_keras_2_excuse_a_failure(line, reason):
    assert reason_not_comparable(line) == reason


def test_a_test_passes_that_passes_on_all_ranks():
    refused = Outcome(False, refused=True, line="UsageError: y")
    first = {"a": PASSED, "b": PASSED, "c": PASSED, "d": Outcome(False, skipped=True, line="one worker")}
    second = {"a": PASSED, "b": FAILED, "c": refused, "d": PASSED}
    rows = judge_ranks([first, second])
    assert [row.verdict for row in rows] == ["pass", "wrong", "refused", "not comparable"]
    assert rows[3].line == "one worker"
    assert [row.verdict for row in judge_ranks([first, {}])] == ["wrong", "wrong", "wrong", "not comparable"]


def report(outcome, error=None, when="call"):
    return pytest.TestReport("a", ("a", 1, "a"), {}, outcome, error, when)


def test_the_last_outcome_of_a_test_counts(tmp_path):
    file = tmp_path / "0.jsonl"
    write_collected(file, ["a", "b"])
    assert read_outcomes(file)["a"].line == "no outcome: the process ended before"
    write_outcome(file, report("passed", when="setup"))
    assert not read_outcomes(file)["a"].passed
    write_outcome(file, report("passed"))
    assert read_outcomes(file)["a"] == Outcome(True)
    write_outcome(file, report("failed", "nfdt.core.errors.UsageError: z\nand more", when="teardown"))
    assert read_outcomes(file)["a"] == Outcome(False, refused=True, line="nfdt.core.errors.UsageError: z")
    write_outcome(file, report("failed", "KeyError: in user code:\n\n    File\n\n    KeyError: 7"))
    assert read_outcomes(file)["a"].line == "KeyError: in user code: KeyError: 7"
    write_outcome(file, report("skipped", ("a.py", 1, "Skipped: no ranks")))
    assert read_outcomes(file)["a"] == Outcome(False, skipped=True, line="no ranks")


def test_a_folder_without_horovod_s_tests_is_an_error(tmp_path):
    done = CliRunner().invoke(main, ["horovod", "--packages", str(tmp_path), str(tmp_path)])
    assert done.exit_code == 1
    assert "expected test/parallel/test*keras*.py" in str(done.exception)


HOROVODS_TESTS = """
import pytest
import keras
import horovod.tensorflow.keras as hvd

def setup_module():
    hvd.init()

def test_ranks():
    keras.optimizers.SGD(lr=0.1)
    assert hvd.allreduce(hvd.rank() + 1.0) == (hvd.size() + 1) / 2

def test_rank_0():
    assert hvd.rank() == 0

def test_twice():
    hvd.DistributedOptimizer(hvd.DistributedOptimizer("sgd"))

def test_private():
    keras.optimizers.SGD()._compute_gradients

def test_more():
    if hvd.size() < 3:
        pytest.skip("Only two workers available")
"""


@needs_horovod
@pytest.mark.long
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("ranks", [1, 2])
def test_horovod_s_tests_run_on_ranks(tmp_path, ranks):
    (tmp_path / "test" / "parallel").mkdir(parents=True)
    (tmp_path / "test" / "parallel" / "test_own_keras.py").write_text(HOROVODS_TESTS)
    rows = tmp_path / "rows.jsonl"
    options = ["horovod", "--packages", str(tmp_path), "--ranks", str(ranks), str(tmp_path)]
    done = CliRunner().invoke(main, ["--json", str(rows), *options])
    assert done.exit_code == 0, done.output
    found = {row["name"].partition("::")[2]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "test_ranks": "pass",
        "test_rank_0": "pass" if ranks == 1 else "wrong",
        "test_twice": "refused",
        "test_private": "not comparable",
        "test_more": "not comparable",
    }
    assert found["test_more"]["line"] == "Only two workers available"
