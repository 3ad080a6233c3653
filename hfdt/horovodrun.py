"""``horovodrun``, started as ``python -m hfdt.horovodrun [--loopback | --probes S,N] [--watch-parent] ARGUMENTS``.

Horovod's launcher opens a key-value store on all interfaces without a password, and trusts all data that is written
there (CVE-2024-10190, CVE-2026-31234). With ``--loopback`` it listens on 127.0.0.1 only: all ranks must run on this
machine.

Its elastic launcher removes the whole host when one of its ranks ends. So that ranks of this machine fail
independently, each gets a separate host name: 127.0.0.1, 127.0.0.01, 127.0.0.001, ...; all are the same address.

Its ssh waits without a limit for a machine without power. Here the machine is lost after N probes, one every S
seconds, without an answer (default: 2,3); the elastic launcher leaves its host out until ssh reaches it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import HTTPServer
from typing import Any

from nfdt.core.host.launcher_rank import one_name_per_slot, slot_of
from nfdt.core.host.link_probes import LinkProbes

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


def order_hosts(available: Collection[str], before: Sequence[str]) -> list[str]:
    """Replace ``order_available_hosts``: earlier hosts keep their order, then this machine's, then by name.

    Horovod takes new hosts in the order of a set, so that rank 0 could be on any of them.
    """
    known = [host for host in before if host in available]
    return [*known, *sorted(set(available) - set(known), key=lambda host: (slot_of(host) is None, host))]


class LostHosts:
    """Hosts whose ranks have ended by themselves, until they are reached again; any thread may call.

    Args:
        reaches: Logs in to a host; returns whether that is possible.
    """

    def __init__(self, reaches: Callable[[str], bool]) -> None:
        self._reaches = reaches
        self._lost: set[str] = set()

    def add(self, host: str) -> None:
        """Record that a rank on a host has ended; this machine needs no login."""
        if slot_of(host) is None and host not in self._lost:
            self._lost.add(host)
            threading.Thread(target=self._await, args=(host,), name=host, daemon=True).start()

    def without(self, found: Mapping[str, int]) -> dict[str, int]:
        """Return the hosts that are not lost, with their slots."""
        return {host: slots for host, slots in found.items() if host not in self._lost}

    def _await(self, host: str) -> None:
        pause = threading.Event()
        while not self._reaches(host):
            pause.wait(LOOK_S)
        self._lost.discard(host)


def patch_horovod(*, only_here: bool, probes: LinkProbes) -> None:
    """Make Horovod's launchers notice lost machines, and its elastic one use :func:`one_name_per_slot`.

    The elastic one also starts ranks on hosts that have returned.

    Args:
        only_here: Whether it listens on loopback, where no other machine can reach it.
        probes: Probes of the connections of ssh.
    """
    from horovod.runner import gloo_run
    from horovod.runner.elastic import discovery, driver, registration
    from horovod.runner.util import remote

    remote.SSH_COMMAND_PREFIX = " ".join((remote.SSH_COMMAND_PREFIX, *probes.ssh_options))
    make_exec_command = gloo_run._exec_command_fn
    login: dict[str, Any] = {}

    def reaches(host: str) -> bool:
        command = remote.get_remote_command("true", host, **login)
        return not subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True).returncode

    def note_login(settings: Any) -> Any:
        login.update(port=settings.ssh_port, identity_file=settings.ssh_identity_file)
        return make_exec_command(settings)

    lost_hosts = LostHosts(reaches)
    find = discovery.HostDiscoveryScript.find_available_hosts_and_slots
    find_fixed = discovery.FixedHosts.find_available_hosts_and_slots

    class Driver(driver.ElasticDriver):
        _host_assignments: dict[str, Any]

        def _update_host_assignments(self, current_hosts: Any) -> Any:
            # A host that failed and returned before the next communicator forms would be treated as still running.
            lost = {host for host, _ in self._worker_registry.get(registration.FAILURE)}
            self._host_assignments = {h: slots for h, slots in self._host_assignments.items() if h not in lost}
            return super()._update_host_assignments(current_hosts)

        def _handle_worker_exit(self, slot_info: Any, exit_code: int, timestamp: float) -> None:
            if exit_code:
                lost_hosts.add(slot_info.hostname)
            super()._handle_worker_exit(slot_info, exit_code, timestamp)

    def find_here(self: Any) -> dict[str, int]:
        found = one_name_per_slot(find(self))
        if only_here and (elsewhere := [host for host in found if slot_of(host) is None]):
            raise RuntimeError(
                f"The host discovery script names {', '.join(elsewhere)}, which cannot reach this machine's loopback "
                "interface. Expected: localhost, or network_interfaces='eth0' (the one that leads there)."
            )
        return lost_hosts.without(found)

    discovery.HostDiscoveryScript.find_available_hosts_and_slots = find_here
    discovery.FixedHosts.find_available_hosts_and_slots = lambda self: lost_hosts.without(find_fixed(self))
    discovery.HostManager.order_available_hosts = staticmethod(order_hosts)
    gloo_run.ElasticDriver, gloo_run._exec_command_fn = Driver, note_login


def main(argv: list[str]) -> None:
    """Run Horovod's launcher, which exits with its own code."""
    from horovod.runner import launch
    from horovod.runner.http import http_server

    loopback, probes = argv[:1] == ["--loopback"], LinkProbes()
    argv = argv[loopback:]
    if argv[:1] == ["--probes"]:
        probes, argv = LinkProbes.parse(argv[1]), argv[2:]
    if argv[:1] == ["--watch-parent"]:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
        argv = argv[1:]
    patch_horovod(only_here=loopback, probes=probes)
    if loopback:
        http_server.find_port = find_loopback_port
        argv = ["--network-interfaces", "lo", *argv]
    sys.argv = ["horovodrun", *argv]
    launch.run_commandline()


if __name__ == "__main__":
    main(sys.argv[1:])
