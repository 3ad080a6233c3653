"""Description of the end of a slot process."""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.work.slot_connection import REGISTERED

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
            head = file.read(LOG_BYTES)
            file.seek(max(file.tell(), file.seek(0, 2) - LOG_BYTES))
            return (head + file.read()).decode(errors="replace")
    except OSError:
        return ""


def keep(log: Path, folder: Path) -> Path:
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
