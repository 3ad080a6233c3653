"""Loss of the shards at any moment: what their last snapshot lacks is trained again, and nothing else."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.restorable_cluster import RestorableCluster
from tests.support.simulated_cluster import job

ALGORITHMS = {
    "async": ("asgd", {}),
    "static": ("asgd", {"tasks": "static"}),
    "overlap": ("asgd", {"overlap": 2}),
    "ssp": ("ssp", {"staleness_bound": 1}),
    "ssp0": ("ssp", {"staleness_bound": 0}),
    "softsync": ("n-softsync", {}),
    "dbs": ("asgd", {"batch": "dbs"}),
    "bsp": ("bsp", {}),
    "bsp-dbs": ("bsp", {"batch": "dbs"}),
}
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
EVENTS = st.sampled_from(
    [*["turn"] * 24, *["snapshot"] * 3, "lose", "lose", "restore", "restore", "kill", "join", "flush", "proceed"]
)
MOVES = st.lists(st.tuples(EVENTS, st.integers(0, 3)), min_size=20, max_size=150)


def started(spec, batches=None):
    cluster = RestorableCluster(spec, batches)
    cluster.join(spec.cluster.workers)
    cluster.coordinator.proceed(spec.fit.initial_epoch)
    cluster.settle()
    return cluster


def act(cluster, moves):
    """Play a random interleaving, then restore the shards and let all workers finish."""
    for event, number in moves:
        if cluster.over:
            break
        names = list(cluster.workers)
        match event:
            case "turn" if names:
                cluster.turn(names[number % len(names)])
            case "kill" if names:
                if number % 2:
                    cluster.workers[names[number % len(names)]].push_half()
                cluster.kill(names[number % len(names)])
            case "snapshot":
                cluster.snapshot(number)
            case "lose" if not cluster.lost:
                cluster.lose_shards()
            case "join" | "restore" | "flush" | "proceed":
                getattr(cluster, event)()
        if cluster.spec.train.kind == "stream":
            cluster.feed()
        cluster.clock.advance(0.003 * number)
    if not cluster.workers and not cluster.over:
        cluster.join()
    cluster.run()


def check(cluster):
    """Check what the final weights of each shard contain: each task once."""
    for shard in cluster.shards:
        assert set(Counter(push.task.task for push in shard.lineage).values()) <= {1}
        if cluster.spec.algorithm.consistency == "bsp":
            order = [(push.task.round, push.task.part) for push in shard.lineage]
            assert order == sorted(order)
            assert len({number for number, _ in order}) == shard.closed_round
    assert [end["epoch"] for end in cluster.of("epoch_end")] == list(range(cluster.spec.fit.epochs))
    assert cluster.all_left()


@pytest.mark.parametrize("name", ALGORITHMS)
@given(shape=SHAPES, moves=MOVES)
def test_the_final_weights_contain_every_row_of_every_epoch(name, shape, moves):
    preset, overrides = ALGORITHMS[name]
    spec = job(preset, overrides=overrides, **shape)
    cluster = started(spec)
    act(cluster, moves)
    check(cluster)
    applied, samples, due = cluster.rows_applied(), spec.train.samples, 0
    for end in cluster.of("epoch_end"):
        rows = applied[end["epoch"]]
        assert rows == Counter(divmod(i, samples) for i in range(due, due + len(rows)))
        assert end["samples"] == len(rows)
        assert end["val_logs"] == ({"rows": float(shape["validation"])} if shape["validation"] else None)
        due += len(rows)
    if spec.fit.steps_per_epoch is None:
        assert due == spec.fit.epochs * samples


@pytest.mark.parametrize("name", ["async", "ssp", "bsp", "softsync"])
@given(batches=st.integers(0, 25), workers=st.integers(1, 4), moves=MOVES)
def test_the_final_weights_contain_every_fed_batch(name, batches, workers, moves):
    preset, overrides = ALGORITHMS[name]
    texts = [b"batch %d" % i for i in range(batches)]
    cluster = started(job(preset, overrides=overrides, workers=workers, stream=True, epochs=2), texts)
    act(cluster, moves)
    check(cluster)
    applied = cluster.rows_applied()
    for epoch in range(2):
        assert applied.get(epoch, Counter()) == Counter(texts)
