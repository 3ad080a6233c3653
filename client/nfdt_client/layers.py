"""Reads the layers of options (environment, file, argument); errors name the layer of a value."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfdt.core.errors import UsageError, similar

logger = logging.getLogger(__name__)

ARGUMENT = "argument"
DEFAULT = "default"
PREFIX = "NFDT_"
# Used by NFDT's commands and scripts; no options of a session.
OTHERS = ("RENDEZVOUS_DIR", "START_LOG", "TLS_CERT", "TLS_KEY", "VENV")


@dataclass(frozen=True)
class Setting:
    """An option's value and a description of the layer it came from."""

    value: Any
    origin: str


def flatten(options: Mapping[str, Any], valid: Sequence[str], where: str = "") -> dict[str, Any]:
    """Convert ``{"emulate": {"fail": x}}`` to ``{"emulate.fail": x}``; check the names and leave None out.

    ``where`` begins the message of an error.
    """
    from nfdt.core.specs.job import Emulation, check_names

    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name == "emulate" and value is not None:
            items = value.model_dump(exclude_defaults=True) if isinstance(value, Emulation) else value
            if not isinstance(items, Mapping):
                raise UsageError(f"{where}emulate: expected a mapping of names to values. Received: {value!r}.")
            flat.update({f"emulate.{key}": item for key, item in items.items()})
        elif name != "emulate":
            flat[name] = value
    try:
        check_names(flat, valid)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    return {name: value for name, value in flat.items() if value is not None}


def from_environment(environ: Mapping[str, str], valid: Sequence[str]) -> dict[str, Setting]:
    """Return the options in ``NFDT_*`` variables; log a warning for variables that are no option."""
    variables = {name: PREFIX + name.replace(".", "_").upper() for name in valid}
    known = [*variables.values(), *(PREFIX + other for other in OTHERS)]
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            logger.warning("%s in the environment is no option and is ignored.%s", variable, similar(variable, known))
    return {
        name: Setting(environ[variable], f"environment {variable}")
        for name, variable in variables.items()
        if environ.get(variable)
    }


def _table_of(path: Path) -> Mapping[str, Any] | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}.") from None
    if path.name == "nfdt.toml" and "tool" not in document:
        return document
    table = document.get("tool", {}).get("nfdt")
    if table is not None and not isinstance(table, Mapping):
        raise UsageError(f"{path}: [tool.nfdt]: expected a table. Received: {table!r}.")
    return table


def find_table(start: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the nearest ``nfdt.toml``, or ``pyproject.toml`` with [tool.nfdt], at or above a folder, and its table."""
    for directory in (start, *start.parents):
        for name in ("nfdt.toml", "pyproject.toml"):
            path = directory / name
            table = _table_of(path) if path.is_file() else None
            if table is None:
                continue
            _check_secrets(path, table)
            return path, table
    return None, {}


def _check_secrets(path: Path, table: Mapping[str, Any]) -> None:
    """Refuse a table that spreads a token: the file may come from a stranger, with a checkout."""
    if "token" in table:  # others may read the file
        raise UsageError(f"{path}: a token does not belong into this file. Expected: token_file.")
    if "insecure" in table:
        raise UsageError(
            f"{path}: insecure does not belong into this file, as it sends your token in plain text. Expected: "
            "--insecure on the command line, or NFDT_INSECURE=true in the environment."
        )
    if "server" in table and "token_file" in table:
        folder, file = path.parent.resolve(), Path(str(table["token_file"])).expanduser().resolve()
        if not file.is_relative_to(folder):
            raise UsageError(
                f"{path}: expected a token_file inside {folder}, as the file also names the server to which the token "
                f"is sent. Received: {file}. Name it by --token-file or NFDT_TOKEN_FILE instead, and leave it out here."
            )


def refuse_foreign_server(file: Mapping[str, Setting], others: Mapping[str, object]) -> None:
    """Refuse a server that a file alone names, for a token that comes from elsewhere.

    Args:
        file: Options of the file.
        others: Those of the environment and the arguments, by name.

    Raises:
        UsageError: the token would be sent to that server.
    """
    if "server" in others or "server" not in file or not others.keys() & {"token", "token_file"}:
        return
    server, path = file["server"].value, Path(file["server"].origin)
    raise UsageError(
        f"{path}: expected a server that you name yourself, as your token, which is not in this file's folder, is sent "
        f"to it: the file may come from a stranger. Received: {server!r}, from this file only. If you trust it, add "
        f"--server {server} or NFDT_SERVER={server}; or name the token by token_file in this file, inside "
        f"{path.parent}, and neither by --token-file nor by NFDT_TOKEN or NFDT_TOKEN_FILE."
    )


def from_file(start: Path, valid: Sequence[str]) -> dict[str, Setting]:
    """Read the options of the nearest file, see :func:`find_table`."""
    path, table = find_table(start)
    return {key: Setting(value, str(path)) for key, value in flatten(table, valid, f"{path}: ").items()}


def refuse_idle(given: Mapping[str, Setting], idle: Sequence[Mapping[str, str]]) -> None:
    """Refuse arguments that have no effect with any preset; log a warning for such options in environment or file."""
    for name in sorted(set(idle[0]).intersection(*idle[1:])):
        setting = given[name]
        what = f"{name}={setting.value!r} ({setting.origin}) has no effect here"
        if setting.origin == ARGUMENT:
            raise UsageError(f"{what}. {idle[0][name]} Leave it out.")
        logger.warning("%s and is ignored. %s", what, idle[0][name])


@contextmanager
def naming_origins(given: Mapping[str, Setting]) -> Iterator[None]:
    """Append to a UsageError in the block the origin of each option that it names."""
    try:
        yield
    except UsageError as error:
        named = [name for name in given if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", str(error))]
        origins = ", ".join(f"{name} from {given[name].origin}" for name in named)
        raise UsageError(f"{error} ({origins})" if origins else str(error)) from None
