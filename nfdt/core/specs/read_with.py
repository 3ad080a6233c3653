"""Which options have an effect: each says, where it is declared, with which choices of others it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ReadWith:
    """Metadata of an option: it is read where each of these options has one of these values.

    An option that declares several is read where any of them holds; one that declares none is always read.

    Args:
        **choices: Values by the name of the option.
    """

    def __init__(self, **choices: tuple[Any, ...]) -> None:
        self.choices = choices

    def holds(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the option is read with these values of all others."""
        return all(chosen[name] in values for name, values in self.choices.items())

    def __str__(self) -> str:
        return " and ".join(f"{name}={' or '.join(map(repr, values))}" for name, values in self.choices.items())


def why_idle(metadata: Sequence[Any], chosen: Mapping[str, Any]) -> str | None:
    """Why an option has no effect: what was expected and received; None where it has one.

    Args:
        metadata: Of the option's declaration.
        chosen: The values of all options.
    """
    wanted = [item for item in metadata if isinstance(item, ReadWith)]
    if not wanted or any(one.holds(chosen) for one in wanted):
        return None
    names = dict.fromkeys(name for one in wanted for name in one.choices)
    received = ", ".join(f"{name}={chosen[name]!r}" for name in names)
    return f"Expected: {', or '.join(map(str, wanted))}. Received: {received}."
