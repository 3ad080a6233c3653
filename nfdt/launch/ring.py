"""Allreduce rings as their job sees them, whatever starts the ranks, and the places of ranks on machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from nfdt.core.errors import NfdtError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.horovod_log import RingStall

RANK_TIMEOUT_S = 60  # time for all ranks to join, and until the others notice a machine that is cut off


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank among all ranks, among those of its machine, and among the machines.

    Attributes:
        rank: Number of the rank.
        size: Number of ranks.
        local_rank: Number among the ranks of its machine.
        local_size: Number of ranks of its machine.
        cross_rank: Number of its machine among those that have a rank of this local rank.
        cross_size: Number of these machines.
        machine: Number of its machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    machine: int

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables from which Horovod takes the place, and those of the ring.

        The name of a host only separates the machines: Horovod connects to addresses from the rendezvous.
        """
        numbers = {name.upper(): number for name, number in asdict(self).items() if name != "machine"}
        gloo = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_TIMEOUT_SECONDS": RANK_TIMEOUT_S}
        place = {**numbers, "HOSTNAME": f"machine-{self.machine}", **gloo}
        return {**{f"HOROVOD_{name}": str(value) for name, value in place.items()}, **variables}


def place_ranks(machines: Sequence[Hashable]) -> list[RankPlace]:
    """Return the place of every rank.

    Args:
        machines: Machine of each rank, by rank.
    """
    sizes = Counter(machines)
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    seen: Counter[Hashable] = Counter()
    places = []
    for rank, machine in enumerate(machines):
        local = seen[machine]
        seen[machine] += 1
        # Horovod counts as cross ranks only the machines that have a rank of the same local rank.
        across = [other for other in numbers if sizes[other] > local]
        place = RankPlace(
            rank, len(machines), local, sizes[machine], across.index(machine), len(across), numbers[machine]
        )
        places.append(place)
    return places


class Ring(Protocol):
    """Ring whose rank 0 registers slots under the ring's name.

    Attributes:
        name: Name of the ring, in the hello of rank 0's slots.
        shape: Shape of the ring.
    """

    name: str
    shape: RingShape

    @property
    def origin(self) -> str:
        """Description of what started the ranks, for logs and error messages."""
        ...

    @property
    def log(self) -> Path | str:
        """Where the output of the ranks is, for error messages."""
        ...

    @property
    def awaited_slots(self) -> int:
        """Number of worker slots that the ring still waits for; 0 when it has them or needs none."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason of the ring's end; None while it runs."""
        ...

    def why(self) -> NfdtError | None:
        """Return the reason of the ring's end, after waiting for it; None if it still runs."""
        ...

    def report(self) -> dict[str, Any] | None:
        """Return the fields of the :class:`SlotFailed` of the first failed rank, if one has reported."""
        ...

    def messages(self) -> tuple[list[RingStall], list[str]]:
        """Return Horovod's stall warnings and the ring's messages since the last call."""
        ...


class RingMaker(ABC):
    """Maker of the rings of one job; the defaults are those of rings that a launcher on the server's machine starts.

    Attributes:
        in_slots: Whether ranks are worker slots of the job; then flat workers must leave theirs first.
        spans_machines: Whether a ring may have ranks on several machines.
    """

    in_slots = False
    spans_machines = True

    @property
    def machines(self) -> tuple[str, ...]:
        """Name of each worker's machine, by the worker's number; empty: one machine, or not placed yet."""
        return ()

    def place(self, groups: Sequence[Sequence[int]], *, together: bool) -> bool:
        """Find machines for all workers of the job, once; return whether they are found.

        Args:
            groups: Numbers of the workers that form one ring.
            together: Whether each ring must be on one machine.

        Raises:
            PolicyRefused: The rings would span machines, which this server does not allow.
        """
        return True

    def adopt(self, slots: Mapping[int, pb.SlotHello]) -> None:  # noqa: B027
        """Reserve the slots of the job's flat workers, by the worker's number, for its rings."""

    def reachable(self, members: Sequence[int], *, elsewhere: bool = False) -> tuple[int, ...]:
        """Return those of the waiting members whose machines have a free slot.

        ``elsewhere``: also those that a free slot of another machine can have, if rings may span machines; that
        machine is theirs from then on.
        """
        return ()

    @abstractmethod
    def claim(self, shape: RingShape) -> Ring:
        """Return a ring of this shape, which starts in the background; the job's own one if it has one."""

    @abstractmethod
    def end(self, rings: Sequence[Ring]) -> None:
        """End these rings in the background; their slots have been dismissed."""

    @abstractmethod
    def release(self, *, usable: bool) -> None:
        """Release the rings of the job at its end; ``usable``: their ranks can serve another job."""
