"""Readers of Horovod's output: stall warnings and the ring's own messages in a growing log, and timelines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nfdt.core.specs.horovod_options import NEWS

MOST_BYTES = 2**20  # limit of one read; the rest waits for the next call

# mpirun: "[1,0]<stderr>:", also within lines that were written in pieces; horovodrun: "[0]<stderr>:"; under a
# launcher of the user: nothing.
_SOURCE = re.compile(r"\[[\d,]+\]<std(?:err|out)>:")
_BEGIN = re.compile(r"waiting for remainder of ranks for more than (\d+) seconds")
_MISSING = "Missing ranks:"
_RANK = re.compile(r"^(\d+)!?: \[(.*)\]\s*$")
_LOST = re.compile(r"Timeout, server (\S+) not responding|Remote daemon: \S+ on node (\S+)")  # ssh; mpirun
TAIL_BYTES = 2**16  # longer than any event
_BORDER = re.compile(rb"\}(?=,\s*(?:\{|$))")  # between two events


@dataclass
class RingStall:
    """Stall of a ring: ranks for which the others wait.

    Attributes:
        since_s: Seconds for which the others have waited at least.
        missing: Tensors that each of these ranks has not submitted.
    """

    since_s: float
    missing: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all missing tensors."""
        return tuple(sorted({name for names in self.missing.values() for name in names}))


class StallReader:
    """Parser of Horovod's warnings in lines of text; lines of several ranks may be interleaved."""

    def __init__(self) -> None:
        self._open: dict[str, RingStall] = {}

    def read(self, lines: Iterator[str] | list[str]) -> list[RingStall]:
        """Return the stalls that these lines complete; Horovod writes the lines of a warning together."""
        found: list[RingStall] = []
        for line in lines:
            source = _SOURCE.match(line)
            found += self._parse(source.group() if source else "", _SOURCE.sub("", line))
        found += [stall for stall in self._open.values() if stall.missing]
        self._open = {source: stall for source, stall in self._open.items() if not stall.missing}
        return found

    def _parse(self, source: str, text: str) -> Iterator[RingStall]:
        """Parse the next line of a rank; yield the stall that it shows to be complete."""
        stall = self._open.get(source)
        if stall is not None:
            if rank := _RANK.match(text):
                stall.missing[int(rank.group(1))] = tuple(rank.group(2).removesuffix("...").replace(",", " ").split())
                return
            if text.startswith(_MISSING):
                return
            del self._open[source]
            if stall.missing:
                yield stall
        if begin := _BEGIN.search(text):
            self._open[source] = RingStall(float(begin.group(1)))


class GrowingFile:
    """Reader of the complete lines that were added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> list[str]:
        """New lines, at most :data:`MOST_BYTES` bytes; none while there is no such file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == MOST_BYTES else b"")
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


class RingMessages:
    """Reader of the messages in a ring's log since the last call."""

    def __init__(self, log: Path) -> None:
        self._file, self._stalls = GrowingFile(log), StallReader()

    def read(self) -> tuple[list[RingStall], list[str]]:
        """Return stalls, each time Horovod repeats them, and messages of the ring itself."""
        lines = self._file.lines()
        texts = [_SOURCE.sub("", line).partition(NEWS)[2] for line in lines if NEWS in line]
        return self._stalls.read(lines), texts


def lost_machine(lines: Iterable[str]) -> str:
    """Return the machine that ssh or mpirun names as lost; "" if they name none."""
    found = next((match for line in lines if (match := _LOST.search(line))), None)
    return "" if found is None else str(found.group(1) or found.group(2))


def describe(stall: RingStall) -> Mapping[str, object]:
    """Return the data of the ``stalled`` event of a stall."""
    return {
        "waiting_for": [f"rank {rank}" for rank in sorted(stall.missing)],
        "since_s": stall.since_s,
        "tensors": list(stall.tensors),
    }


def finish_timeline(path: Path) -> bool:
    """Turn a timeline whose writer is gone into valid JSON; drop its last, incomplete event.

    Returns:
        Whether the file was repaired. A file without a complete event, or that is no timeline, stays unchanged.
    """
    try:
        with path.open("r+b") as file:
            if file.read(1) != b"[":
                return False
            size = file.seek(0, 2)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            end = _last_event(tail)
            if end is None or tail.rstrip().endswith(b"}]"):  # no timeline, or one that its writer has closed
                return False
            file.seek(start + end)
            file.truncate()
            file.write(b"]")
            return True
    except OSError:
        return False


def timelines(path: Path) -> list[Path]:
    """Return the timelines of a ring: ``t.json``, and for an elastic ring ``t.1.json``, ... after its resets."""
    later = re.compile(re.escape(path.stem) + r"\.\d+" + re.escape(path.suffix))
    found = [p for p in path.parent.glob("*") if later.fullmatch(p.name)] if path.parent.is_dir() else []
    return [path, *sorted(found)]


def _last_event(tail: bytes) -> int | None:
    """Return the offset of the last complete event's end."""
    borders = [match.end() for match in _BORDER.finditer(tail)]
    if not borders:
        return None
    rest = tail[borders[-1] :].lstrip(b", \r\n").rstrip(b", \r\n")
    try:
        json.loads(rest)
    except ValueError:
        return borders[-1]
    return len(tail.rstrip(b", \r\n"))
