import stat

import pytest

from nfdt.core.errors import ProtocolError, ServerUnreachable, UsageError
from nfdt.core.host.launcher_rank import LauncherRank, find_launcher_rank
from nfdt.launch.rendezvous import RendezvousInfo, await_rendezvous, publish_rendezvous, rendezvous_file
from tests.support.clocks import ManualClock

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1327038465",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}
RESTARTED = {"SLURM_RESTART_COUNT": "1"}
PMIX = {"PMIX_RANK": "5", "PMIX_SIZE": "6", "PMIX_NAMESPACE": "ns"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [(OPEN_MPI, (1, 3, 1)), (HYDRA, (2, 4, 0)), (SLURM, (0, 8, 0)), (PMIX, (5, 6, 0))],
    ids=["openmpi", "hydra", "slurm", "pmix"],
)
def test_each_launcher_is_understood(environment, expected):
    place = find_launcher_rank(environment)
    assert place is not None
    assert (place.rank, place.size, place.local_rank) == expected


def test_without_a_launcher_there_is_no_place():
    assert find_launcher_rank({"HOME": "/root"}) is None


def test_all_ranks_of_a_launch_meet_and_two_launches_do_not():
    others = find_launcher_rank({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"})
    again = find_launcher_rank({**OPEN_MPI, "PMIX_NAMESPACE": "9"})
    mine = find_launcher_rank(OPEN_MPI)
    assert rendezvous_file(mine, {"HOME": "/h"}) == rendezvous_file(others, {"HOME": "/h"})
    assert rendezvous_file(mine, {"HOME": "/h"}) != rendezvous_file(again, {"HOME": "/h"})


def test_a_requeued_job_has_a_file_of_its_own():
    """The first run may have been killed and have left its file; the ids of the job and its steps are the same."""
    files = [rendezvous_file(find_launcher_rank({**SLURM, **again}), {"HOME": "/h"}) for again in ({}, RESTARTED)]
    assert files[0] != files[1]


@pytest.mark.parametrize("size", ["1", "x", ""])
def test_a_rank_outside_the_size_is_a_usage_error(size):
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_RANK"):
        find_launcher_rank({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": size})


def test_the_directory_can_be_chosen(tmp_path):
    assert rendezvous_file(LauncherRank(0, 1, 0, "j"), {"NFDT_RENDEZVOUS_DIR": str(tmp_path)}).parent == tmp_path


def test_the_rendezvous_file_is_private_read_by_the_others_and_gone_afterwards(tmp_path):
    path = tmp_path / "new" / "m.json"
    sent = RendezvousInfo("10.0.0.1:5", "secret", "-----BEGIN")
    with publish_rendezvous(path, sent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await_rendezvous(path) == sent
    assert not path.exists()
    assert "secret" not in repr(sent)


def test_the_other_ranks_wait_for_rank_0(tmp_path):
    path, clock = tmp_path / "m.json", ManualClock()
    entered = []

    def sleep(seconds):
        clock.advance(seconds)
        if not entered:
            entered.append(publish_rendezvous(path, RendezvousInfo("h:1", "t")))
            entered[0].__enter__()

    assert await_rendezvous(path, now=clock.now, sleep=sleep).address == "h:1"


def test_a_rendezvous_that_is_missing_for_too_long_is_an_error_with_a_remedy(tmp_path):
    clock = ManualClock()
    with pytest.raises(ServerUnreachable, match="NFDT_RENDEZVOUS_DIR"):
        await_rendezvous(tmp_path / "none", timeout_s=5, now=clock.now, sleep=clock.advance)


def test_a_file_that_others_can_read_is_not_trusted(tmp_path):
    path = tmp_path / "m.json"
    path.write_text('{"address": "h:1", "token": "t"}')
    path.chmod(0o644)
    with pytest.raises(ProtocolError, match="0600"):
        await_rendezvous(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_a_file_that_is_no_rendezvous_is_refused(tmp_path, text):
    path = tmp_path / "m.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ProtocolError, match="no rendezvous file"):
        await_rendezvous(path)
