"""Groups of commands, which are imported when they run: the help of a group needs none of them.

An NFDT error of a command becomes one message on stderr and its exit code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import click

from nfdt.cli.script import INTERRUPTED
from nfdt.core.errors import NfdtError


class Commands(click.Group):
    """A click group that turns NFDT errors and interrupts into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except NfdtError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


class _Imported(MutableMapping[str, click.Command]):
    """Commands by name; one that is ``MODULE:ATTRIBUTE`` is imported when it is looked up."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)
        self._found: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._found:
            module, attribute = self._homes[name].split(":")
            self._found[name] = getattr(importlib.import_module(module), attribute)
        return self._found[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._homes[name] = ""
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._homes[name]
        self._found.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes


class LazyCommands(Commands):
    """A group whose commands are imported when they are invoked, or asked for their own help.

    Args:
        *args: Arguments of ``click.Group``.
        homes: ``MODULE:ATTRIBUTE`` of each command.
        summaries: First sentence of each command's help, for the group's help.
        **kwargs: Arguments of ``click.Group``.
    """

    def __init__(self, *args: Any, homes: Mapping[str, str], summaries: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = _Imported(homes)
        self._summaries = summaries

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their summaries, without importing them."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, _shortened(self._summaries[name], limit)) for name in names])


def _shortened(summary: str, limit: int) -> str:
    """Return a summary as click shortens that of a command."""
    return click.Command(None, help=summary).get_short_help_str(limit)
