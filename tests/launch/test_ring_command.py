from __future__ import annotations

import sys

import pytest

from nfdt.core.errors import UsageError
from nfdt.launch.ring_command import RingShape, Surroundings, choose_launcher, ring_command, ring_environment

PROGRAM = ["python", "-m", "hfdt.rank"]
WITH_MPI = Surroundings("/usr/bin/mpirun", cores=2, root=False)
ROOT = Surroundings("/usr/bin/mpirun", cores=2, root=True)
WITHOUT = Surroundings(None, cores=2, root=False)


def test_mpirun_comes_first_where_it_exists():
    assert choose_launcher(RingShape(2), WITH_MPI) == "mpirun"
    assert choose_launcher(RingShape(2), WITHOUT) == "horovodrun"


def test_mpirun_that_is_asked_for_and_missing_is_an_error_that_says_what_to_install():
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
