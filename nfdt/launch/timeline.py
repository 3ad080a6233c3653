"""Repair of Horovod's timeline, a Chrome trace whose end is missing if the ring was killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

TAIL_BYTES = 2**16  # longer than any event
_BORDER = re.compile(rb"\}(?=,\s*(?:\{|$))")  # between two events


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
            if _is_closed(tail):
                return False
            end = _last_event(tail)
            if end is None:
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


def _is_closed(tail: bytes) -> bool:
    return tail.rstrip().endswith(b"}]")


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
