"""Command-line options shared by several commands, and their conversion to settings of the client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from nfdt.cli.script import Script, check_script, describe_failure, exit_code_of
from nfdt.core.errors import UsageError
from nfdt.core.host import logs
from nfdt.core.specs.presets import PRESETS

if TYPE_CHECKING:
    from nfdt_client.connection import JobsClient
    from nfdt_client.connection_options import ConnectionOptions

    from nfdt.core.host.local_servers import LocalServer

_CliCommand = TypeVar("_CliCommand", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False)
LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"])


class ScriptCommand(click.Command):
    """A command that ends in SCRIPT or ``-m MODULE``; later arguments belong to the script, as for ``python``."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options up to ``-m``; the rest belongs to the script."""
        takes_value = {
            name: not (option.is_flag or option.count)
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--" and args[at][:2] != "-m":
            at += 2 if takes_value.get(args[at]) else 1
        ours, rest = args[:at], args[at:]
        # click would read -m as an option of ours, and -mMODULE as several: "--" ends our options before it.
        if rest and rest[0][:2] == "-m":
            rest = ["--", "-m", *([rest[0][2:]] if rest[0] != "-m" else []), *rest[1:]]
        return super().parse_args(ctx, [*ours, *rest])


def script_argument(*, required: bool = True) -> Callable[[_CliCommand], _CliCommand]:
    """Add ``SCRIPT ARGS`` or ``-m MODULE ARGS`` to a :class:`ScriptCommand`, as the parameter ``script``.

    A script that cannot be compiled ends the command as it would end Python, before anything is started.
    """

    def read(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> Script | None:
        if not words:
            return None
        script = Script.from_words(words)
        if not script.is_module:
            FILE.convert(script.name, parameter, context)
        elif not script.name:
            raise click.BadParameter("-m: expected the name of a module after it.", context, parameter)
        try:
            check_script(script)
        except (SyntaxError, ValueError, OSError) as error:
            _exit_as_python(error)
        return script

    metavar = "SCRIPT|-m MODULE [ARGS]..."
    return click.argument(
        "script",
        nargs=-1,
        type=click.UNPROCESSED,
        required=required,
        callback=read,
        metavar=metavar,
        shell_complete=lambda _context, _parameter, begun: [CompletionItem(begun, type="file")],
    )


@contextmanager
def exiting_as_python() -> Iterator[None]:
    """End the command as Python ends a script that raises: with its traceback on stderr, and its exit code."""
    try:
        yield
    except BaseException as error:  # SystemExit and KeyboardInterrupt have exit codes of their own
        _exit_as_python(error)


def _exit_as_python(error: BaseException) -> NoReturn:
    if message := describe_failure(error):
        click.echo(message, err=True)
    click.get_current_context().exit(exit_code_of(error))


def combined(*options: Callable[[_CliCommand], _CliCommand]) -> Callable[[_CliCommand], _CliCommand]:
    """Return a decorator that adds several options to a command, in this order."""

    def add(command: _CliCommand) -> _CliCommand:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _server_options(server_help: str) -> Callable[[_CliCommand], _CliCommand]:
    return combined(
        click.option("--server", metavar="HOST:PORT", help=server_help),
        click.option("--token-file", type=FILE, help="File with the server's token (or NFDT_TOKEN)."),
        click.option("--ca-file", type=FILE, help="Certificates to trust; turns TLS on."),
        click.option(
            "--insecure", is_flag=True, default=None, help="Allow a server that is not on loopback without TLS."
        ),
    )


server_options = _server_options("Job server; without it everything runs here.")
"""Adds ``--server --token-file --ca-file --insecure`` to a command that trains."""


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a connection, and call the command with a connection to that job server first."""

    @_server_options("Job server; without it, that of your script that trains on this machine.")
    @wraps(command)
    def connected(
        *, server: str | None, token_file: str | None, ca_file: str | None, insecure: bool | None, **rest: Any
    ) -> None:
        with open_connection(server, token_file, ca_file, insecure) as connection:
            command(connection, **rest)

    return connected


def with_job_id(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--server --token-file --ca-file`` and ``[ID]``, and call the command with a connection and the job's id."""

    @with_connection
    @click.argument("job_id", metavar="[ID]", required=False)
    @wraps(command)
    def for_job(connection: JobsClient, job_id: str | None, **rest: Any) -> None:
        command(connection, job_id or latest_job(connection), **rest)

    return for_job


def latest_job(connection: JobsClient) -> str:
    """Return the id of the job that was submitted last, of one that has not ended before others.

    Raises:
        UsageError: there is no job.
    """
    from nfdt_client.connection import TERMINAL

    jobs = connection.list()
    if not jobs:
        raise UsageError(f"Which job? Expected: one on the server {connection.address}. Received: it has none yet.")
    return str(max(jobs, key=lambda job: (job.state not in TERMINAL, job.submitted_at)).job_id)


def settings_option(text: str = "Any other option; repeatable.") -> Callable[[_CliCommand], _CliCommand]:
    """Add ``--set KEY=VALUE``, as the parameter ``settings``: a mapping."""
    return click.option(
        *("--set", "settings"),
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _parameter, pairs: parse_settings(pairs),
        help=text,
    )


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """Convert ``("dc_lambda=10", "emulate.slowdown=1,4")`` to a mapping; values stay text.

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


def algorithms_option(default: str, text: str, *, show_default: bool = False) -> Callable[[_CliCommand], _CliCommand]:
    """Add ``--algorithm A,B``, as the parameter ``algorithms``: a list of names."""

    def read(_context: click.Context, _parameter: click.Parameter, names: str) -> list[str]:
        return [name.strip() for name in names.split(",") if name.strip()]

    return click.option(
        *("--algorithm", "algorithms"),
        default=default,
        show_default=show_default,
        metavar="A[,B...]",
        callback=read,
        help=text,
    )


log_level_option = click.option(
    "--log-level", type=LOG_LEVELS, default="warning", help="What nfdt itself logs to stderr."
)


def training_options(default_algorithm: str) -> Callable[[_CliCommand], _CliCommand]:
    """Add ``--algorithm --set --log-level``; ``default_algorithm`` is the preset without the first one."""
    return combined(
        click.option("--algorithm", metavar="NAME", help=f"One of {', '.join(PRESETS)}. Default: {default_algorithm}."),
        settings_option("Any other option of `nfdt config`, which lists them; repeatable."),
        log_level_option,
    )


insecure_rings_option = click.option(
    "--insecure-allreduce", is_flag=True, help="Let ranks on several machines exchange gradients in plain text."
)


def format_option(text: str | None = None) -> Callable[[_CliCommand], _CliCommand]:
    """Add ``--format text|json``, as the parameter ``format_``."""
    return click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help=text)


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that an option names.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: expected a file that can be written. Received: {error}.") from None


def log_to_stderr(level: str) -> None:
    """Send NFDT's log to stderr; silence TensorFlow's start-up messages unless the level is debug."""
    logs.log_to_stderr(level)
    if level != "debug":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def find_job_server(**given: Any) -> tuple[ConnectionOptions, LocalServer | None]:
    """Return the options of the connection, and the description of the server if it is one of this user's scripts here.

    The server is named by the options, the environment or a file; otherwise it is that of the only script of this user
    that trains on this machine.

    Args:
        **given: Options of the connection by name.

    Raises:
        UsageError: none of them names a server, and no script trains here, or several do.
    """
    from nfdt_client.connection_options import find_server

    from nfdt.core.host.local_servers import find_servers, servers_folder

    options = find_server(given)
    local = [one for one in find_servers(servers_folder()) if options.server in (None, one.address)]
    if options.server is None and len(local) != 1:
        running = ", ".join(one.address for one in local) or "none"
        raise UsageError(
            "Which server? Expected: --server HOST:PORT, NFDT_SERVER in the environment, server in nfdt.toml, or one "
            f"script that trains on this machine. Received: no server; scripts train at {running}."
        )
    return options, local[0] if local else None


@contextmanager
def open_connection(
    server: str | None, token_file: str | None, ca_file: str | None, insecure: bool | None
) -> Iterator[JobsClient]:
    """Connect to a job server, see :func:`find_job_server`; close the connection after the block."""
    from nfdt_client.connection import JobsClient

    options, local = find_job_server(server=server, token_file=token_file, ca_file=ca_file, insecure=insecure)
    # A server of a script on this machine needs no token from the user: its description has one.
    if local is not None and (options.server is None or not options.has_token):
        connection = JobsClient(local.address, local.token)
    else:
        connection = JobsClient(str(options.server), options.token(), **options.tls)
    with closing(connection):
        yield connection
