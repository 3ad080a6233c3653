"""Removes internal frames from tracebacks: a user sees the frames of the script, then the message.

Keras removes its own frames in the same way. ``keras.config.disable_traceback_filtering()`` keeps them all.
"""

from __future__ import annotations

import functools
import linecache
import logging
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# The command line's own frames stay: nfdt.cli.script removes them.
_ROOMS = "codecs|consistency|core|engines|jobserver|launch|model|shard|simulate|transport|update_rules|worker"
_INTERNAL = re.compile(rf"/(nfdt_client|nfdt/({_ROOMS})|hfdt/(keras|runtime))/[^/]|/keras/src/|/tensorflow/python/")
# Libraries whose frames are as internal as their callers: the standard library, and packages that NFDT calls.
_CALLED = re.compile(
    r"^<frozen |/python3\.\d+/(?!site-packages/|dist-packages/)|-packages/(google|grpc|numpy|pydantic)/"
)
_ENTRY = re.compile(r'  File "(?P<path>[^"]*)", line (?P<number>\d+)')


def hide_frames(function: F) -> F:
    """Decorate a public function: the exceptions that leave it show no internal frames, not even its own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if _is_enabled():
                logger.debug("Traceback with all frames:", exc_info=error)
                _filter(error)
            raise  # without an argument, which would add an entry for this frame

    return call  # type: ignore[return-value]


def filter_text(text: str) -> str:
    """Remove the internal frames from a formatted traceback; of one that has no others, the innermost stays."""
    if not _is_enabled():
        return text
    entries: list[tuple[str, str]] = []  # path, or "" for other text, and lines
    for line in text.splitlines(keepends=True):
        if found := _ENTRY.match(line):
            entries.append(_with_source(found["path"], int(found["number"]), line))
        elif entries and entries[-1][0] and line.startswith("  "):
            entries[-1] = (entries[-1][0], entries[-1][1] + line)
        else:
            entries.append(("", line))
    innermost = max((index for index, (path, _) in enumerate(entries) if path), default=None)
    kept = [(index, entry) for index, (entry, shown) in enumerate(_visible(entries, lambda entry: entry[0])) if shown]
    if innermost is not None and not any(path for _, (path, _) in kept):
        kept = sorted([*kept, (innermost, entries[innermost])])
    return "".join(lines for _, (_, lines) in kept)


def _with_source(path: str, number: int, line: str) -> tuple[str, str]:
    """Return path and text of an entry; for code that was sent from a loaded file, with its name and text here."""
    name = path[1:-1]
    if path[:1] != "<" or name not in {getattr(module, "__file__", None) for module in [*sys.modules.values()]}:
        return path, line
    source = linecache.getline(name, number).strip()
    return name, line.replace(path, name, 1) + (f"    {source}\n" if source else "")


def _visible(entries: Iterable[Any], path_of: Callable[[Any], str]) -> Iterator[tuple[Any, bool]]:
    """Yield each entry of a traceback, outermost first, and whether it is shown."""
    below_internal = True
    for entry in entries:
        path = path_of(entry)
        internal = bool(_INTERNAL.search(path)) or (below_internal and bool(_CALLED.search(path)))
        below_internal = internal or not path
        yield entry, not internal


def _is_enabled() -> bool:
    """Whether Keras removes internal frames; the default."""
    config = getattr(sys.modules.get("keras"), "config", None)
    enabled = getattr(config, "is_traceback_filtering_enabled", None)
    return enabled is None or bool(enabled())


def _filter(error: BaseException) -> None:
    """Remove the internal frames from the traceback of an exception, and from those of its causes."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = _filtered(found.__traceback__)
        pending += [found.__cause__, found.__context__]


def _filtered(trace: types.TracebackType | None) -> types.TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = None
    shown = [entry for entry, shown in _visible(entries, lambda e: e.tb_frame.f_code.co_filename) if shown]
    for entry in reversed(shown):
        kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
