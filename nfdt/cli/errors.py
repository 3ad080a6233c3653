"""Exit of a command: an NFDT error becomes one message on stderr and its exit code."""

from __future__ import annotations

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
