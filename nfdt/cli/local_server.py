"""The job server of ``nfdt run``, whose slots are forked from the process that runs the script."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nfdt_client.embedded import EmbeddedServer, StartedServer, server_environment
from nfdt_client.options import Options

from nfdt.core.errors import NotInstalled
from nfdt.core.host.keras_backend import TENSORFLOW, current_backend
from nfdt.core.host.machine import find_gpus
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.startup import quick_imports, quiet_start
from nfdt.launch.fork_here import FORK_SERVER_LOG, fork_server_here, import_slots

_log = logging.getLogger(__name__)


@contextmanager
def local_server(options: Options) -> Iterator[StartedServer | None]:
    """Start a job server, import Keras while it starts, and fork the fork server of its slots from this process.

    So Keras and TensorFlow are imported once. Yields None where slots cannot be forked from here (other backends and
    topologies, GPUs, a server elsewhere, missing packages): the session then starts what it needs.
    """
    if not _is_forkable(options):
        yield None
        return
    with ExitStack() as undo:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        undo.callback(theirs.close)
        with requests:
            workers, shards = options.cluster.workers, options.cluster.shards
            server = EmbeddedServer(workers, shards, fork_server=requests, warm=options.warm, ui=options.ui)
            undo.callback(server.stop)
            server.start()
        if server.is_warm:
            yield server
            return
        environment = server_environment()
        try:
            with quiet_start(), quick_imports():
                import_slots(serves_scripts=True)
        except ImportError as error:  # the session reports it
            _log.info("Slots are not forked from this process: %s", error)
            yield server
            return
        await_fork_server = fork_server_here(theirs, environment, Path(server.folder) / FORK_SERVER_LOG)
        if await_fork_server is not None:
            undo.callback(await_fork_server)
            undo.callback(server.stop)  # first: then the fork server ends by itself
        yield server


def _is_forkable(options: Options) -> bool:
    """Whether slots can be forked from this process, which has imported no Keras yet."""
    try:
        require_server_packages("A server in this script", current_backend().name)
    except NotInstalled:
        return False
    return (
        sys.platform.startswith("linux")
        and options.server is None
        and options.algorithm.topology_facts.flat
        and current_backend().name == TENSORFLOW
        and "keras" not in sys.modules
        and not find_gpus(os.environ)
    )
