"""Results as tables and figures, from values written by hand."""

from __future__ import annotations

import csv
import io

import pytest

from nfdt.simulate.cluster import parse_cluster
from nfdt.simulate.results import curves_csv, described_limits, machines_csv, metric_of, plot, staleness_csv


def result(name, at_s=1.0):
    curve = [
        {"at_s": at_s / 2, "samples": 50, "epoch": 0, "ends_epoch": False, "logs": {"loss": 2.0}},
        {
            "at_s": at_s,
            "samples": 100,
            "epoch": 0,
            "ends_epoch": True,
            "logs": {"loss": 1.0, "val_loss": 1.5, "mae": 0.7, "val_mae": 0.5},
        },
    ]
    machines = [{"machine": i, "samples": 50, "steps": 5, "utilisation": 0.5 + i / 4} for i in range(2)]
    return {
        "name": name,
        "algorithm": name,
        "fit": 0,
        "curve": curve,
        "staleness": {"0": 4, "1": 6},
        "machines": machines,
    }


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_tables_have_a_line_for_each_point_staleness_and_machine():
    results = [result("asgd"), result("bsp", 2.0)]
    assert [(r["algorithm"], r["virtual_s"], r["mae"]) for r in rows(curves_csv(results))] == [
        ("asgd", "0.5", ""),
        ("asgd", "1.0", "0.7"),
        ("bsp", "1.0", ""),
        ("bsp", "2.0", "0.7"),
    ]
    assert [r["gradients"] for r in rows(staleness_csv(results))] == ["4", "6", "4", "6"]
    assert [r["utilisation"] for r in rows(machines_csv(results))] == ["0.5", "0.75", "0.5", "0.75"]


def test_the_metric_of_the_validation_comes_first():
    assert metric_of([result("asgd")]) == "val_mae"
    assert metric_of([{**result("asgd"), "curve": []}, result("bsp")]) is None


def test_the_limit_is_the_sum_of_the_described_speeds():
    limits = described_limits(parse_cluster({"workers": [{"step_ms": 100, "count": 2}, {"step_ms": 400}]}), 8)
    assert limits["samples_per_s"] == pytest.approx(2 * 80 + 20)
    assert limits["lower_bound"]["1"]["workers"] == 2


def test_a_picture_is_drawn_where_matplotlib_is_installed(tmp_path):
    pytest.importorskip("matplotlib")
    plot([result(f"row {i}") for i in range(9)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
