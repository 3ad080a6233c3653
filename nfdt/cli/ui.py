"""``nfdt ui``: a link to the page of a job server, opened in a browser."""

from __future__ import annotations

import webbrowser

import click

from nfdt.cli.options import connection_options, open_connection
from nfdt.core.errors import UsageError


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link only.")
@connection_options
@click.argument("job_id", metavar="[ID]", required=False, default="")
def ui(job_id: str, no_open: bool, server: str | None, token_file: str | None, ca_file: str | None) -> None:
    """Open the page of a server, or of one of its jobs, in a browser, and print the link, which opens it once.

    The page has the rights of your token. The server must have been started with --ui.
    """
    with open_connection(server, token_file, ca_file) as connection:
        link = connection.open_page(job_id)
        if not link:
            raise UsageError(
                f"The server {connection.address} has no page. Expected: one that was started with `nfdt server --ui "
                "127.0.0.1:7778`, `nfdt run --ui`, or distribute(ui=True)."
            )
    click.echo(link)
    if not no_open:
        webbrowser.open(link)
