"""docs/sources.md: claims, the trainings that judge them, and their commands."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.reports import claims
from benchmarks.reports.claims import Claim, CommandResults, NotMeasured, Verdict, plan_of_command, table
from benchmarks.reports.source_claims import CLAIMS, commands, real_scaling, scaling
from benchmarks.workloads.clusters import machines, speeds_and_link
from tests.support.study import result, some_results

COMMAND = "convergence --workers 8 --speeds equal --rates 0.05,0.01 --rows ddc-asgd,asgd --seeds 2"


def above(trained):
    own, other = trained.best("ddc-asgd"), trained.best("asgd")
    return Verdict(f"{own.scores}; {other.scores}", own.score > other.score)


CLAIM = Claim("above asgd", "no figure", COMMAND, "an MLP", above)


def test_a_claim_is_judged_by_the_trainings_of_its_command():
    others = [result("asgd", 8, 0.05, 0.99, seed=2), result("asgd", 8, 0.05, 0.99, epochs=9)]
    figure = "`ddc-asgd` 87.3 ± 0.1; `asgd` 80.0 ± 0.0 (2 seeds)"
    assert CLAIM.judged([*some_results(), *others]) == (figure, "**confirmed**")
    better = [replace(r, score=0.95) if r.training.row == "asgd" else r for r in some_results()]
    assert CLAIM.judged(better)[1] == "**not confirmed**"


def test_a_claim_whose_trainings_are_not_complete_is_not_judged():
    lacking = [r for r in some_results() if (r.training.row, r.training.rate) != ("asgd", 0.01)]
    assert CLAIM.judged(lacking) == ("", "not measured yet")


def test_rows_that_have_been_trained_are_shown_beside_the_judged_one():
    trained = CommandResults(COMMAND, some_results())
    assert [case.row for case in trained.measured(["asgd", "ddc-asgd", "bsp"], 8, "equal")] == ["ddc-asgd", "asgd"]


def test_a_claim_about_machines_is_judged_by_the_report_of_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "FOLDER", tmp_path)

    def faster(report):
        ratio = report.value("fast", "own", "samples/s") / report.value("fast", "other", "samples/s")
        return Verdict(f"{ratio:.1f} times", ratio > 1)

    claim = Claim("faster", "no figure", "slow --links 10", "machines", faster)
    assert claim.judged([]) == ("", "not measured yet")
    rows = [
        {"case": "fast", "peer": peer, "unit": "samples/s", "runs": [value] * runs, "value": value}
        for peer, value, runs in (("own", 30.0, 1), ("other", 20.0, 2), ("lost", None, 1))
    ]
    report = {"rows": rows, "ratios": {"own/other": 1.5, "own/lost": None}}
    (tmp_path / "slow.json").write_text(json.dumps(report))
    assert claim.judged([]) == ("1.5 times (1 to 2 runs)", "**confirmed**")
    assert replace(claim, find=lambda found: Verdict("", found.ratio("own/other") > 1)).judged([])[1] == "**confirmed**"
    assert replace(claim, find=lambda found: found.ratio("own/lost")).judged([]) == ("", "not measured yet")
    (tmp_path / "slow.json").write_text(json.dumps({**report, "rows": [*rows[:1], {**rows[2], "peer": "other"}]}))
    assert claim.judged([]) == ("", "not measured yet")


def test_a_scaling_curve_is_made_from_the_report_of_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    with pytest.raises(NotMeasured, match=r"hetero\.json"):
        real_scaling()
    rows = [
        {"case": f"{workers} x 200 ms", "peer": peer, "unit": "of the limit", "runs": [share], "value": share}
        for workers, peer, share in ((1, "bsp", 1.0), (1, "asgd", 0.9), (4, "bsp", 0.5), (4, "asgd", 0.75))
    ]
    (tmp_path / "hetero.json").write_text(json.dumps({"rows": rows, "ratios": {}}))
    assert real_scaling().splitlines()[:4] == [
        "| row | 1 | 4 |",
        "|---|---|---|",
        "| `bsp` | 1.00 (1.00) | 2.00 (0.50) |",
        "| `asgd` | 0.90 (0.90) | 3.00 (0.75) |",
    ]


def test_a_table_has_a_line_for_each_claim_and_each_command_once():
    text = table([CLAIM, replace(CLAIM, text="again")], some_results())
    assert [line.split(" | ")[0] for line in text.splitlines()[2:4]] == ["| above asgd", "| again"]
    assert text.count(f"./scripts/bench {COMMAND}  # 1") == 1


def test_figures_of_a_case_are_means_over_its_seeds():
    runs = [
        replace(result("asgd", 8, 0.05, 0.8, seed=seed), loss=loss, staleness={"0": 6, "3": 3}, worker_staleness=(1, 5))
        for seed, loss in ((0, 0.4), (1, 0.6))
    ]
    case = CommandResults(COMMAND.replace("0.05,0.01", "0.05"), runs).best("asgd")
    assert (case.loss, case.pushes, case.worker_staleness) == (pytest.approx(0.5), 3, [1, 5])
    assert case.seconds_to(70) == 7.5
    assert case.seconds_to(90) == float("inf")
    with pytest.raises(NotMeasured, match="staleness of each worker"):
        _ = CommandResults(COMMAND, some_results()).best("asgd").worker_staleness


def test_every_source_has_claims_and_every_command_names_trainings():
    assert all(CLAIMS.values())
    for command in commands():
        plan = plan_of_command(command)
        assert plan.rows
        assert plan.speeds
    with pytest.raises(NotMeasured):
        scaling(some_results())


def test_links_of_a_cluster_are_those_of_its_name():
    linked, free = machines(8, "unequal@100"), machines(8, "unequal")
    assert linked.shards.bandwidth_mbit == 100
    assert {worker.bandwidth_mbit for worker in linked.workers} == {100}
    assert [w.step_ms for w in linked.workers] == [w.step_ms for w in free.workers]
    assert not free.has_links
    assert [(w.count, w.step_ms) for w in machines(4, "halves").workers] == [(2, 100), (2, 400)]
    for name in ("slow", "equal@", "equal@0", "equal@fast"):
        with pytest.raises(ValueError, match="Speeds: expected one of equal"):
            speeds_and_link(name)
