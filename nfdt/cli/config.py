"""``nfdt config``: each option's value and the layer it came from."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from nfdt_client.options import resolve

from nfdt.cli.options import format_option, settings_option
from nfdt.cli.table import render


@click.command()
@settings_option("As if given to `nfdt run`.")
@format_option("How to print.")
def config(settings: dict[str, str], format_: str) -> None:
    """Print every option, its value and where it came from."""
    found = resolve(settings).settings
    if format_ == "json":
        click.echo(json.dumps({name: asdict(setting) for name, setting in found.items()}, indent=2))
        return
    rows = [(name, "-" if s.value in (None, ()) else str(s.value), s.origin) for name, s in found.items()]
    click.echo(render(("option", "value", "from"), rows, left=3))
