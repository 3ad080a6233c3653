"""Places of ranks on machines."""

from __future__ import annotations

from nfdt.core.specs.horovod_options import RingTuning
from nfdt.launch.ring import RankPlace, place_ranks


def test_ranks_of_one_machine():
    assert place_ranks(["a", "a"]) == [RankPlace(0, 2, 0, 2, 0, 1, 0), RankPlace(1, 2, 1, 2, 0, 1, 0)]


def test_ranks_of_unequal_machines():
    places = place_ranks(["a", "a", "b", "c", "a", "c"])
    assert [place.machine for place in places] == [0, 0, 1, 2, 0, 2]
    assert [place.local_rank for place in places] == [0, 1, 0, 0, 2, 1]
    assert [place.local_size for place in places] == [3, 3, 1, 2, 3, 2]
    assert [(place.cross_rank, place.cross_size) for place in places] == [
        (0, 3),
        (0, 2),
        (1, 3),
        (2, 3),
        (0, 1),
        (1, 2),
    ]


def test_the_environment_names_the_place_and_gloo():
    found = place_ranks(["a", "b"])[1].environment(RingTuning(cycle_time_ms=2.5).variables())
    assert found["HOROVOD_RANK"] == "1"
    assert found["HOROVOD_LOCAL_SIZE"] == "1"
    assert found["HOROVOD_CROSS_RANK"] == "1"
    assert found["HOROVOD_CONTROLLER"] == found["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert found["HOROVOD_CYCLE_TIME"] == "2.5"
