"""Place of rank 0 among the hosts of a ring."""

from __future__ import annotations

import pytest
from nfdt_client.ring import place_first_rank

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import ClusterSpec

ELSEWHERE = "192.0.2.1"


def test_this_machine_comes_first_among_the_hosts():
    placed = place_first_rank(ClusterSpec(workers=4, hosts=f"{ELSEWHERE}:2,localhost:1,192.0.2.2"))
    assert placed.hosts == f"localhost:1,{ELSEWHERE}:2,192.0.2.2"


def test_hosts_without_this_machine_are_refused_at_once():
    with pytest.raises(UsageError, match=r"hosts: expected this machine, .*Received: '192\.0\.2\.1:2'"):
        place_first_rank(ClusterSpec(hosts=f"{ELSEWHERE}:2"))


@pytest.mark.parametrize(
    "text", ["# the machines\n\nlocalhost slots=1\n192.0.2.1 slots=2\n", "127.0.0.1:2\n"], ids=["slots", "colon"]
)
def test_a_hostfile_may_begin_with_this_machine(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    cluster = ClusterSpec(hostfile=str(path))
    assert place_first_rank(cluster) == cluster


def test_a_hostfile_that_begins_elsewhere_is_refused_at_once(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("192.0.2.1 slots=2\nlocalhost\n")
    with pytest.raises(UsageError, match=r"first line .*Received: '192\.0\.2\.1'"):
        place_first_rank(ClusterSpec(hostfile=str(path)))
    with pytest.raises(UsageError, match="expected a file with hosts"):
        place_first_rank(ClusterSpec(hostfile=str(tmp_path / "none")))
