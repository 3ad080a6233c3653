"""The line that a script prints when one of its fits becomes a job."""

from __future__ import annotations

from pathlib import Path

from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2 as pb


def start_line(job_id: str, spec: JobSpec, server: pb.ServerDescription, link: str) -> str:
    """Return job, algorithm, workers, folder of the logs and link to the page, as far as the server has them."""
    workers = spec.cluster.workers
    parts = [f"job {job_id}", f"{spec.algorithm.name} on {workers} worker{'s' if workers != 1 else ''}"]
    if server.state_dir:
        parts.append(f"logs in {Path(server.state_dir) / 'logs'}")
    parts.append(f"page {link}" if link else "look at it with `nfdt top`")
    return f"nfdt: {', '.join(parts)}"
