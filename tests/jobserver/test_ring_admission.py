"""Jobs that a shared server refuses because their rings extend beyond its own machine."""

from __future__ import annotations

import pytest

from nfdt.core.errors import PolicyRefused
from nfdt.core.specs.job import ClusterSpec
from nfdt.jobserver.slot_rings import refuse_reach
from nfdt.launch.horovod_command import RingShape


@pytest.mark.parametrize(
    "reach",
    [
        {"hosts": "a:2"},
        {"hostfile": "hosts.txt"},
        {"network_interfaces": "eth0", "min_workers": 1},
        {"launcher": "world"},
    ],
    ids=lambda reach: next(iter(reach)),
)
def test_a_shared_server_logs_in_nowhere(reach):
    expected = "logs in nowhere .* without hosts, hostfile, network_interfaces or launcher='world'. Run the script"
    with pytest.raises(PolicyRefused, match=expected):
        refuse_reach(RingShape.of(ClusterSpec(workers=4, **reach)))


@pytest.mark.parametrize("option", ["host_discovery_script", "timeline", "autotune_log"])
def test_a_shared_server_touches_no_file_that_a_job_names(option):
    expected = "without host_discovery_script, timeline or autotune_log. Received: named.txt. Run the script without"
    with pytest.raises(PolicyRefused, match=expected):
        refuse_reach(RingShape.of(ClusterSpec(workers=4, autotune=True, **{option: "named.txt"})))


def test_a_ring_of_the_servers_own_machine_is_not_refused():
    refuse_reach(RingShape.of(ClusterSpec(workers=4, min_workers=2)))
