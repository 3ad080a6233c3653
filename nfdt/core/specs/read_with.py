"""Conditions under which options have an effect: the choices of other options with which an option is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ReadWith:
    """Metadata of an option: the option is read if each of these other options has one of these values.

    An option that declares several conditions is read if any of them holds; without a condition it is always read.

    Args:
        **choices: Allowed values by the name of the other option.
    """

    def __init__(self, **choices: tuple[Any, ...]) -> None:
        self.choices = choices

    def holds(self, chosen: Mapping[str, Any]) -> bool:
        """Return whether the option is read with these values of all options."""
        return all(chosen[name] in values for name, values in self.choices.items())

    def __str__(self) -> str:
        return " and ".join(f"{name}={' or '.join(map(repr, values))}" for name, values in self.choices.items())


def why_idle(metadata: Sequence[Any], chosen: Mapping[str, Any]) -> str | None:
    """Return why an option has no effect (expected and received values), or None if it has one.

    Args:
        metadata: Metadata of the option's declaration.
        chosen: The values of all options.
    """
    wanted = [item for item in metadata if isinstance(item, ReadWith)]
    if not wanted or any(one.holds(chosen) for one in wanted):
        return None
    names = dict.fromkeys(name for one in wanted for name in one.choices)
    received = ", ".join(f"{name}={chosen[name]!r}" for name in names)
    return f"Expected: {', or '.join(map(str, wanted))}. Received: {received}."
