"""Trials on a real cluster are judged by the weights, whatever the events of the job are."""

from __future__ import annotations

import pytest

from nfdt.chaos.accounting import counting_options, counting_script, length_for
from nfdt.chaos.report import make_report
from nfdt.chaos.schedule import parse_schedule, plan_faults
from nfdt.chaos.trial import local_trial
from nfdt.cli.chaos import describe_report
from tests.support.soak.invariants import violations

pytestmark = pytest.mark.processes

HANG_S = 600
KILLS = """
seed = 7
[cluster]
workers = 3
shards = SHARDS
options = { algorithm = "PRESET", "emulate.step_ms" = 20 }
[[fault]]
kind = "kill"
role = "worker"
at_step = 120
[[fault]]
kind = "kill"
role = "worker"
at_step = 300
"""
LOSSES = """
seed = 7
[cluster]
workers = 3
shards = 2
options = { algorithm = "asgd", snapshot_s = 2, "emulate.step_ms" = 15 }
# A shard that is killed right after a snapshot lacks nothing; two of them hardly happen to be.
[[fault]]
kind = "kill"
role = "shard"
at_s = 2
[[fault]]
kind = "kill"
role = "shard"
at_s = 5
[[fault]]
kind = "kill"
role = "worker"
at_s = 8
[[fault]]
kind = "kill"
role = "server"
at_s = 10
"""
# Imported by every process of the cluster.
MUTANTS = {
    "throws every fifth push away": """
from dataclasses import replace
from nfdt.shard.modes import AsynchronousMode
real, pushes = AsynchronousMode._use, [0]
def use(self, gradient, *rest):
    pushes[0] += 1
    if pushes[0] % 5 == 0:
        gradient = replace(gradient, values=gradient.values * 0)
    return real(self, gradient, *rest)
AsynchronousMode._use = use
""",
    "applies a repeated push": """
from nfdt.shard.backups import BackupStore
from nfdt.shard.modes import AsynchronousMode
BackupStore.count_tasks = lambda self, tasks: True
real, pushes = AsynchronousMode._use, [0]
def use(self, *push):
    pushes[0] += 1
    if pushes[0] % 50 == 0:  # a killed worker's push is repeated, too, if it had no time to report it
        real(self, *push)
    return real(self, *push)
AsynchronousMode._use = use
""",
}


def run(tmp_path, schedule):
    """Train the counting model under a schedule; return the report and the jobs."""
    plan = parse_schedule(schedule)
    cluster = plan.cluster.model_copy(update={"options": counting_options(plan.cluster.options)})
    plan = plan.model_copy(update={"cluster": cluster})
    script, counts = tmp_path / "script.py", tmp_path / "counts.json"
    script.write_text(counting_script(counts, **length_for(plan_faults(plan))))
    record = local_trial(plan, [str(script)], tmp_path / "trial").run()
    return make_report(record, counts=counts), record.jobs


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(
    ("preset", "shards"),
    [("ddc-asgd", 2), ("bsp", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [("asgd", 2), ("ssp", 1)])],
)
def test_every_sample_is_trained_once_in_every_epoch_though_workers_are_killed(tmp_path, preset, shards):
    report, jobs = run(tmp_path, KILLS.replace("PRESET", preset).replace("SHARDS", str(shards)))
    check_counts(report, jobs)


@pytest.mark.timeout(HANG_S)
def test_every_sample_is_trained_once_though_shards_go_back_to_snapshots_and_the_server_is_killed(tmp_path):
    report, jobs = run(tmp_path, LOSSES)
    assert report.samples.again > 0, "of which the snapshots had no update"
    check_counts(report, jobs)


def check_counts(report, jobs):
    assert report.problems == ()
    assert (report.counted.again, report.counted.never) == (0, 0)
    assert report.counted.once >= 2 * 1536
    assert report.survived
    assert violations(report, jobs, None) == []


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(
    "mutant", ["throws every fifth push away", pytest.param("applies a repeated push", marks=pytest.mark.long)]
)
def test_a_shard_that_loses_or_repeats_updates_is_found_though_its_job_succeeds(tmp_path, monkeypatch, mutant):
    (tmp_path / "sitecustomize.py").write_text(MUTANTS[mutant])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report, jobs = run(tmp_path, KILLS.replace("PRESET", "asgd").replace("SHARDS", "1"))
    assert report.problems == ()
    assert [job.state for job in jobs] == ["succeeded"]
    assert report.samples.never == 0, "by its own books"
    missing = report.counted.never if mutant.startswith("throws") else report.counted.again
    assert missing > 0
    assert not report.survived
    assert [text for text in violations(report, jobs, None) if text.startswith(f"{missing} samples")]
    assert f"{report.counted.again} again, {report.counted.never} never" in describe_report(report)
