"""The exception tree of NFDT, and the exit code of each branch.

::

    NfdtError                      1
     ├─ UsageError (ValueError)    2   an option, name or value that cannot be used
     ├─ CaptureError (TypeError)   2   an object of the script that cannot be sent to the cluster
     │   ├─ UnreadableData         2   ... data that only the script's process can read
     │   └─ ModelMismatch          2   ... a model that another process builds differently
     ├─ NotInstalled (ImportError) 2   a requested optional component is not installed
     ├─ NotStored                  1   the server's disk is full, or it cannot write there
     ├─ JobFailed                  3   the job failed on the cluster
     │   └─ WorkerFailed           3   ... because a worker's code raised
     ├─ ServerUnreachable          4   no server at the address
     ├─ Refused                    5   the server refused the request
     │   ├─ AuthenticationFailed   5   wrong or missing token, or a certificate that is not trusted
     │   ├─ VersionMismatch        5   Python, Keras or TensorFlow differ
     │   ├─ PolicyRefused          5   the server's policy forbids this job
     │   └─ JobTaken               5   another client is attached to the job
     ├─ JobCancelled               6   the job was cancelled
     └─ ProtocolError              3   a peer sent an invalid message
         └─ ShapeMismatch          3   ... a payload of another size

Messages state what happened, what was expected, what was received, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def similar(name: str, valid: Iterable[str]) -> str:
    """Return `` Did you mean 'x' or 'y'?`` with the one to three valid names that are nearest; "" without any."""
    close = difflib.get_close_matches(name, list(valid))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


class NfdtError(Exception):
    """Base of all exceptions that NFDT raises deliberately."""

    exit_code = 1


class UsageError(NfdtError, ValueError):
    """An option, name or value that cannot be used."""

    exit_code = 2


class CaptureError(NfdtError, TypeError):
    """An object of the user's script cannot be sent to the cluster."""

    exit_code = 2


class UnreadableData(CaptureError):
    """Training or validation data that the workers cannot read; the script's own process may be able to."""


class ModelMismatch(CaptureError):
    """A worker built another model than the script has."""


class NotInstalled(NfdtError, ImportError):
    """A requested optional component is not installed; the message holds the command that installs it."""

    exit_code = 2


class NotStored(NfdtError):
    """The server could not write to its disk; the same call may succeed once there is room."""


class JobFailed(NfdtError, RuntimeError):
    """The job failed on the cluster; the message holds the reason."""

    exit_code = 3


class WorkerFailed(JobFailed):
    """A worker's code raised; the message holds the worker's name and its traceback."""


class ServerUnreachable(NfdtError, ConnectionError):
    """No server answers at the address."""

    exit_code = 4


class Refused(NfdtError, PermissionError):
    """The server refused the request."""

    exit_code = 5


class AuthenticationFailed(Refused):
    """The token is missing or wrong, or the server's certificate is not trusted."""


class VersionMismatch(Refused):
    """Python, Keras or TensorFlow differ between client and worker."""


class PolicyRefused(Refused):
    """The server's policy forbids this job."""


class JobTaken(Refused):
    """Another client is attached to the job."""


class JobCancelled(NfdtError, RuntimeError):
    """The job was cancelled."""

    exit_code = 6


class ProtocolError(NfdtError, RuntimeError):
    """A peer sent a message that breaks the protocol."""

    exit_code = 3


class ShapeMismatch(ProtocolError):
    """A payload has another size, shape or dtype than expected."""


def error_class(name: str | None) -> type[NfdtError] | None:
    """Return the class of this module with that name; None for any other name, which a peer may have sent."""
    found = globals().get(name) if name else None
    return found if isinstance(found, type) and issubclass(found, NfdtError) else None


class Terminated(SystemExit):
    """End of this process because of a signal: a scheduler's, for instance, which needs the machine.

    Args:
        code: Exit code of a process that the signal killed.
    """
