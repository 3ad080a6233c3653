"""Keeps what would end with a server or a script: logs and state of a failed job, a backup of a fit."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from keras.callbacks import BackupAndRestore

from nfdt.core.errors import NfdtError
from nfdt.core.host.private_files import private
from nfdt.core.work.artifacts import default_cache
from nfdt.model.keras_internals import training as keras_training
from nfdt_client.handle import JobHandle
from nfdt_client.job import InteractiveJob
from nfdt_client.model_state import ModelState
from nfdt_client.upload import receive

logger = logging.getLogger(__name__)

MOST_KEPT = 10  # failed jobs; the oldest are removed
MOST_LOG_BYTES = 10 * 2**20  # of each log; its end is kept
STATE = "state.safetensors"


def failures_folder() -> Path:
    """Return the folder with one folder for each failed job."""
    return default_cache().parent / "failed"


def keep_failure(job: InteractiveJob, state_dir: Path) -> Path | None:
    """Copy the logs of a server of this machine, and the events and the last stored state of a job.

    Args:
        job: The job.
        state_dir: Directory of its server.

    Returns:
        The folder; None, with the reason in the log, if it cannot be written.
    """
    folder = failures_folder() / job.job_id
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        parts = (log for part in ("logs", "rings") for log in sorted((state_dir / part).glob("*.log")))
        for log in (state_dir.parent / "server.log", *parts):
            with contextlib.suppress(FileNotFoundError):
                _copy_end(log, folder / log.name)
        with open(folder / "events.log", "w", opener=private, encoding="utf-8") as events:
            for line in JobHandle(job.job_id, job.connection).logs():
                events.write(f"{line}\n")
        with contextlib.suppress(NfdtError):  # nothing is stored yet
            artifact = job.connection.snapshot(job.job_id).artifact
            with open(folder / STATE, "wb", opener=private) as file:
                receive(job.connection, artifact, file)
        _remove_old(folder)
    except (OSError, NfdtError) as error:
        logger.warning("The logs of job %s are not kept: %s", job.job_id, error)
        return None
    return folder


def describe_kept(folder: Path) -> str:
    """Return the contents of the folder of a failed job, as a note for its error."""
    what = "Logs and the last stored weights" if (folder / STATE).exists() else "Logs"
    return f"{what} of the failed job are in {folder}"


def _copy_end(source: Path, target: Path) -> None:
    with open(source, "rb") as log, open(target, "wb", opener=private) as copy:
        log.seek(max(0, os.fstat(log.fileno()).st_size - MOST_LOG_BYTES))
        shutil.copyfileobj(log, copy)


def _remove_old(newest: Path) -> None:
    others = [folder for folder in newest.parent.iterdir() if folder != newest]
    for folder in sorted(others, key=lambda path: path.stat().st_mtime)[: -(MOST_KEPT - 1)]:
        shutil.rmtree(folder, ignore_errors=True)


def back_up(state: ModelState, job: InteractiveJob, callbacks: Any, epoch: int) -> None:
    """Save the cluster's current state with each BackupAndRestore callback; the next run begins with ``epoch``.

    The steps that workers have not finished are lost. A failure is logged: the process ends in any case.

    Args:
        state: Access to the state of the model, which receives it.
        job: The job, which still runs.
        callbacks: Keras' CallbackList of the fit.
        epoch: The epoch that is being trained.
    """
    savers = [callback for callback in callbacks.callbacks if isinstance(callback, BackupAndRestore)]
    if not savers:
        logger.warning("Terminated in epoch %d: nothing is saved, as fit has no BackupAndRestore callback.", epoch + 1)
        return
    try:
        state.write(job.snapshot(), keep_learning_rate=True)
        for saver in savers:
            keras_training.back_up(saver, epoch)
    except (NfdtError, OSError) as error:
        logger.error("Terminated in epoch %d: its state is not saved: %s", epoch + 1, error)
        return
    logger.warning("Terminated in epoch %d: saved in %s.", epoch + 1, ", ".join(str(s.backup_dir) for s in savers))
