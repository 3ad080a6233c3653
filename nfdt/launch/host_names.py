"""Names and addresses of this machine, as other machines of its cluster use them."""

from __future__ import annotations

import ipaddress
import socket

from nfdt.core.wire.channel import is_loopback
from nfdt.launch.machine import is_own_address, reachable_host


def own_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces that are up; without loopback and link-local ones."""
    import psutil  # clients need not have it

    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        a.address for name, all_ in psutil.net_if_addrs().items() if name in up for a in all_ if a.family in families
    ]
    return [address for address in found if _is_reachable(address)]


def public_host() -> str:
    """Return the name or address at which other machines reach this one.

    It is the host name if that resolves to an address of a network interface. On many machines it resolves to loopback;
    then it is the address of the default route, and without such a route that of the first interface.
    """
    if is_own_address(name := socket.gethostname(), loopback=False):
        return name
    routed, addresses = reachable_host("0.0.0.0"), own_addresses()
    return routed if routed in addresses or not addresses else addresses[0]


def certificate_hosts(host: str) -> list[str]:
    """Return the names and addresses for a certificate of this machine, which others reach at ``host``."""
    return list(
        dict.fromkeys([host, socket.gethostname(), socket.getfqdn(), *own_addresses(), "localhost", "127.0.0.1"])
    )


def _is_reachable(address: str) -> bool:
    return not is_loopback(address) and not ipaddress.ip_address(address.partition("%")[0]).is_link_local
