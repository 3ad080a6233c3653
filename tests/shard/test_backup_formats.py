"""What a shard keeps of what it sends: enough for its rule, and what it stands for is what the worker holds."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.specs.job import resolve_algorithm
from nfdt.shard.backup_formats import ANCHOR_ANSWERS, FEW_WORKERS, kind_for
from nfdt.shard.tensors import Half, halved, whole
from nfdt.update_rules import OptimizerTraits, make_rule
from tests.support.shard_cluster import Cluster, Reference, gradients, start_weights

MANY = FEW_WORKERS + 1


def cluster(rule, records, **options):
    return Cluster(Reference(keras.optimizers.SGD(0.1, momentum=0.9)), rule=rule, records=records, **options)


def held(cluster, worker, sequence=0):
    """What the shard believes that the worker holds."""
    backups = cluster.stores[0]._workers[worker].backups
    return cluster.stores[0]._engine.array(backups.used(worker, sequence).weights)


@pytest.mark.parametrize(
    ("preset", "options", "workers", "kind"),
    [
        ("bsp", {}, 16, "none"),
        ("asgd", {}, 16, "none"),
        ("n-softsync", {}, 16, "none"),
        ("ddc-asgd", {}, FEW_WORKERS, "exact"),
        ("ddc-asgd", {}, MANY, "half"),
        ("dc-asgd-a", {}, MANY, "half"),
        ("ddc-asgd", {"codec": "int8"}, MANY, "exact"),
        ("asgd", {"codec": "adaptive"}, 1, "exact"),
        ("asgd", {"reply_codec": "bf16"}, 1, "exact"),
        ("ddc-asgd", {"codec": "int8", "reply_codec": "identity"}, MANY, "half"),
    ],
)
def test_no_more_is_kept_than_is_needed(preset, options, workers, kind):
    algorithm = resolve_algorithm(preset, **options)
    assert kind_for(make_rule(algorithm, OptimizerTraits("sgd")), algorithm, workers) == kind


@pytest.mark.parametrize("rule", ["dc", "dc-a", "ddc"])
def test_what_is_sent_is_what_is_kept_bit_for_bit(rule):
    c = cluster(rule, "half")
    names = [f"w{i}" for i in range(6)]
    for name in names:
        assert np.array_equal(c.pull(name), start_weights())
    for step, g in enumerate(gradients(40)):
        name = names[step * 5 % 6]
        reply = c.push(0.1 * g, name)[0]
        assert np.array_equal(reply.weights, held(c, name))
    assert not np.array_equal(reply.weights, c.weights)
    assert np.array_equal(c.pull(name), c.weights)  # to the last bit


@pytest.mark.parametrize("rule", ["dc", "dc-a", "ddc"])
def test_halves_train_as_exact_records_do(rule):
    half, exact = cluster(rule, "half"), cluster(rule, "exact")
    names = [f"w{i}" for i in range(6)]
    [c.pull(name) for c in (half, exact) for name in names]
    for step, g in enumerate(gradients(60)):
        name = names[step * 5 % 6]
        replies = [c.push(0.01 * g, name)[0].weights for c in (half, exact)]
        moved = np.linalg.norm(replies[1] - start_weights())
        assert np.linalg.norm(replies[0] - replies[1]) < 0.1 * moved  # ddc, whose measure of a step begins at 0


def test_few_anchors_are_alive():
    c = cluster("ddc", "half")
    names = [f"w{i}" for i in range(8)]
    [c.pull(name) for name in names]
    most = 0
    for step, g in enumerate(gradients(10 * ANCHOR_ANSWERS * len(names))):
        c.push(0.01 * g, names[step % len(names)])
        records = [c.stores[0]._workers[name].backups.used(name, 0).weights for name in names]
        most = max(most, len({id(record.anchor) for record in records}))
    assert most == 2


def test_weights_that_were_replaced_are_no_difference_to_an_old_anchor():
    replies = []
    for c in (cluster("ddc", "half"), cluster("ddc", "exact")):
        [c.pull(name) for name in "ab"]
        g = gradients(2)
        c.push(g[0], "a")
        c.stores[0].write(np.full(c.stores[0].size, 1000, np.float32), {})
        replies.append(c.push(g[1], "a")[0].weights)
    assert np.abs(replies[0] - replies[1]).max() < 0.01


def test_the_anchor_is_a_new_one_once_weights_were_replaced():
    c = cluster("ddc", "half")
    [c.pull(name) for name in "ab"]
    g = gradients(3)
    anchors = []
    for step, vector in enumerate(g):
        if step == 2:
            c.stores[0].write(np.full(c.stores[0].size, 1000, np.float32), {})
        c.push(vector, "a")
        anchors.append(c.stores[0]._workers["a"].backups.used("a", 0).weights.anchor)
    assert anchors[0] is anchors[1]
    assert np.array_equal(anchors[2], np.full(c.stores[0].size, 1000, np.float32))


@pytest.mark.parametrize("rule", ["plain", "staleness-scaled"])
def test_a_rule_that_does_not_look_back_trains_the_same_without_records(rule):
    none, exact = cluster(rule, "none"), cluster(rule, "exact")
    [c.pull(name) for c in (none, exact) for name in "ab"]
    for step, g in enumerate(gradients(12)):
        replies = [c.push(g, "ab"[step // 2 % 2])[0] for c in (none, exact)]
        assert replies[0].staleness == replies[1].staleness
        assert np.array_equal(replies[0].weights, replies[1].weights)
    assert none.stores[0]._workers["a"].backups.used("a", 0).weights is None


@pytest.mark.parametrize(("rule", "records"), [("plain", "none"), ("ddc", "half")])
def test_a_push_that_comes_again_is_applied_once(rule, records):
    c = cluster(rule, records)
    c.pull("a"), c.pull("b")
    g = gradients(2)
    c.push(g[0], "b")
    first = c.push(g[0], "a", sequence=5)[0]
    c.push(g[1], "b")
    again = c.push(g[0], "a", sequence=5)[0]
    assert (again.applied, again.staleness, c.stores[0].version) == (False, 1, 3)
    assert np.array_equal(again.weights, first.weights if records == "half" else c.weights)
    assert c.push(g[0], "a", sequence=6)[0].staleness == (1 if records == "half" else 0)


@pytest.mark.parametrize(("rule", "records"), [("plain", "none"), ("ddc", "half")])
def test_rounds_and_softsync_go_with_every_kind_of_record(rule, records):
    c = cluster(rule, records, merge_count=2)
    w = cluster(rule, "exact", merge_count=2)
    for each in (c, w):
        each.pull("a"), each.pull("b")
        for number in range(3):
            for part, name in enumerate("ab"):
                g = 0.1 * gradients(2, seed=number)[part]
                each.push(g, name, round=number + 1, part=part, parts=2, want_weights=False)
        each.pull("a"), each.pull("b")
        for step, g in enumerate(gradients(6)):
            each.push(0.1 * g, "ab"[step % 2])
    atol = 2e-3 if rule == "plain" else 2e-2  # ddc looks at where a drift points, and these drifts are short
    np.testing.assert_allclose(c.weights, w.weights, rtol=2e-3, atol=atol)
    assert c.stores[0].version == w.stores[0].version == 6


def test_a_half_is_the_nearest_one_and_what_is_not_finite_stays_so():
    rng = np.random.default_rng(0)
    anchor = rng.normal(size=1000).astype(np.float32)
    weights = anchor + (rng.normal(size=1000) * 10.0 ** rng.integers(-30, 2, 1000)).astype(np.float32)
    weights[:3] = np.nan, np.inf, -np.inf
    sent, difference = halved(tf.constant(weights), tf.constant(anchor))
    assert difference.dtype == tf.bfloat16
    assert np.array_equal(sent.numpy(), whole(Half(tf.constant(anchor), difference)).numpy(), equal_nan=True)
    assert not np.isfinite(sent.numpy()[:3]).any()
    off = np.abs(sent.numpy()[3:] - weights[3:])
    arithmetic = 2.0**-23 * (np.abs(anchor[3:]) + np.abs(weights[3:]))
    assert (off <= np.abs(weights[3:] - anchor[3:]) * 2.0**-8 + arithmetic).all()
