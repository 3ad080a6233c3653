"""``nfdt ui``: a link to the page of a job server, opened in a browser."""

from __future__ import annotations

import webbrowser

import click
from nfdt_client.connection import JobsClient

from nfdt.cli.options import with_connection
from nfdt.core.errors import UsageError


@click.command()
@click.option("--no-open", is_flag=True, help="Print the link only.")
@with_connection
@click.argument("job_id", metavar="[ID]", required=False, default="")
def ui(connection: JobsClient, job_id: str, no_open: bool) -> None:
    """Open the page of a server, or of one of its jobs, in a browser, and print the link, which opens it once.

    The page has the rights of your token. The server must have been started with --ui.
    """
    link = connection.open_page(job_id)
    if not link:
        raise UsageError(
            f"The server {connection.address} has no page. Expected: one that was started with `nfdt server --ui "
            "127.0.0.1:7778`, `nfdt run --ui`, or distribute(ui=True)."
        )
    click.echo(link)
    if not no_open:
        webbrowser.open(link)
