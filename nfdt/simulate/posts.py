"""The machines behind one worker of the coordinator, and how they divide its tasks."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.simulate.machines import Machine


@dataclass(frozen=True)
class Share:
    """Division of a task among the machines of a worker.

    Attributes:
        rows: Rows of a full step per machine; the rows of a task are split in this proportion.
        rate: Factor of the learning rate; None: that of the job.
        local_steps: Steps between two pushes of a group that pushes differences.
    """

    rows: tuple[int, ...]
    rate: float | None = None
    local_steps: int = 1


@dataclass(frozen=True)
class MachineGroup:
    """The machines of one worker.

    Attributes:
        machines: The machines, at least one.
        inside_s: Seconds to average a gradient among them.
    """

    machines: tuple[Machine, ...]
    inside_s: float = 0.0


@dataclass
class Post:
    """The machines and the share of one worker of the coordinator.

    Attributes:
        group: Its machines.
        share: Division of a task among the machines; changes between epochs.
        worker: Name of its current worker, or of its last one.
    """

    group: MachineGroup
    share: Share
    worker: str = ""

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of its machines."""
        return tuple(machine.number for machine in self.group.machines)
