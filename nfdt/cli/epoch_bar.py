"""Bars of a job's epochs on a terminal, drawn from its events in the form of Keras' own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from nfdt_client.handle import describe_log, epoch_logs, format_event

from nfdt.core.events import Event

WIDTH = 20  # of a bar, in characters
_BAR = ("epoch_begin", "progress", "epoch_end")


class EpochBar:
    """Writer of one line per epoch, which is drawn again as the epoch advances; other events get lines of their own.

    Args:
        out: Terminal.
        epochs: Number of epochs of the job.
    """

    def __init__(self, out: TextIO, epochs: int) -> None:
        self._out, self._epochs = out, epochs
        self._began = 0.0
        self._steps: int | None = None
        self._open = False

    def add(self, event: Event) -> None:
        """Draw an event."""
        if event.kind not in _BAR:
            self._close()
            self._out.write(f"{format_event(event)}\n")
            self._out.flush()
            return
        data = event.data
        if event.kind == "epoch_begin":
            self._close()
            self._began, self._steps = event.at, data.get("steps")
            self._out.write(f"Epoch {data['epoch'] + 1}/{self._epochs}\n")
        else:
            over = event.kind == "epoch_end"
            seconds = float(data.get("seconds") or 0.0) if over else event.at - self._began
            logs = epoch_logs(data) if over else data.get("logs") or {}
            self._draw(int(data.get("steps") or 0), seconds, logs, over=over)
        self._out.flush()

    def _draw(self, steps: int, seconds: float, logs: Mapping[str, Any], *, over: bool) -> None:
        step_s = seconds / steps if steps else 0.0
        total = steps if over else self._steps
        done = min(1.0, steps / total) if total else 0.0
        filled = WIDTH if over else int(WIDTH * done)
        left_s = seconds if over else step_s * max(0, (total or steps) - steps)
        of = f"{steps}/{total}" if total else f"{steps}/Unknown"
        numbers = "".join(f" - {name}: {describe_log(value)}" for name, value in logs.items())
        clock = f"{_clock(left_s)} {step_s * 1000:.0f}ms/step"
        line = f"{of} {'━' * filled}{'─' * (WIDTH - filled)} {clock}{numbers}"
        width = shutil.get_terminal_size().columns
        self._out.write(f"\r\x1b[K{line if over else line[: width - 1]}")
        self._open = True
        if over:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._out.write("\n")
        self._open = False


def _clock(seconds: float) -> str:
    """Format seconds as Keras does: 12s, 3:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


def draw(events: Iterable[Event], out: TextIO, epochs: int) -> None:
    """Draw events as they come: bars on a terminal, else one line each."""
    bar = EpochBar(out, epochs) if out.isatty() else None
    for event in events:
        if bar is not None:
            bar.add(event)
        else:
            out.write(f"{format_event(event)}\n")
            out.flush()
