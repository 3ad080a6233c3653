"""Start of a process: quick and quiet imports of large libraries, without their threads, and a log of the phases."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nfdt.core.host.keras_backend import current_backend

_ARROW_OPTIONS = "JE_ARROW_MALLOC_CONF"  # read by the jemalloc of pyarrow when it is loaded; the last value counts


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable the garbage collector in the block, then freeze the survivors: later collections skip them.

    Imports create almost no garbage but many objects, which the collector traverses repeatedly. This takes a quarter of
    the time in which TensorFlow and Keras are imported.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


@contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back output to stderr inside the block, also from C++ code; show it if the block raises, or at level debug.

    TensorFlow 2.21 announces oneDNN on every import, regardless of TF_CPP_MIN_LOG_LEVEL.
    """
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def not_importing(*names: str) -> Iterator[None]:
    """Make imports of optional packages fail in the block; afterwards they can be imported again.

    Args:
        *names: Packages; those that are loaded already stay.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: import raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


@contextmanager
def worker_imports() -> Iterator[None]:
    """Import in the block as in :func:`quick_imports`, without packages that workers do not use.

    TensorFlow imports JAX for converters of TensorFlow Lite, and Keras scikit-learn, with pandas, for its wrappers: a
    third of the time in which they are imported. Code of a job may import them later.
    """
    with quick_imports(), not_importing(*sorted({"jax", "sklearn"} - {current_backend().name})):
        yield


@contextmanager
def without_allocator_threads() -> Iterator[None]:
    """Keep pyarrow, which pandas imports, from starting a thread that returns unused memory to the system."""
    # A process with threads does not fork.
    theirs = os.environ.get(_ARROW_OPTIONS)
    os.environ[_ARROW_OPTIONS] = ",".join(filter(None, [theirs, "background_thread:false"]))
    try:
        yield
    finally:
        if theirs is None:
            del os.environ[_ARROW_OPTIONS]
        else:
            os.environ[_ARROW_OPTIONS] = theirs


def quiet_grpc() -> None:
    """Keep gRPC, which is imported later, from writing lines of its own to stderr, unless the environment asks for it.

    What they say is in the errors of the calls.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


VARIABLE = "NFDT_START_LOG"


def note_start(process: str, phase: str) -> None:
    """Append a phase, as a line of JSON, to the file that NFDT_START_LOG names; do nothing without that variable.

    ``at`` is the Unix time in seconds. ``cpu_s`` is the processor time of the process in seconds, which begins at the
    fork in a forked process.

    Args:
        process: Name of this process, as in ``worker-0``.
        phase: What it has just done.
    """
    if path := os.environ.get(VARIABLE):
        values = {"at": time.time(), "cpu_s": time.process_time(), "process": process, "phase": phase}
        line = json.dumps(values) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(file)
