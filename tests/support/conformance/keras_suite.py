"""Keras' own tests of ``fit`` and of callbacks, from the installed package or a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tests.support.conformance.outcome_file import read_outcomes
from tests.support.conformance.verdicts import Outcome, Row, judge

PLUGIN = "tests.support.conformance.session_plugin"
SUITES = {"fit": (["src/trainers/trainer_test.py"], "fit"), "callbacks": (["src/callbacks"], "")}
DEADLINE_S = 3600


def installed() -> Path:
    """Return the folder of the installed Keras."""
    spec = find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def run(suite: str, keras: Path, workers: int, packages: Path, options: Mapping[str, str]) -> list[Row]:
    """Run the tests of a suite plain and with workers.

    Args:
        suite: A key of ``SUITES``.
        keras: Folder of the package ``keras``.
        workers: Number of workers.
        packages: Folder with packages that only these tests import.
        options: Further options of the sessions.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CONFORMANCE_OPTIONS": json.dumps(dict(options))}
        plain, distributed = (
            _outcomes(suite, keras, n, packages, {**variables, "CONFORMANCE_OUT": f"{folder}/{n}.jsonl"})
            for n in (0, workers)
        )
    return judge(plain, distributed)


def _outcomes(
    suite: str, keras: Path, workers: int, packages: Path, variables: Mapping[str, str]
) -> dict[str, Outcome]:
    files, expression = SUITES[suite]
    out = Path(variables["CONFORMANCE_OUT"])
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN),
        *("-c", os.devnull, "--rootdir", str(keras), "--import-mode", "importlib", "-k", expression),
        *(str(keras / file) for file in files),
    ]
    found = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        **variables,
        "CONFORMANCE_WORKERS": str(workers),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), found, str(packages)])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd=out.parent)
    if not out.exists():
        raise RuntimeError(f"Tests of {suite}: expected outcomes. Received none:\n{done.stdout[-3000:]}")
    return read_outcomes(out)
