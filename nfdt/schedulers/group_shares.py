"""Shares of groups: rows per member, and a learning-rate factor.

We define all of this; see docs/algorithms/group-sync.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nfdt.core.work.member_rows import row_unit
from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.grouping import Groups
from nfdt.schedulers.proportions import equal_time_split, proportional_split
from nfdt.schedulers.throughput import StepTime


@dataclass(frozen=True)
class GroupShare:
    """One group's share of the job.

    Attributes:
        members: Workers of the group.
        rows: Rows of one step per member, in the order of ``members``; their sum is the group's local batch.
        step_s: Predicted seconds of a step, those of the slowest member.
        staleness: Predicted updates of the other groups during one step.
        rate: Factor of the learning rate for this group's updates.
    """

    members: tuple[int, ...]
    rows: tuple[int, ...]
    step_s: float
    staleness: float
    rate: float

    @property
    def batch(self) -> int:
        """Number of rows in the group's step."""
        return sum(self.rows)


class FixedSizes(LocalSizes):
    """Batch sizes that are set from outside, such as those of groups, and do not follow measured speeds."""

    def __init__(self, reference: int) -> None:
        super().__init__(reference)
        self._present: set[str] = set()

    def state(self, sizes: Mapping[str, int]) -> None:
        """Set the sizes from now on."""
        self._sizes = dict(sizes)

    def joined(self, worker: str) -> None:
        """Add a worker."""
        self._present.add(worker)

    def left(self, worker: str) -> None:
        """Remove a worker; the sizes of the others stay."""
        self._present.discard(worker)

    def split(self, total: int) -> list[tuple[str, int]]:
        """Divide a round of ``total`` samples by the sizes: (worker, samples), without workers that get none."""
        workers = sorted(self._present)
        shares = proportional_split(total, [float(self.of(worker)) for worker in workers])
        return [(worker, count) for worker, count in zip(workers, shares, strict=True) if count]


def share_out(
    groups: Groups,
    times: Mapping[int, StepTime],
    local_batch: int,
    *,
    proportional: bool,
    least: int = 1,
    most: int | None = None,
) -> tuple[GroupShare, ...]:
    """Return rows and rates of every group.

    With M members in all and B = M * ``local_batch`` rows to divide::

        B_g   = B * r_g / sum r              r_g rows per second of the group; fixed: |g| * local_batch
        b_i   = (T_g - alpha_i) / beta_i     equal finish, T_g = (B_g + sum alpha_i / beta_i) / sum 1 / beta_i
        tau_g = T_g * sum_{h != g} 1 / T_h   psi_g = min(1, G / (1 + tau_g))
        rate  = psi_g * G * B_g / B          their mean is 1 if every psi is 1

    Rows that follow speed are multiples of :func:`row_unit`, so that steps, which JAX compiles for each number of rows,
    are compiled for few of them.

    Args:
        groups: Members of each group.
        times: Step time of every member.
        local_batch: Reference batch of one worker, in rows.
        proportional: Whether rows follow speed; otherwise every member gets ``local_batch``.
        least: Minimum number of rows of one member, if they follow speed.
        most: Maximum number of rows of one member; None for no bound.
    """
    total = local_batch * sum(map(len, groups))
    rows = [[local_batch] * len(group) for group in groups]
    if proportional:
        rows = _rows(groups, times, local_batch, least, most)
    seconds = [
        max(times[member].seconds(count) for member, count in zip(group, counts, strict=True))
        for group, counts in zip(groups, rows, strict=True)
    ]
    staleness = [own * sum(1 / s for s in seconds) - 1 for own in seconds]
    scale = len(groups) / total
    return tuple(
        GroupShare(group, tuple(counts), own, tau, min(1.0, len(groups) / (1 + tau)) * scale * sum(counts))
        for group, counts, own, tau in zip(groups, rows, seconds, staleness, strict=True)
    )


def _rows(
    groups: Groups, times: Mapping[int, StepTime], local_batch: int, least: int, most: int | None
) -> list[list[int]]:
    members = [member for group in groups for member in group]
    rates = [times[member].samples_per_s(local_batch) for member in members]
    unit = row_unit(local_batch, *(bound for bound in (least, most) if bound and bound > 1))
    split = proportional_split(local_batch * len(members), rates, least=least, most=most, unit=unit)
    own = dict(zip(members, split, strict=True))
    return [
        equal_time_split(sum(own[m] for m in group), [times[m] for m in group], least=least, most=most, unit=unit)
        for group in groups
    ]
