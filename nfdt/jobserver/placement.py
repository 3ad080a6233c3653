"""Choice among the slots of several machines, for shards and for the ranks of rings. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

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


def place_groups(free: Sequence[PoolSlot], groups: Sequence[Sequence[int]], *, together: bool) -> dict[int, PoolSlot]:
    """Return a slot for each member of the groups, with each group on as few machines as possible; empty if impossible.

    A group takes the machine with the fewest slots that suffice; else machine by machine, the largest first.

    Args:
        free: Slots to choose from.
        groups: Numbers of the members.
        together: Whether each group must be on one machine.
    """
    queues = _by_machine(free)
    placed: dict[int, PoolSlot] = {}
    for members in sorted(groups, key=len, reverse=True):
        sizes = sorted((len(queue), machine) for machine, queue in queues.items())
        suffices = [machine for size, machine in sizes if size >= len(members)]
        machines = suffices[:1] or ([] if together else [machine for _, machine in reversed(sizes)])
        slots = [slot for machine in machines for slot in queues[machine]][: len(members)]
        if len(slots) < len(members):
            return {}
        for member, slot in zip(members, slots, strict=True):
            queues[machine_of(slot.hello)].remove(slot)
            placed[member] = slot
    return placed


def returning_slots(
    free: Sequence[PoolSlot], members: Sequence[int], machines: Mapping[int, MachineId], *, elsewhere: bool
) -> list[PoolSlot]:
    """Return a slot for each member of a group on the member's machine; empty if one has none.

    Args:
        free: Slots to choose from.
        members: The members, in order.
        machines: Machine of each member.
        elsewhere: Whether a member whose machine has no free slot may take one of another machine.
    """
    chosen = free_seats(free, members, machines, elsewhere=elsewhere)
    return [chosen[member] for member in members] if len(chosen) == len(members) else []


def free_seats(
    free: Sequence[PoolSlot], members: Sequence[int], machines: Mapping[int, MachineId], *, elsewhere: bool
) -> dict[int, PoolSlot]:
    """Return a slot for each member that can have one, its own machine before others; see :func:`returning_slots`."""
    queues = _by_machine(free)
    chosen = {member: queues[machines[member]].popleft() for member in members if queues.get(machines[member])}
    left = deque(slot for queue in queues.values() for slot in queue)
    for member in members if elsewhere else ():
        if member not in chosen and left:
            chosen[member] = left.popleft()
    return chosen


def _by_machine(slots: Sequence[PoolSlot]) -> dict[MachineId, deque[PoolSlot]]:
    queues: dict[MachineId, deque[PoolSlot]] = {}
    for slot in slots:
        queues.setdefault(machine_of(slot.hello), deque()).append(slot)
    return queues
