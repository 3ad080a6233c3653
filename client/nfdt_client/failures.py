"""A job's failure as the exception raised in the script."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any

from nfdt.core import errors
from nfdt.core.errors import JobCancelled, JobFailed, WorkerFailed
from nfdt_client.tracebacks import filter_text

TRAINED = "Training had begun."
_NEVER = (StopIteration, StopAsyncIteration)  # would end a loop silently


def failure_of(job_id: str, data: Mapping[str, Any]) -> Exception:
    """Return the exception for a job that ended without success.

    Args:
        job_id: The job.
        data: Data of its last ``state`` event: ``state``, ``reason`` and, when a worker's code raised,
            ``error`` with ``type``, ``module``, ``message``, ``traceback`` and ``worker``.

    Returns:
        The original exception type when it is a built-in, an NFDT error, or defined in a Keras or TensorFlow
        module that is loaded here; its ``__cause__`` is a WorkerFailed with the worker's traceback.
        Otherwise WorkerFailed, JobFailed or JobCancelled.
    """
    reason = str(data.get("reason") or "no reason given")
    if data.get("state") == "cancelled":
        return JobCancelled(f"Job {job_id} was cancelled: {reason}.")
    error = data.get("error")
    if not error:
        return JobFailed(f"Job {job_id} failed: {reason}")
    return _worker_failure(job_id, error, reason)


def _worker_failure(job_id: str, error: Mapping[str, Any], reason: str) -> Exception:
    module = str(error.get("module") or error.get("exception_module") or "builtins")
    name = str(error.get("type") or error.get("exception_type") or "")
    message = str(error.get("message") or reason)
    worker = str(error.get("worker") or error.get("slot") or "a worker")
    remote = filter_text(str(error.get("traceback") or f"{name}: {message}")).strip()
    original = rebuild(module, name, message)
    if original is None:
        return WorkerFailed(f"{worker} of job {job_id} failed: {name}: {message}\n\n{remote}")
    original.__cause__ = WorkerFailed(f"{worker} of job {job_id} failed.\n\n{remote}")
    original.add_note(f"Raised on {worker} of job {job_id}; its traceback is shown above.")
    return original


def stop_reason(error: BaseException) -> str:
    """Return the reason for which a script that raised this error cancels its job."""
    return f"the script stopped: {type(error).__name__}: {error}"[:500]


def trained_before(error: BaseException) -> bool:
    """Whether the job that this error ended had begun its first epoch."""
    return TRAINED in getattr(error, "__notes__", ())


def rebuild(module: str, name: str, message: str) -> Exception | None:
    """Return an exception by its class name; None unless the type may be reconstructed from remote data.

    Nothing is imported: a Keras or TensorFlow type is found only when its module is loaded.
    """
    kind = _find(module, name)
    if kind is None or not issubclass(kind, Exception) or issubclass(kind, _NEVER):
        return None
    for arguments in ((message,), (None, None, message)):  # TensorFlow's take (node, operation, message)
        try:
            return kind(*arguments)
        except Exception:
            continue
    return None


def _find(module: str, name: str) -> type | None:
    if module == "builtins":
        found: Any = getattr(builtins, name, None)
    elif module == errors.__name__:
        found = errors.error_class(name)
    elif module.split(".")[0] in ("keras", "tensorflow"):
        found = getattr(sys.modules.get(module), name, None)
    else:
        found = None
    return found if isinstance(found, type) else None
