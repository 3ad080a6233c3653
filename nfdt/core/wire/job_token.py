"""Credentials of a job's processes: the job's key, which only its server holds, and a token for each worker.

A worker's token contains the worker's name and an HMAC of it with the key. It is valid for this job, this worker, and
training calls only; administrative calls need the key.
"""

from __future__ import annotations

import hashlib
import hmac

from nfdt.core.wire.channel import same_token


def worker_token(key: str, worker: str) -> str:
    """Return the token of a worker of the job with this key."""
    code = hmac.new(key.encode(), f"worker {worker}".encode(), hashlib.sha256).hexdigest()
    return f"{worker}:{code}"


def worker_of(key: str, token: str) -> str | None:
    """Return the worker that a token belongs to, or None for any other token, including the key."""
    worker, _, _ = token.rpartition(":")
    return worker if worker and same_token(worker_token(key, worker), token) else None
