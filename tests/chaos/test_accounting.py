"""Arithmetic of recovery, steps and samples over recorded events."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.chaos.accounting import (
    RecordedEvent,
    RecordedJob,
    SampleCounts,
    count_samples,
    counting_options,
    failure,
    first_progress,
    full_speed_after,
    last_logs,
    longest_pause,
    recovered_at,
    samples_of_epoch,
    trained_steps,
    training_times,
)
from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from tests.support.simulated_shard import SimulatedShard

SIZE = 100


def job(*events: tuple, samples: int | None = SIZE, job_id: str = "job-1") -> RecordedJob:
    """Return a job of events, each (time, kind, fields...)."""
    made = [RecordedEvent(at, kind, _data(kind, *fields)) for at, kind, *fields in events]
    return RecordedJob(job_id, samples, made)


def _data(kind: str, *fields) -> dict:
    if kind == "state":
        return dict(zip(("state", "reason"), fields, strict=False))
    if kind == "epoch_begin":
        return {"epoch": fields[0]}
    if kind == "shards_restored":
        return {"redone_samples": fields[0]}
    epoch, samples, *logs = fields
    return {"epoch": epoch, "samples": samples, "steps": samples // 10, "logs": logs[0] if logs else {}}


EPOCH = (
    (0, "epoch_begin", 0),
    (1, "progress", 0, 50),
    (2, "progress", 0, 100),
    (3, "epoch_end", 0, 100, {"loss": 1.0}),
)
SUCCEEDED = (9, "state", "succeeded")


def test_an_undisturbed_job_trains_every_sample_once():
    jobs = [job(*EPOCH, SUCCEEDED)]
    assert count_samples(jobs) == SampleCounts(once=100)
    assert trained_steps(jobs) == 10
    assert first_progress(jobs) == 1


def test_samples_that_are_missing_were_never_trained():
    assert count_samples([job((3, "epoch_end", 0, 90))]) == SampleCounts(once=90, never=10)


def test_an_epoch_without_its_end_was_never_trained():
    assert count_samples([job((3, "epoch_end", 0, 100), (6, "epoch_end", 2, 100))]).never == 100


def test_samples_that_count_twice_were_trained_again():
    assert count_samples([job((3, "epoch_end", 0, 110))]).again == 10


def test_a_job_that_goes_back_within_an_epoch_trains_samples_again():
    events = [(0, "epoch_begin", 0), (1, "progress", 0, 70), (2, "progress", 0, 40), (3, "epoch_end", 0, 100)]
    assert count_samples([job(*events)]) == SampleCounts(once=70, again=30)


def test_samples_that_restored_shards_redo_are_those_of_the_event():
    events = [(0, "epoch_begin", 0), (1, "progress", 0, 70), (2, "shards_restored", 50), (3, "progress", 0, 30)]
    assert count_samples([job(*events, (4, "epoch_end", 0, 100))]) == SampleCounts(once=50, again=50)


def test_an_epoch_that_begins_again_in_its_middle_repeats_what_it_lacks():
    events = [(0, "epoch_begin", 0), (1, "progress", 0, 70), (2, "epoch_begin", 0), (3, "progress", 0, 60)]
    assert count_samples([job(*events, (4, "epoch_end", 0, 100))]) == SampleCounts(once=90, again=10)


def test_a_job_that_goes_back_over_epochs_trains_them_again():
    events = [*EPOCH, (4, "epoch_begin", 1), (5, "progress", 1, 20), (6, "epoch_begin", 0), (7, "progress", 0, 100)]
    events += [(8, "epoch_end", 0, 100), (9, "epoch_end", 1, 100)]
    assert count_samples([job(*events)]) == SampleCounts(once=80, again=120)


def test_an_unknown_size_is_that_of_the_longest_epoch():
    jobs = [job((1, "epoch_end", 0, 64), (2, "epoch_end", 1, 60), samples=None)]
    assert count_samples(jobs) == SampleCounts(once=124, never=4)


@pytest.mark.parametrize(("at", "expected"), [(1.5, 2), (0.5, 1), (3.5, None)])
def test_training_has_recovered_when_it_is_beyond_its_position(at, expected):
    assert recovered_at([job(*EPOCH)], at) == expected


def test_training_that_went_back_recovers_when_it_is_beyond_the_farthest_position():
    events = [(1, "progress", 0, 70), (2, "progress", 0, 10), (3, "progress", 0, 70), (4, "progress", 0, 80)]
    assert recovered_at([job(*events)], 1.5) == 4


def test_the_end_of_a_job_counts_as_progress():
    assert recovered_at([job(*EPOCH, SUCCEEDED)], 5) == 9


def test_a_second_job_is_beyond_the_first():
    jobs = [job(*EPOCH), job((7, "progress", 0, 10), job_id="job-2")]
    assert recovered_at(jobs, 5) == 7
    assert trained_steps(jobs) == 11


def test_steps_that_were_repeated_count_once():
    assert trained_steps([job((1, "progress", 0, 70), (2, "progress", 0, 10))]) == 7


def test_a_failed_job_is_named_with_its_reason():
    assert failure([job(*EPOCH, SUCCEEDED)]) is None
    assert failure([job(*EPOCH, (9, "state", "failed", "no shard"))]) == "job-1 failed: no shard"


def test_the_last_logs_include_the_validation():
    ended = job(*EPOCH)
    ended.events[-1].data["val_logs"] = {"loss": 2.0}
    assert last_logs([ended]) == {"loss": 1.0, "val_loss": 2.0}
    assert last_logs([]) == {}


@pytest.mark.parametrize(
    ("kind", "steps", "expected"), [("arrays", None, 40), ("arrays", 3, None), ("stream", None, None)]
)
def test_the_size_of_an_epoch_is_known_for_whole_arrays(kind, steps, expected):
    spec = {"train": {"kind": kind, "samples": 40}, "fit": {"steps_per_epoch": steps}}
    assert samples_of_epoch(spec) == expected


def test_samples_are_trained_at_the_times_at_which_positions_advance():
    jobs = [job((1, "progress", 0, 50), (3, "progress", 0, 100), (4, "epoch_end", 0, 100), (6, "progress", 1, 30))]
    assert training_times(jobs) == [(1, 50), (3, 50), (6, 30)]


def test_samples_that_are_trained_again_are_trained():
    jobs = [job((1, "progress", 0, 50), (2, "shards_restored", 40), (3, "progress", 0, 20), (4, "progress", 0, 60))]
    assert training_times(jobs) == [(1, 50), (4, 40)]


def test_the_longest_pause_includes_those_at_both_ends():
    times = [(1.0, 5), (2.0, 5), (5.0, 5), (6.0, 5)]
    assert longest_pause(times, 1.5, 6.5) == 3.0
    assert longest_pause(times, 5.5, 9.0) == 3.0
    assert longest_pause([], 2.0, 4.0) == 2.0


@pytest.mark.parametrize(("again_at", "seconds"), [(10.0, 0.0), (14.0, 2.5), (21.0, None)])
def test_full_speed_is_nine_tenths_of_the_samples_per_second_before(again_at, seconds):
    steady = [(0.25 + 0.5 * i, 10) for i in range(40)]
    slow = [(at, 10 if at < 10.0 or at > again_at else 8) for at, _ in steady]
    found = full_speed_after(slow, 10.0, 20.0)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=0.5))


@pytest.mark.parametrize(("options", "moved"), [({}, 1.0), (counting_options({}), 2.0)], ids=["as given", "counting"])
def test_a_late_gradient_counts_like_any_other(options, moved):
    rule = make_rule(resolve_algorithm("ddc-asgd", **options), OptimizerTraits("sgd"))
    rows = np.eye(200)
    shard = SimulatedShard(rule, np.zeros(200))
    shard.pull("late")
    shard.pull("other")
    for row in rows:
        shard.push("other", row, 1.0)  # an epoch
    shard.push("late", rows[0], 1.0)  # its task of the next one, on weights of before
    assert -shard.weights[0] == pytest.approx(moved, abs=1e-6)


def test_only_what_an_algorithm_reads_is_turned_off_for_counting():
    assert counting_options({"algorithm": "asgd", "workers": 3}) == {"algorithm": "asgd", "workers": 3}
    assert counting_options({"algorithm": "dc-asgd"}) == {"algorithm": "dc-asgd", "dc_lambda": 0.0}
