"""``nfdt submit --slurm``: the batch script that it writes, what it refuses, and the examples beside it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nfdt.cli import cli
from nfdt.cli.submit import SlurmJob, batch_script
from nfdt.core.errors import UsageError
from tests.support.command_lines import command_of

ROOT = Path(__file__).parents[2]
HPC = sorted((ROOT / "examples" / "hpc").iterdir())


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print(1)")
    return path


def submit(*arguments, path="/nowhere"):
    return CliRunner(env={"PATH": path}).invoke(cli, ["submit", *map(str, arguments)])


def check_syntax(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def parsed(words):
    """Return the parameters that a command of our own receives; ``words`` begin with ``nfdt`` or its full path."""
    assert Path(words[0]).name in ("nfdt", "hfdt")
    command = command_of(cli, words[1])
    return command.make_context(words[1], list(words[2:]), resilient_parsing=False).params


def test_the_batch_script_starts_the_ranks_with_all_arguments(script):
    options = ["--nodes", 2, "--ntasks-per-node", 4, "--time", "01:00:00", "--sbatch=--mem=8G"]
    got = submit(
        "--slurm",
        "--dry-run",
        *options,
        "--algorithm",
        "asgd",
        "--set",
        "overlap=1",
        "--insecure-allreduce",
        script,
        "--data",
        "a b",
    )
    assert got.exit_code == 0, got.output
    check_syntax(got.output)
    lines = got.output.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("--nodes=2", "--ntasks-per-node=4", "--time=01:00:00", "--mem=8G", "--job-name=train"):
        assert f"#SBATCH {option}" in lines
    (srun,) = [shlex.split(line) for line in lines if line.startswith("srun ")]
    command = srun[[Path(word).name for word in srun].index("nfdt") :]
    params = parsed(command)
    assert (params["algorithm"], params["settings"]) == ("asgd", {"overlap": "1"})
    assert params["insecure_allreduce"]
    assert (params["script"].name, params["script"].args) == (str(script), ("--data", "a b"))


def test_a_module_is_submitted_as_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "train.py").write_text("")
    printed = submit("--slurm", "--dry-run", "-m", "own_package.train", "x").output
    (srun,) = [line for line in printed.splitlines() if "srun" in line]
    assert srun.endswith(" -m own_package.train x")


def test_a_job_that_is_queued_again_does_so_after_sigterm_only():
    text = batch_script(SlurmJob(["true"], "x", requeue_s=90))
    assert "#SBATCH --signal=TERM@90" in text
    assert "#SBATCH --requeue" in text
    for code, requeued in ((143, True), (0, False), (1, False)):
        shell = f'srun() {{ return {code}; }}; scontrol() {{ echo "$@"; }}; sleep() {{ :; }}; SLURM_JOB_ID=7\n{text}'
        done = subprocess.run(["bash"], input=shell, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert done.stdout == ("requeue 7\n" if requeued else "")
    assert "requeue" not in batch_script(SlurmJob(["true"], "x"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SCRIPT"], "Expected: --slurm"),
        (["--slurm", "--ntasks-per-node", "1", "SCRIPT"], "Expected: 2 tasks or more. Received: 1"),
        (["--slurm", "--sbatch", "mem", "SCRIPT"], "as --mem=8G. Received: 'mem'"),
        (["--slurm", "SCRIPT"], "expected the command sbatch in PATH. Received: none"),
    ],
)
def test_what_cannot_be_submitted_is_refused(script, arguments, message):
    got = submit(*(str(script) if word == "SCRIPT" else word for word in arguments))
    assert got.exit_code == 2
    assert message in got.output


def test_the_reason_of_sbatch_is_passed_on(script, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    sbatch.chmod(0o700)
    got = submit("--slurm", script, path=f"{tmp_path}:/usr/bin:/bin")
    assert got.exit_code == 3
    assert "invalid partition" in got.output


@pytest.mark.parametrize("name", ["a\nb", "x"])
def test_an_option_of_sbatch_is_one_line(name):
    with pytest.raises(UsageError):
        SlurmJob(["true"], "x", options=[f"{name}"])


@pytest.mark.parametrize("example", HPC, ids=lambda path: path.name)
def test_the_commands_of_the_example_are_ours(example, script):
    text = example.read_text()
    check_syntax(text)
    lines = [line for line in text.splitlines() if line.startswith(("srun ", "mpirun "))]
    assert lines
    for line in lines:
        words = shlex.split(line.replace('"$@"', f"{script} --epochs 10").replace("$SCRIPT", f"{script} --epochs 10"))
        at = [word in ("nfdt", "hfdt") for word in words].index(True)
        if words[at] == "nfdt":
            assert parsed(words[at:])["script"].args == ("--epochs", "10")


def test_the_command_is_that_of_this_python(script):
    (srun,) = [line for line in submit("--slurm", "--dry-run", script).output.splitlines() if line.startswith("srun")]
    assert str(Path(sys.executable).parent) in srun
    assert isinstance(cli, click.Group)
