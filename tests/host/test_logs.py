"""The log on standard error: what it escapes, and how it treats a message that comes again and again."""

from __future__ import annotations

import io
import logging

import pytest

from nfdt.core.host.logs import MOST, REPEAT_S, EscapingFormatter, SparingHandler, escape


class Written:
    """A logger with a handler under a clock that the test moves, and the lines that it has written."""

    def __init__(self) -> None:
        self.now, self._stream = 0.0, io.StringIO()
        self.log = logging.Logger("under test")
        handler = SparingHandler(self._stream, clock=lambda: self.now)
        handler.setFormatter(EscapingFormatter("%(levelname)s %(message)s"))
        self.log.addHandler(handler)

    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def written() -> Written:
    return Written()


def test_a_message_is_written_once_a_second_and_its_repetitions_are_counted(written):
    for tenth in range(25):
        written.now = tenth * REPEAT_S / 10
        written.log.error("no descriptor is free")
    assert written.lines() == [
        "ERROR no descriptor is free",
        "ERROR no descriptor is free (9 more of this since the last line)",
        "ERROR no descriptor is free (9 more of this since the last line)",
    ]


def test_messages_that_differ_are_all_written(written):
    for number in range(2 * MOST):
        written.log.warning("worker %d has joined", number)
    assert len(written.lines()) == 2 * MOST


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jowned", "\\x1b[2Jowned"),
        ("a\rb\tc", "a\\rb\\tc"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("naïve Größe 学", "naïve Größe 学"),
    ],
)
def test_control_characters_are_shown_and_letters_stay(written, text, shown):
    assert escape(text) == shown
    written.log.warning("job %s", text)
    assert written.lines() == [f"WARNING job {shown}"]


def test_a_name_cannot_forge_a_line(written):
    written.log.warning("job %s", "x\n2026-01-01 ERROR all is lost")
    assert written.lines() == ["WARNING job x", "    2026-01-01 ERROR all is lost"]


def test_a_traceback_is_whole(written):
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        written.log.exception("failed")
    lines = written.lines()
    assert lines[:2] == ["ERROR failed", "Traceback (most recent call last):"]
    assert lines[-2:] == ["ValueError: first", "second"]
