"""Options, arguments and environment of slot processes, and the reasons for their ends."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE
from nfdt.core.jobs.runner import Role
from nfdt.core.work.slot_connection import GRACE_S, PATIENCE_S, REGISTERED
from nfdt.launch.fork_client import SLOT_MODULE

_SHARED_GPUS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX leaves unused GPU memory to other processes

SLOT = (sys.executable, "-P", "-m", SLOT_MODULE)  # -P: no file of the user shadows our modules
MOST_KEPT = 50
LOG_BYTES = 2**20  # most that is read of a log
REASON_LENGTH = 1000
_LOG_PREFIX = re.compile(r"^\S+ \S+ (ERROR|CRITICAL) [\w.]+ ")

_CAUSES = {
    "SIGKILL": "usually the kernel's out-of-memory killer: the machine had too little memory",
    "SIGSEGV": "a crash in native code, as of TensorFlow or a driver",
    "SIGABRT": "a failed check in native code, as of TensorFlow or a driver",
    "SIGBUS": "often a full /dev/shm or a full disk",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "somebody or the batch system ended it",
    "SIGHUP": "its terminal was closed",
    "SIGXCPU": "it used up its limit of processor time",
}


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
            ``key_file`` to present to a server that asks for certificates; ``insecure``: True to do without.
        gpus: ``CUDA_VISIBLE_DEVICES`` of worker i is ``gpus[i % len(gpus)]``; empty: as inherited.
        wait_s: Seconds for which a slot retries a server that does not answer.
        grace_s: Seconds from the request to end a slot until its process ends in any case.
        backend: Backend of Keras in worker slots; shards run on TensorFlow.
        command: Command line; tests give another one. Slots with another command line, or with GPUs, are not forked.
        environment: Variables that are added to the inherited ones.
        kept_logs: Folder to which the log of a failed slot is copied, if ``logs`` does not outlive the job.
        code_user: Whose rights the code of jobs has, see :func:`nfdt.core.host.code_user.choose_code_user`.
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
    code_user: str = ""


def slot_arguments(options: SlotOptions, role: Role, name: str) -> list[str]:
    """Return the arguments of one slot, without secrets."""
    argv = ["--server", options.server, "--role", role, "--name", name, "--host", options.host, "--watch-stdin"]
    if options.wait_s != PATIENCE_S:
        argv += ["--wait", str(options.wait_s)]
    if options.grace_s != GRACE_S:
        argv += ["--grace", str(options.grace_s)]
    for name, value in options.tls.items():
        argv += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
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


@dataclass(frozen=True)
class SlotEnd:
    """End of one slot process.

    Attributes:
        returncode: Exit code as in ``subprocess.Popen``: negative for a signal.
        log: File with its standard error.
        reason: Last line of that file if the process failed by itself; "" otherwise.
        registered: Whether the process had registered at its server.
    """

    returncode: int
    log: Path
    reason: str = ""
    registered: bool = False

    @classmethod
    def read(cls, returncode: int, log: Path) -> SlotEnd:
        """Return the end of a process with the reason from its log."""
        text = _text_of(log)
        lines = text.strip().splitlines()
        reason = _LOG_PREFIX.sub("", lines[-1])[:REASON_LENGTH] if lines and returncode > 0 else ""
        return cls(returncode, log, reason, REGISTERED in text)

    @property
    def killed(self) -> bool:
        """Whether it was killed by SIGKILL, as by the kernel where memory is short."""
        return self.returncode == -signal.SIGKILL

    def __str__(self) -> str:
        reason = f": {self.reason.rstrip('.')}" if self.reason else ""
        return f"its process {self._what()}{reason}; log: {self.log}"

    def _what(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal
            name = f"signal {-self.returncode}"
        cause = f" ({_CAUSES[name]})" if name in _CAUSES else ""
        return f"was ended by {name}{cause}"


def _text_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            # The head shows whether the slot registered, the tail why it ended.
            head = file.read(LOG_BYTES)
            file.seek(max(file.tell(), file.seek(0, 2) - LOG_BYTES))
            return (head + file.read()).decode(errors="replace")
    except OSError:
        return ""


def keep_log(log: Path, folder: Path) -> Path:
    """Copy a log to a permanent folder of the newest logs; return the copy's path, or the log's if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = Path(shutil.copy2(log, folder))
        others = sorted(folder.glob(f"{log.name.partition('-')[0]}-*.log"), key=lambda path: path.stat().st_mtime)
        for old in others[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return log
    return kept
