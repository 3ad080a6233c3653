"""Options, arguments and environment of slot processes: values in, values out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE
from nfdt.core.jobs.launcher import Role
from nfdt.core.work.slot_connection import GRACE_S, PATIENCE_S
from nfdt.launch.fork_client import SLOT_MODULE

_SHARED_GPUS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX leaves unused GPU memory to other processes

SLOT = (sys.executable, "-P", "-m", SLOT_MODULE)  # -P: no file of the user shadows our modules


@dataclass(frozen=True)
class SlotOptions:
    """Options for starting slots.

    Attributes:
        server: ``host:port`` at which the slots register.
        token: Secret, passed through the environment, never through argv.
        logs: Directory of the slots' standard error; made with mode 0700.
        prefix: Prefix of the slots' names.
        host: Address of this machine at which others reach the slots; shards listen on it.
        tls: PEM files: ``ca_file`` with certificates to trust, if the server uses TLS, and ``cert_file`` and
            ``key_file`` to present to a server that asks for certificates.
        gpus: ``CUDA_VISIBLE_DEVICES`` of worker i is ``gpus[i % len(gpus)]``; empty: as inherited.
        wait_s: Seconds for which a slot retries a server that does not answer.
        grace_s: Seconds from the request to end a slot until its process ends in any case.
        backend: Backend of Keras in worker slots; shards run on TensorFlow.
        command: Command line; tests give another one. Slots with another command line, or with GPUs, are not forked.
        environment: Variables that are added to the inherited ones.
        kept_logs: Folder to which the log of a failed slot is copied, if ``logs`` does not outlive the job.
    """

    server: str
    token: str = field(repr=False)
    logs: Path
    prefix: str = ""
    host: str = "127.0.0.1"
    tls: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    wait_s: float = PATIENCE_S
    grace_s: float = GRACE_S
    backend: str = TENSORFLOW
    command: Sequence[str] = SLOT
    environment: Mapping[str, str] = field(default_factory=dict)
    kept_logs: Path | None = None


def slot_arguments(options: SlotOptions, role: Role, name: str) -> list[str]:
    """Return the arguments of one slot, without secrets."""
    argv = ["--server", options.server, "--role", role, "--name", name, "--host", options.host, "--watch-stdin"]
    if options.wait_s != PATIENCE_S:
        argv += ["--wait", str(options.wait_s)]
    if options.grace_s != GRACE_S:
        argv += ["--grace", str(options.grace_s)]
    for name, file in options.tls.items():
        argv += [f"--{name.replace('_', '-')}", file]
    return argv


def shared_environment(options: SlotOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all slots share, without secrets."""
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **inherited, VARIABLE: TENSORFLOW, **options.environment}


def slot_environment(options: SlotOptions, role: Role, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one slot."""
    chosen = {**inherited, "NFDT_TOKEN": options.token}
    if role == "worker" and options.gpus:
        chosen["CUDA_VISIBLE_DEVICES"] = options.gpus[index % len(options.gpus)]
    shared = shared_environment(options, chosen)
    return {**_SHARED_GPUS, **shared, VARIABLE: options.backend} if role == "worker" else shared
