"""Names of the jobs of one script, in the order of its fits."""

from __future__ import annotations

import itertools


class JobNames:
    """Names of the jobs of successive fits: NAME, NAME-2, NAME-3 and so on.

    Args:
        name: The first name; None: the jobs have no names.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._numbers = name, itertools.count(1)

    def next(self) -> str:
        """Return the name of the next job; "" for none."""
        number = next(self._numbers)
        return "" if self._name is None else self._name if number == 1 else f"{self._name}-{number}"
