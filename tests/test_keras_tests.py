"""The page of Keras' own tests is that of the recorded rows, and these are good enough."""

from __future__ import annotations

import re

import pytest

from tests.support.conformance.keras_page import PAGE, Record, judged, page
from tests.support.conformance.keras_reasons import DIFFERENCES, reason_to_differ
from tests.support.conformance.keras_suite import SUITES, Configuration
from tests.support.conformance.verdicts import Outcome

VERSIONS = {"Python": "3.11", "Keras": "3.15.1", "TensorFlow": "2.21.0"}
CONFIGURATION = Configuration("bsp", 1, "exact")
A, B, C, D = (f"src/callbacks/x_test.py::X::test_{name}" for name in "abcd")
WRONG = Outcome(False, line="AssertionError: 'nan' not found in ['0', 'inf']")
OUTCOMES = {A: Outcome(True, fits=1), B: Outcome(False, refused=True, line="UsageError: b|c"), C: WRONG, D: WRONG}


@pytest.fixture
def record():
    made = Record(dict(VERSIONS))
    made.add_plain({**dict.fromkeys([A, B, C], Outcome(True)), D: Outcome(False, skipped=True, line="JAX only")})
    made.judge(CONFIGURATION, OUTCOMES, SUITES)
    return made


@pytest.fixture(scope="module")
def recorded():
    return Record.read()


def test_the_page_is_the_one_that_the_rows_make(recorded):
    assert PAGE.read_text(encoding="utf-8") == page(recorded), "run scripts/conformance keras --record"


def test_each_row_has_a_verdict_and_a_reason_in_each_configuration(recorded):
    for rows in recorded.rows.values():
        assert rows.keys() == recorded.plain.keys()
        assert [test for test, (verdict, line) in rows.items() if verdict != "pass" and not line] == []


def test_no_row_is_wrong_for_an_unknown_reason(recorded):
    wrong = {
        title: [test for test, (verdict, _) in judged(title, rows).items() if verdict == "wrong"]
        for title, rows in recorded.rows.items()
    }
    assert {title: tests for title, tests in wrong.items() if tests} == {}


def test_19_of_20_tests_pass_with_one_worker_and_exact_hooks(recorded):
    for title, rows in recorded.rows.items():
        if title.endswith(", 1, exact"):
            verdicts = [verdict for verdict, _ in rows.values() if verdict != "not comparable"]
            assert verdicts.count("pass") >= 0.95 * len(verdicts) > 0


@pytest.mark.parametrize("pattern", DIFFERENCES)
def test_a_known_difference_is_in_a_row(recorded, pattern):
    rows = [(title, test, row) for title, rows in recorded.rows.items() for test, row in rows.items()]
    texts = [f"{title}: {test}: {line}" for title, test, (verdict, line) in rows if verdict == "wrong"]
    assert any(re.search(pattern, text) for text in texts)


def test_rows_are_judged_by_the_plain_run(record):
    assert {test: verdict for test, (verdict, _) in record.rows["bsp, 1, exact"].items()} == {
        **{A: "pass", B: "refused", C: "wrong", D: "not comparable"}
    }
    assert record.rows["bsp, 1, exact"][D] == ("not comparable", "JAX only")


def test_a_suite_that_runs_again_takes_the_place_of_its_rows_only(record):
    other = "src/x_test.py::test_e"
    record.add_plain({other: Outcome(True)})
    record.judge(CONFIGURATION, {other: Outcome(True, fits=1)}, ("fit",))
    assert record.rows["bsp, 1, exact"][other] == ("pass", "")
    assert record.rows["bsp, 1, exact"][B][0] == "refused"


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    path = tmp_path / "rows.jsonl"
    record.write(path)
    assert Record.read(path) == record
    assert len(path.read_text().splitlines()) == 1 + len(record.plain)


def test_a_page_has_counts_and_a_line_for_each_test(record):
    text = page(record)
    assert "on Python 3.11, Keras 3.15.1, TensorFlow 2.21.0" in text
    assert "\n| `bsp` | 1 | exact | 3 | 1 | 1 | 0 | 1 |\n" in text
    lines = text.partition("## callbacks/x_test.py")[2].splitlines()
    assert lines[2] == "| test | bsp<br>1<br>exact | reason |"
    assert lines[4] == "| `test_a` | ✓ |  |"
    assert lines[5] == "| `test_b` | R | UsageError: b\\|c |"
    assert lines[6].startswith("| `test_c` | **W** | AssertionError: 'nan'")
    assert lines[7] == "| `test_d` | – | JAX only |"


def test_only_a_known_reason_makes_a_difference_of_a_failure():
    known = "src/callbacks/csv_logger_test.py::CSVLoggerTest::test_stop_training_csv"
    assert "not finite" in reason_to_differ("bsp, 1, exact", known, WRONG.line)
    assert reason_to_differ("bsp, 1, exact", known, "KeyError: 'loss'") == ""
    assert judged("bsp, 1, exact", {known: ("wrong", WRONG.line)})[known][0] == "differs"
    assert judged("bsp, 1, exact", {C: ("wrong", WRONG.line)})[C] == ("wrong", WRONG.line)
