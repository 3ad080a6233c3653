"""Options of the connection to a job server, for commands that need no others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfdt.core.errors import UsageError
from nfdt_client.layers import PREFIX, Setting, find_table, refuse_foreign_server

TLS = ("ca_file", "cert_file", "key_file", "insecure")
CONNECTION = ("server", "token", "token_file", *TLS)


@dataclass(frozen=True)
class ConnectionOptions:
    """Address, certificates and secret of a job server.

    Attributes:
        server: ``HOST:PORT``; None: no layer names a server.
        tls: ``ca_file``, ``cert_file``, ``key_file`` and ``insecure``, as far as they are given.
    """

    server: str | None = None
    tls: Mapping[str, Any] = field(default_factory=dict)
    _token: str | None = field(default=None, repr=False)
    _token_file: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether a secret or its file is given."""
        return bool(self._token or self._token_file)

    def token(self) -> str:
        """Return the secret for the server, which is read from its file only now.

        Raises:
            UsageError: there is none, or its file cannot be read.
        """
        if self._token:
            return self._token
        if not self._token_file:
            raise UsageError(
                f"The server {self.server} needs a token. Expected: NFDT_TOKEN or NFDT_TOKEN_FILE in the environment, "
                "or token_file in nfdt.toml. Received: none."
            )
        return read_token(Path(self._token_file))


def connection_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`ConnectionOptions` from the options by name.

    Raises:
        UsageError: the address is malformed, or the switch for plain text is.
    """
    checked = {**given, "insecure": switch("insecure", given.get("insecure", False))}
    return {
        "server": check_server(given["server"]) if "server" in given else None,
        "tls": {name: checked[name] for name in TLS if checked.get(name)},
        "_token": given.get("token"),
        "_token_file": given.get("token_file"),
    }


def find_server(arguments: Mapping[str, Any]) -> ConnectionOptions:
    """Merge the layers of the connection only: argument > environment > file.

    Other options in the environment and the file are not looked at.

    Raises:
        UsageError: the address is malformed, or the file is, or the file names a server for a token from elsewhere.
    """
    path, table = find_table(Path.cwd().resolve())
    file = {name: Setting(table[name], str(path)) for name in CONNECTION if name in table}
    others = {name: os.environ[v] for name in CONNECTION if os.environ.get(v := PREFIX + name.upper())}
    others |= {name: value for name, value in arguments.items() if value is not None}
    refuse_foreign_server(file, others)
    given = {name: setting.value for name, setting in file.items()} | others
    return ConnectionOptions(**connection_fields(given))


def switch(name: str, value: Any) -> bool:
    """Return the value of an option that is true or false.

    Raises:
        UsageError: it is something else.
    """
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise UsageError(f"{name}: expected true or false. Received: {value!r}.")
    return found


def read_token(path: Path) -> str:
    """Return the secret in a file, stripped of white space.

    Raises:
        UsageError: the file cannot be read or is empty.
    """
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"The token file {path} cannot be read: {error.strerror}.") from None
    if not token:
        raise UsageError(f"The token file {path} is empty. Expected: the server's token.")
    if len(token.split()) > 1:
        raise UsageError(
            f"The token file {path}: expected one token and nothing else. Received: {len(token.split())} words. "
            "Copy your own token from the server's file into a file of yours."
        )
    return token


def check_server(value: Any) -> str:
    """Return an address after a check.

    Raises:
        UsageError: it is not ``HOST:PORT``.
    """
    host, _, port = str(value).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"server: expected HOST:PORT. Received: {value!r}.")
    return str(value)
