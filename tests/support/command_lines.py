"""Command lines of ``nfdt`` that are written in documents and files, checked against the commands."""

from __future__ import annotations

from collections.abc import Sequence

import click

from nfdt.cli import cli

WITH_SCRIPT = ("run", "mpi", "simulate", "plan", "submit")


def command_of(group: click.Group, name: str) -> click.Command:
    """Return a command of a group.

    Raises:
        AssertionError: There is no such command.
    """
    command = group.get_command(click.Context(group), name)
    assert command is not None, name
    return command


def unknown_options(words: Sequence[str]) -> set[str]:
    """Return the options that the command does not have; arguments after the script belong to the script.

    Raises:
        AssertionError: There is no such command.
    """
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        command, rest = command_of(command, rest[0]), rest[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    if command.name in WITH_SCRIPT:
        script = next((i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m"), len(rest))
        return {word for word in rest[:script] if word.startswith("-")} - known
    return {word.split("=")[0] for word in rest if word.startswith("-")} - known
