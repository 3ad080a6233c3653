"""Examples: each runs with the command in its first lines, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import environment, start_server, start_workers, stop

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEADLINE_S = 240

# The last line that each example prints, and the least value that it must reach.
REACHES = {
    "callbacks": (r"best validation accuracy: ([\d.]+)", 0.85),
    "custom_train_step": (r"training accuracy: ([\d.]+)", 0.85),
    "digits": (r"test accuracy: ([\d.]+)", 0.90),
    "digits_decorated": (r"test accuracy: ([\d.]+)", 0.90),
    "functional": (r"validation accuracy of digit: ([\d.]+)", 0.75),
    "generator_data": (r"accuracy on unshifted digits: ([\d.]+)", 0.70),
    "mlflow_callback": (r"recorded accuracy: ([\d.]+)", 0.85),
    "wandb_offline": (r"recorded accuracy: ([\d.]+)", 0.85),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Provide a server that the unmodified examples share: its two workers are started once."""
    cluster = start_server(tmp_path_factory.mktemp("examples"), "--allow-code")
    workers = start_workers(cluster, 2)
    yield cluster.env()
    stop(workers, cluster.process)


def imports(example: Path) -> list[str]:
    """Return the packages that an example imports."""
    return re.findall(r"^(?:from|import) (\w+)", example.read_text(), re.MULTILINE)


def command_of(example: Path) -> list[str]:
    """Return the command of an example: Python for decorated ones, with their own cluster; else ``nfdt run``."""
    if "nfdt" in imports(example):
        return [sys.executable, str(example)]
    return [sys.executable, "-m", "nfdt.cli", "run", "--workers", "2", str(example)]


def test_every_example_is_run():
    assert {example.stem for example in EXAMPLES} == set(REACHES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_trains_on_two_workers(example, server, tmp_path):
    decorated = "nfdt" in imports(example)
    pattern, least = REACHES[example.stem]
    done = subprocess.run(
        command_of(example),
        cwd=tmp_path,  # where recorders write
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(WANDB_MODE="offline", **({} if decorated else server)),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(pattern, done.stdout)
    assert found, done.stdout[-2000:]
    assert float(found[1]) >= least
    assert "worker-0" in done.stdout + done.stderr
    assert "worker-1" in done.stdout + done.stderr
