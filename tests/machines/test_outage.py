"""A job whose machines fail: the others go on within seconds, and each sample is trained once."""

from __future__ import annotations

import pytest

from benchmarks.run.outage import Outage, Run, pauses, schedule, trial
from nfdt.chaos.accounting import read_counts
from tests.support.soak.machine_schedule import parse_machine_schedule

SLACK = 2.0  # of a machine with other work
SHORT = Run("asgd", (Outage("power", "worker", 6, 14, 3), Outage("pause", "shard", 12, 22, 15)), counts=True)


def test_the_schedule_of_a_run_has_its_outages_one_after_the_other():
    text, seconds = schedule(SHORT, 2, 1)
    planned = parse_machine_schedule(text)
    assert [(one.kind, one.role, one.at_s) for one in planned.fault] == [
        ("power", "worker", 8.0),
        ("pause", "shard", 22),
    ]
    assert seconds == 8 + 14 + 22 + 6
    assert (planned.cluster.workers, planned.cluster.shards) == (2, 1)


@pytest.mark.feature("Machines of a worker and a shard stand still", area="Failures")
@pytest.mark.long
@pytest.mark.machines
@pytest.mark.timeout(400)
def test_nobody_waits_for_a_machine_without_power_and_not_long_for_a_shard_that_stands_still(tmp_path):
    record, counts = trial(SHORT, tmp_path, workers=2, shards=1)
    assert (record.problems, record.leftovers, record.missed) == ([], [], [])
    for outage, pause_s, _ in pauses(SHORT, record):
        assert pause_s <= SLACK * outage.target_s, outage.name
    found = read_counts(counts)
    assert (found.again, found.never) == (0, 0)
    kinds = [event.kind for event in record.jobs[0].events]
    assert kinds.count("worker_lost") >= 1
    assert kinds.count("shards_restored") == 1
