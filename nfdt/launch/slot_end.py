"""Description of the end of a slot process."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

MOST_KEPT = 50

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
    """

    returncode: int
    log: Path

    def __str__(self) -> str:
        return f"its process {self._what()}; log: {self.log}"

    def _what(self) -> str:
        if self.returncode >= 0:
            return f"exited with code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal
            name = f"signal {-self.returncode}"
        cause = f" ({_CAUSES[name]})" if name in _CAUSES else ""
        return f"was ended by {name}{cause}"


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
