"""Lines that a job prints in a slot."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from nfdt.core.work.messages import MOST_LINES
from nfdt.worker.job_output import collected_output


@pytest.fixture
def sent():
    return []


@pytest.fixture
def collected(sent):
    def send(lines):
        sent.extend((line.level, line.text) for line in lines)

    return lambda: collected_output(send, "the log of w")


def test_whole_lines_that_are_printed_are_sent_and_stay_in_the_log(collected, sent, capsys):
    with collected():
        print("first")
        print("second", end=" ")
        print("line")
        print("   ")
        sys.stdout.write("no end")
    assert sent == [("info", "first"), ("info", "second line")]
    assert capsys.readouterr().out == "first\nsecond line\n   \nno end"
    print("later")
    assert len(sent) == 2


def test_of_a_progress_bar_the_last_state_is_sent(collected, sent):
    with collected():
        for percent in range(101):
            print(f"\r{percent} %", end="")
        print()
    assert sent == [("info", "100 %")]


def test_warnings_are_sent_with_their_level_and_what_is_below_is_not(collected, sent):
    log = logging.getLogger("layers")
    with collected():
        log.info("nothing")
        log.warning("two\nlines")
        log.error("bad: %s", 3)
        print("UserWarning: deprecated", file=sys.stderr)
    logged = [("warning", "two"), ("warning", "lines"), ("error", "bad: 3")]
    assert sent == [*logged, ("info", "UserWarning: deprecated")]


def test_a_line_does_not_wait_for_the_end(collected, sent):
    arrived = threading.Event()

    def send(lines):
        sent.extend(line.text for line in lines)
        arrived.set()

    with collected_output(send, "the log"):
        print("now")
        assert arrived.wait(60)
        assert sent == ["now"]


def test_more_lines_than_the_limit_are_announced_once(collected, sent):
    with collected():
        for number in range(2 * MOST_LINES):
            print(number)
    assert len(sent) == MOST_LINES + 1
    assert sent[MOST_LINES - 1] == ("info", str(MOST_LINES - 1))
    assert sent[-1] == ("warning", f"More than {MOST_LINES} lines: the others are only in the log of w.")


def test_threads_do_not_share_the_lines_that_they_have_begun(collected, sent):
    begun, done = threading.Event(), threading.Event()

    def other():
        begun.wait(60)
        print("other")
        done.set()

    thread = threading.Thread(target=other)
    with collected():
        thread.start()
        print("one", end="")
        begun.set()
        done.wait(60)
        print(" line")
    thread.join(60)
    assert sent == [("info", "other"), ("info", "one line")]
