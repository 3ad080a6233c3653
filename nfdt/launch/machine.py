"""Names and addresses of this machine for other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from nfdt.core.host.machine import is_own_address
from nfdt.core.wire.channel import is_loopback

_WILDCARDS = ("0.0.0.0", "::")


def is_wildcard(listen_host: str) -> bool:
    """Whether a server that listens on this host listens on every address of its machine."""
    return listen_host in _WILDCARDS


def reachable_host(listen_host: str, names: Sequence[str] = ()) -> str:
    """Return the host at which other machines reach a server.

    Args:
        listen_host: Host that the server listens on.
        names: Names and addresses in its certificate. For a wildcard, the first of them that belongs to this machine
            and is not loopback is preferred to the address of the default route.
    """
    if not is_wildcard(listen_host):
        return listen_host
    for name in names:
        if not name.startswith("*") and is_own_address(name, loopback=False):
            return name
    with contextlib.suppress(OSError):
        return route_address("192.0.2.1")
    return socket.gethostname()


def route_address(host: str) -> str:
    """Return the address of this machine from which it sends to another host.

    Raises:
        OSError: The host has no address, or there is no route to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def own_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces that are up; without loopback and link-local ones."""
    import psutil  # clients need not have it

    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each for name, addresses in psutil.net_if_addrs().items() if name in up for each in addresses]
    return [
        each.address
        for each in found
        if each.family in families
        and not is_loopback(each.address)
        and not ipaddress.ip_address(each.address.partition("%")[0]).is_link_local
    ]


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
