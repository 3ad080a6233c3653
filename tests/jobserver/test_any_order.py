"""A job whose messages come in any order ends in a defined state, and applies each row exactly once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.wire import jobs_pb2
from tests.support.job_in_turns import JOB, World

ALGORITHMS = {
    "asgd": {"name": "asgd", "update_rule": "plain"},
    "bsp": {"name": "bsp", "update_rule": "plain", "consistency": "bsp"},
}
every_job = pytest.mark.parametrize(
    ("name", "attended"),
    [
        ("asgd", True),
        ("bsp", False),
        pytest.param("asgd", False, marks=pytest.mark.long),
        pytest.param("bsp", True, marks=pytest.mark.long),
    ],
)

number = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("thread"), number),
    st.tuples(st.just("process"), number),
    st.tuples(st.just("process"), number),
    st.tuples(st.just("round"), st.integers(1, 5)),
    st.tuples(st.just("time"), st.sampled_from([0.3, 1.1, 3.0])),
)
LOSSES = st.one_of(
    st.tuples(st.just("lose worker"), number),
    st.tuples(st.just("lose shard"), number),
    st.tuples(st.just("lose shard"), number),
    st.tuples(st.just("drain"), number),
    st.tuples(st.just("add"), st.sampled_from(["worker", "shard"])),
)
REQUESTS = st.one_of(
    st.tuples(st.just("snapshot"), st.none()),
    st.tuples(st.just("rate"), st.sampled_from([0.1, 0.01])),
    st.tuples(st.just("watch"), st.none()),
    st.tuples(st.just("permit"), st.tuples(st.integers(0, 1), st.integers(0, 6))),
    st.tuples(st.just("permit"), st.tuples(st.integers(0, 1), st.integers(0, 6))),
)
RESTARTS = st.tuples(st.just("restart"), st.booleans())
EVENTS = st.lists(st.one_of(STEPS, STEPS, STEPS, STEPS, LOSSES, REQUESTS, RESTARTS), max_size=60)


@contextmanager
def world_of(name: str, attended: bool) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        world = World(Path(folder), monkeypatch, ALGORITHMS[name], attended=attended)
        try:
            yield world
        finally:
            world.close()


def bring(world: World, event: str, value) -> None:
    """Let one thing happen."""
    processes = [process for process in world.processes if process.alive]
    match event:
        case "thread" if world.turns.threads:
            world.turns.run(value)
        case "process" if processes:
            processes[value % len(processes)].step()
        case "round":
            world.go_on(value)
        case "time":
            world.clock.advance(value)
        case "lose worker" | "lose shard" | "drain":
            role = "worker" if event == "lose worker" else "shard"
            if living := world.living(role):
                process = living[value % len(living)]
                process.drain() if event == "drain" else process.lose()
        case "add":
            world.add(value)
        case "snapshot":
            world.snapshot()
        case "rate":
            world.request(set_learning_rate=jobs_pb2.SetLearningRate(value=value))
        case "permit" if world.attended:
            world.permit(*value)
        case "watch":
            world.job.clients.watching(1, "")
        case "restart":
            world.restart_server(killed=value)
    world.begin()


def ends_in(world: World, *states: str) -> str:
    """Let the job end in one of these states, or fail for a reason that it may have."""
    state, reason = world.finish(), world.store.get(JOB).reason or ""
    if state == "failed":
        assert "ended no epoch between" in reason or "workers in a row or more ended" in reason, reason
    else:
        assert state in states
    return state


def of(world: World, kind: str) -> list[dict]:
    """Return what the events of a kind hold."""
    return [event.data for event in world.store.events(JOB) if event.kind == kind]


@every_job
@settings(max_examples=settings().max_examples // 2)
@given(events=EVENTS)
def test_losses_requests_and_restarts_in_any_order_lose_no_row_and_apply_none_twice(name, attended, events):
    with world_of(name, attended) as world:
        for event, value in events:
            bring(world, event, value)
        if ends_in(world, "succeeded") == "succeeded":
            assert (world.applied() == 1).all(), world.applied()
            redone = sum(restored["redone_samples"] for restored in of(world, "shards_restored"))
            trained = sum(worker["samples"] for worker in of(world, "result")[0]["workers"].values())
            assert world.applied().size <= trained <= world.applied().size + redone


@every_job
def test_workers_are_admitted_only_to_shards_that_have_addresses(name, attended):
    with world_of(name, attended) as world:
        world.request(set_learning_rate=jobs_pb2.SetLearningRate(value=0.1))
        while world.job.core.training is None:
            world.begin()
            world.go_on(1)
        assert not any(worker.admitted for worker in world.job.core.slots.living())
        world.add("shard")
        world.turns.finish("call")  # the rate is set, but the job's thread does not know it yet
        world.living("shard")[0].lose()
        world.turns.finish("end of shard-0")
        assert ends_in(world, "succeeded") == "succeeded"
        assert (world.applied() == 1).all()


@every_job
@settings(max_examples=settings().max_examples // 4)
@given(events=EVENTS, later=EVENTS, stops=st.booleans())
def test_a_job_that_is_stopped_or_cancelled_at_any_time_ends_so(name, attended, events, later, stops):
    with world_of(name, attended) as world:
        for event, value in events:
            bring(world, event, value)
        if world.ended:
            return
        world.request(**({"stop_training": jobs_pb2.StopTraining()} if stops else {"cancel": jobs_pb2.Cancel()}))
        for event, value in later:
            bring(world, event, value) if event != "restart" else None
        if ends_in(world, "succeeded", "cancelled") == "succeeded":
            assert (world.applied() <= 1).all(), world.applied()
            assert stops or (world.applied() == 1).all()  # it had ended before


@contextmanager
def epoch_ahead() -> Iterator[World]:
    """Yield a job whose first epoch has ended, and whose workers train the second one without permission."""
    with world_of("asgd", attended=True) as world:
        world.permit(0, 0)
        for _ in range(300):
            world.begin()
            world.go_on(1)
            training = world.job.core.training
            if training is not None and training.between_epochs and training.coordinator.ahead is not None:
                break
        world.go_on(2)
        assert training.coordinator.passed
        yield world


@settings(max_examples=settings().max_examples // 2)
@given(events=EVENTS)
def test_an_epoch_that_has_begun_ahead_loses_no_row_and_applies_none_twice(events):
    with epoch_ahead() as world:
        for event, value in events:
            bring(world, event, value)
        if ends_in(world, "succeeded") == "succeeded":
            assert (world.applied() == 1).all(), world.applied()


def test_a_learning_rate_between_two_epochs_makes_workers_begin_the_second_one_again():
    with epoch_ahead() as world:
        rows = [rows for shard in world.shards.values() if shard.alive for rows in shard.weights[world.samples :]]
        assert any(rows), "some rows of the second epoch are trained"
        world.request(set_learning_rate=jobs_pb2.SetLearningRate(value=0.1))
        world._until(lambda: not world.turns.lives("client"))
        recovery = world.job.core.training.recovery
        assert recovery.rolled_back
        assert not any(shard.weights[world.samples :].any() for shard in world.shards.values() if shard.alive)
        assert ends_in(world, "succeeded") == "succeeded"
        assert (world.applied() == 1).all()
        assert not [event for event in world.store.events(JOB) if event.kind in ("shard_lost", "shards_restored")]


def test_an_end_between_two_epochs_has_the_state_of_the_first_one():
    with epoch_ahead() as world:
        world.request(stop_training=jobs_pb2.StopTraining())
        assert ends_in(world, "succeeded") == "succeeded"
        assert world.applied().tolist() == [[1] * world.samples, [0] * world.samples]
