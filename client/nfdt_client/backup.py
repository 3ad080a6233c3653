"""Backup of the state of a fit that a signal ends, for the run that continues it."""

from __future__ import annotations

import logging
from typing import Any

from nfdt.core.errors import NfdtError
from nfdt_client.job import InteractiveJob
from nfdt_client.model_state import ModelState

logger = logging.getLogger(__name__)


def back_up(state: ModelState, job: InteractiveJob, callbacks: Any, epoch: int) -> None:
    """Save the cluster's current state with each BackupAndRestore callback; the next run begins with ``epoch``.

    The steps that workers have not finished are lost. A failure is logged: the process ends in any case.

    Args:
        state: Access to the state of the model, which receives it.
        job: The job, which still runs.
        callbacks: Keras' CallbackList of the fit.
        epoch: The epoch that is being trained.
    """
    from keras.callbacks import BackupAndRestore

    from nfdt.core import keras_internals

    savers = [callback for callback in callbacks.callbacks if isinstance(callback, BackupAndRestore)]
    if not savers:
        logger.warning("Terminated in epoch %d: nothing is saved, as fit has no BackupAndRestore callback.", epoch + 1)
        return
    try:
        state.write(job.snapshot(), keep_learning_rate=True)
        for saver in savers:
            keras_internals.back_up(saver, epoch)
    except (NfdtError, OSError) as error:
        logger.error("Terminated in epoch %d: its state is not saved: %s", epoch + 1, error)
        return
    logger.warning("Terminated in epoch %d: saved in %s.", epoch + 1, ", ".join(str(s.backup_dir) for s in savers))
