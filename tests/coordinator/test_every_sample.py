"""Training of every sample: exactly once without failures; at least once, never dropped, when workers die."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_cluster import job, started

pytestmark = pytest.mark.processes

ALGORITHMS = [
    ("asgd", {}),
    ("asgd", {"tasks": "static"}),
    ("ssp", {"staleness_bound": 1}),
    ("ssp", {"staleness_bound": 0, "tasks": "static"}),
    ("n-softsync", {}),
    ("bsp", {}),
    ("asgd", {"overlap": 2}),
    ("local-ddc", {"local_steps": 4}),
]
IDS = ["free", "free-static", "ssp", "ssp0-static", "softsync", "bsp", "overlap2", "local"]
BY_SPEED = [
    ("asgd", {"tasks": "proportional"}),
    ("asgd", {"tasks": "finish-together"}),
    ("ssp", {"staleness_bound": 0, "tasks": "finish-together"}),
    ("ssp", {"batch": "dbs"}),
    ("asgd", {"batch": "dbs", "tasks": "finish-together"}),
    ("bsp", {"batch": "dbs"}),
    ("ssp", {"staleness_bound": 1, "overlap": 1}),
    ("asgd", {"batch": "dbs", "tasks": "finish-together", "overlap": 1}),
]
BY_SPEED_IDS = [
    "proportional",
    "finish-together",
    "ssp0-finish-together",
    "ssp-dbs",
    "dbs-finish-together",
    "bsp-dbs",
    "ssp-overlap",
    "dbs-finish-together-overlap",
]
SHAPES = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 4),
        "samples": st.integers(1, 60),
        "batch_size": st.integers(1, 7),
        "epochs": st.integers(1, 3),
        "steps_per_epoch": st.none() | st.integers(1, 9),
        "validation": st.none() | st.integers(1, 20),
        "interactive": st.booleans(),
    }
)


def check_rows(spec, cluster):
    """Check that every epoch has its own rows and no others: successive passes over the data, without a gap."""
    samples, due = spec.train.samples, 0
    for epoch in range(spec.fit.epochs):
        count = len(cluster.trained[epoch])
        assert set(cluster.trained[epoch]) == {divmod(i, samples) for i in range(due, due + count)}
        due += count
    if spec.fit.steps_per_epoch is None:
        assert due == spec.fit.epochs * samples
    else:
        assert all(0 < end["steps"] <= spec.fit.steps_per_epoch for end in cluster.of("epoch_end"))


def act(cluster, moves, kill_at=(), silent_at=None):
    """Play a random interleaving, then let all workers finish; at ``silent_at`` one falls silent, or is heard again."""
    silent = {}
    for number, (index, what) in enumerate(moves):
        if cluster.over:
            break
        if silent_at is not None:
            now = cluster.clock.now()
            if number in silent_at:
                name = list(cluster.workers)[index % len(cluster.workers)]
                silent = {other: since for other, since in silent.items() if other != name} or {name: now}
            for name in cluster.workers:
                cluster.coordinator.heard(name, now - silent.get(name, now))
            cluster.coordinator.tick()
            cluster.settle()
            cluster.clock.advance(0.4)
        names = [name for name in cluster.workers if name not in silent]
        if number in kill_at and len(names) > 0:
            cluster.kill(names[index % len(names)])
            if what % 2:
                cluster.join()
        elif what == 0:
            cluster.flush()
        elif what == 1:
            cluster.proceed()
        elif what == 2 and cluster.spec.train.kind == "stream":
            cluster.feed()
        elif names:
            cluster.turn(names[index % len(names)])
        cluster.clock.advance(0.003 * what)
    if not cluster.workers and not cluster.over:
        cluster.join()
    cluster.run()


def check_counts(cluster):
    """Each sample is counted for one worker."""
    counted = sum(row["samples"] for row in cluster.coordinator.measured().values())
    assert counted == sum(end["samples"] for end in cluster.of("epoch_end"))


MOVES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=30, max_size=120)
KILLS = st.sets(st.integers(0, 60), max_size=6)


@pytest.mark.parametrize(("preset", "overrides"), ALGORITHMS + BY_SPEED, ids=IDS + BY_SPEED_IDS)
@given(shape=SHAPES, moves=MOVES)
def test_exactly_once_when_nothing_fails(preset, overrides, shape, moves):
    spec = job(preset, overrides=overrides, **shape)
    cluster = started(spec)
    act(cluster, moves)
    check_rows(spec, cluster)
    assert all(set(rows.values()) == {1} for rows in cluster.trained.values())
    for end in cluster.of("epoch_end"):
        assert end["samples"] == end["logs"]["seen"] == cluster.trained[end["epoch"]].total()
        assert end["val_logs"] == ({"rows": float(shape["validation"])} if shape["validation"] else None)
    assert len(cluster.of("epoch_end")) == spec.fit.epochs
    check_counts(cluster)
    assert cluster.all_left()


@pytest.mark.parametrize(("preset", "overrides"), ALGORITHMS + BY_SPEED, ids=IDS + BY_SPEED_IDS)
@given(shape=SHAPES, moves=MOVES, kills=KILLS)
def test_at_least_once_when_workers_are_killed(preset, overrides, shape, moves, kills):
    spec = job(preset, overrides=overrides, **shape)
    cluster = started(spec)
    act(cluster, moves, kills)
    assert len(cluster.of("epoch_end")) == spec.fit.epochs
    check_rows(spec, cluster)
    requeued = sum(lost["requeued"] for lost in cluster.of("worker_lost"))
    for end in cluster.of("epoch_end"):
        trained = cluster.trained[end["epoch"]]
        assert end["samples"] == len(trained)
        assert end["val_logs"] == ({"rows": float(shape["validation"])} if shape["validation"] else None)
    check_counts(cluster)
    again = Counter(task.task for _, task in cluster.pushes)
    assert again.total() - len(again) <= requeued


@pytest.mark.parametrize(("preset", "overrides"), ALGORITHMS + BY_SPEED, ids=IDS + BY_SPEED_IDS)
@given(shape=SHAPES, moves=MOVES, silences=KILLS)
def test_shards_that_apply_each_task_once_have_each_row_once_whoever_falls_silent(
    preset, overrides, shape, moves, silences
):
    spec = job(preset, overrides=overrides, **shape)
    cluster = started(spec)
    act(cluster, moves, silent_at=silences)
    check_rows(spec, cluster)
    check_counts(cluster)
    applied = {(task.task, task.part): task for _, task in cluster.pushes}
    assert set(Counter(row for task in applied.values() for row in cluster.rows(task)).values()) == {1}
    for end in cluster.of("epoch_end"):
        assert end["samples"] == len(cluster.trained[end["epoch"]])
        assert end["val_logs"] == ({"rows": float(shape["validation"])} if shape["validation"] else None)


@pytest.mark.parametrize(("preset", "overrides"), ALGORITHMS, ids=IDS)
@given(batches=st.integers(0, 25), workers=st.integers(1, 4), moves=MOVES, kills=KILLS)
def test_every_fed_batch_is_trained(preset, overrides, batches, workers, moves, kills):
    texts = [b"batch %d" % i for i in range(batches)]
    cluster = started(job(preset, overrides=overrides, workers=workers, stream=True, epochs=2), texts)
    act(cluster, moves, kills)
    for epoch in range(2):
        assert set(cluster.trained[epoch]) == set(texts)
        if not kills:
            assert cluster.trained[epoch] == Counter(texts)


@pytest.mark.parametrize("batch", ["fixed", "dbs"])
@given(shape=SHAPES, moves=MOVES, kills=KILLS)
@settings(max_examples=4 * settings().max_examples)
def test_synchronous_rounds_never_overlap_and_are_whole(batch, shape, moves, kills):
    cluster = started(job("bsp", overrides={"batch": batch}, **shape))
    act(cluster, moves, kills)
    rounds = [task.round for _, task in cluster.pushes]
    assert rounds == sorted(rounds)
    parts = {}
    for _, task in cluster.pushes:
        parts.setdefault(task.round, set()).add((task.part, task.parts, task.start, task.stop))
    for held in parts.values():
        assert len({p[1] for p in held}) == 1
        assert {p[0] for p in held} == set(range(next(iter(held))[1]))
    assert sorted(parts) == list(range(1, len(parts) + 1))


@given(bound=st.integers(0, 3), workers=st.integers(2, 4), overlap=st.integers(0, 2), moves=MOVES)
def test_bounded_staleness_holds_within_the_first_epoch(bound, workers, overlap, moves):
    overrides = {"staleness_bound": bound, "overlap": overlap}
    cluster = started(job("ssp", overrides=overrides, workers=workers, samples=200))
    done = Counter({f"worker-{i}": 0 for i in range(workers)})
    for index, _ in moves:
        name = f"worker-{index % workers}"
        before = len(cluster.pushes)
        cluster.turn(name)
        done[name] += len(cluster.pushes) - before
        if cluster.coordinator.phase == "train" and len(cluster.pushes) < 40:
            assert max(done.values()) - min(done.values()) <= bound + 2


@given(shape=SHAPES, moves=MOVES, kills=KILLS, stop=st.integers(0, 100))
@pytest.mark.parametrize(("preset", "overrides"), ALGORITHMS, ids=IDS)
def test_stopping_ends_after_what_is_leased_with_one_epoch_end(preset, overrides, shape, moves, kills, stop):
    cluster = started(job(preset, overrides=overrides, **shape))
    act_until = moves[:stop]
    for index, what in act_until:
        names = list(cluster.workers)
        if what == 0:
            cluster.flush()
            cluster.proceed()
        else:
            cluster.turn(names[index % len(names)])
    begun = len(cluster.of("epoch_begin"))
    cluster.coordinator.stop_training()
    cluster.settle()
    act(cluster, moves[stop:], kills)
    assert len(cluster.of("epoch_begin")) == len(cluster.of("epoch_end")) == begun
    assert [e["epoch"] for e in cluster.of("epoch_end")] == list(range(begun))
