"""State that shards send, on its way to a file: each array is written where it belongs, and never held as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import (
    PREFIX_BYTES,
    ArrayEntry,
    bytes_of,
    dump_header,
    header_bytes,
    read_header,
    size_of,
    storable,
    write_all,
)
from nfdt.core.errors import ProtocolError
from nfdt.core.sharding.plan import JoinedArray
from nfdt.core.wire.chunks import payloads
from nfdt.core.wire.shards_pb2 import StateChunk
from nfdt.model.program.state import METRICS

Place = tuple[int, int]
"""Descriptor of a file, and position in it."""


@dataclass(frozen=True)
class Rest:
    """What a state has besides what shards hold: the untrained state in the program's order, and the metrics' state."""

    untrained: Sequence[Array] = ()
    metrics: bytes = b""

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of a state by name; see :mod:`nfdt.model.program.state`."""
        named = {f"untrained/{index}": storable(array) for index, array in enumerate(self.untrained)}
        return {**named, METRICS: np.frombuffer(self.metrics, np.uint8)} if self.metrics else named


@dataclass(frozen=True)
class StateFile:
    """File in the format of safetensors whose arrays come from shards, or are known already.

    Attributes:
        header: Header of the file.
        places: For each shard, the positions of what it sends, by its names.
        known: Position and array of what is known.
        size: Size in bytes.
    """

    header: bytes
    places: Sequence[Mapping[str, int]]
    known: Sequence[tuple[int, Array]]
    size: int

    @classmethod
    def of_state(
        cls, table: Mapping[str, JoinedArray], parts: Sequence[Mapping[str, ArrayEntry]], rest: Mapping[str, Array]
    ) -> StateFile:
        """Return the file of a whole state, given the shards' arrays joined, those of each shard, and the others."""
        others = {name: ArrayEntry(array.dtype, array.shape) for name, array in rest.items()}
        header, entries = dump_header({**{name: joined.entry for name, joined in table.items()}, **others})
        places: list[dict[str, int]] = [{} for _ in parts]
        for name, joined in table.items():
            at = len(header) + entries[name].start
            for shard in joined.shards:
                places[shard][name] = at
                at += parts[shard][name].nbytes
        known = [(len(header) + entries[name].start, array) for name, array in rest.items()]
        return cls(header, places, known, len(header) + size_of(entries.values()))

    @classmethod
    def of_records(cls, parts: Sequence[Mapping[str, ArrayEntry]]) -> StateFile:
        """Return the file of the records of all shards, given the arrays of each; see ``core/sharding/records.py``."""
        prefix = "records/"
        names = [[name for name in part if name.startswith(prefix)] for part in parts]
        if [] in names:
            raise ProtocolError(
                f"Shard {names.index([])}: expected its state with records. Received: none; it has no snapshots."
            )
        header, entries = dump_header(
            {f"{i}/{name.removeprefix(prefix)}": parts[i][name] for i, own in enumerate(names) for name in own}
        )
        places = [
            {name: len(header) + entries[f"{i}/{name.removeprefix(prefix)}"].start for name in own}
            for i, own in enumerate(names)
        ]
        return cls(header, places, (), len(header) + size_of(entries.values()))

    def begin(self, file: int) -> list[dict[str, Place]]:
        """Write the header and what is known to a descriptor; return the places of what each shard sends."""
        write_all(file, self.header, 0)
        for position, array in self.known:
            write_all(file, bytes_of(array), position)
        return [{name: (file, position) for name, position in own.items()} for own in self.places]


class IncomingState:
    """Safetensors that arrive in chunks: first the header, then the bytes of the arrays.

    Args:
        chunks: The chunks, in order.
        most: Largest size of the whole, in bytes.
        begun: Called once the first chunk has arrived.

    Attributes:
        arrays: The arrays in the order of their bytes, known once the header has arrived.

    Raises:
        ProtocolError: the chunks are no safetensors.
    """

    def __init__(self, chunks: Iterable[StateChunk], most: int, begun: Callable[[], object] = lambda: None) -> None:
        self._payloads = payloads(chunks, most, "Shard state")
        head = bytearray(next(self._payloads, b""))
        begun()
        while len(head) < PREFIX_BYTES:
            head += self._next()
        size = header_bytes(bytes(head[:PREFIX_BYTES]))
        while len(head) < size:
            head += self._next()
        self.arrays: Mapping[str, ArrayEntry] = read_header(memoryview(head)[:size])
        self._first = bytes(memoryview(head)[size:])

    def _next(self) -> bytes:
        data = next(self._payloads, None)
        if data is None:
            raise ProtocolError("Shard state: expected more bytes than it consists of.")
        return data

    def write(self, places: Mapping[str, Place], *, written: bool = False) -> None:
        """Write arrays to their places as their bytes arrive; those of arrays without a place are dropped.

        With ``written``, the sender may have done so: then nothing more arrives.
        """
        piece, at = memoryview(self._first), 0
        for name, entry in self.arrays.items():
            while at < entry.stop:
                if not piece and not (piece := memoryview(self._next())):
                    if written:
                        return
                    raise ProtocolError("Shard state: expected more bytes than it consists of.")
                length = min(len(piece), entry.stop - at)
                if name in places:
                    file, start = places[name]
                    write_all(file, piece[:length], start + at - entry.start)
                piece, at = piece[length:], at + length
        if any(self._payloads):
            raise ProtocolError(
                f"Shard state: expected {size_of(self.arrays.values())} bytes of arrays. Received more."
            )
