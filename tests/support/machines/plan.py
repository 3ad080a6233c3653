"""Plan of a rig: what its keeper builds, and the command that enters a machine of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
NETWORK = "10.77.0.0/24"
PREFIX = "nfdt-rig-"
STATE = "rig.json"


class RigError(RuntimeError):
    """Failure to build, use or remove a rig."""


@dataclass(frozen=True)
class MachinePlan:
    """One machine, as wanted and, once ``holder`` is set, as built."""

    name: str
    address: str
    port: str
    rate_mbit: float | None = None
    cpus: float | None = None
    cgroup: str | None = None
    holder: int = 0


@dataclass(frozen=True)
class RigPlan:
    """All machines of a rig, the folder it owns, and the process that it must not outlive."""

    owner: int
    folder: str
    machines: tuple[MachinePlan, ...]
    private: tuple[str, ...] = field(default=())
    switch: int = 0

    @classmethod
    def parse(cls, text: str) -> RigPlan:
        """Read what :meth:`text` wrote."""
        values = json.loads(text)
        machines = tuple(MachinePlan(**machine) for machine in values.pop("machines"))
        return cls(**{**values, "machines": machines, "private": tuple(values["private"])})

    def text(self) -> str:
        """Write the plan as JSON."""
        return json.dumps(asdict(self))

    @property
    def own(self) -> Path:
        """Return the folder whose contents differ in each machine."""
        return Path(self.folder) / "own"

    @property
    def hosts(self) -> Path:
        """Return the file that each machine has as ``/etc/hosts``."""
        return Path(self.folder) / "hosts"


def namespace_of(pid: int) -> str:
    """Return the network namespace of a process, by the name that all its members share."""
    return os.readlink(f"/proc/{pid}/ns/net")


def entering(rig: RigPlan, machine: MachinePlan, command: Sequence[str | Path], cwd: str | Path) -> list[str]:
    """Return the command that runs ``command`` in a machine, as the same process from start to end."""
    inside = ["nsenter", f"--target={machine.holder}", "--net", "--uts", "--mount", "--ipc"]
    inside += ["--", "env", f"--chdir={cwd}", *map(str, command)]
    if machine.cgroup is None:
        return inside
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{machine.cgroup}/cgroup.procs", *inside]


def environment(rig: RigPlan, machine: MachinePlan, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process in a machine: those of ``base``, with the machine's own folders."""
    kept = {name: value for name, value in base.items() if not name.startswith("XDG_")}
    own = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    return {**kept, "HOSTNAME": machine.name, **{name: str(rig.own / folder) for name, folder in own.items()}}
