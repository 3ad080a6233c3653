"""Credentials of a job's processes: the job's key, which only its server holds, and a token for each worker.

A worker's token contains the worker's name and an HMAC of it with the key. It is valid for this job, this worker, and
training calls only; administrative calls need the key.

A ticket of a task admits one push: the shards accept gradients for tasks only that were leased to the worker. It is an
HMAC of the worker and the task with the key of the shards, so that neither side has to ask the job server.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from nfdt.core.wire.channel import same_token

TASK_TICKET_BYTES = 16


def worker_token(key: str, worker: str) -> str:
    """Return the token of a worker of the job with this key."""
    code = hmac.new(key.encode(), f"worker {worker}".encode(), hashlib.sha256).hexdigest()
    return f"{worker}:{code}"


def worker_of(key: str, token: str) -> str | None:
    """Return the worker that a token belongs to, or None for any other token, including the key."""
    worker, _, _ = token.rpartition(":")
    return worker if worker and same_token(worker_token(key, worker), token) else None


def task_ticket(key: bytes, worker: bytes, task: int, round: int = 0, part: int = 0) -> bytes:
    """Return the ticket of a task that is leased to a worker, ``TASK_TICKET_BYTES`` long.

    Args:
        key: Key of the job's current shards.
        worker: Name of the worker.
        task: Number of the task.
        round: Synchronous round of the task; 0 for none.
        part: Part of the round.
    """
    return hmac.digest(key, b"task %b %d %d %d" % (worker, task, round, part), "sha256")[:TASK_TICKET_BYTES]


def is_task_ticket(ticket: bytes, *of: Any) -> bool:
    """Whether a ticket is that of a task; ``of`` are the arguments of :func:`task_ticket`."""
    return hmac.compare_digest(ticket, task_ticket(*of))
