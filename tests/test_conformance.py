"""``scripts/conformance``: verdicts, and real scripts that run plain and distributed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.conformance import library_suite, written_files
from tests.support.conformance.__main__ import main
from tests.support.conformance.fit_calls import find_fitting_tests
from tests.support.conformance.fit_difference import Tolerance, difference
from tests.support.conformance.horovod_suite import judge_ranks
from tests.support.conformance.keras3_spelling import as_keras3, reason_not_comparable
from tests.support.conformance.outcome_file import read_outcomes, write_collected, write_outcome
from tests.support.conformance.script_suite import Run, error_line, judged
from tests.support.conformance.verdicts import Outcome, Row, judge, table
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

FILE = """
model.save("m.keras")
if "nfdt_client" in sys.modules:
    open("more.txt", "w").close()
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


def fit(epochs=(0, 1), **logs):
    return {"epochs": list(epochs), "logs": [[name, values] for name, values in logs.items()]}


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (fit(loss=[2.1, 1.1], f1=[[0.5, 0.7], [0.5, 0.7]]), ""),
        (fit(loss=[2.0, 1.3], f1=[[0.5, 0.7], [0.5, 0.7]]), "loss of epoch 2: 1. plain, 1.3 distributed"),
        (fit(loss=[2.7, 1.0], f1=[[0.5, 0.7], [0.5, 0.7]]), "loss of epoch 1: 2. plain, 2.7 distributed"),
        (fit(loss=[2.0, 1.0], f1=[[0.5, 0.7], [0.5, 0.2]]), "f1 of epoch 2: [0.5, 0.7] plain, [0.5, 0.2] distributed"),
        (fit(loss=[2.0, 1.0], f1=[0.5, 0.5]), "f1 of epoch 1: [0.5, 0.7] plain, 0.5 distributed"),
        (fit((0,), loss=[2.0], f1=[[0.5, 0.7]]), "epochs [0, 1] plain, [0] distributed"),
        (fit((2, 3), loss=[2.0, 1.0], f1=[[0.5, 0.7], [0.5, 0.7]]), "epochs [0, 1] plain, [2, 3] distributed"),
        (fit(f1=[[0.5, 0.7], [0.5, 0.7]], loss=[2.0, 1.0]), "logs ['loss', 'f1'] plain, ['f1', 'loss'] distributed"),
        (fit(loss=[2.0, 1.0]), "logs ['loss', 'f1'] plain, ['loss'] distributed"),
        (fit(loss=[2.0, 1.0], f1=[[0.5, 0.7]]), "f1: 2 values plain, 1 distributed"),
    ],
)
def test_histories_are_compared(received, text):
    plain = fit(loss=[2.0, 1.0], f1=[[0.5, 0.7], [0.5, 0.7]])
    assert difference([plain], [received], Tolerance(0.2, 0.0)) == (f"fit 1: {text}" if text else "")


def test_a_plain_loss_that_is_not_finite_is_not_compared():
    assert difference([fit(loss=[np.nan, np.inf])], [fit(loss=[9.0, np.nan])], Tolerance(0.1, 0.0)) == ""
    assert difference([fit(loss=[1.0, 1.0])], [fit(loss=[1.0, np.nan])], Tolerance(0.1, 0.0)) != ""


def test_each_fit_has_a_partner():
    assert difference([fit(loss=[1.0, 1.0])], [], Tolerance.of(1)) == "1 fits plain, 0 distributed"


def test_one_worker_is_held_to_less():
    plain, received = [fit(loss=[1.0, 1.0])], [fit(loss=[1.0, 1.2])]
    assert difference(plain, received, Tolerance.of(2)) == ""
    assert difference(plain, received, Tolerance.of(1)) == "fit 1: loss of epoch 2: 1. plain, 1.2 distributed"


def test_files_that_a_script_wrote_are_those_that_are_new_or_changed(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        (folder / "logs").mkdir(parents=True)
        (folder / "script.py").write_text("x")
        (folder / "log.csv").write_text("epoch,loss\n")
    (after / "log.csv").write_text("epoch,loss\n0,1.5\n1,1.2\n")
    (after / "logs" / "events.out.tfevents.1795692810.host-3.7450.0.v2").write_text("")
    np.save(after / "y.npy", np.zeros((2, 3), "float32"))
    found = written_files.written(after, before)
    assert found == {
        "log.csv": "2 lines below 'epoch,loss'",
        "logs/events.out.tfevents.N.0.v2": "",
        "y.npy": "(2, 3) float32",
    }
    assert written_files.difference(found, found) == ""
    assert written_files.difference(found, {**found, "x": ""}) == "x: written only distributed"
    assert written_files.difference({**found, "x": ""}, found) == "x: written only plain"
    shorter = {**found, "log.csv": "1 lines below 'epoch,loss'"}
    assert written_files.difference(found, shorter).startswith("log.csv: 2 lines")


def test_saved_models_have_the_form_of_their_weights(tmp_path):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for name in ("m.keras", "m.weights.h5", "other.h5"):
        path = tmp_path / name
        path.write_bytes(b"torn") if name == "other.h5" else model.save_weights(path) if ".weights" in name else (
            model.save(path)
        )
    assert "model.weights.h5" in written_files.form(tmp_path / "m.keras")
    assert "(2, 1)" in written_files.form(tmp_path / "m.weights.h5")
    assert written_files.form(tmp_path / "other.h5") == "cannot be read"


def test_a_distributed_run_has_to_leave_what_the_plain_one_left():
    fits, files = [fit(loss=[1.0, 1.0])], {"m.keras": "a"}
    plain = Run(Outcome(True, fits=1), fits, files)
    assert judged(plain, plain, 2) == plain.outcome
    assert judged(plain, Run(Outcome(True, fits=0), fits, files), 2).line == "0 of 1 fits distributed"
    assert judged(plain, Run(Outcome(True, fits=1), fits), 2).line == "m.keras: written only plain"
    assert judged(plain, Run(Outcome(True, fits=1), [fit(loss=[1.0, 9.0])], files), 2).line.startswith("fit 1: loss")
    refused = Outcome(False, refused=True, line="CaptureError: y")
    assert judged(plain, Run(refused), 2) == refused


KERAS_TESTS = """
class Tests(TestCase):
    def test_direct(self):
        with self.subTest("x"):
            self.make().fit(x, y)

    def test_through_a_method(self):
        self._check("adam")

    def test_through_a_function(self):
        for case in cases:
            run(case)

    def test_of_the_name(self):
        self.fit_nothing()

    def test_predict(self):
        self.make().predict(x)

    def _check(self, name):
        run(name)

def run(case):
    model.fit(case)
"""


def test_tests_that_fit_are_found_in_their_source():
    assert find_fitting_tests(KERAS_TESTS) == {"test_direct", "test_through_a_method", "test_through_a_function"}


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
    (folder / "file.py").write_text(SCRIPT.format(distributed=True, fails=False) + FILE)
    (folder / "none.py").write_text("print('no model is trained')")
    rows = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(main, ["--json", str(rows), "examples", "--workers", "1", str(folder)])
    assert "scripts of scripts on 1 worker: 1 of 4 pass, 0 refused, 3 wrong" in done.output
    found = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert found["good.py"]["verdict"] == "pass"
    assert found["other.py"]["verdict"] == "wrong"
    assert found["file.py"]["line"] == "more.txt: written only distributed"
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


@pytest.mark.horovod
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


@pytest.mark.parametrize(("workers", "passes"), [(1, False), (2, True)])
def test_scripts_with_libraries_have_equal_fits_on_one_worker(workers, passes):
    plain, distributed = (
        Run(Outcome(True, fits=1), [{"epochs": [0], "logs": [["loss", [loss]]]}]) for loss in (1.0, 1.01)
    )
    assert library_suite.judged(plain, plain, workers).passed
    assert library_suite.judged(plain, distributed, workers).passed == passes


def test_no_script_with_libraries_trains_otherwise_than_plain_keras():
    rows = library_suite.read_record()["rows"]
    assert set(rows) <= {script.stem for script in library_suite.scripts()}
    assert rows["keras_rs_dlrm"]["libraries"] == ["keras-rs"]
    assert {found for row in rows.values() for found, _ in row["verdicts"].values()} <= {"pass", "refused"}
