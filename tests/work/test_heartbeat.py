"""Heartbeats: sent by work that advances, and not too often."""

from nfdt.core.work.heartbeat import Heartbeat
from tests.support.clocks import ManualClock


def test_heartbeats_follow_the_work_but_not_more_often_than_configured():
    clock, beats = ManualClock(), []
    heartbeat = Heartbeat(lambda: beats.append(clock.now()), 10.0, clock.now)
    began = clock.now()
    for _ in range(25):
        clock.advance(1.0)
        heartbeat()
    assert [at - began for at in beats] == [10.0, 20.0]


def test_work_that_hangs_sends_no_heartbeat():
    clock, beats = ManualClock(), []
    Heartbeat(lambda: beats.append(clock.now()), 10.0, clock.now)
    clock.advance(1000.0)
    assert beats == []
