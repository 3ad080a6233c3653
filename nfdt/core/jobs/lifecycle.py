"""The states of a job and their transitions: a pure table.

::

    queued ──> starting ──> running ──> succeeded
       │          │            ├──────> failed
       └──────────┴────────────┴──────> cancelled, failed
"""

from __future__ import annotations

from typing import Literal

from nfdt.core.errors import UsageError

JobState = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled"]

TRANSITIONS: dict[JobState, tuple[JobState, ...]] = {
    "queued": ("starting", "failed", "cancelled"),
    "starting": ("running", "failed", "cancelled"),
    "running": ("succeeded", "failed", "cancelled"),
    "succeeded": (),
    "failed": (),
    "cancelled": (),
}

TERMINAL: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
ACTIVE: tuple[JobState, ...] = ("queued", "starting", "running")

RESTARTED = "server restarted"


def is_terminal(state: str) -> bool:
    """Return whether a job in this state has ended."""
    return state in TERMINAL


def check_transition(job_id: str, old: JobState, new: JobState) -> None:
    """Raise UsageError unless a job may go from ``old`` to ``new``."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(TRANSITIONS[old]) or "nothing, it has ended"
        raise UsageError(f"Job {job_id} is {old}. Expected next: {allowed}. Received: {new}.")
