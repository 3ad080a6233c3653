"""The exception tree of the product, and the exit code of each branch.

::

    NfdtError                      1
     ├─ UsageError (ValueError)    2   an option, name or value that cannot be used
     ├─ CaptureError (TypeError)   2   something in the script that cannot be shipped
     ├─ NotInstalled (ImportError) 2   an optional part that was asked for is not there
     ├─ JobFailed                  3   the job failed on the cluster
     │   └─ WorkerFailed           3   ... because a worker's code raised
     ├─ ServerUnreachable          4   no server at the address
     ├─ Refused                    5   the server answered no
     │   ├─ AuthenticationFailed   5   wrong or missing token
     │   ├─ VersionMismatch        5   Python, Keras or TensorFlow differ
     │   └─ PolicyRefused          5   the server's policy forbids this job
     ├─ JobCancelled               6   the job was cancelled
     └─ ProtocolError              3   a peer sent something that cannot be
         └─ ShapeMismatch          3   ... a payload of another size

Messages say what happened, what was expected, what was received, and the remedy.
"""

from __future__ import annotations


class NfdtError(Exception):
    """Base of everything this product raises on purpose."""

    exit_code = 1


class UsageError(NfdtError, ValueError):
    """An option, name or value that cannot be used."""

    exit_code = 2


class CaptureError(NfdtError, TypeError):
    """Something in the user's script cannot be shipped to the cluster."""

    exit_code = 2


class NotInstalled(NfdtError, ImportError):
    """An optional part that was asked for is not installed; the message holds the command that installs it."""

    exit_code = 2


class JobFailed(NfdtError, RuntimeError):
    """The job failed on the cluster; the message holds the reason."""

    exit_code = 3


class WorkerFailed(JobFailed):
    """A worker's code raised; the message holds the worker's name and its traceback."""


class ServerUnreachable(NfdtError, ConnectionError):
    """No server answers at the address."""

    exit_code = 4


class Refused(NfdtError, PermissionError):
    """The server answered no."""

    exit_code = 5


class AuthenticationFailed(Refused):
    """The token is missing or wrong."""


class VersionMismatch(Refused):
    """Python, Keras or TensorFlow differ between client and worker."""


class PolicyRefused(Refused):
    """The server's policy forbids this job."""


class JobCancelled(NfdtError, RuntimeError):
    """The job was cancelled."""

    exit_code = 6


class ProtocolError(NfdtError, RuntimeError):
    """A peer sent a message that breaks the protocol."""

    exit_code = 3


class ShapeMismatch(ProtocolError):
    """A payload has another size, shape or dtype than was agreed."""


def error_class(name: str | None) -> type[NfdtError] | None:
    """Return the class of this module with that name; None for any other name, which a peer may have sent."""
    found = globals().get(name) if name else None
    return found if isinstance(found, type) and issubclass(found, NfdtError) else None
