"""Places of ranks on machines, and the environment that makes a process such a rank: values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

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

    def environment(self, tuning: Mapping[str, str]) -> dict[str, str]:
        """Return the variables from which Horovod takes the place, and those of its tuning.

        The name of a host only separates the machines: Horovod connects to addresses from the rendezvous.
        """
        place = {
            "RANK": self.rank,
            "SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": self.local_size,
            "CROSS_RANK": self.cross_rank,
            "CROSS_SIZE": self.cross_size,
            "HOSTNAME": f"machine-{self.machine}",
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
            "GLOO_TIMEOUT_SECONDS": RANK_TIMEOUT_S,
        }
        return {**{f"HOROVOD_{name}": str(value) for name, value in place.items()}, **tuning}


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
        across = [other for other in numbers if sizes[other] > local]
        place = RankPlace(
            rank, len(machines), local, sizes[machine], across.index(machine), len(across), numbers[machine]
        )
        places.append(place)
    return places
