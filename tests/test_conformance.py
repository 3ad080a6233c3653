"""``scripts/conformance``: verdicts, and real scripts that run plain and distributed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.support.conformance.__main__ import main
from tests.support.conformance.script_suite import difference
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
        ([fit(1.1)], ""),
        ([fit(3.0)], "fit 1: loss 1 plain, 3 distributed"),
        ([fit(epochs=1)], "fit 1: 2 epochs plain, 1 distributed"),
        ([fit(accuracy=0.5)], "fit 1: logs"),
        ([], "1 fits plain, 0 distributed"),
    ],
)
def test_histories_are_compared(received, text):
    found = difference([fit()], received)
    assert found.startswith(text)
    assert bool(found) == bool(text)


@pytest.mark.long
@pytest.mark.timeout(4 * DEADLINE_S)
def test_scripts_of_a_folder_run_plain_and_distributed(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "good.py").write_text(SCRIPT.format(distributed=True, fails=False))
    (folder / "other.py").write_text(SCRIPT.format(distributed=True, fails=True))
    (folder / "none.py").write_text("print('no model is trained')")
    rows = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(main, ["--json", str(rows), "examples", "--workers", "1", str(folder)])
    assert done.output.startswith("scripts of scripts: 1 of 2 pass, 0 refused, 1 wrong"), done.output
    found = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert found["good.py"]["verdict"] == "pass"
    assert found["other.py"]["verdict"] == "wrong"
    assert "another result" in found["other.py"]["line"]
