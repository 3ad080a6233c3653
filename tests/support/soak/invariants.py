"""Invariants of a job of a soak, checked after its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nfdt.chaos.accounting import RecordedJob, TrainingPosition, positions
from nfdt.chaos.report import ChaosReport

LEAST_ACCURACY = 0.08  # below the undisturbed result
GROWTH = 0.25  # of a server's memory
MORE_FILES = 32  # descriptors that a server may have more after the faults than at the first one
GOES_BACK = ("shards_restored", "shard_lost")  # events after which training may be at an earlier position


def violations(report: ChaosReport, jobs: Sequence[RecordedJob], accuracy: float | None) -> list[str]:
    """Return the invariants that a job broke, in words.

    Args:
        report: Its report.
        jobs: Its jobs with their events; one is expected.
        accuracy: Accuracy without faults; None: unknown.
    """
    found = [*report.problems, *(f"left over: {one}" for one in report.leftovers)]
    for where, counts in (("by the events", report.samples), ("by the weights", report.counted)):
        if counts is not None and counts.never:
            found.append(f"{counts.never} samples were never trained, {where}")
    if report.counted is not None and report.counted.again:
        found.append(f"{report.counted.again} samples were trained again, by the weights")
    if len(jobs) > 1:
        found.append(f"the script had {len(jobs)} jobs")
    if report.memory_growth is not None and report.memory_growth > GROWTH:
        found.append(f"the server's memory grew by {report.memory_growth:.0%}")
    if report.more_files is not None and report.more_files > MORE_FILES:
        found.append(f"the server has {report.more_files} more open files")
    reached = report.result.get("accuracy", 0.0)
    if not report.problems and accuracy is not None and reached < accuracy - LEAST_ACCURACY:
        found.append(f"accuracy {reached:.3f}, without faults {accuracy:.3f}")
    for job in jobs:
        found += unexplained_returns(job)
    return found


def unexplained_returns(job: RecordedJob) -> Iterator[str]:
    """Yield each place where training went back without an event that explains it."""
    explained, last = True, TrainingPosition()
    for event in job.events:
        explained |= event.kind in GOES_BACK or (event.kind == "state" and event.data["state"] == "queued")
        for _, position in positions([RecordedJob(job.job_id, job.samples, [event])]):
            if position < last and not explained:
                yield f"{job.job_id} went back from {last} to {position} without a reason"
            explained, last = False, position
