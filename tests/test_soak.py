"""Soaks: their random jobs, the invariants of a job, their tables, and three minutes of a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nfdt.chaos.accounting import RecordedEvent, RecordedJob, SampleCounts
from nfdt.chaos.report import ChaosReport, FaultOutcome
from nfdt.chaos.schedule import ROLES, parse_schedule
from tests.support.scripts import environment
from tests.support.soak.draw import LOCAL, MACHINES, PRESETS, draw_job, undisturbed
from tests.support.soak.invariants import violations
from tests.support.soak.machine_schedule import AMOUNTS, parse_machine_schedule
from tests.support.soak.rows import FAULTS, JOBS, fault_rows, read_rows, summarise

ROOT = Path(__file__).parents[1]
SOAK = [sys.executable, "-m", "tests.support.soak"]
HANG_S = 3000


def progress(epoch: int, samples: int) -> RecordedEvent:
    return RecordedEvent(1.0, "progress", {"epoch": epoch, "samples": samples, "steps": samples, "logs": {}})


def report(**changes) -> ChaosReport:
    outcome = FaultOutcome(1, "kill", "worker", 0, 1.0, 0.5, True)
    fields = {"faults": (outcome,), "samples": SampleCounts(100), "result": {"accuracy": 0.9}, **changes}
    return ChaosReport(**fields)


@pytest.mark.parametrize("choice", [LOCAL, MACHINES], ids=["local", "machines"])
def test_jobs_repeat_with_their_seed(choice):
    assert draw_job(1, 5, choice) == draw_job(1, 5, choice)
    assert draw_job(1, 5, choice) != draw_job(2, 5, choice)
    assert draw_job(1, 5, choice) != draw_job(1, 6, choice)


@pytest.mark.parametrize(
    ("choice", "parse"), [(LOCAL, parse_schedule), (MACHINES, parse_machine_schedule)], ids=["local", "machines"]
)
def test_jobs_have_every_fault_on_every_role_and_every_preset(choice, parse):
    jobs = [draw_job(1, number, choice) for number in range(300)]
    schedules = [parse(job.text) for job in jobs]
    assert {(row.kind, row.role) for schedule in schedules for row in schedule.fault} == set(choice.pairs)
    assert {schedule.cluster.options["algorithm"] for schedule in schedules} == set(PRESETS)
    assert {(schedule.cluster.workers, schedule.cluster.shards) for schedule in schedules} == {
        (workers, shards) for workers in (1, 2, 3) for shards in (1, 2)
    }
    assert [job.workers for job in jobs] == [schedule.cluster.workers for schedule in schedules]


def test_jobs_that_send_exact_gradients_are_counted_by_their_weights():
    for job in (draw_job(1, number, LOCAL) for number in range(60)):
        exact = parse_schedule(job.text).cluster.options["codec"] == "identity" and job.preset != "n-softsync"
        assert job.counts == exact


def test_machines_have_faults_that_one_machine_cannot_have():
    kinds = {kind for kind, _ in MACHINES.pairs}
    assert kinds == {"power", "pause", "cut", "slow", "lose", "corrupt", "kill", "stall", "terminate"}
    assert set(MACHINES.pairs) == {(kind, role) for kind in kinds for role in ROLES}


def test_faults_of_machines_have_the_amounts_that_they_need():
    rows = [row for number in range(300) for row in parse_machine_schedule(draw_job(1, number, MACHINES).text).fault]
    for row in rows:
        amounts = [row.mbit is not None, row.delay_ms > 0, row.percent > 0]
        assert sum(amounts) == (row.kind in AMOUNTS)
        assert (row.percent > 0) == (row.kind in ("lose", "corrupt"))
    assert {row.mbit is None for row in rows if row.kind == "slow"} == {True, False}


def test_faults_of_machines_are_planned_by_their_times():
    schedule = parse_machine_schedule(draw_job(1, 5, MACHINES).text)
    planned = schedule.plan()
    assert planned == schedule.plan()
    assert [fault.row for fault in planned] == sorted(schedule.fault, key=lambda row: row.at_s)
    assert [fault.number for fault in planned] == list(range(1, len(planned) + 1))
    assert len({fault.draw for fault in planned}) == len(planned)


@pytest.mark.parametrize("parse", [parse_schedule, parse_machine_schedule], ids=["local", "machines"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_job_without_faults(preset, parse):
    schedule = parse(undisturbed(preset, 3).text)
    assert (schedule.cluster.options["algorithm"], schedule.cluster.workers, schedule.fault) == (preset, 3, ())


def test_a_good_job_breaks_nothing():
    events = [progress(0, 50), progress(0, 100)]
    assert violations(report(), [RecordedJob("job-1", 100, events)], 0.92) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": ("client ended",)}, "client ended"),
        ({"leftovers": ("file x",)}, "left over: file x"),
        ({"samples": SampleCounts(90, 0, 10)}, "10 samples were never trained, by the events"),
        ({"counted": SampleCounts(90, 0, 10)}, "10 samples were never trained, by the weights"),
        ({"counted": SampleCounts(90, 10, 0)}, "10 samples were trained again, by the weights"),
        ({"memory_growth": 0.5}, "the server's memory grew by 50%"),
        ({"more_files": 33}, "the server has 33 more open files"),
        ({"result": {"accuracy": 0.8}}, "accuracy 0.800, without faults 0.920"),
    ],
)
def test_a_broken_invariant_is_named(changes, message):
    assert violations(report(**changes), [], 0.92) == [message]


def test_a_second_job_of_the_script_is_a_violation():
    assert violations(report(), [RecordedJob("a", 1), RecordedJob("b", 1)], None) == ["the script had 2 jobs"]


def test_training_goes_back_only_after_an_event_that_explains_it():
    back = [progress(1, 50), progress(1, 20)]
    (text,) = violations(report(), [RecordedJob("job-1", 100, back)], None)
    assert "went back from" in text
    for reason in (RecordedEvent(1.0, "shards_restored", {}), RecordedEvent(1.0, "state", {"state": "queued"})):
        assert violations(report(), [RecordedJob("job-1", 100, [back[0], reason, back[1]])], None) == []


def test_rows_of_several_soaks_add_up(tmp_path):
    for seed, survived in ((1, True), (2, False)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes = (
            FaultOutcome(1, "kill", "worker", 0, 1.0, 0.5 * seed, survived),
            FaultOutcome(2, "cut", "client", None, None, None, None),
        )
        rows = fault_rows(seed, draw_job(seed, 1, LOCAL), report(faults=outcomes))
        (folder / FAULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = {"seed": seed, "job": 1, "preset": "bsp", "violations": [] if survived else ["lost"]}
        (folder / JOBS).write_text(json.dumps(job) + "\n")
    folders = [tmp_path / "1", tmp_path / "2"]
    assert summarise(read_rows(folders, FAULTS), read_rows(folders, JOBS)).splitlines() == [
        "fault  role    injected  survived  median s  worst s  too late",
        "cut    client         0         0         -        -         2",
        "kill   worker         2         1       0.8      1.0         0",
        "2 jobs, 1 with violations; 1 of 2 faults survived",
        "job 1 of seed 2 (bsp): lost",
    ]


def test_a_soak_needs_a_folder():
    done = subprocess.run(SOAK, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert "expected --logs DIR" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(HANG_S)
def test_jobs_survive_three_minutes_of_faults(tmp_path):
    command = [*SOAK, "--minutes", "3", "--seed", "1", "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_rows([tmp_path], FAULTS) != []
