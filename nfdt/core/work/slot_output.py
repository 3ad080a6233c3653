"""Limits of the output that slots send to their jobs."""

from __future__ import annotations

from collections.abc import Iterable

from nfdt.core.wire import workers_pb2 as pb

MOST_LINES = 1000  # of one assignment
MOST_CHARACTERS = 2000  # of one line
LEVELS = ("info", "warning", "error")


def readable_lines(lines: Iterable[pb.OutputLine]) -> list[tuple[str, str]]:
    """Return level and text of received lines, without what controls terminals; empty lines are left out."""
    found = []
    for line in lines:
        text = line.text[:MOST_CHARACTERS]
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if shown.strip():
            found.append((line.level if line.level in LEVELS else "info", shown))
    return found
