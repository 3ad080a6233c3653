"""Exit of a command: errors of the product become one message on stderr and their exit code."""

from __future__ import annotations

from typing import Any

import click

from nfdt.cli.script import INTERRUPTED
from nfdt.core.errors import NfdtError


class Commands(click.Group):
    """A group whose commands end that way."""

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
