"""``horovodrun``, started as ``python -m hfdt.horovodrun [--loopback] [--watch-parent] ARGUMENTS``.

Horovod's launcher opens a key-value store on all interfaces without a password, and trusts all data that is written
there (CVE-2024-10190, CVE-2026-31234). With ``--loopback`` it listens on 127.0.0.1 only: all ranks must run on this
machine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from http.server import HTTPServer
from typing import Any

from hfdt.launch.patches import patch_horovod

LOOK_S = 0.5


def find_loopback_port(factory: Callable[[tuple[str, int]], HTTPServer]) -> tuple[Any, int]:
    """Replace Horovod's ``find_port``: listen on loopback, with a port that the kernel chooses."""
    server = factory(("127.0.0.1", 0))
    return server, int(server.server_address[1])


def end_with_parent(parent: int) -> None:
    """End this process, and with it all ranks, when its parent has ended."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(LOOK_S)
    os._exit(1)


def main(argv: list[str]) -> None:
    """Run Horovod's launcher, which exits with its own code."""
    from horovod.runner import launch
    from horovod.runner.http import http_server

    loopback = argv[:1] == ["--loopback"]
    argv = argv[loopback:]
    if argv[:1] == ["--watch-parent"]:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
        argv = argv[1:]
    patch_horovod(only_here=loopback)
    if loopback:
        http_server.find_port = find_loopback_port
        argv = ["--network-interfaces", "lo", *argv]
    sys.argv = ["horovodrun", *argv]
    launch.run_commandline()


if __name__ == "__main__":
    main(sys.argv[1:])
