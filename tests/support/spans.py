"""Spans of jobs on a server, whose last deliveries come after the end of the job."""

from __future__ import annotations

import time
from collections.abc import Collection
from threading import Event
from typing import Any

from nfdt_client.connection import JobsClient

from tests.support.scripts import ServerProcess

DEADLINE_S = 60.0


def await_spans(server: ServerProcess, processes: Collection[str], job: int = -1) -> list[Any]:
    """Return the spans of a job, by its place in the list, once those of these processes are there."""
    deadline, pause = time.monotonic() + DEADLINE_S, Event()
    client = JobsClient(server.address, server.token_file.read_text())
    try:
        while True:
            spans = client.trace(client.list()[job].job_id)
            missing = set(processes) - {each.process for each in spans}
            if not missing:
                return spans
            assert time.monotonic() < deadline, f"no spans of {missing}"
            pause.wait(0.05)
    finally:
        client.close()
