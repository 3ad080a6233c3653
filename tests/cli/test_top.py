"""Tables of ``nfdt top``."""

from __future__ import annotations

import io

import pytest
from nfdt_client.handle import JobStatus
from rich.console import Console

from nfdt.cli.top import MOST_WORKERS, JobView


def status(workers: dict, **facts) -> JobStatus:
    known = {"job_id": "job-1", "name": "m", "state": "running", "reason": "", "algorithm": "ddc-asgd"}
    known |= {"workers": 2, "epoch": 0, "epochs": 3, "submitted_at": 1.0, "ended_at": 0.0, "logs": {"loss": 0.5}}
    return JobStatus(**{**known, **facts}, worker_statistics=workers)


def text_of(view: JobView, shown: JobStatus) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view.render(shown))
    return console.file.getvalue()


def totals(samples: int, **more) -> dict:
    return {"samples": samples, "compute_s": samples / 1000, "staleness": {"0": 1, "2": 1}, "batch_size": 32, **more}


def test_rates_are_those_between_two_looks():
    times = iter([10.0, 12.0])
    view = JobView(lambda: next(times))
    text_of(view, status({"worker-0": totals(100), "worker-1": totals(50)}))
    shown = text_of(view, status({"worker-0": totals(1100, bytes_sent=4e6), "worker-1": totals(50)}))
    (first,) = [line for line in shown.splitlines() if "worker-0" in line]
    assert first.split()[:4] == ["worker-0", "500", "32", "1.0"]
    assert "50 %" in first  # 1 s of computation in 2 s
    assert "2.0 MB/s" in first
    assert "500 samples/s" in shown
    assert "epoch 1 of 3" in shown
    assert "loss 0.5" in shown


def test_rates_that_are_not_known_yet_are_a_dash():
    shown = text_of(JobView(), status({"worker-0": totals(100, bytes_sent=1, bytes_received=1)}))
    (row,) = [line for line in shown.splitlines() if "worker-0" in line]
    assert row.split() == ["worker-0", "-", "32", "1.0", "-", "-", "-", "-", "-"]
    assert "  - samples/s" in shown


def test_many_workers_share_a_row():
    workers = {f"worker-{i}": totals(10) for i in range(MOST_WORKERS + 9)}
    shown = text_of(JobView(), status(workers))
    assert "9 others" in shown
    assert f"worker-{MOST_WORKERS}" not in shown


@pytest.mark.parametrize(
    ("place", "starts_in_s", "shown"),
    [
        (2, 40.4, "queued (2 in queue, in about 40 s)"),
        (1, 300.0, "(1 in queue, in about 5 min)"),
        (3, None, "(3 in queue)"),
    ],
)
def test_a_job_that_waits_is_shown_with_its_place_and_when_it_starts(place, starts_in_s, shown):
    assert shown in text_of(JobView(), status({}, state="queued", place=place, starts_in_s=starts_in_s))
