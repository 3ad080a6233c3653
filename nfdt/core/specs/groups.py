"""The option ``groups``: text form of the workers that train together."""

from __future__ import annotations

from nfdt.core.errors import UsageError

PATTERN = r"^(auto|\d+|\d+(,\d+)*(;\d+(,\d+)*)+)$"

GroupMembers = tuple[tuple[int, ...], ...]


def explicit_groups(text: str, workers: int) -> GroupMembers | None:
    """Return the members of each group, or None where speeds determine them.

    Args:
        text: ``auto``; a number of groups; or their members: ``0,1;2,3``.
        workers: Number of workers.

    Raises:
        UsageError: there are more groups than workers, or the members are not each worker exactly once.
    """
    if text == "auto":
        return None
    if ";" not in text:
        if not 1 <= int(text) <= workers:
            raise UsageError(f"groups: expected 1 to {workers} groups of {workers} workers. Received: {text}.")
        return (tuple(range(workers)),) if int(text) == 1 else None
    groups = tuple(tuple(sorted(map(int, group.split(",")))) for group in text.split(";"))
    if sorted(member for group in groups for member in group) != list(range(workers)):
        raise UsageError(
            f"groups: expected each of the workers 0 to {workers - 1} in one group, as in '0,1;2,3'. "
            f"Received: {text!r}."
        )
    return groups


def wanted_groups(text: str) -> int | None:
    """Return the requested number of groups; None: determined by speeds."""
    return int(text) if text.isdigit() else None
