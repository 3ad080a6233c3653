"""A folder of scripts, run with ``python`` and with ``nfdt run``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.conformance import fit_difference, histories, written_files
from tests.support.conformance.verdicts import Outcome, Row, verdict

REFUSED = (2, 5)  # exit codes of nfdt.core.errors
ERROR = re.compile(r"[\w.]*[A-Z]\w*: ")  # at the end of a traceback; notes and tables may follow it
LOCAL = "This model.fit trains in this process"  # of nfdt_client.local_fit


@dataclass(frozen=True)
class Run:
    """Result of a run of a script.

    Attributes:
        outcome: How it ended.
        fits: Histories of its fits; see :func:`fit_difference.difference`.
        files: Forms of the files that it wrote; see :func:`written_files.written`.
    """

    outcome: Outcome
    fits: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def run(folder: Path, counts: Iterable[int], deadline_s: float) -> Iterator[tuple[int, Row]]:
    """Run every script of a folder plain and with workers, each time in a copy of the folder.

    Args:
        folder: Folder with the scripts.
        counts: Numbers of workers.
        deadline_s: Time for one run of a script.

    Yields:
        Number of workers, and row.
    """
    for script in sorted(folder.glob("*.py")):
        if "fit(" in script.read_text(encoding="utf-8"):
            plain = run_script([sys.executable], script, deadline_s)
            for workers in counts:
                yield workers, _row(script, plain, workers, deadline_s)


def _row(script: Path, plain: Run, workers: int, deadline_s: float) -> Row:
    if not plain.outcome.passed:
        return verdict(script.name, plain.outcome, None)
    command = [sys.executable, "-m", "nfdt.cli", "run", "--workers", str(workers)]
    distributed = run_script(command, script, deadline_s)
    return verdict(script.name, plain.outcome, judged(plain, distributed, workers))


def judged(plain: Run, distributed: Run, workers: int) -> Outcome:
    """Return the outcome of a distributed run, which fails where fits or files differ from those of the plain one."""
    outcome = distributed.outcome
    text = fit_difference.difference(plain.fits, distributed.fits, fit_difference.Tolerance.of(workers))
    if not text and outcome.fits != len(distributed.fits):
        text = f"{outcome.fits} of {len(distributed.fits)} fits distributed"
    text = text or written_files.difference(plain.files, distributed.files)
    return Outcome(False, line=text) if outcome.passed and text else outcome


def run_script(command: list[str], script: Path, deadline_s: float) -> Run:
    """Run a script with a command in a copy of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        site, place = Path(folder) / "site", Path(folder) / "scripts"
        site.mkdir()
        shutil.copytree(script.parent, place)
        out = site / "histories.jsonl"
        (site / "sitecustomize.py").write_text(Path(histories.__file__).read_text())
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "CONFORMANCE_OUT": str(out), "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            done = subprocess.run(
                [*command, script.name],
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            return Run(Outcome(False, line=f"not at its end after {deadline_s:g} s"))
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        outcome = Outcome(
            done.returncode == 0,
            refused=done.returncode in REFUSED,
            line=error_line(done.stderr),
            fits=len(found) - done.stderr.count(LOCAL),
        )
        return Run(outcome, found, written_files.written(place, script.parent))


def error_line(stderr: str) -> str:
    """Return the line of the last error that Python printed, or the last line at all."""
    lines = stderr.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])[:300]
