"""Rights of the holders of tokens: what each role may do, whose jobs a holder sees, its quotas, and the audit log.

A line of a token file is a secret, whose holder is an administrator, or ``NAME ROLE SECRET [jobs=N] [workers=N]``. The
file is readable by its owner only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from nfdt.core.errors import PolicyRefused, UsageError
from nfdt.core.wire import jobs_pb2, workers_pb2
from nfdt.core.wire.channel import same_token

MIN_LENGTH = 8
TokenRole = Literal["read", "train", "work", "admin"]
ROLES: dict[str, TokenRole] = {role: role for role in get_args(TokenRole)}
_QUOTAS = ("jobs", "workers")
_JOBS = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name
_WORKERS = workers_pb2.DESCRIPTOR.services_by_name["Workers"].full_name
_READING = frozenset({"Describe", "Download", "List", "OpenPage", "Show", "Slots", "Trace", "Watch"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Holder of one token.

    Attributes:
        secret: The token.
        name: Name in the token file; "" for a secret alone. Tokens with one name belong to one owner of jobs.
        role: ``read``: look at the owner's jobs; ``train``: also submit and change them; ``work``: offer slots;
            ``admin``: all of it, for the jobs of all owners.
        jobs: Maximum number of the owner's jobs that run at a time; None: no limit.
        workers: Maximum number of workers of these jobs together; None: no limit.
    """

    secret: str = field(repr=False)
    name: str = ""
    role: TokenRole = "admin"
    jobs: int | None = None
    workers: int | None = None

    @classmethod
    def parse(cls, line: str) -> Holder:
        """Return the holder that a line of a token file describes.

        Raises:
            UsageError: The line is neither a secret nor a name, a role, a secret and quotas.
        """
        words = line.split()
        secret = words[0] if len(words) == 1 else words[2] if len(words) > 2 else ""
        if len(secret) < MIN_LENGTH:
            raise UsageError(
                f"Token file: expected a token of at least {MIN_LENGTH} characters in each line, alone or as NAME "
                f"{'|'.join(ROLES)} TOKEN [jobs=N] [workers=N]. Received: a line of {len(words)} words, "
                f"{len(secret)} characters of a token."
            )
        if len(words) == 1:
            return cls(secret)
        name, role, quotas = words[0], ROLES.get(words[1]), dict(word.partition("=")[::2] for word in words[3:])
        if role is None:
            raise UsageError(f"Token of {name}: expected a role of {', '.join(ROLES)}. Received: {words[1]}.")
        wrong = [f"{key}={value}" for key, value in quotas.items() if key not in _QUOTAS or not value.isdecimal()]
        if wrong:
            raise UsageError(f"Token of {name}: expected jobs=N or workers=N. Received: {', '.join(wrong)}.")
        limits: dict[str, Any] = {key: int(value) for key, value in quotas.items()}
        return cls(secret, name, role, **limits)

    @property
    def owner(self) -> str:
        """Owner of the jobs that are submitted with this token: the name, else a hash of the token."""
        return self.name or hashlib.sha256(self.secret.encode()).hexdigest()[:16]

    def sees(self, owner: str) -> bool:
        """Whether this holder may know of the jobs of an owner."""
        return self.role == "admin" or owner == self.owner

    def may_call(self, method: str) -> bool:
        """Whether the role includes a method, ``/package.Service/Name``."""
        _, service, name = method.rsplit("/", 2)
        if self.role == "admin" or service not in (_JOBS, _WORKERS):
            return True
        if self.role == "work":
            return service == _WORKERS or name == "Describe"
        return service == _JOBS and (self.role == "train" or name in _READING)

    def check_call(self, method: str) -> None:
        """Raise PolicyRefused if the role does not include a method."""
        if not self.may_call(method):
            raise PolicyRefused(
                f"{method.rpartition('/')[2]}: expected a token with another role. Received: the token of "
                f"{self.name}, whose role is {self.role}. Ask the administrator of the server for one."
            )


class Holders:
    """All tokens of a server.

    Args:
        lines: Lines of a token file.
        *others: More holders.

    Raises:
        UsageError: A line describes no token, two lines have the same token, or there is no line.
    """

    def __init__(self, lines: Iterable[str], *others: Holder) -> None:
        found = [Holder.parse(line) for line in lines]
        if not found:
            raise UsageError(f"A job server needs a token of at least {MIN_LENGTH} characters. Received: none.")
        if len({holder.secret for holder in found}) < len(found):
            raise UsageError("Token file: expected different tokens. Received: one of them twice.")
        self._holders = (*found, *others)

    def quotas(self) -> dict[str, dict[str, int]]:
        """Return the quotas of each owner by their names; of several lines with one name, the least counts."""
        found: dict[str, dict[str, int]] = {}
        for holder in self._holders:
            own = found.setdefault(holder.owner, {})
            for name, limit in (("jobs", holder.jobs), ("workers", holder.workers)):
                if limit is not None:
                    own[name] = min(limit, own.get(name, limit))
        return found

    def find(self, secret: str) -> Holder | None:
        """Return the holder of a token; None for an unknown one."""
        # All tokens are compared, each in constant time, so that the duration reveals nothing about them.
        found = [holder for holder in self._holders if same_token(holder.secret, secret)]
        return found[0] if found else None


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the lines of a file; empty lines and lines that begin with # are skipped.

    Raises:
        UsageError: the file does not exist, other users may read it, or a line describes no token.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None
    if mode & 0o077:
        raise UsageError(f"Token file {path}: expected mode 0600. Received: {mode:04o}. Run: chmod 600 {path}")
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    Holders(tokens)
    return tokens


def ensure_token_file(path: Path) -> tuple[str, ...]:
    """Return the lines of a file, which is created with a new token if it does not exist."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_tokens(path)
    except OSError as error:
        raise _unusable(path, error) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_tokens(path)


def of_worker(secret: str) -> str:
    """Return the line of a token file that gives a secret to ``nfdt worker``."""
    return f"workers work {secret}"


def _unusable(path: Path, error: OSError | UnicodeDecodeError) -> UsageError:
    what = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
    return UsageError(
        f"Token file: expected a text file that user {os.geteuid()} can read, or a place where a server can make one. "
        f"Received: {path} ({what}). Name another file, or change the permissions of this one."
    )


class AuditLog:
    """Append-only file of actions; every method may be called from any thread.

    Args:
        path: The file; created with mode 0600 if it does not exist.
        now: Returns the Unix time in seconds.

    Raises:
        UsageError: The file cannot be opened for appending.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"Audit log: expected a file that this user can append to, or none. Received: {path} "
                f"({error.strerror}). Change its permissions, or choose another state directory."
            ) from None

    def write(self, action: str, holder: Holder, peer: str, job_id: str = "", **details: str) -> None:
        """Append a line; a line that cannot be written (full disk) goes to the server's log instead.

        Args:
            action: Name of the action, such as ``submit``.
            holder: Holder of the token that came with the call.
            peer: Address of the caller.
            job_id: Job that the action is about.
            **details: More fields of the line.
        """
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._now()))
        line = {"at": at, "action": action, "who": holder.owner, "role": holder.role, "from": peer, "job": job_id}
        text = json.dumps({**{key: value for key, value in line.items() if value}, **details}) + "\n"
        try:
            os.write(self._descriptor, text.encode())  # one call: lines of several threads do not mix
        except OSError as error:
            _log.error("%s cannot be written (%s): %s", self._path, error.strerror, text.strip())

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        os.close(self._descriptor)
