"""The benchmarks run and write what docs/benchmarks.md says. How fast anything is, is not asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import accuracy, overhead
from benchmarks.report import Report, Row

ROOT = Path(__file__).parents[1]


def written(report: Report, folder: Path) -> dict:
    report.finish(folder / "report.json")
    return json.loads((folder / "report.json").read_text())


def test_overhead_compares_one_worker_with_plain_fit(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(overhead, "CASES", {"mlp": overhead.CASES["mlp"]})
    monkeypatch.setattr(overhead, "QUICK", {"mlp": overhead.Work(samples=512, epochs=2, runs=1)})
    report = Report("overhead", [overhead.SEED])
    overhead.run(report, None, quick=True)
    got = written(report, tmp_path)
    assert set(got) == {"bench", "versions", "machine", "seeds", "rows", "ratios"}
    assert set(got["ratios"]) == {"nfdt/plain@mlp", "startup_s"}
    assert {(row["case"], row["peer"]) for row in got["rows"]} == {("mlp", "plain fit"), ("mlp", "nfdt, 1 worker")}
    assert "nfdt/plain@mlp" in capsys.readouterr().out


def test_accuracy_compares_the_algorithms_on_the_same_seeds(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "ALGORITHMS", ("ddc-asgd",))
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    report = Report("accuracy", [0])
    accuracy.run(report, epochs=2, rates=(0.1,), step_ms=1.0)
    got = written(report, tmp_path)
    assert {row["peer"] for row in got["rows"]} == {"plain fit", "ddc-asgd"}
    assert "accuracy@lr 0.1@ddc-asgd" in got["ratios"]


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_hfdt_compares_a_ring_with_a_loop_written_by_hand(monkeypatch, tmp_path):
    from benchmarks import hfdt

    monkeypatch.setattr(hfdt, "CASES", {"mlp": hfdt.CASES["mlp"]})
    monkeypatch.setattr(hfdt, "QUICK", {"mlp": hfdt.Work(samples=1024, epochs=2, runs=1)})
    monkeypatch.setattr(hfdt, "LAUNCHERS", ("mpirun",))
    report = Report("hfdt", [hfdt.SEED])
    hfdt.run(report, None, quick=True)
    got = written(report, tmp_path)
    assert set(got["ratios"]) == {"hfdt/handwritten@mpirun", "hfdt/handwritten@mpirun@mlp"}
    assert {row["peer"] for row in got["rows"]} == {"by hand", "hfdt"}


def test_a_row_s_value_is_the_median_of_its_runs():
    assert Row("case", "peer", "s", [3.0, 1.0, 2.0]).value == 2.0


def test_the_models_have_the_sizes_they_are_named_for():
    sizes = {case: build().count_params() for case, (build, _) in overhead.CASES.items()}
    assert sizes["mlp"] == pytest.approx(0.1e6, rel=0.05)
    assert sizes["cnn"] == pytest.approx(1e6, rel=0.05)
    assert sizes["10M"] == pytest.approx(10e6, rel=0.05)


def test_bench_without_a_name_lists_the_benchmarks():
    done = subprocess.run([ROOT / "scripts" / "bench"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "overhead: " in done.stderr
    assert "accuracy: " in done.stderr
