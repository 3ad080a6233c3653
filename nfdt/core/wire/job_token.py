"""Rights to a job's processes: the job's key, which its server keeps, and a token for each worker.

A worker's token says its name and proves it by a code that only the key makes. It is good for this job, this worker,
and training: what administers a job needs the key.
"""

from __future__ import annotations

import hashlib
import hmac

from nfdt.core.wire.channel import same_token


def worker_token(key: str, worker: str) -> str:
    """The token of a worker of the job with this key."""
    code = hmac.new(key.encode(), f"worker {worker}".encode(), hashlib.sha256).hexdigest()
    return f"{worker}:{code}"


def worker_of(key: str, token: str) -> str | None:
    """The worker whose token this is; None for any other token, the key too."""
    worker, _, _ = token.rpartition(":")
    return worker if worker and same_token(worker_token(key, worker), token) else None
