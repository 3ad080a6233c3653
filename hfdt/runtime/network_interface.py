"""The network interface at which the other ranks reach this one."""

from __future__ import annotations

import socket

import psutil

from nfdt.core.errors import UsageError
from nfdt.core.wire.channel import is_loopback


def own_address(host: str) -> str:
    """Return the address of an interface of this machine that a host name, or an address itself, stands for.

    A name that also leads to loopback on its own machine, as Debian sets it up, counts by its other addresses.

    Raises:
        UsageError: No interface of this machine has it.
    """
    return _interface_of(host)[1]


def interface_of(host: str) -> str:
    """Return the name of the network interface that has the address of :func:`own_address`."""
    return _interface_of(host)[0]


def _interface_of(host: str) -> tuple[str, str]:
    found = _addresses_of(host)
    wanted = {address for address in found if is_loopback(host) or not is_loopback(address)}
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        for one in addresses:
            if (address := one.address.partition("%")[0]) in wanted:
                return name, address
    raise UsageError(
        f"Address {host} of this slot: expected a name or an address of an interface of its machine, for Gloo. "
        f"Received: {', '.join(sorted(found)) or 'no address'}; the interfaces are {', '.join(sorted(interfaces))}. "
        "Give the slot such an address: `nfdt worker --host`, or `nfdt server --advertise` for slots of the server."
    )


def _addresses_of(host: str) -> set[str]:
    """Return the addresses of a host name; those of an address are itself."""
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
