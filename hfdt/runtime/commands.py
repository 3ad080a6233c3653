"""Commands that rank 0 broadcasts before all ranks execute them: one message per collective action."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_LENGTH = 8


@dataclass(frozen=True)
class Command:
    """One message.

    Attributes:
        kind: ``job`` (build it), ``do`` (an instruction of the coordinator), ``release`` (drop the job), ``idle``
            (nothing: rank 0 waits, and Horovod must not take the others for stalled; an elastic ring checks for new
            hosts), ``quit``.
        values: JSON values: the assignment of a job; the new learning rate of an instruction.
        reply: The coordinator's ``NextReply``, serialised.
        state: The state that replaces the ranks' state (safetensors), or nothing.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    reply: bytes = b""
    state: bytes = b""

    def encode(self) -> bytes:
        """As bytes: header, reply, state."""
        header = json.dumps({"kind": self.kind, "values": self.values, "reply": len(self.reply)}).encode()
        return len(header).to_bytes(_LENGTH, "little") + header + self.reply + self.state

    @classmethod
    def decode(cls, data: bytes) -> Command:
        """Inverse of :meth:`encode`."""
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        header = json.loads(data[_LENGTH:start])
        stop = start + header["reply"]
        return cls(header["kind"], header["values"], data[start:stop], data[stop:])
