"""Report of a trial: what each fault cost, whether it was survived, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nfdt.chaos.accounting import SampleCounts, count_samples, last_logs, read_counts, recovered_at
from nfdt.chaos.trial import TrialRecord
from nfdt.core.errors import NfdtError


@dataclass(frozen=True)
class FaultOutcome:
    """Outcome of one fault.

    Attributes:
        number: Its place in the plan.
        kind: Kind of fault.
        role: Role of its target.
        target: Index of its target; None: it was not injected.
        at_s: Seconds after the first trained step; None: it was not injected.
        recovery_s: Seconds until training was beyond its position before the fault; None: it never was.
        survived: Whether training went on after it; None: it was not injected.
    """

    number: int
    kind: str
    role: str
    target: int | None
    at_s: float | None
    recovery_s: float | None
    survived: bool | None


@dataclass(frozen=True)
class ChaosReport:
    """Report of a trial.

    Attributes:
        faults: All faults of the plan, in the trial of the script if there was one.
        samples: Samples trained once, again and never, from the events of the jobs.
        counted: The same from the weights of the counting model; None: it was not trained.
        why_not_counted: The reason why it was not.
        result: Logs of the last epoch.
        undisturbed: Those of the same script without faults; None: it was not run.
        leftovers: Remains after the end, in words.
        memory_growth: Greatest relative growth of a server's resident memory between the first and the last fault that
            the same process has survived; None: no process was measured twice.
        more_files: Greatest number of descriptors by which the open ones of a server have grown in the same time.
        problems: Reasons why the trial did not end well.
    """

    faults: tuple[FaultOutcome, ...]
    samples: SampleCounts
    result: Mapping[str, float]
    undisturbed: Mapping[str, float] | None = None
    leftovers: tuple[str, ...] = ()
    memory_growth: float | None = None
    more_files: int | None = None
    problems: tuple[str, ...] = field(default=())
    counted: SampleCounts | None = None
    why_not_counted: str = ""

    @property
    def survived(self) -> bool:
        """Whether all faults were injected and survived, samples were trained as promised, and nothing is left."""
        well = not self.problems and not self.leftovers and not self.samples.never
        exact = self.counted is None or not (self.counted.again or self.counted.never)
        return well and exact and all(fault.survived for fault in self.faults)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"survived": self.survived, **asdict(self)}


def make_report(
    record: TrialRecord,
    undisturbed: TrialRecord | None = None,
    *,
    counting: TrialRecord | None = None,
    counts: Path | None = None,
    why_not_counted: str = "",
) -> ChaosReport:
    """Return the report of a schedule.

    Args:
        record: The trial of a script, or of the counting model alone.
        undisturbed: Trial of the same script without faults.
        counting: The trial of the counting model after that of a script, under the same schedule.
        counts: File to which the counting model has written its counts.
        why_not_counted: Why there are none.
    """
    others = {"undisturbed": undisturbed, "counting model": counting}
    problems = [f"{name}: {one}" for name, other in others.items() if other is not None for one in _problems(other)]
    counted = None
    if counts is not None:
        try:
            counted = read_counts(counts)
        except NfdtError as error:
            problems.append(str(error))
    records = [one for one in (record, counting) if one is not None]
    files = [n[-1] - n[0] for one in records for n in one.server_files.values() if len(n) > 1]
    growths = [b[-1] / b[0] - 1 for one in records for b in one.server_bytes.values() if len(b) > 1]
    return ChaosReport(
        faults=_outcomes(record),
        samples=count_samples(record.jobs),
        result=last_logs(record.jobs),
        undisturbed=None if undisturbed is None else last_logs(undisturbed.jobs),
        leftovers=tuple(left for one in records for left in one.leftovers),
        memory_growth=max(growths, default=None),
        more_files=max(files, default=None),
        problems=(*record.problems, *problems),
        counted=counted,
        why_not_counted=why_not_counted,
    )


def _problems(record: TrialRecord) -> list[str]:
    """Return the problems of a trial whose faults have no rows in the report."""
    fates = {False: "not survived", None: "not injected"}
    found = [outcome for outcome in _outcomes(record) if not outcome.survived]
    return [*record.problems, *(f"{one.kind} of a {one.role}: {fates[one.survived]}" for one in found)]


def _outcomes(record: TrialRecord) -> tuple[FaultOutcome, ...]:
    """Return the outcome of each fault; the last one before a failure counts as its cause."""
    found = []
    for injection in record.injections:
        row, recovered = injection.fault.row, recovered_at(record.jobs, injection.at)
        last = injection is record.injections[-1]
        found.append(
            FaultOutcome(
                number=injection.fault.number,
                kind=row.kind,
                role=row.role,
                target=injection.target.index,
                at_s=injection.at - (record.began_at or injection.at),
                recovery_s=None if recovered is None else recovered - injection.at,
                survived=recovered is not None and not (last and record.problems),
            )
        )
    missed = [FaultOutcome(f.number, f.row.kind, f.row.role, None, None, None, None) for f in record.missed]
    return (*found, *missed)
