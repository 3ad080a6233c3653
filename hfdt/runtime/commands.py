"""Commands that rank 0 broadcasts and all ranks execute: one message per collective action."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_LENGTH = 8


@dataclass(frozen=True)
class Command:
    """Message of rank 0 to all ranks.

    Attributes:
        kind: ``job`` (build it), ``do`` (execute an instruction of the coordinator), ``release`` (drop the job),
            ``idle`` (no action: rank 0 waits, and Horovod must not consider the others stalled; an elastic ring checks
            for new hosts), ``quit``.
        values: JSON values: the assignment of a job; the new learning rate of an instruction.
        reply: The coordinator's ``NextReply``, serialised.
        state: State that replaces the state of the ranks (safetensors), or empty.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    reply: bytes = b""
    state: bytes = b""

    def encode(self) -> bytes:
        """Return the command as bytes: header, reply, state."""
        header = json.dumps({"kind": self.kind, "values": self.values, "reply": len(self.reply)}).encode()
        return len(header).to_bytes(_LENGTH, "little") + header + self.reply + self.state

    @classmethod
    def decode(cls, data: bytes) -> Command:
        """Decode the result of :meth:`encode`."""
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        header = json.loads(data[_LENGTH:start])
        stop = start + header["reply"]
        return cls(header["kind"], header["values"], data[start:stop], data[stop:])
