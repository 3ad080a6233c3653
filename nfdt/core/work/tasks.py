"""A task: one local batch that the coordinator assigns and a worker trains."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One local batch: rows ``[start, stop)`` of the sample order of pass ``pass_index``.

    ``task`` is unique within the job. ``round``, ``part`` and ``parts`` identify the part of a
    synchronous global batch; rounds count from 1 (``parts == 1`` and ``round == 0`` for asynchronous presets).
    ``round_samples`` is the number of samples of all parts; 0 where it is not known before the batches are read.
    ``data`` is the encoded batch itself for streams, which have no row numbers.
    ``ticket`` shows the shards that the task is leased to the worker; see :mod:`nfdt.core.wire.job_token`.
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
    round_samples: int = 0
    ticket: bytes = field(default=b"", compare=False)

    def share_of(self, samples: int) -> float:
        """Return the fraction of the round's samples in a part of so many; where unknown, parts count as equal."""
        return samples / self.round_samples if self.round_samples else 1.0 / max(self.parts, 1)
