"""``horovodrun``, started as ``python -m hfdt.horovodrun [--loopback] [--watch-parent] ARGUMENTS``.

Horovod's launcher opens a key-value store on all interfaces without a password, and trusts all data that is written
there (CVE-2024-10190, CVE-2026-31234). With ``--loopback`` it listens on 127.0.0.1 only: all ranks must run on this
machine.

Its elastic launcher removes the whole host when one of its ranks ends. So that ranks of this machine fail
independently, each gets a separate host name: 127.0.0.1, 127.0.0.01, 127.0.0.001, ...; all are the same address.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from http.server import HTTPServer
from typing import Any

from nfdt.core.host.launcher_rank import one_name_per_slot, slot_of

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


def patch_horovod(*, only_here: bool) -> None:
    """Make Horovod's elastic launcher use :func:`one_name_per_slot`, and start ranks on hosts that have returned.

    Args:
        only_here: Whether it listens on loopback, where no other machine can reach it.
    """
    from horovod.runner import gloo_run
    from horovod.runner.elastic import discovery, driver, registration

    find = discovery.HostDiscoveryScript.find_available_hosts_and_slots

    class Driver(driver.ElasticDriver):
        _host_assignments: dict[str, Any]

        def _update_host_assignments(self, current_hosts: Any) -> Any:
            # A host that failed and returned before the next communicator forms would be treated as still running.
            lost = {host for host, _ in self._worker_registry.get(registration.FAILURE)}
            self._host_assignments = {h: slots for h, slots in self._host_assignments.items() if h not in lost}
            return super()._update_host_assignments(current_hosts)

    def find_here(self: Any) -> dict[str, int]:
        found = one_name_per_slot(find(self))
        if only_here and (elsewhere := [host for host in found if slot_of(host) is None]):
            raise RuntimeError(
                f"The host discovery script names {', '.join(elsewhere)}, which cannot reach this machine's loopback "
                "interface. Expected: localhost, or network_interfaces='eth0' (the one that leads there)."
            )
        return found

    discovery.HostDiscoveryScript.find_available_hosts_and_slots = find_here
    gloo_run.ElasticDriver = Driver


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
