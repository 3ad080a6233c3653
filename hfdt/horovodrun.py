"""``horovodrun``, started as ``python -m hfdt.horovodrun [--loopback] ARGUMENTS``.

Horovod's launcher opens a key-value store on all interfaces that asks nobody for a password, and what is written there
is trusted (CVE-2024-10190, CVE-2026-31234). With ``--loopback`` it listens on 127.0.0.1 only: all ranks have to be on
this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import HTTPServer
from typing import Any


def find_loopback_port(factory: Callable[[tuple[str, int]], HTTPServer]) -> tuple[Any, int]:
    """What Horovod's ``find_port`` does, on loopback, with a port that the kernel chooses."""
    server = factory(("127.0.0.1", 0))
    return server, int(server.server_address[1])


def main(argv: list[str]) -> None:
    """Run Horovod's launcher; it exits with its own code."""
    from horovod.runner import launch
    from horovod.runner.http import http_server

    if argv[:1] == ["--loopback"]:
        http_server.find_port = find_loopback_port
        argv = ["--network-interfaces", "lo", *argv[1:]]
    sys.argv = ["horovodrun", *argv]
    launch.run_commandline()


if __name__ == "__main__":
    main(sys.argv[1:])
