"""Copy of a job's state that a rank restores after a loss of ranks, in memory or as bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nfdt.core.arrays.layout import Array
from nfdt.core.program.state import State, dump_state, load_state
from nfdt.core.training import merge

_LENGTH = 8


@dataclass(frozen=True)
class Snapshot:
    """Committed state of a job.

    Attributes:
        commit: Number of the commit.
        state: Weights and optimizer variables, equal on all ranks.
        untrained: This rank's untrained variables.
        base: Untrained variables at the beginning of the epoch, equal on all ranks.
        counters: ``epoch``, ``steps`` and ``samples`` of the job, equal on all ranks.
        own: ``epoch_samples`` and ``epoch_steps`` of this rank.
        metrics: Metric variables (encoded) of every rank, by its number.
        orphans: Metric variables (encoded) of ranks lost in this epoch.
        answer: Report of the work up to this commit; a new leader sends it again, as it may not have been sent.
    """

    commit: int
    state: State
    untrained: list[Array]
    base: list[Array]
    counters: Mapping[str, int]
    own: Mapping[str, int]
    metrics: Mapping[int, bytes]
    orphans: tuple[bytes, ...] = ()
    answer: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        """Return the snapshot as bytes, for ranks with another or no snapshot; ``own`` is not included."""
        parts = [
            json.dumps(
                {
                    "commit": self.commit,
                    "counters": dict(self.counters),
                    "metrics": {str(number): _text(data) for number, data in self.metrics.items()},
                    "orphans": [_text(data) for data in self.orphans],
                    "answer": _text(self.answer),
                }
            ).encode(),
            dump_state(self.state.weights, self.state.optimizer, dict(enumerate(self.untrained))),
            merge.encode_arrays(self.base),
        ]
        return b"".join(len(part).to_bytes(_LENGTH, "little") + part for part in parts)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Decode the result of :meth:`encode`; ``untrained`` are the sender's."""
        parts, at = [], 0
        while at < len(data):
            start = at + _LENGTH
            at = start + int.from_bytes(data[at:start], "little")
            parts.append(data[start:at])
        header: dict[str, Any] = json.loads(parts[0])
        state = load_state(parts[1])
        return cls(
            commit=header["commit"],
            state=State(state.weights, state.optimizer),
            untrained=[state.untrained[i] for i in sorted(state.untrained)],
            base=merge.decode_arrays(parts[2]),
            counters=header["counters"],
            own={},
            metrics={int(number): _bytes(text) for number, text in header["metrics"].items()},
            orphans=tuple(_bytes(text) for text in header["orphans"]),
            answer=_bytes(header["answer"]),
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
