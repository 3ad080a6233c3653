"""Messages of the server about the worlds of a rank."""

from __future__ import annotations

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.rank_worlds import RankWorlds


def test_a_rank_leaves_at_a_commit_or_at_once_and_the_next_world_is_whole():
    worlds, cuts = RankWorlds(), []
    worlds.break_off = lambda: cuts.append(True)
    worlds.leave(at_commit=True)
    assert (worlds.leaving, worlds.broken, cuts) == (True, False, [])
    worlds.leave(at_commit=False)
    assert (worlds.leaving, worlds.broken, cuts) == (True, True, [True])
    worlds.announce(pb.RankAssignment(rank=3))
    assert (worlds.leaving, worlds.broken) == (False, False)
    assert worlds.await_next().rank == 3
