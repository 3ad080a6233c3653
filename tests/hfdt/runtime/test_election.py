from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("horovod")

from hfdt.runtime.elastic.ring import Candidate, assign_numbers, elect, lost_hosts
from nfdt.core.errors import JobFailed


def rank(number: int = 0, commit: int = -1, *, reaches_server: bool = True, leads: bool = False) -> Candidate:
    return Candidate(number, commit, "job" if commit >= 0 else "", reaches_server, leads)


def test_in_a_new_ring_the_lowest_rank_that_reaches_the_server_leads():
    assert elect([rank(-1), rank(-1)]) == 0
    assert elect([rank(-1, reaches_server=False), rank(-1), rank(-1)]) == 1


def test_the_leader_goes_on_leading_whatever_its_rank_is_now():
    assert elect([rank(1, 7), rank(0, 6, leads=True)]) == 1


def test_the_newest_commit_leads_when_the_leader_is_gone():
    assert elect([rank(3), rank(1, 6), rank(2, 7)]) == 2


def test_a_rank_that_cannot_reach_the_server_does_not_lead():
    assert elect([rank(1, 9, reaches_server=False), rank(2, 7)]) == 1


def test_a_ring_without_a_possible_leader_ends_with_a_reason():
    with pytest.raises(JobFailed, match="no other rank can reach the job server"):
        elect([rank(1, 9, reaches_server=False)])


def test_numbers_last_as_long_as_their_rank_and_are_never_used_twice():
    assert assign_numbers([rank(-1), rank(-1)]) == [0, 1]
    ranks = [rank(2), rank(-1), replace(rank(0), used=(0, 1, 2, 3)), rank(-1)]
    assert assign_numbers(ranks) == [2, 4, 0, 5]


def test_the_machines_of_ranks_that_are_gone_are_known_by_their_numbers():
    assert lost_hosts({0: "a", 1: "b", 2: "b"}, [0, 2, 3]) == ["b"]
    assert lost_hosts({}, [0, 1]) == []
