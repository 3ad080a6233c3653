"""Metrics of a fit for TensorBoard: what Keras' own callback writes, and what each worker did."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_board_packages
from nfdt.core.work.statistics import split_by_rank

logger = logging.getLogger(__name__)

_VALIDATION = "val_"
_FORMAT = "brain.Event:2"  # of event files


class Board:
    """Writes the event files of one fit.

    ``train`` and ``validation`` have the tags of ``keras.callbacks.TensorBoard``; a folder for each worker or rank has
    ``samples_per_s``, ``batch_size`` and the histogram ``staleness`` of an epoch's gradients. Steps are epochs.

    Args:
        folder: Folder of the files.

    Raises:
        NotInstalled: TensorBoard is missing.
        UsageError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        require_board_packages("tensorboard=")
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._broken = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"tensorboard: expected a folder that can be written. Received: {error}.") from None

    def write_epoch(
        self,
        epoch: int,
        logs: Mapping[str, Any],
        learning_rate: float | None,
        workers: Mapping[str, Mapping[str, Any]],
        seconds: float,
    ) -> None:
        """Write an epoch. The first failure is logged as a warning, and nothing is written after it.

        Args:
            epoch: Index of the epoch, from 0 on.
            logs: Logs as callbacks get them.
            learning_rate: Learning rate at its end, if it is a number.
            workers: Totals of each worker, as in ``history.nfdt``.
            seconds: Duration of the epoch.
        """
        if self._broken:
            return
        try:
            self._write_logs(epoch, logs, learning_rate)
            for name, row in split_by_rank(workers).items():
                self._write_worker(epoch, name, row, seconds)
            for file in self._files.values():
                file.flush()
        except OSError as error:
            self._broken = True
            logger.warning("TensorBoard: %s cannot be written any more: %s. The training goes on.", self._folder, error)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                logger.warning("TensorBoard: %s is not complete: %s", self._folder, error)

    def _write_logs(self, epoch: int, logs: Mapping[str, Any], learning_rate: float | None) -> None:
        numbers = {name: value for name, value in logs.items() if np.ndim(value) == 0}
        for name, value in numbers.items():
            if name.startswith(_VALIDATION):
                self._add_scalar("validation", f"epoch_{name.removeprefix(_VALIDATION)}", value, epoch)
            else:
                self._add_scalar("train", f"epoch_{name}", value, epoch)
        if learning_rate is not None:
            self._add_scalar("train", "epoch_learning_rate", learning_rate, epoch)

    def _write_worker(self, epoch: int, name: str, row: Mapping[str, Any], seconds: float) -> None:
        before = self._before.get(name, {})
        run = f"workers/{name.replace('/', '-')}"
        if seconds > 0:
            samples = (row.get("samples") or 0) - (before.get("samples") or 0)
            self._add_scalar(run, "samples_per_s", samples / seconds, epoch)
        if row.get("batch_size"):
            self._add_scalar(run, "batch_size", row["batch_size"], epoch)
        bins = _new_bins(row.get("staleness") or {}, before.get("staleness") or {})
        if bins:
            self._add_histogram(run, "staleness", bins, epoch)
        self._before[name] = dict(row)

    def _add_scalar(self, run: str, tag: str, value: float, step: int) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._add(run, scalar_pb(tag, float(value)), step)

    def _add_histogram(self, run: str, tag: str, bins: Mapping[int, int], step: int) -> None:
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        values = np.repeat(np.fromiter(bins, float), np.fromiter(bins.values(), int))
        self._add(run, histogram_pb(tag, values, buckets=max(bins) - min(bins) + 1), step)

    def _add(self, run: str, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [Event(wall_time=time.time(), step=step, summary=summary)]
        if run not in self._files:
            self._files[run] = _open(self._folder / run)
            events.insert(0, Event(wall_time=time.time(), file_version=_FORMAT))
        writer = RecordWriter(self._files[run])
        for event in events:
            writer.write(event.SerializeToString())


def _open(folder: Path) -> IO[bytes]:
    """Return a new event file in a folder; TensorBoard reads all of them in order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}").open("xb")


def _new_bins(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[int, int]:
    """Return what was added to a histogram since the previous one."""
    counts = {int(tau): int(count) - int(before.get(tau, 0)) for tau, count in now.items()}
    return {tau: count for tau, count in sorted(counts.items()) if count > 0}
