"""``nfdt doctor``: report of installed parts, working parts, and remedies for the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import click

from nfdt.cli.options import format_option
from nfdt.core.host.packages import install

Verdict = Literal["ok", "optional", "missing"]
PROBE_TIMEOUT_S = 60
_TENSORFLOW_PROBE = """
import json
import tensorflow as tf
print(json.dumps([tf.__version__, [d.name for d in tf.config.list_physical_devices("GPU")]]))
"""
_JAX_PROBE = """
import jax
print(", ".join(f"{device.platform}:{device.id}" for device in jax.local_devices()))
"""
_HOROVOD_PROBE = """
import horovod.tensorflow as hvd
print(", ".join(name for name, built in (("gloo", hvd.gloo_built()), ("MPI", hvd.mpi_built())) if built))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``missing`` parts are required for training, ``optional`` ones only for some features."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(subject: str, verdict: Verdict, program: str, remedy: str, prefix: str = "") -> Finding | str:
    """Run a program in a process of its own, which a broken installation can abort.

    Returns:
        The last line that the program prints; if it fails, the finding with this verdict and remedy.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Finding(subject, verdict, f"its import took longer than {PROBE_TIMEOUT_S} s", "try again")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(subject, verdict, prefix + reason, remedy)
    return done.stdout.strip().splitlines()[-1]


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    for name in ("nfdt", "keras", "numpy", "grpcio", "protobuf"):
        version = _version(name)
        remedy = "" if version else f"pip install {name}"
        yield Finding(name, "ok" if version else "missing", version or "not installed", remedy)


def _tensorflow() -> Iterator[Finding]:
    remedy = f"{install('cpu')} (with GPUs {install('tensorflow')})"
    found = _probe("tensorflow", "missing", _TENSORFLOW_PROBE, remedy)
    if isinstance(found, Finding):
        yield found
        return
    version, gpus = json.loads(found)
    yield Finding("tensorflow", "ok", version)
    yield Finding("gpus", "ok" if gpus else "optional", ", ".join(gpus) or "none: workers use the cores")


def _jax() -> Finding:
    version, remedy = _version("jax"), install("jax")
    if version is None:
        return Finding("jax", "optional", "not installed: needed for scripts on JAX only", remedy)
    found = _probe("jax", "optional", _JAX_PROBE, remedy, f"{version} does not load: ")
    return found if isinstance(found, Finding) else Finding("jax", "ok", f"{version} with {found}")


def _machine() -> Iterator[Finding]:
    try:
        import psutil
    except ImportError:
        yield Finding("server", "optional", "without psutil", install("server"))
        return
    gibibytes = psutil.virtual_memory().total / 2**30
    yield Finding("cores", "ok", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    yield Finding("memory", "ok", f"{gibibytes:.1f} GiB; each worker needs about 0.5 GiB before the model")
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield Finding("loopback", "ok", f"could listen on port {listener.getsockname()[1]}")
    except OSError as error:
        yield Finding("loopback", "missing", str(error), "allow this user to listen on 127.0.0.1")


def _launchers() -> Iterator[Finding]:
    mpirun = shutil.which("mpirun")
    if mpirun:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S).stdout
        yield Finding("mpi", "ok", (said.splitlines() or [mpirun])[0])
    else:
        yield Finding(
            "mpi", "optional", "no mpirun: needed for 'nfdt mpi' only", "apt-get install openmpi-bin libopenmpi-dev"
        )
    slurm = shutil.which("srun")
    yield Finding("slurm", "ok" if slurm else "optional", slurm or "no srun")
    yield _horovod()


def _horovod() -> Finding:
    """Import Horovod's compiled extension; success shows that it exists and matches the installed TensorFlow."""
    version, remedy = _version("horovod"), "./scripts/install-horovod"
    if version is None:
        return Finding("horovod", "optional", "not installed: needed for hfdt and, on TensorFlow, allreduce", remedy)
    found = _probe("horovod", "optional", _HOROVOD_PROBE, remedy, f"{version} does not load: ")
    return found if isinstance(found, Finding) else Finding("horovod", "ok", f"{version} with {found}")


def examine() -> Iterator[Finding]:
    """Yield all findings about this machine and this Python, in the order of the report, as they are made."""
    yield from _packages()
    yield from _tensorflow()
    yield _jax()
    yield from _machine()
    yield from _launchers()


@click.command()
@format_option("How to print.")
def doctor(format_: str) -> None:
    """Say what works on this machine, and what to do about the rest (exit code 1 if training cannot work)."""
    findings = []
    if format_ == "text":
        click.echo(_line("subject", "verdict", "detail"))
    for finding in examine():
        findings.append(finding)
        if format_ == "text":
            detail = finding.detail + (f" -> {finding.remedy}" if finding.remedy else "")
            click.echo(_line(finding.subject, finding.verdict, detail))
    if format_ == "json":
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    sys.exit(any(finding.verdict == "missing" for finding in findings))


def _line(subject: str, verdict: str, detail: str) -> str:
    """Return a line of the report, whose columns have fixed widths because later lines are not known yet."""
    return f"{subject:<10}  {verdict:<8}  {detail}"
