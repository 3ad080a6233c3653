from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import resolve_cluster
from nfdt.launch.horovod_command import HostInfo, RingShape, choose_launcher, ring_command, ring_environment

PROGRAM = ["python", "-m", "hfdt.runtime.rank"]
WITH_MPI = HostInfo("/usr/bin/mpirun", cores=2, root=False)
ROOT = HostInfo("/usr/bin/mpirun", cores=2, root=True)
WITHOUT = HostInfo(None, cores=2, root=False)


def test_mpirun_comes_first_where_it_exists():
    assert choose_launcher(RingShape(2), WITH_MPI) == "mpirun"
    assert choose_launcher(RingShape(2), WITHOUT) == "horovodrun"


def test_a_missing_mpirun_is_an_error_that_names_what_to_install():
    with pytest.raises(UsageError, match="openmpi-bin"):
        ring_command(RingShape(2, "mpirun"), PROGRAM, WITHOUT)


def test_mpirun_starts_every_rank_on_this_machine_over_loopback():
    argv = ring_command(RingShape(2), PROGRAM, WITH_MPI)
    assert argv[:3] == ["/usr/bin/mpirun", "-np", "2"]
    assert argv[-3:] == PROGRAM
    assert argv[argv.index("oob_tcp_if_include") + 1] == "lo"
    assert not {"--oversubscribe", "--allow-run-as-root"} & set(argv)


def test_more_ranks_than_cores_and_root_are_allowed_when_they_are_so():
    argv = ring_command(RingShape(4), PROGRAM, ROOT)
    assert {"--oversubscribe", "--allow-run-as-root"} <= set(argv)


@pytest.mark.parametrize(("cores", "gives_way"), [(2, True), (3, True), (4, False)])
def test_ranks_that_wait_give_way_where_cores_are_few(cores, gives_way):
    argv = ring_command(RingShape(2), PROGRAM, HostInfo("/usr/bin/mpirun", cores=cores, root=False))
    assert ("mpi_yield_when_idle" in argv) == gives_way


@pytest.mark.parametrize(("hosts", "gives_way"), [("a:2,b:2", True), ("a:1,b:3", True), ("a,b,c,d", False)])
def test_ranks_that_wait_give_way_on_every_machine_that_has_many(hosts, gives_way):
    argv = ring_command(RingShape(4, hosts=hosts), PROGRAM, HostInfo("/usr/bin/mpirun", cores=2, root=False))
    assert ("mpi_yield_when_idle" in argv) == gives_way


def test_launchers_notice_a_machine_without_power_after_the_jobs_own_time():
    shape = RingShape.of(resolve_cluster(workers=2, hosts="a:1,b:1", heartbeat_s=3, lost_s=12))
    argv = ring_command(shape, PROGRAM, WITH_MPI)
    assert [after(argv, f"oob_tcp_keepalive_{name}") for name in ("time", "intvl", "probes")] == ["3", "3", "3"]
    assert "HFDT_LINK_PROBES=3,3" in argv
    argv = ring_command(replace(shape, launcher="horovodrun"), PROGRAM, WITH_MPI)
    assert after(argv, "--probes") == "3,3"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (RingShape(4, hosts="a:2,b:2"), ["-H", "a:2,b:2"]),
        (RingShape(4, hostfile="/etc/hosts.mpi"), ["--hostfile", "/etc/hosts.mpi"]),
    ],
    ids=["hosts", "hostfile"],
)
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hosts_are_passed_on_and_nothing_is_bound_to_loopback_then(shape, expected, launcher):
    argv = ring_command(RingShape(4, launcher, shape.hosts, shape.hostfile), PROGRAM, WITH_MPI)
    at = argv.index(expected[0])
    assert argv[at : at + 2] == expected
    assert not {"lo", "--loopback"} & set(argv)


def test_horovodrun_listens_on_loopback_when_all_ranks_are_here():
    argv = ring_command(RingShape(2, "horovodrun", "localhost:2"), PROGRAM, WITH_MPI)
    assert argv[:5] == [sys.executable, "-P", "-m", "hfdt.horovodrun", "--loopback"]
    assert "--gloo" in argv
    assert argv[-3:] == PROGRAM


def test_a_rank_of_a_world_is_the_program_itself():
    assert ring_command(RingShape(2, "world"), PROGRAM, WITHOUT) == PROGRAM


def test_a_new_world_does_not_inherit_the_old_one_and_no_token_goes_along():
    inherited = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "NFDT_TOKEN": "secret", "PATH": "/bin"}
    outside = ring_environment(inherited, in_world=False)
    inside = ring_environment(inherited, in_world=True)
    assert not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "NFDT_TOKEN"} & set(outside)
    assert inside["PMIX_RANK"] == "0"
    assert "NFDT_TOKEN" not in inside
    assert outside["PATH"] == "/bin"


def elastic(**options) -> RingShape:
    return RingShape.of(resolve_cluster(workers=options.pop("workers", 3), **options))


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_an_elastic_ring_has_a_host_name_for_every_rank_of_this_machine():
    argv = ring_command(elastic(min_workers=2), PROGRAM, WITH_MPI)
    assert argv[3:6] == ["hfdt.horovodrun", "--loopback", "--watch-parent"]
    assert after(argv, "-H") == "127.0.0.1:1,127.0.0.01:1,127.0.0.001:1"
    assert after(argv, "--min-np") == "2"
    assert "--max-np" not in argv
    assert argv[argv.index("--blacklist-cooldown-range") + 1 :][:2] == ["2", "600"]
    assert argv[-3:] == PROGRAM


def test_hosts_of_an_elastic_ring_keep_their_names_but_for_this_machine_s():
    argv = ring_command(elastic(workers=4, min_workers=1, hosts="localhost:2,b:2"), PROGRAM, WITH_MPI)
    assert after(argv, "-H") == "127.0.0.1:1,127.0.0.01:1,b:2"
    assert "--loopback" not in argv


def test_a_discovery_script_lists_the_hosts_of_ranks_and_is_quoted_for_its_shell():
    shape = elastic(max_workers=8, host_discovery_script="/home/me/my hosts.sh")
    argv = ring_command(shape, PROGRAM, WITHOUT)
    assert after(argv, "--host-discovery-script") == "'/home/me/my hosts.sh'"
    assert "-H" not in argv
    assert "--loopback" in argv
    assert after(argv, "-np") == "3"
    fewer = elastic(min_workers=2, host_discovery_script="/d")
    assert after(ring_command(fewer, PROGRAM, WITHOUT), "-np") == "2", "the ring begins with as many as there are"
    outside = elastic(host_discovery_script="/d", network_interfaces="eth0,ib0")
    argv = ring_command(outside, PROGRAM, WITHOUT)
    assert "--loopback" not in argv
    assert after(argv, "--network-interfaces") == "eth0,ib0"


def test_mpirun_cannot_lose_a_rank():
    with pytest.raises(UsageError, match="mpirun ends all ranks"):
        ring_command(elastic(min_workers=2, launcher="mpirun"), PROGRAM, WITH_MPI)
    assert choose_launcher(elastic(min_workers=2), WITH_MPI) == "horovodrun"


def test_horovod_knows_the_flags_of_an_elastic_ring(monkeypatch):
    launch = pytest.importorskip("horovod.runner.launch")
    shape = elastic(min_workers=2, max_workers=5, reset_limit=7, elastic_timeout_s=33, host_cooldown_s=4)
    argv = ring_command(shape, PROGRAM, WITHOUT)
    monkeypatch.setattr("sys.argv", ["horovodrun", *argv[6:]])
    given = launch.parse_args()
    assert (given.min_num_proc, given.max_num_proc, given.reset_limit) == (2, 5, 7)
    assert (given.elastic_timeout, given.cooldown_range, given.gloo_timeout_seconds) == (33, [4, 600], 60)
    assert given.command == PROGRAM
