"""The interface at which the other ranks reach a slot, by an address or a name; its place in a world."""

from __future__ import annotations

import socket

import psutil
import pytest

pytest.importorskip("horovod")

from hfdt.runtime.network_interface import interface_of
from hfdt.runtime.tensorflow_ranks import place_of
from nfdt.core.errors import UsageError
from nfdt.launch.ring import place_ranks

LO = next(name for name, all in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in all))


def resolve(monkeypatch, *addresses: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)


def other_interface() -> tuple[str, str]:
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name != LO and one.family == socket.AF_INET:
                return name, one.address
    pytest.skip("loopback is the only interface here")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_an_interface_where_it_is_asked_for(host):
    assert interface_of(host) == LO


def test_a_name_is_an_interface_by_its_address_even_if_it_leads_to_loopback_as_well(monkeypatch):
    name, address = other_interface()
    resolve(monkeypatch, "127.0.0.1", address)
    assert interface_of("head") == name


def test_a_name_that_leads_to_loopback_alone_is_refused_for_other_machines(monkeypatch):
    resolve(monkeypatch, "127.0.0.1")
    with pytest.raises(UsageError, match=r"Received: 127\.0\.0\.1; .*--advertise"):
        interface_of("head")


def test_a_name_without_an_address_is_refused():
    with pytest.raises(UsageError, match="Received: no address"):
        interface_of("no-such-host.invalid")


def test_an_elastic_horovod_reads_its_place_as_its_own_launcher_would_send_it():
    from horovod.runner.common.util.hosts import SlotInfo

    place = place_ranks(["a", "b", "a"])[2]
    numbers = (place.rank, place.local_rank, place.cross_rank, place.size, place.local_size, place.cross_size)
    assert place_of(place.environment({})) == SlotInfo("a", *numbers).to_response_string().encode()
