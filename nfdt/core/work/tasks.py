"""A task: one local batch, as the coordinator hands it out and a worker trains it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One local batch: rows ``[start, stop)`` of the sample order of pass ``pass_index``.

    ``task`` is unique within the job. ``round``, ``part`` and ``parts`` say which part of which
    synchronous global batch it is; rounds count from 1 (``parts == 1`` and ``round == 0`` for asynchronous presets).
    ``data`` is the encoded batch itself for streams, which have no rows to point at.
    """

    task: int
    start: int
    stop: int
    pass_index: int = 0
    round: int = 0
    part: int = 0
    parts: int = 1
    data: bytes = b""
    samples: int = 0
