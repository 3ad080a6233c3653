"""Run a user's Python file as ``python FILE ARGS`` would, inside this process."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nfdt.core.errors import NfdtError

INTERRUPTED = 130


@contextmanager
def _arguments_of(script: Path, args: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the script would find them; both are put back."""
    argv, path = sys.argv, sys.path
    kept = path if sys.flags.safe_path else path[1:]  # path[0] is the directory of what Python started
    sys.argv, sys.path = [str(script), *args], [str(script.resolve().parent), *kept]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def run_script(script: Path, args: Sequence[str]) -> None:
    """Execute ``script`` as ``__main__``; what it raises, SystemExit included, passes through."""
    with _arguments_of(script, args):
        runpy.run_path(str(script), run_name="__main__")


def exit_code_of(error: BaseException) -> int:
    """The exit code of docs/troubleshooting.md for what ended a script.

    An error of the product counts when it was raised itself or is the stated cause (``raise ... from``)
    of what was raised; anything else is the script's own failure: 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, NfdtError):
            return seen.exit_code
        seen = seen.__cause__
    return 1


def describe_failure(error: BaseException, script: Path) -> str:
    """What to print on stderr: Python's traceback from the script's first line on.

    Nothing for an interrupt or a plain exit code; the message alone for an error of the product that
    was raised before the script's first line ran.
    """
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    report = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(report.stack) if frame.filename == str(script)), None)
    if first is None and isinstance(error, NfdtError):
        return f"Error: {error}"
    report.stack = traceback.StackSummary.from_list(report.stack[first or 0 :])
    return "".join(report.format()).rstrip("\n")
