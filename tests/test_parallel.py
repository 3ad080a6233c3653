"""Start of the tests that need several ranks, with each launcher, and behaviour without Horovod."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import MPIRUN, rank_environment

ROOT = Path(__file__).parents[1]
DEADLINE_S = 570
WITHOUT_HOROVOD = "import sys; sys.modules['horovod'] = None; import hfdt.keras as hvd\n"

pytestmark = pytest.mark.timeout(600)

HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interfaces", "lo"]


def run_ranks(launcher: list[str], ranks: int, *program: str) -> str:
    """Run ranks and return their output; fail with the output if one of them fails."""
    done = subprocess.run(
        [*launcher, "-np", str(ranks), sys.executable, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=rank_environment(),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-12000:]
    return done.stdout


def run_tests(launcher: list[str], ranks: int, *arguments: str) -> None:
    output = run_ranks(launcher, ranks, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments)
    assert len(re.findall(r"\d+ passed", output)) == ranks, output


@pytest.mark.horovod
@pytest.mark.mpi
def test_training_holds_on_two_ranks_under_mpirun():
    run_tests(MPIRUN, 2, *(f"tests/parallel/test_{name}.py" for name in ("equals_keras", "collectives", "ring_job")))


@pytest.mark.horovod
@pytest.mark.mpi
@pytest.mark.long
def test_everything_holds_on_two_ranks_under_mpirun():
    run_tests(MPIRUN, 2, "tests/parallel")


@pytest.mark.horovod
@pytest.mark.long
def test_training_holds_on_two_ranks_under_horovodrun():
    run_tests(HOROVODRUN, 2, "tests/parallel/test_equals_keras.py", "tests/parallel/test_collectives.py")


@pytest.mark.horovod
@pytest.mark.mpi
@pytest.mark.long
def test_training_holds_on_four_ranks_under_mpirun():
    run_tests(MPIRUN, 4, *(f"tests/parallel/test_{name}.py" for name in ("equals_keras", "adasum", "as_horovod")))


@pytest.mark.horovod
@pytest.mark.mpi
def test_a_horovod_script_trains_with_its_import_changed(tmp_path):
    output = run_ranks(MPIRUN, 2, "examples/horovod/digits.py", str(tmp_path))
    accuracies = dict(re.findall(r"rank (\d) test accuracy: ([\d.]+)", output))
    assert set(accuracies) == {"0", "1"}
    assert len(set(accuracies.values())) == 1, "the ranks hold different weights"
    assert float(accuracies["0"]) > 0.9
    assert (tmp_path / "checkpoint.keras").exists()


@pytest.mark.horovod
def test_one_process_is_a_world_of_one():
    program = """
import keras, numpy as np, hfdt.keras as hvd
hvd.init()
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=callbacks)
print(hvd.rank(), hvd.size())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "0 1", done.stderr


@pytest.mark.processes
def test_without_horovod_one_clear_error_names_the_remedy():
    calls = ["hvd.init()", "hvd.DistributedOptimizer('sgd')", "hvd.Average", "hvd.allreduce(1.0)"]
    program = WITHOUT_HOROVOD + "".join(
        f"try:\n    {call}\nexcept ImportError as error:\n    print('asked:', error)\n" for call in calls
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    answers = done.stdout.split("asked:")[1:]
    assert len(answers) == len(calls), done.stderr
    assert all("./scripts/install-horovod" in answer for answer in answers)
