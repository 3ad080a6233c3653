"""Probes of silent connections."""

from __future__ import annotations

import socket

import pytest

from nfdt.core.host.link_probes import VARIABLE, LinkProbes


@pytest.mark.parametrize(
    ("heartbeat_s", "lost_s", "expected"),
    [(2.0, 8.0, (2, 3)), (0.1, 0.4, (1, 1)), (5.0, 10.0, (5, 1)), (3.0, 10.0, (3, 3))],
)
def test_a_machine_is_lost_in_the_first_whole_interval_after_the_limit(heartbeat_s, lost_s, expected):
    probes = LinkProbes.within(heartbeat_s, lost_s)
    assert (probes.every_s, probes.count) == expected
    assert probes.lost_s >= lost_s


def test_ranks_read_the_probes_of_their_ring():
    assert LinkProbes.read({VARIABLE: str(LinkProbes(3, 5))}) == LinkProbes(3, 5)
    assert LinkProbes.read({}) == LinkProbes(2, 3)


def test_the_kernel_probes_a_connection_and_waits_no_longer_for_data_that_are_not_taken():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        LinkProbes(3, 4).apply(link)
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        found = [link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        assert found == [3, 3, 4, 15_000]
