"""The option ``groups``: which workers train together, written out."""

from __future__ import annotations

from nfdt.core.errors import UsageError

PATTERN = r"^(auto|\d+|\d+(,\d+)*(;\d+(,\d+)*)+)$"

GroupMembers = tuple[tuple[int, ...], ...]


def explicit_groups(text: str, workers: int) -> GroupMembers | None:
    """The members of each group; None where they are to be found by speed.

    Args:
        text: ``auto``; a number of groups; or their members: ``0,1;2,3``.
        workers: How many workers there are.

    Raises:
        UsageError: more groups than workers, or members that are not each worker once.
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
    """Return the number of groups that is asked for; None: as many as speeds suggest."""
    return int(text) if text.isdigit() else None
