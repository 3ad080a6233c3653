"""Who speaks for an elastic ring: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.core.errors import JobFailed


@dataclass(frozen=True)
class Candidate:
    """What one rank tells the others when they meet.

    Attributes:
        number: Its own for as long as the process lives; -1 before it has one.
        commit: How often it has copied its state; -1 for a rank that has none.
        job: The job it has built; "" for none.
        attends: Whether it can reach the job server.
        leads: Whether it is the one that does.
    """

    number: int
    commit: int
    job: str
    attends: bool
    leads: bool


def elect(candidates: Sequence[Candidate]) -> int:
    """The rank that leads: who does already, else who has the newest copy of the state, else the lowest.

    Raises:
        JobFailed: no rank can reach the job server.
    """
    able = [rank for rank, candidate in enumerate(candidates) if candidate.attends]
    if not able:
        raise JobFailed(
            "The rank that spoke for the ring is gone, and no other rank can reach the job server: they are on other "
            "machines, or the script itself was that rank. Submit the job again."
        )
    return max(able, key=lambda rank: (candidates[rank].leads, candidates[rank].commit, -rank))


def assign_numbers(candidates: Sequence[Candidate], used: Sequence[int]) -> list[int]:
    """A number for every rank: its own, or one that nobody had before."""
    following = max([-1, *used, *(c.number for c in candidates)]) + 1
    numbers = []
    for candidate in candidates:
        numbers.append(candidate.number if candidate.number >= 0 else following)
        following += candidate.number < 0
    return numbers
