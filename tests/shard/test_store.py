from __future__ import annotations

import itertools
import threading
from functools import partial

import keras
import numpy as np
import pytest

from nfdt.codecs import make_codec
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.shard.backups import Backup, WorkerRecord
from nfdt.shard.buffers import aligned_buffer
from nfdt.shard.messages import RESYNC_AFTER, DeltaRequest, Gradient, Reply, ReplyHistory
from nfdt.shard.modes import AsynchronousMode, MergedMode, RoundMode
from nfdt.shard.store import staleness_bin
from nfdt.transport.base import WeightDelta
from tests.support.shard_cluster import LAYOUT, Cluster, Reference, gradients, start_weights

RATE = 0.1


def cluster(rule="plain", optimizer=None, **options):
    return Cluster(Reference(optimizer or keras.optimizers.SGD(RATE)), rule=rule, **options)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def test_staleness_counts_the_updates_a_worker_missed():
    c = cluster()
    c.pull("a"), c.pull("b")
    g = gradients(1)[0]
    assert [c.push(g, w)[0].staleness for w in "abbaab"] == [0, 1, 0, 2, 0, 2]
    assert c.stores[0].version == 6


def test_two_workers_keep_separate_backups():
    """DC-ASGD, by hand: the correction uses the weights that *this* worker held."""
    c = cluster("dc", dc_lambda=0.5)
    held = {"a": c.pull("a"), "b": c.pull("b")}
    w = start_weights()
    for name, g in zip("ababba", gradients(6), strict=True):
        w = w - RATE * (g + 0.5 * g * g * (w - held[name]))
        held[name] = c.push(g, name)[0].weights
        close(held[name], w)


def test_a_reply_is_not_changed_by_later_pushes():
    c = cluster("ddc", keras.optimizers.SGD(RATE, momentum=0.9))
    first = c.stores[0].pull("a").weights
    copy = first.copy()
    second = c.push(gradients(1)[0], "a")[0].weights
    second_copy = second.copy()
    for g in gradients(5):
        c.push(g, "a")
    assert np.array_equal(first, copy)
    assert np.array_equal(second, second_copy)


def test_a_duplicate_is_answered_but_not_applied():
    c = cluster()
    c.pull()
    g = gradients(1)[0]
    before = c.push(g, sequence=7)[0]
    again = c.push(g, sequence=7)[0]
    assert (again.applied, again.version) == (False, before.version)
    assert np.array_equal(again.weights, before.weights)
    assert c.stores[0].statistics()["duplicates"] == 1


@pytest.mark.parametrize("rounds", [False, True])
def test_nothing_of_a_forgotten_worker_is_applied(rounds):
    c = cluster(mode=RoundMode) if rounds else cluster()
    store, numbers = c.stores[0], {"round": 1, "parts": 1} if rounds else {}
    store.pull("w")
    assert store.forget("w") == []
    for request in (lambda: store.pull("w"), lambda: store.push("w", Gradient(2, gradients(1)[0], **numbers))):
        with pytest.raises(ProtocolError, match="w: expected one of a worker of the job.*the job has given up"):
            request()
    assert store.version == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_a_gradient_that_is_not_finite_changes_nothing(rule, bad):
    c, clean = (cluster(rule, keras.optimizers.Adam(0.01)) for _ in range(2))
    c.pull(), clean.pull()
    non_finite = gradients(1)[0]
    non_finite[3] = bad
    answer = c.push(non_finite)[0]
    assert (answer.applied, answer.version) == (False, 0)
    assert np.array_equal(answer.weights, start_weights())
    for g in gradients(3):
        assert np.array_equal(c.push(g)[0].weights, clean.push(g)[0].weights)
    assert c.stores[0].statistics()["dropped"] == 1


@pytest.mark.parametrize(
    "values", [np.zeros(3, np.float32), np.zeros(LAYOUT.size), np.zeros((1, LAYOUT.size), np.float32)]
)
def test_another_size_or_type_is_refused(values):
    c = cluster()
    c.pull()
    with pytest.raises(ShapeMismatch, match="worker w: expected 26 float32"):
        c.stores[0].push("w", Gradient(1, values))


# -- softsync


def test_softsync_applies_the_weighted_mean_of_merge_count_gradients():
    c = cluster(mode=partial(MergedMode, count=3))
    c.pull("a"), c.pull("b")
    g = gradients(3)
    first = c.push(g[0], "a", samples=10)[0]
    assert (first.version, first.applied) == (0, True)
    assert np.array_equal(first.weights, start_weights())
    c.push(g[1], "b", samples=20)
    answer = c.push(g[2], "a", samples=30)[0]
    assert answer.version == 1
    close(answer.weights, start_weights() - RATE * (g[0] * 10 + g[1] * 20 + g[2] * 30) / 60)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_softsync_divides_each_gradient_by_its_own_staleness(order, momentum):
    """Zhang et al. 2016, by hand: of a merge of staleness 0 and 4, the second gradient counts a quarter."""
    c = cluster("staleness-scaled", keras.optimizers.SGD(RATE, momentum=momentum), mode=partial(MergedMode, count=2))
    [c.pull(name) for name in "abz"]
    still = np.zeros(LAYOUT.size, np.float32)
    for name in "zzzzzzzz":  # four updates that move nothing
        c.push(still, name, want_weights=False)
    c.pull("b")
    a, b = gradients(2)
    for name in order:
        c.push({"a": a, "b": b}[name], name, samples={"a": 30, "b": 10}[name], want_weights=False)
    first = RATE * (30 * a / 4 + 10 * b) / 40
    close(c.weights, start_weights() - first)
    c.pull("a"), c.pull("b")
    [c.push(b, name, want_weights=False) for name in "ab"]
    close(c.weights, start_weights() - first - momentum * first - RATE * b)


def test_softsync_gives_adam_the_mean_of_the_factors_as_its_rate():
    c = cluster("staleness-scaled", keras.optimizers.Adam(RATE), mode=partial(MergedMode, count=2))
    reference = Reference(keras.optimizers.Adam(RATE))
    [c.pull(name) for name in "ab"]
    still = np.zeros(LAYOUT.size, np.float32)
    for _ in range(2):
        c.push(still, "b"), c.push(still, "b")
        reference.apply(still)
    a, b = gradients(2)
    c.push(a, "a", want_weights=False), c.push(b, "b", want_weights=False)  # staleness 2 and 0
    reference.optimizer.learning_rate = RATE * 0.75
    reference.apply((a / 2 + b) / 1.5)
    close(c.weights, reference.weights)


def test_softsync_corrects_each_gradient_with_its_own_backup():
    c = cluster("dc", mode=partial(MergedMode, count=2), dc_lambda=0.5)
    c.pull("a"), c.pull("b")
    start, g = start_weights(), gradients(4)
    c.push(g[0], "a", want_weights=False)
    c.push(g[1], "a")  # a now holds version 1, b still version 0
    w1 = start - RATE * (g[0] + g[1]) / 2
    c.push(g[2], "b", want_weights=False)
    close(c.weights, w1)
    c.push(g[3], "a")
    corrected = g[2] + 0.5 * g[2] * g[2] * (w1 - start)
    close(c.weights, w1 - RATE * (corrected + g[3]) / 2)


def test_flush_applies_what_softsync_holds():
    c = cluster(mode=partial(MergedMode, count=4))
    c.pull()
    g = gradients(1)[0]
    c.push(g)
    assert c.stores[0].flush() == 1
    assert c.stores[0].flush() == 1
    close(c.weights, start_weights() - RATE * g)


# -- rounds


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_round_does_not_depend_on_the_order_of_arrival(order):
    c = cluster("ddc", keras.optimizers.SGD(RATE, momentum=0.9), mode=RoundMode)
    reference = Reference(keras.optimizers.SGD(RATE, momentum=0.9))
    wanted = None
    samples = (32, 32, 7)
    for number in range(2):
        g = gradients(3, seed=number)
        for part in order:
            c.push(g[part], f"w{part}", samples=samples[part], round=number + 1, part=part, parts=3, want_weights=False)
        reference.apply((g[0] * 32 + g[1] * 32 + g[2] * 7) / np.float32(71))
        close(c.pull("w0"), reference.weights)
        wanted = c.weights
    ordered = cluster("ddc", keras.optimizers.SGD(RATE, momentum=0.9), mode=RoundMode)
    for number in range(2):
        for part in range(3):
            fields = {"samples": samples[part], "round": number + 1, "part": part, "parts": 3}
            ordered.push(gradients(3, seed=number)[part], **fields, want_weights=False)
    assert np.array_equal(ordered.weights, wanted)


def test_a_part_counts_once_from_any_worker():
    c = cluster(mode=RoundMode)
    g = gradients(2)
    c.push(g[0], "a", round=1, part=0, parts=2, want_weights=False)
    assert not c.push(g[0], "b", round=1, part=0, parts=2, want_weights=False)[0].applied
    assert c.push(g[1], "b", round=1, part=1, parts=2, want_weights=False)[0].version == 1
    late = c.push(g[1], "a", round=1, part=1, parts=2, want_weights=False)[0]
    assert (late.applied, late.version) == (False, 1)
    close(c.weights, start_weights() - RATE * g.mean(0))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_repeated_by_any_worker_after_the_round_is_closed_counts_once(parts):
    """Case: also the only part of a round, with one worker or at the end of an epoch."""
    c = cluster(mode=RoundMode)
    c.pull("a"), c.pull("b")
    g = gradients(1)[0]
    for part in range(parts):
        assert c.push(g, "a", round=1, part=part, parts=parts, want_weights=parts == 1)[0].applied
    again = c.push(g, "b", round=1, part=0, parts=parts, want_weights=parts == 1)[0]
    assert (again.applied, c.stores[0].version) == (False, 1)
    assert parts == 2 or np.array_equal(again.weights, c.weights)
    close(c.weights, start_weights() - RATE * g)


def test_a_part_that_is_not_finite_counts_for_nothing():
    c = cluster(mode=RoundMode)
    g = gradients(2)
    non_finite = np.full_like(g[0], np.nan)
    assert not c.push(non_finite, "a", round=1, part=0, parts=2, want_weights=False)[0].applied
    assert c.push(g[1], "b", round=1, part=1, parts=2, want_weights=False)[0].version == 1
    close(c.weights, start_weights() - RATE * g[1])
    for part in (0, 1):
        c.push(non_finite, "a", round=2, part=part, parts=2, want_weights=False)
    assert c.stores[0].version == 1


def test_a_part_that_came_early_is_kept_as_it_came():
    """Reason: the memory of a push is reused once the push is answered."""
    c = cluster(mode=RoundMode)
    g = gradients(2)
    borrowed = aligned_buffer(LAYOUT.size)  # as on a shard: a tensor shares this memory
    borrowed[:] = g[1]
    c.stores[0].push("b", Gradient(1, borrowed, round=1, part=1, parts=2), want_weights=False)
    borrowed[:] = 7
    c.push(g[0], "a", round=1, part=0, parts=2, want_weights=False)
    close(c.weights, start_weights() - RATE * g.mean(0))


def test_flush_closes_a_round_that_is_not_complete():
    c = cluster(mode=RoundMode)
    g = gradients(2)
    c.push(g[1], "b", round=4, part=1, parts=3, want_weights=False)
    assert c.stores[0].flush() == 1
    close(c.weights, start_weights() - RATE * g[1])


@pytest.mark.parametrize(
    "fields",
    [{"round": 2, "part": 0, "parts": 2}, {"round": 1, "part": 1, "parts": 3}, {"round": 1, "part": 2, "parts": 2}],
)
def test_parts_that_contradict_each_other_are_refused(fields):
    c = cluster(mode=RoundMode)
    g = gradients(1)[0]
    c.push(g, "a", round=1, part=0, parts=2, want_weights=False)
    with pytest.raises(ProtocolError, match="expected a part of round 1 with 2 parts"):
        c.push(g, "b", **fields)


@pytest.mark.parametrize(
    ("mode", "round_", "expected"), [(AsynchronousMode, 1, "asynchronous"), (RoundMode, 0, "a part of a round")]
)
def test_pushes_that_the_mode_does_not_have_are_refused(mode, round_, expected):
    c = cluster(mode=mode)
    c.pull()
    with pytest.raises(ProtocolError, match=expected):
        c.push(gradients(1)[0], round=round_)
    assert c.stores[0].statistics()["pushes"] == 0


# -- waiting, statistics, threads


def test_a_pull_waits_for_the_version_it_asks_for():
    c = cluster()
    c.pull("a")
    found = []
    waiting = threading.Thread(target=lambda: found.append(c.stores[0].pull("b", min_version=1).version))
    waiting.start()
    c.push(gradients(1)[0], "a")
    waiting.join(10)
    assert found == [1]
    with pytest.raises(ProtocolError, match="expected version 9"):
        c.stores[0].pull("b", min_version=9, timeout_s=0.0)


def test_statistics_are_per_worker():
    c = cluster()
    c.pull("a"), c.pull("b")
    for name in "aab":
        c.push(gradients(1)[0], name)
    found = c.stores[0].statistics()
    assert (found["version"], found["pushes"]) == (3, 3)
    assert found["learning_rate"] == c.stores[0]._engine.learning_rate > 0
    assert found["workers"]["a"] == {"pushes": 2, "duplicates": 0, "dropped": 0, "staleness": {"0": 2}}
    assert found["workers"]["b"]["staleness"] == {"2": 1}


def test_the_histogram_has_few_bins():
    assert [staleness_bin(t) for t in (0, 63, 64, 127, 128, 5000)] == [0, 63, 64, 64, 128, 4096]


def test_pushes_from_many_threads_are_each_applied_once():
    c = cluster()
    g = np.full(LAYOUT.size, 0.5, np.float32)

    def work(name):
        c.stores[0].pull(name)
        for sequence in range(1, 26):
            c.stores[0].push(name, Gradient(sequence, g))

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert c.stores[0].version == 100
    close(c.weights, start_weights() - RATE * 50)
    workers = c.stores[0].statistics()["workers"].values()
    assert sum(sum(w["staleness"].values()) for w in workers) == 100


@pytest.mark.parametrize("rule", ["dc-a", "ddc"])
def test_three_shards_fed_in_the_same_order_equal_one_shard(rule):
    one, three = (cluster(rule, keras.optimizers.SGD(RATE, momentum=0.9), shards=s) for s in (1, 3))
    for c in (one, three):
        [c.pull(w) for w in "abc"]
    for name, g in zip("abcbbacab", gradients(9), strict=True):
        replies = [np.concatenate([r.weights for r in c.push(g, name)]) for c in (one, three)]
        close(*replies)
    close(one.weights, three.weights)


@pytest.mark.parametrize("later", [0, 1], ids=["at once", "after a later push"])
def test_a_push_that_comes_again_is_answered_with_the_bits_it_was_answered_with_first(later):
    store = cluster(overlap=2).stores[0]
    coarse = make_codec("int4", top_k=0.01)
    base = store.pull("w", sequence=1)
    g = gradients(3)
    first = store.push("w", Gradient(2, g[0], computed_on=1), delta=DeltaRequest(coarse, 1))
    assert first.delta is not None
    took = np.empty(LAYOUT.size, np.float32)
    coarse.decode(first.delta.payload, took)
    took += base.weights
    if later:
        store.push("w", Gradient(3, g[1], computed_on=1), delta=DeltaRequest(coarse, 2))
    for _ in range(2):  # on any stream
        again = store.push("w", Gradient(2, g[0], computed_on=1), delta=DeltaRequest(coarse, 1))
        assert (again.applied, again.delta) == (False, None)
        assert np.array_equal(again.weights, took)
        assert np.array_equal(np.asarray(store._backups.get("w", 2).weights), took)


@pytest.mark.parametrize("ask", ["pull", "push"])
def test_after_weights_were_replaced_all_of_them_are_sent_once(ask):
    store = cluster().stores[0]
    request = DeltaRequest(make_codec("int8", top_k=0.01), 1)
    store.pull("w", sequence=1)
    store.write(start_weights() + 1000, {})
    g = gradients(2)
    answers = {"pull": lambda: store.pull("w", sequence=2, delta=request)}
    answers["push"] = lambda: store.push("w", Gradient(2, g[0]), delta=request)
    whole = answers[ask]()
    assert whole.delta is None
    assert np.array_equal(whole.weights, store.read()[0])
    assert store.push("w", Gradient(3, g[1]), delta=DeltaRequest(request.codec, 2)).delta is not None


def test_all_weights_are_sent_after_so_many_deltas():
    history, codec = ReplyHistory(), make_codec("int8", top_k=0.01)
    assert history.delta_request(codec) is None
    weights, delta = np.zeros(1, np.float32), WeightDelta(codec, np.zeros(1, np.uint8), 1)
    for first in (1, RESYNC_AFTER + 2):
        history.add(first, Reply(0, weights))
        for sequence in range(first + 1, first + RESYNC_AFTER + 1):
            assert history.delta_request(codec) == DeltaRequest(codec, sequence - 1)
            history.add(sequence, Reply(0, delta=delta))
        assert history.delta_request(codec) is None


def test_an_answer_is_replaced_while_a_later_one_is_there():
    held = WorkerRecord(3, {})
    for sequence in (1, 2, 3):
        held.add(sequence, Backup(f"whole {sequence}", sequence))
    held.add(2, Backup("reduced", 2))
    assert held.get(2).weights == "reduced"
    assert held.used("w", 2).weights == "reduced"
    assert held.get(1) is None
    held.add(1, Backup("late", 1))
    assert held.get(1) is None
