"""Timing of steps in blocks: short steps are averaged, long ones are timed singly."""

import pytest

pytest.importorskip("horovod")

from hfdt.runtime.group_job import BLOCK_S, RECENT, StepTimer


def recorded(steps):
    timer = StepTimer()
    for rows, seconds in steps:
        timer.add(rows, seconds)
    return timer.summary()


def test_short_steps_are_averaged_over_a_block():
    count, recent = recorded([(32, BLOCK_S / 4), (32, BLOCK_S / 2), (32, BLOCK_S / 2)])
    assert count == 1
    assert recent == [(32, pytest.approx(BLOCK_S * 5 / 12))]


def test_a_long_step_is_a_block():
    assert recorded([(32, 1.0), (16, 0.5)]) == [2, [(32, 1.0), (16, 0.5)]]


def test_steps_of_other_rows_begin_another_block():
    assert recorded([(32, BLOCK_S * 0.9), (16, BLOCK_S * 0.9)]) == [0, []]


def test_the_latest_blocks_are_kept_and_all_are_counted():
    count, recent = recorded([(32, 1.0 + i) for i in range(100)])
    assert count == 100
    assert [seconds for _, seconds in recent] == [1.0 + i for i in range(100 - RECENT, 100)]
