"""The page of kept runs, served by this process: they are jobs that have ended, in a store that is thrown away."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from nfdt_client.run_history import FINISHED, INTERRUPTED, KeptRun

from nfdt.core.errors import UsageError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import JobState
from nfdt.core.jobs.rights import AuditLog, Holders
from nfdt.core.jobs.runner import JobMeasures, JobRunner, QueuePlace, Role
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.web.pages import PageSource
from nfdt.web.server import PageAddress, PageServer

OWNER = "history"
ENDINGS: Mapping[str, JobState] = {FINISHED: "succeeded", INTERRUPTED: "cancelled"}


class NoRunner:
    """The part of a runner that the page asks, of jobs that have all ended."""

    def places(self) -> dict[str, QueuePlace]:
        """Return no place in a queue."""
        return {}

    def slots(self, role: Role | None = None) -> list[pb.SlotDescription]:
        """Return no slot."""
        return []

    def workers_wanted(self) -> int:
        """Return that no worker is wanted."""
        return 0

    def measures(self) -> dict[str, JobMeasures]:
        """Return no numbers of running jobs."""
        return {}

    def snapshot(self, job_id: str, contents: int) -> pb.SnapshotReply:
        """Raise UsageError: weights are not kept."""
        raise UsageError(f"Run {job_id}: its weights are not kept. Save them with a callback, or with model.save.")


@contextmanager
def page_of_runs(runs: Sequence[KeptRun]) -> Iterator[str]:
    """Serve the page of runs on loopback in the block; yield a link that opens it once.

    Raises:
        UsageError: no run has begun a job.
    """
    seen = [run for run in runs if run.spec]
    if not seen:
        raise UsageError("nfdt runs open: expected a run whose job has begun. Received: none, see `nfdt runs`.")
    with tempfile.TemporaryDirectory(prefix="nfdt-runs-") as name:
        folder = Path(name)
        with closing(JobStore(folder / "jobs.sqlite")) as store:
            for run in seen:
                _add(store, run)
            holders = Holders([f"{OWNER} read {(token := secrets.token_hex(16))}"])
            runner = cast(JobRunner, NoRunner())
            source = PageSource(store, ArtifactStore(folder / "artifacts"), runner, holders, AuditLog(folder / "audit"))
            server = PageServer(PageAddress("127.0.0.1:0"), source)
            server.start()
            try:
                holder = holders.find(token)
                assert holder is not None
                yield server.make_link(holder, seen[0].id if len(seen) == 1 else "")
            finally:
                server.stop()


def _add(store: JobStore, run: KeptRun) -> None:
    """Add a run as a job with its events: state, workers, epochs."""
    job, at = run.id, run.started
    store.add(job, json.dumps(run.spec), session="", owner=OWNER, at=at)
    for begun in ("starting", "running"):
        store.transition(job, cast(JobState, begun), at=at)
    for index, worker in enumerate(run.per_worker):
        store.append(job, "worker_joined", {"worker": worker, "index": index}, at)
    for epoch in run.epochs:
        store.append(job, "epoch_begin", {"epoch": epoch["epoch"]}, at)
        at += float(epoch.get("seconds") or run.seconds / len(run.epochs))
        store.append(job, "epoch_end", _end_of(epoch), at)
    last = run.epochs[-1] if run.epochs else {"epoch": 0, "logs": {}}
    store.update(
        job,
        epoch=last["epoch"],
        last_logs_json=json.dumps(last["logs"]),
        workers_json=json.dumps(dict(run.per_worker)),
    )
    state = ENDINGS.get(run.ending, "failed")
    store.transition(job, state, reason=None if run.ending in ENDINGS else run.ending, at=run.started + run.seconds)


def _end_of(epoch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of an epoch's end."""
    logs = epoch["logs"]
    validation = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
    return {
        "epoch": epoch["epoch"],
        "logs": {name: value for name, value in logs.items() if not name.startswith("val_")},
        "val_logs": validation or None,
        "seconds": epoch.get("seconds", 0.0),
        "samples": epoch.get("samples", 0),
        "steps": None,
    }
