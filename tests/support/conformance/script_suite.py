"""A folder of scripts, run with ``python`` and with ``nfdt run``."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.conformance import histories
from tests.support.conformance.verdicts import Outcome, Row, verdict

REFUSED = (2, 5)  # exit codes of nfdt.core.errors
ERROR = re.compile(r"[\w.]*[A-Z]\w*: ")  # at the end of a traceback; notes and tables may follow it
LOCAL = "This model.fit trains in this process"  # of nfdt_client.local_fit
TOLERANCE = 0.25  # of the last losses, relative: several workers draw other samples


def run(folder: Path, workers: int, deadline_s: float) -> list[Row]:
    """Run every script of a folder plain and with workers; the scripts run in a copy of nothing but their folder.

    Args:
        folder: Folder with the scripts.
        workers: Number of workers.
        deadline_s: Time for one run of a script.
    """
    return [_row(script, workers, deadline_s) for script in sorted(folder.glob("*.py")) if "fit(" in script.read_text()]


def _row(script: Path, workers: int, deadline_s: float) -> Row:
    plain, expected = _outcome([sys.executable, script.name], script, deadline_s)
    if not plain.passed:
        return verdict(script.name, plain, None)
    command = [sys.executable, "-m", "nfdt.cli", "run", "--workers", str(workers), script.name]
    distributed, received = _outcome(command, script, deadline_s)
    text = difference(expected, received)
    if not text and distributed.fits != len(received):
        text = f"{distributed.fits} of {len(received)} fits distributed"
    if distributed.passed and text:
        distributed = Outcome(False, line=text)
    return verdict(script.name, plain, distributed)


def _outcome(command: list[str], script: Path, deadline_s: float) -> tuple[Outcome, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as site:
        out = Path(site) / "histories.jsonl"
        (Path(site) / "sitecustomize.py").write_text(Path(histories.__file__).read_text())
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "CONFORMANCE_OUT": str(out), "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            done = subprocess.run(
                command,
                cwd=script.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, line=f"not at its end after {deadline_s:g} s"), []
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    fits = len(found) - done.stderr.count(LOCAL)
    return Outcome(
        done.returncode == 0, refused=done.returncode in REFUSED, line=error_line(done.stderr), fits=fits
    ), found


def error_line(stderr: str) -> str:
    """Return the line of the last error that Python printed, or the last line at all."""
    lines = stderr.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])[:300]


def difference(expected: list[dict[str, Any]], received: list[dict[str, Any]]) -> str:
    """Return how the fits of a distributed script differ from those of the plain one; "": they do not."""
    if len(expected) != len(received):
        return f"{len(expected)} fits plain, {len(received)} distributed"
    for number, (one, other) in enumerate(zip(expected, received, strict=True), 1):
        if one["epochs"] != other["epochs"]:
            return f"fit {number}: {one['epochs']} epochs plain, {other['epochs']} distributed"
        if set(one["logs"]) != set(other["logs"]):
            return f"fit {number}: logs {sorted(one['logs'])} plain, {sorted(other['logs'])} distributed"
        for name in sorted(log for log in one["logs"] if log.endswith("loss")):
            loss, found = one["logs"][name], other["logs"][name]
            if math.isfinite(loss) and not math.isclose(loss, found, rel_tol=TOLERANCE, abs_tol=0.05):
                return f"fit {number}: {name} {loss:.4g} plain, {found:.4g} distributed"
    return ""
