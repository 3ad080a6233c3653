"""Order in which slots of several machines are taken. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.pool_slot import PoolSlot

MachineId = tuple[str, str]
"""Boot identifier and host name: containers of one machine have host names of their own."""


def machine_of(hello: pb.SlotHello) -> MachineId:
    """Return the machine of a slot."""
    return hello.boot_id, hello.host


def spread_over_machines(slots: Iterable[PoolSlot], is_here: Callable[[pb.SlotHello], bool]) -> list[PoolSlot]:
    """Return slots in the order in which shards take them: each machine once, then each again.

    Every machine with shards adds its link to the job. The server's own machine is last, as its link carries the
    tasks and the data as well.
    """
    used: Counter[MachineId] = Counter()
    keyed = []
    for slot in slots:
        machine = machine_of(slot.hello)
        keyed.append((is_here(slot.hello), used[machine], slot))
        used[machine] += 1
    return [slot for _, _, slot in sorted(keyed, key=lambda entry: entry[:2])]
