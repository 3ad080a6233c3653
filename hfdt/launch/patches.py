"""Patches of Horovod's elastic launcher: single ranks of a machine may fail, and lost hosts may return at once.

The launcher removes the whole host when one of its ranks ends. So that ranks of this machine fail independently, each
gets a separate host name: 127.0.0.1, 127.0.0.01, 127.0.0.001, ...; all are the same address.
"""

from __future__ import annotations

from typing import Any

from nfdt.core.host.launcher_rank import one_name_per_slot, slot_of


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
