"""Election of the leader of an elastic ring, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.core.errors import JobFailed


@dataclass(frozen=True)
class Candidate:
    """State of one rank at a rendezvous.

    Attributes:
        number: Number of the rank for the lifetime of its process; -1 before it is assigned.
        commit: Number of its last commit; -1 without one.
        job: Identifier of its job; "" for none.
        reaches_server: Whether it can reach the job server.
        leads: Whether it is the current leader.
    """

    number: int
    commit: int
    job: str
    reaches_server: bool
    leads: bool


def elect(candidates: Sequence[Candidate]) -> int:
    """Return the new leader: the current leader, else the rank with the newest commit, else the lowest.

    Raises:
        JobFailed: no rank can reach the job server.
    """
    able = [rank for rank, candidate in enumerate(candidates) if candidate.reaches_server]
    if not able:
        raise JobFailed(
            "The rank that spoke for the ring is gone, and no other rank can reach the job server: they are on other "
            "machines, or the script itself was that rank. Submit the job again."
        )
    return max(able, key=lambda rank: (candidates[rank].leads, candidates[rank].commit, -rank))


def assign_numbers(candidates: Sequence[Candidate], used: Sequence[int]) -> list[int]:
    """Return a number for every rank: its own, or a previously unused one."""
    following = max([-1, *used, *(c.number for c in candidates)]) + 1
    numbers = []
    for candidate in candidates:
        numbers.append(candidate.number if candidate.number >= 0 else following)
        following += candidate.number < 0
    return numbers
