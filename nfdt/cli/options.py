"""Command-line options that several commands share, and how they become settings of the client."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from nfdt_client.connection import Connection
from nfdt_client.options import resolve

from nfdt.core.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False)
LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])


def server_options(command: _Command) -> _Command:
    """``--server --token-file --ca-file``: where the job server is and how it is spoken to."""
    for option in (
        click.option("--ca-file", type=FILE, help="Certificates to trust; turns TLS on."),
        click.option("--token-file", type=FILE, help="File with the server's token (or NFDT_TOKEN)."),
        click.option("--server", metavar="HOST:PORT", help="Job server; without it everything runs here."),
    ):
        command = option(command)
    return command


def training_options(command: _Command) -> _Command:
    """``--algorithm --set --log-level``."""
    for option in (
        click.option("--log-level", type=LOG_LEVELS, default="warning", help="What nfdt itself logs to stderr."),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other option; repeatable."),
        click.option("--algorithm", metavar="NAME", help="A preset; ddc-asgd unless set otherwise."),
    ):
        command = option(command)
    return command


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """``("dc_lambda=10", "emulate.slowdown=1,4")`` as a mapping; values stay text.

    Raises:
        UsageError: an item without ``=``.
    """
    settings = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"--set: expected KEY=VALUE. Received: {pair!r}.")
        settings[name.strip()] = value
    return settings


def log_to_stderr(level: str) -> None:
    """Send the product's log to stderr; unless debugging, TensorFlow's start-up messages are silenced."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if level != "debug":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@contextmanager
def open_connection(server: str | None, token_file: str | None, ca_file: str | None) -> Iterator[Connection]:
    """A connection to the job server that the options, the environment or a file name; closed after the block.

    Raises:
        UsageError: none of them names a server.
    """
    options = resolve({"server": server, "token_file": token_file, "ca_file": ca_file})
    if options.server is None:
        raise UsageError(
            "Which server? Expected: --server HOST:PORT, NFDT_SERVER in the environment, or server in nfdt.toml."
        )
    connection = Connection(options.server, options.token(), ca_file=options.ca_file)
    try:
        yield connection
    finally:
        connection.close()
