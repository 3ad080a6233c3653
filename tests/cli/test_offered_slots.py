"""``nfdt worker`` in this process: what it logs when it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from nfdt.cli.serve import offer_slots
from nfdt.core.errors import JobFailed
from nfdt.launch.slot_process import SlotOptions
from tests.support.hello_server import DEADLINE_S, TOKEN, HelloServer


@pytest.fixture
def server() -> Iterator[HelloServer]:
    server = HelloServer()
    yield server
    server.stop()


def lines_of(caplog) -> str:
    """Return the log after the end of all threads that might still write to it."""
    for thread in threading.enumerate():
        if thread.name in ("health", "ended"):
            thread.join(DEADLINE_S)
    return caplog.text


def test_nothing_is_logged_after_the_reason_and_no_representation_of_a_call_at_all(server, tmp_path, caplog):
    caplog.set_level(logging.INFO, "nfdt")
    options = SlotOptions(server.address, TOKEN, tmp_path, command=("false",))
    with pytest.raises(JobFailed, match="3 times in a row"):
        offer_slots(options, 1)
    before = caplog.text
    assert lines_of(caplog) == before
    assert "health stream ended" not in before
    assert f"was not reported: {server.address} answered UNIMPLEMENTED" in before
    assert "RPC that terminated" not in before


def test_a_server_that_does_not_answer_is_logged_in_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "nfdt")
    offer_slots(SlotOptions("127.0.0.1:1", TOKEN, tmp_path), 0)
    (line,) = lines_of(caplog).splitlines()
    assert "the server's health stream ended: No answer from 127.0.0.1:1" in line
