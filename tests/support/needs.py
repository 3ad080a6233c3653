"""Programs that some tests need beyond the packages of ``.venv``, and why one of them is missing here."""

from __future__ import annotations

import functools
import importlib.util
import shutil

from tests.support import machines, slurm, ssh


def _programs(*names: str) -> str:
    missing = [name for name in names if shutil.which(name) is None]
    return f"missing programs: {' '.join(missing)}" if missing else ""


REASONS = {
    "machines": machines.unavailable,
    "slurm": lambda: slurm.missing_packages() or machines.unavailable(),
    "ssh": lambda: ssh.missing_programs() or machines.unavailable(),
    "horovod": lambda: "" if importlib.util.find_spec("horovod") else "./scripts/install-horovod installs it",
    "mpi": lambda: _programs("mpirun"),
    "browser": lambda: _programs("chromium", "chromedriver"),
}
"""Reason for which a test with a mark of this name cannot run here; the text is empty if it can."""


@functools.cache
def lacking(need: str) -> str:
    """Return why tests with a mark cannot run here; the text is empty if they can."""
    return f"{need}: {reason}" if (reason := REASONS[need]()) else ""
