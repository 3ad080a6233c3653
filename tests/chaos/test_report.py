"""Reports: what each fault cost, and what counts as survived."""

from __future__ import annotations

import json
import os

import psutil
import pytest

from nfdt.chaos.accounting import RecordedEvent, RecordedJob, counting_script, length_for, why_not_counted
from nfdt.chaos.processes import ClusterProcess
from nfdt.chaos.report import make_report
from nfdt.chaos.schedule import parse_schedule, plan_faults
from nfdt.chaos.trial import Injection, TrialRecord
from nfdt.cli.chaos import describe_report

SCHEDULE = """
[[fault]]
kind = "kill"
role = "worker"
at_s = 1
[[fault]]
kind = "stall"
role = "server"
seconds = 1
at_s = 3
"""
WORKER, SERVER = plan_faults(parse_schedule(SCHEDULE))
OWN = psutil.Process(os.getpid())


def progress(at: float, samples: int) -> RecordedEvent:
    return RecordedEvent(at, "progress", {"epoch": 0, "samples": samples, "steps": samples, "logs": {}})


def record(**changes) -> TrialRecord:
    """Return a trial in which a worker was killed at 11 s and the server stalled at 13 s."""
    events = [progress(10, 20), progress(11.5, 40), progress(12, 50), progress(15, 90)]
    events.append(RecordedEvent(16, "epoch_end", {"epoch": 0, "samples": 100, "steps": 100, "logs": {"loss": 0.5}}))
    trial = TrialRecord(
        injections=[
            Injection(WORKER, ClusterProcess("worker", 1, OWN), 11.0),
            Injection(SERVER, ClusterProcess("server", 0, OWN), 13.0),
        ],
        jobs=[RecordedJob("job-1", 100, events, "succeeded")],
        began_at=10.0,
        server_bytes={OWN: [100, 90, 110]},
        server_files={OWN: [40, 60, 43]},
    )
    for name, value in changes.items():
        setattr(trial, name, value)
    return trial


def test_a_fault_is_survived_when_training_went_on():
    report = make_report(record())
    assert report.survived
    assert [(f.kind, f.role, f.target) for f in report.faults] == [("kill", "worker", 1), ("stall", "server", 0)]
    assert [(f.at_s, f.recovery_s, f.survived) for f in report.faults] == [(1.0, 0.5, True), (3.0, 2.0, True)]
    assert report.samples.once == 100
    assert report.memory_growth == pytest.approx(0.1)
    assert report.more_files == 3


def test_a_fault_after_which_nothing_went_on_is_not_survived():
    report = make_report(record(jobs=[RecordedJob("job-1", None, [progress(10, 20), progress(11.5, 40)])]))
    assert not report.survived
    assert [f.survived for f in report.faults] == [True, False]


def test_the_last_fault_before_a_failure_is_not_survived():
    report = make_report(record(problems=["job-1 failed: no shard"]))
    assert [f.survived for f in report.faults] == [True, False]


def test_a_fault_that_was_not_injected_is_not_survived():
    report = make_report(record(injections=record().injections[:1], missed=[SERVER]))
    assert not report.survived
    assert (report.faults[1].survived, report.faults[1].target) == (None, None)


@pytest.mark.parametrize("changes", [{"leftovers": ["file x"]}, {"problems": ["stopped"]}])
def test_leftovers_and_problems_are_not_survived(changes):
    assert not make_report(record(**changes)).survived


def test_samples_that_were_never_trained_are_not_survived():
    trial = record()
    trial.jobs[0].events[-1].data["samples"] = 99
    report = make_report(trial)
    assert report.samples.never == 1
    assert not report.survived


def test_a_report_is_json():
    report = make_report(record(), record())
    read = json.loads(json.dumps(report.as_json()))
    assert read["survived"] is True
    assert read["undisturbed"] == read["result"] == {"loss": 0.5}
    assert read["faults"][1]["recovery_s"] == 2.0


def test_a_report_is_shown_as_a_table():
    trial = record(missed=[SERVER], leftovers=["port 127.0.0.1:1"], problems=["it was stopped"])
    assert describe_report(make_report(trial, record())).splitlines() == [
        "fault  target    at s  recovery s      survived",
        "kill   worker 1   1.0         0.5           yes",
        "stall  server 0   3.0         2.0            NO",
        "stall  server       -           -  not injected",
        "samples, from the job's events: 100 trained once, 0 again, 0 never",
        "result without faults: loss 0.5",
        "result: loss 0.5",
        "left over: port 127.0.0.1:1",
        "memory of the server between first and last fault: +10.0%",
        "open files of the server in that time: +3",
        "problem: it was stopped",
    ]


@pytest.mark.parametrize(
    ("times", "survived", "line"),
    [
        ({"3.0": 1536}, True, "4608 trained once, 0 again, 0 never"),
        ({"3.0": 1500, "4.0": 36}, False, "4608 trained once, 36 again, 0 never"),
        ({"3.0": 1500, "1.0": 36}, False, "4536 trained once, 0 again, 72 never"),
    ],
)
def test_the_weights_decide_whatever_the_events_say(tmp_path, times, survived, line):
    (tmp_path / "counts").write_text(json.dumps({"epochs": 3, "times": times}))
    report = make_report(record(), counts=tmp_path / "counts")
    assert report.survived == survived
    assert f"samples, from the weights of the counting model: {line}" in describe_report(report).splitlines()


@pytest.mark.parametrize("text", [None, "{", '{"epochs": 1, "times": {"0.25": 8}}'])
def test_counts_that_are_missing_or_no_whole_numbers_are_a_problem(tmp_path, text):
    if text is not None:
        (tmp_path / "counts").write_text(text)
    report = make_report(record(), counts=tmp_path / "counts")
    assert not report.survived
    assert "ounting model" in report.problems[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"problems": ["no shard"]}, "counting model: no shard"),
        ({"missed": [SERVER]}, "counting model: stall of a server: not injected"),
    ],
)
def test_the_trial_of_the_counting_model_has_to_end_well_too(changes, problem):
    assert make_report(record(), counting=record()).survived
    report = make_report(record(), counting=record(**changes))
    assert problem in report.problems
    assert not report.survived


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"algorithm": "bsp"}, ""),
        ({"algorithm": "asgd", "overlap": 1, "emulate.step_ms": 5}, ""),
        ({"algorithm": "asgd", "codec": "int8"}, "codec='int8' sends approximations"),
        ({"algorithm": "n-softsync"}, "consistency='softsync' averages gradients"),
        ({"algorithm": "dbs-sgd"}, "batch='dbs' scales the learning rate"),
        ({"algorithm": "group-sync"}, "groups and allreduce rings"),
        ({"algorithm": "allreduce"}, "groups and allreduce rings"),
    ],
)
def test_weights_count_where_updates_are_exact(options, why):
    assert why_not_counted(options).startswith(why)
    assert bool(why_not_counted(options)) == bool(why)


def test_the_counting_model_is_trained_until_the_faults_are_over(tmp_path):
    assert length_for([WORKER, SERVER]) == {"steps": 0, "seconds": 8.0}
    assert length_for([]) == {"steps": 0, "seconds": 0.0}
    script = counting_script(tmp_path / "a'b", steps=3, seconds=2.0)
    compile(script, "script", "exec")
