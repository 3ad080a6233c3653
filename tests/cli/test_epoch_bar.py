"""Bars of epochs on a terminal, and lines elsewhere."""

from __future__ import annotations

import io
import re

from nfdt.cli.job_pictures import draw_progress
from nfdt.core.events import Event

CONTROL = re.compile(r"\x1b\[[?\d]*[a-zA-Z]")
EVENTS = [
    Event(1, 100.0, "worker_joined", {"worker": "worker-0", "index": 0, "host": "h", "device": "cpu"}),
    Event(2, 100.0, "epoch_begin", {"epoch": 0, "steps": 40}),
    Event(3, 102.0, "progress", {"epoch": 0, "steps": 10, "samples": 320, "logs": {"loss": 1.25}}),
    Event(
        4, 110.0, "epoch_end", {"epoch": 0, "logs": {"loss": 1.0}, "val_logs": {"loss": 2.0}, "seconds": 8, "steps": 40}
    ),
    Event(5, 111.0, "epoch_begin", {"epoch": 1, "steps": None}),
    Event(6, 113.0, "progress", {"epoch": 1, "steps": 4, "samples": 128, "logs": {}}),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch, events) -> list[str]:
    """Return what a terminal gets, without its control sequences; a bar that is drawn again is a line of its own."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    draw_progress(events, out, 2)
    return [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", out.getvalue())) if line]


def test_a_bar_has_the_time_that_is_left_and_the_logs(monkeypatch):
    assert drawn(monkeypatch, EVENTS)[2] == "10/40 ━━━━━─────────────── 6s 200ms/step - loss: 1.25"


def test_the_end_of_an_epoch_has_its_duration_and_the_validation(monkeypatch):
    assert f"40/40 {'━' * 20} 8s 200ms/step - loss: 1 - val_loss: 2" in drawn(monkeypatch, EVENTS)


def test_an_epoch_of_unknown_length_is_counted(monkeypatch):
    assert drawn(monkeypatch, EVENTS)[-1].startswith("4/Unknown ────────────────────")


def test_other_events_have_lines_above_the_bar(monkeypatch):
    lost = Event(4, 104.0, "worker_lost", {"worker": "worker-0", "reason": "killed"})
    lines = drawn(monkeypatch, [*EVENTS[:3], lost, EVENTS[3]])
    assert "worker-0 joined" in lines[0]
    assert lines[1] == "Epoch 1/2"
    assert "worker_lost" in lines[3]
    assert lines[4].startswith("10/40")  # drawn again
    assert lines[5].startswith("40/40")


def test_a_bar_never_takes_two_lines(monkeypatch):
    many = {f"metric_{i}": 0.5 for i in range(20)}
    bar = drawn(monkeypatch, [EVENTS[1], Event(3, 102.0, "progress", {"epoch": 0, "steps": 10, "logs": many})])[1]
    assert len(bar) == 100
    assert bar.endswith("…")


def test_long_times_are_written_as_clocks(monkeypatch):
    progress = Event(2, 3700.0, "progress", {"epoch": 0, "steps": 1, "logs": {}})
    assert "1:01:40" in drawn(monkeypatch, [Event(1, 0.0, "epoch_begin", {"epoch": 0, "steps": 2}), progress])[1]


def test_without_a_terminal_each_event_is_a_line():
    out = io.StringIO()
    draw_progress(EVENTS, out, 2)
    assert len(out.getvalue().splitlines()) == len(EVENTS)
    assert "\r" not in out.getvalue()
