"""A fork server that is forked from this process, which has imported the modules of slots for itself."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from atexit import _run_exitfuncs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import _shutdown  # type: ignore[attr-defined]
from typing import NoReturn

from nfdt.core.host.startup import note_start
from nfdt.launch.fork_client import SLOT_MODULE
from nfdt.launch.fork_server import ForkServer, lead_session, other_threads

_log = logging.getLogger(__name__)

FORK_SERVER_LOG = "fork-server.log"
END_S = 5.0
POLL_S = 0.01  # interval of checks for its end


def _await_end(pid: int) -> None:
    """Wait for the end of the fork server, which ends when the launcher closes its socket; kill it after a deadline."""
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ChildProcessError):  # the script has waited for all children
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(POLL_S)


def import_slots(*, serves_scripts: bool) -> None:
    """Import the modules of slots, with Keras and its backend, and start none of their threads.

    Args:
        serves_scripts: Whether a script will run in this process, see :func:`nfdt.worker.slot.load`.

    Raises:
        ImportError: One of them cannot be imported.
    """
    importlib.import_module(SLOT_MODULE).load(serves_scripts=serves_scripts)


def fork_server_here(requests: socket.socket, environment: Mapping[str, str], log: Path) -> Callable[[], None] | None:
    """Fork a fork server from this process; its slots then begin with what this process has imported.

    The threads of OpenBLAS end before each fork, by its own handler, and begin again when they are needed. Where any
    other thread runs, there is no fork server: a fork might interrupt it in the middle of its work.

    Args:
        requests: Socket of the launcher's requests, which the fork server takes over: this process closes it.
        environment: Environment of the fork server.
        log: File for its output.

    Returns:
        Function that waits for the fork server's end; None if there is no fork server.
    """
    with requests:
        if threading.active_count() > 1:
            _warn([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # It waits for a byte: whether all threads had ended before the fork is known only afterwards.
        begins, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            end_forked(lambda: _serve(parent, begins, requests, environment, log))
        os.close(begins)
        threads = other_threads()
        if not threads:
            os.write(begin, b"\n")
        os.close(begin)
    if not threads:
        return partial(_await_end, pid)
    _warn(threads)
    _await_end(pid)
    return None


def _warn(threads: Sequence[str]) -> None:
    _log.warning(
        "Workers start some seconds later: they are not forked from this process, because something that it imported "
        "has started threads (%s).",
        ", ".join(threads),
    )


def _serve(parent: int, begins: int, requests: socket.socket, environment: Mapping[str, str], log: Path) -> int:
    """Serve in the new process, and run each of its slots; return the exit code."""
    lead_session(parent)
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    keep_descriptors({begins, requests.fileno()}, null, output, output)
    logging.getLogger().handlers.clear()
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the command: slots are started with -P
    if not os.read(begins, 1):
        return 0
    os.close(begins)
    os.environ.clear()
    os.environ.update(environment)
    note_start("fork server", "is forked")
    arguments = ForkServer(requests).serve()
    return 0 if arguments is None else int(importlib.import_module(SLOT_MODULE).main(arguments))


def end_forked(run: Callable[[], int]) -> NoReturn:
    """Run a function in a process that was just forked, and end the process; no frame of the parent goes on in it."""
    code = 1
    try:
        code = run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _shutdown()  # as multiprocessing ends a forked process
            _run_exitfuncs()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def keep_descriptors(kept: set[int], stdin: int, stdout: int, stderr: int) -> None:
    """Set the standard streams of a process that was just forked, and close all other descriptors but the kept ones."""
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
