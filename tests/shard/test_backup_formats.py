"""Backup formats: they keep enough for the rule, and represent the weights that the worker holds."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.specs.job import resolve_algorithm
from nfdt.shard.backups import REPLIES_PER_ANCHOR
from nfdt.shard.building import FEW_WORKERS, format_for
from nfdt.shard.engine import AnchoredBf16
from nfdt.shard.modes import MergedMode, RoundMode
from nfdt.shard.tensors import compress, decompress
from nfdt.update_rules import OptimizerTraits, make_rule
from tests.support.shard_cluster import Cluster, Reference, gradients, start_weights

MANY = FEW_WORKERS + 1


def cluster(rule, backup_format, **options):
    return Cluster(
        Reference(keras.optimizers.SGD(0.1, momentum=0.9)), rule=rule, backup_format=backup_format, **options
    )


def backup(cluster, worker, sequence=0):
    """Return the newest backup of a worker, or that of a sequence number, as the shard keeps it."""
    return cluster.stores[0]._backups.known(worker).used(worker, sequence).weights


def held(cluster, worker, sequence=0):
    """Return the weights that the worker holds according to the shard."""
    return cluster.stores[0]._engine.array(backup(cluster, worker, sequence))


@pytest.mark.parametrize(
    ("preset", "options", "workers", "backup_format"),
    [
        ("bsp", {}, 16, "none"),
        ("asgd", {}, 16, "none"),
        ("n-softsync", {}, 16, "none"),
        ("ddc-asgd", {}, FEW_WORKERS, "exact"),
        ("ddc-asgd", {}, MANY, "anchored"),
        ("dc-asgd-a", {}, MANY, "anchored"),
        ("ddc-asgd", {"codec": "int8"}, MANY, "exact"),
        ("asgd", {"codec": "adaptive"}, 1, "exact"),
        ("asgd", {"reply_codec": "bf16"}, 1, "exact"),
        ("ddc-asgd", {"codec": "int8", "reply_codec": "identity"}, MANY, "anchored"),
    ],
)
def test_no_more_is_kept_than_is_needed(preset, options, workers, backup_format):
    algorithm = resolve_algorithm(preset, **options)
    assert format_for(make_rule(algorithm, OptimizerTraits("sgd")), algorithm, workers) == backup_format


@pytest.mark.parametrize("rule", ["dc", "dc-a", "ddc"])
def test_what_is_sent_is_what_is_kept_bit_for_bit(rule):
    c = cluster(rule, "anchored")
    names = [f"w{i}" for i in range(6)]
    for name in names:
        assert np.array_equal(c.pull(name), start_weights())
    for step, g in enumerate(gradients(40)):
        name = names[step * 5 % 6]
        reply = c.push(0.1 * g, name)[0]
        assert np.array_equal(reply.weights, held(c, name))
    assert not np.array_equal(reply.weights, c.weights)
    assert np.array_equal(c.pull(name), c.weights)  # bit for bit


@pytest.mark.parametrize("rule", ["dc", "dc-a", "ddc"])
def test_anchored_backups_train_as_exact_ones_do(rule):
    anchored, exact = cluster(rule, "anchored"), cluster(rule, "exact")
    names = [f"w{i}" for i in range(6)]
    [c.pull(name) for c in (anchored, exact) for name in names]
    for step, g in enumerate(gradients(60)):
        name = names[step * 5 % 6]
        replies = [c.push(0.01 * g, name)[0].weights for c in (anchored, exact)]
        moved = np.linalg.norm(replies[1] - start_weights())
        assert np.linalg.norm(replies[0] - replies[1]) < 0.1 * moved  # ddc, whose measure of a step begins at 0


def test_few_anchors_are_alive():
    c = cluster("ddc", "anchored")
    names = [f"w{i}" for i in range(8)]
    [c.pull(name) for name in names]
    most = 0
    for step, g in enumerate(gradients(10 * REPLIES_PER_ANCHOR * len(names))):
        c.push(0.01 * g, names[step % len(names)])
        records = [backup(c, name) for name in names]
        most = max(most, len({id(record.anchor) for record in records}))
    assert most == 2


def test_weights_that_were_replaced_are_no_difference_to_an_old_anchor():
    replies = []
    for c in (cluster("ddc", "anchored"), cluster("ddc", "exact")):
        [c.pull(name) for name in "ab"]
        g = gradients(2)
        c.push(g[0], "a")
        c.stores[0].write(np.full(c.stores[0].size, 1000, np.float32), {})
        replies.append(c.push(g[1], "a")[0].weights)
    assert np.abs(replies[0] - replies[1]).max() < 0.01


def test_the_anchor_is_a_new_one_once_weights_were_replaced():
    c = cluster("ddc", "anchored")
    [c.pull(name) for name in "ab"]
    g = gradients(3)
    anchors = []
    for step, vector in enumerate(g):
        if step == 2:
            c.stores[0].write(np.full(c.stores[0].size, 1000, np.float32), {})
        c.push(vector, "a")
        anchors.append(backup(c, "a").anchor)
    assert anchors[0] is anchors[1]
    assert np.array_equal(anchors[2], np.full(c.stores[0].size, 1000, np.float32))


@pytest.mark.parametrize("rule", ["plain", "staleness-scaled"])
def test_a_rule_that_does_not_look_back_trains_the_same_without_backups(rule):
    none, exact = cluster(rule, "none"), cluster(rule, "exact")
    [c.pull(name) for c in (none, exact) for name in "ab"]
    for step, g in enumerate(gradients(12)):
        replies = [c.push(g, "ab"[step // 2 % 2])[0] for c in (none, exact)]
        assert replies[0].staleness == replies[1].staleness
        assert np.array_equal(replies[0].weights, replies[1].weights)
    assert backup(none, "a") is None


@pytest.mark.parametrize(("rule", "backup_format"), [("plain", "none"), ("ddc", "anchored")])
def test_a_push_that_comes_again_is_applied_once(rule, backup_format):
    c = cluster(rule, backup_format)
    c.pull("a"), c.pull("b")
    g = gradients(2)
    c.push(g[0], "b")
    first = c.push(g[0], "a", sequence=5)[0]
    c.push(g[1], "b")
    again = c.push(g[0], "a", sequence=5)[0]
    assert (again.applied, again.staleness, c.stores[0].version) == (False, 1, 3)
    assert np.array_equal(again.weights, first.weights if backup_format == "anchored" else c.weights)
    assert c.push(g[0], "a", sequence=6)[0].staleness == (1 if backup_format == "anchored" else 0)


@pytest.mark.parametrize(("rule", "backup_format"), [("plain", "none"), ("ddc", "anchored")])
def test_rounds_go_with_every_backup_format(rule, backup_format):
    c, w = (cluster(rule, name, mode=RoundMode) for name in (backup_format, "exact"))
    for each in (c, w):
        for number in range(3):
            for part, name in enumerate("ab"):
                g = 0.1 * gradients(2, seed=number)[part]
                each.push(g, name, round=number + 1, part=part, parts=2, want_weights=False)
    same_after(rule, c, w)
    assert c.stores[0].version == w.stores[0].version == 3


@pytest.mark.parametrize(("rule", "backup_format"), [("plain", "none"), ("ddc", "anchored")])
def test_softsync_goes_with_every_backup_format(rule, backup_format):
    c, w = (cluster(rule, name, mode=partial(MergedMode, count=2)) for name in (backup_format, "exact"))
    for each in (c, w):
        each.pull("a"), each.pull("b")
        for step, g in enumerate(gradients(6)):
            each.push(0.1 * g, "ab"[step % 2])
    same_after(rule, c, w)
    assert c.stores[0].version == w.stores[0].version == 3


def same_after(rule, c, w):
    atol = 2e-3 if rule == "plain" else 2e-2  # ddc uses the direction of a drift, and these drifts are short
    np.testing.assert_allclose(c.weights, w.weights, rtol=2e-3, atol=atol)


def test_a_compressed_vector_is_the_nearest_one_and_what_is_not_finite_stays_so():
    rng = np.random.default_rng(0)
    anchor = rng.normal(size=1000).astype(np.float32)
    weights = anchor + (rng.normal(size=1000) * 10.0 ** rng.integers(-30, 2, 1000)).astype(np.float32)
    weights[:3] = np.nan, np.inf, -np.inf
    sent, difference = compress(tf.constant(weights), tf.constant(anchor))
    assert difference.dtype == tf.bfloat16
    assert np.array_equal(
        sent.numpy(), decompress(AnchoredBf16(tf.constant(anchor), difference)).numpy(), equal_nan=True
    )
    assert not np.isfinite(sent.numpy()[:3]).any()
    off = np.abs(sent.numpy()[3:] - weights[3:])
    arithmetic = 2.0**-23 * (np.abs(anchor[3:]) + np.abs(weights[3:]))
    assert (off <= np.abs(weights[3:] - anchor[3:]) * 2.0**-8 + arithmetic).all()
