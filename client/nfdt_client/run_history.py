"""History of this user's runs on this machine: a file for each fit of a session, which outlives script and server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nfdt.core.errors import UsageError
from nfdt.core.host.machine import versions
from nfdt.core.host.private_files import private
from nfdt.core.work.statistics import split_by_rank
from nfdt_client.layers import DEFAULT

if TYPE_CHECKING:
    from nfdt.core.specs.job import JobSpec
    from nfdt_client.job_session import JobSession

logger = logging.getLogger(__name__)

FINISHED = "finished"
INTERRUPTED = "interrupted"
GIT_S = 5.0  # time for git to answer
LONGEST = 300  # characters of the reason of a failure


@dataclass(frozen=True)
class KeptRun:
    """One call of ``fit`` in a session.

    Attributes:
        id: UTC time of its start and a random part, as in ``20261128-081530-3f9c``.
        script: Path of the script, "" without one.
        arguments: Arguments of the script.
        directory: Working directory of the script.
        commit: Commit of the script's git repository, with ``+`` behind it if tracked files differ; "" without one.
        started: Unix time in seconds.
        seconds: Duration of the call.
        ending: ``finished``, ``interrupted``, or ``failed: `` and the error.
        where: As in :class:`~nfdt_client.fit_record.FitRecord`; "" for a fit that failed.
        reason: As in :class:`~nfdt_client.fit_record.FitRecord`.
        algorithm: Name of the preset.
        workers: Number of workers, or of ranks.
        server: Address of the shared server, "" for one of the script's own.
        jobs: Names of the jobs that trained it.
        spec: Specification of the last one; empty for a fit that was not submitted.
        options: Options that are not defaults, by name; without secrets.
        versions: Versions of Python and of Keras' packages, and the backend.
        epochs: For each epoch ``epoch`` (from 0), ``logs``, and where known ``seconds`` and ``samples``.
        per_worker: ``history.nfdt``, by worker.
    """

    id: str
    script: str
    arguments: Sequence[str]
    directory: str
    commit: str
    started: float
    seconds: float
    ending: str
    where: str
    reason: str
    algorithm: str
    workers: int
    server: str
    jobs: Sequence[str]
    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    epochs: Sequence[Mapping[str, Any]]
    per_worker: Mapping[str, Mapping[str, Any]]

    @property
    def metrics(self) -> dict[str, float]:
        """Logs of the last epoch that are single numbers."""
        logs = self.epochs[-1]["logs"] if self.epochs else {}
        return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of the epochs on the cluster; None where nothing was measured."""
        timed = [epoch for epoch in self.epochs if epoch.get("seconds")]
        seconds = sum(epoch["seconds"] for epoch in timed)
        return sum(epoch["samples"] for epoch in timed) / seconds if seconds else None

    @property
    def mean_staleness(self) -> float | None:
        """Mean number of updates that a gradient of any worker has missed; None where none was counted."""
        pushes = [pair for worker in self.per_worker.values() for pair in worker.get("staleness", {}).items()]
        count = sum(int(n) for _, n in pushes)
        return sum(int(tau) * int(n) for tau, n in pushes) / count if count else None

    @property
    def worker_s(self) -> float:
        """Seconds that all workers together were occupied: the cost of the run."""
        return sum(float(statistics.get("seconds", 0.0)) for statistics in self.per_worker.values())


def runs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the files: in XDG_STATE_HOME, else in ``~/.local/state``."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path("~/.local/state").expanduser()) / "nfdt" / "runs"


@contextlib.contextmanager
def kept_run(session: JobSession, model: Any) -> Iterator[None]:
    """Keep the fit of ``model`` in the block as a run, however it ends.

    A run that cannot be written is warned of once in a session.
    """
    most = session.options.keep_runs
    if not most:
        yield
        return
    started, jobs, before = time.time(), len(session.submitted), getattr(model, "history", None)
    ending = FINISHED
    try:
        yield
    except BaseException as error:
        ending = _described(error)
        raise
    finally:
        history = getattr(model, "history", None)
        history = history if history is not before else None
        run = _run(session, started, ending, session.submitted[jobs:], history)
        try:
            keep(run, runs_folder(), most)
        except (OSError, TypeError, ValueError) as error:
            if (text := f"The run is not kept for `nfdt runs`: {error}") not in session.logged:
                session.logged.add(text)
                logger.warning("%s", text)


def _described(error: BaseException) -> str:
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit and signals
        return INTERRUPTED
    return f"failed: {type(error).__name__}: {error}".splitlines()[0][:LONGEST]


def _run(
    session: JobSession, started: float, ending: str, jobs: Sequence[tuple[str, JobSpec]], history: Any
) -> KeptRun:
    options, record = session.options, getattr(history, "nfdt", None)
    script = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0] not in ("", "-c", "-m") else None
    workers = dict(record or {})
    return KeptRun(
        id=f"{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}",
        script=str(script or ""),
        arguments=sys.argv[1:],
        directory=os.getcwd(),
        commit=_commit(script.parent) if script is not None else "",
        started=started,
        seconds=time.time() - started,
        ending=ending,
        where=record.where if record is not None else "",
        reason=record.reason if record is not None else "",
        algorithm=options.algorithm.name,
        workers=len(split_by_rank(workers)) or options.cluster.workers,
        server=str(options.server or ""),
        jobs=[job for job, _ in jobs],
        spec=jobs[-1][1].model_dump(mode="json") if jobs else {},
        options={name: s.value for name, s in options.settings.items() if s.origin != DEFAULT},
        versions=versions(),
        epochs=_epochs(history, record.epochs if record is not None else []),
        per_worker=workers,
    )


def _epochs(history: Any, measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the logs of a History by epoch, with what was measured of each."""
    by_epoch = {row["epoch"]: row for row in measured}
    logs = history.history if history is not None else {}
    return [
        {"epoch": epoch, **by_epoch.get(epoch, {}), "logs": {name: v[at] for name, v in logs.items() if at < len(v)}}
        for at, epoch in enumerate(history.epoch if history is not None else ())
    ]


def _commit(folder: Path) -> str:
    def git(*words: str) -> str:
        command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_S)
        except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit, or a very large one
            return ""
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit + "+" * bool(commit and git("status", "--porcelain", "--untracked-files=no"))


def _plain(value: Any) -> Any:
    """Return a value that json does not know as one that it knows: arrays as lists, others as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def keep(run: KeptRun, folder: Path, most: int) -> None:
    """Write a run, and remove the oldest ones above ``most``.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps(asdict(run), default=_plain)
    part = folder / f".{run.id}.part"
    try:
        with open(part, "w", encoding="utf-8", opener=private) as file:
            file.write(text)
        part.rename(folder / f"{run.id}.json")
    finally:
        part.unlink(missing_ok=True)
    for old in _files(folder)[:-most]:
        old.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    """Return the files of all runs, oldest first."""
    return sorted(folder.glob("*.json"), key=lambda path: path.name)


def read_runs(folder: Path) -> list[KeptRun]:
    """Return all runs of a folder, oldest first; one warning names the files that are none of this version."""
    names, found = {field.name for field in fields(KeptRun)}, []
    others: dict[Path, Exception] = {}
    for path in _files(folder):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append(KeptRun(**{name: value for name, value in values.items() if name in names}))
        except FileNotFoundError:  # removed meanwhile, as one of the oldest
            continue
        except (OSError, ValueError, TypeError, AttributeError) as error:
            others[path] = error
    if others:
        path, why = next(iter(others.items()))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        logger.warning("%s%s: expected a run of this version. Received: %s. Remove what is none.", path, more, why)
    return found


def find_run(runs: Sequence[KeptRun], name: str) -> KeptRun:
    """Return the run whose id ends or begins with ``name``.

    Raises:
        UsageError: there is none, or more than one.
    """
    found = [run for run in runs if run.id.endswith(name) or run.id.startswith(name)]
    if len(found) != 1:
        several = ", ".join(run.id for run in found[-3:])
        raise UsageError(
            f"expected the id of a run, or a beginning or an end that only one has. Received: {name!r}, "
            + (f"which {len(found)} have, among them {several}." if found else "which none has: see `nfdt runs`.")
        )
    return found[0]
