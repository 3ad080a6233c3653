"""The rules for differences of several steps, against the equations written out, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, Push, make_rule
from nfdt.update_rules.blocks import KernelBlocks

SHAPE, SIZE = (6, 3), 18  # blocks of six rows of one column


def literal(workers, moves, start):
    """Return the weights after each push, and those that each worker is sent, by the equations of the docstring."""
    w, reserve = start.copy(), np.zeros(SIZE)
    s, n = np.zeros(3), 0
    release = 1 / (10 * workers)
    phi = 1 - (1 - release) ** workers
    held, found = {}, []
    for worker, move in moves:
        h = held.get(worker, start)
        d, difference = w - h, move
        u = np.zeros(SIZE)
        for column in range(3):
            at = np.arange(column, SIZE, 3)
            length, root = np.linalg.norm(difference[at]) + 1e-30, np.sqrt(s[column]) + 1e-10
            c = np.clip(0.5 * (difference[at] @ d[at]) / (length * root), -1, 1)
            f = (1 + c) / (1 + 2 * np.linalg.norm(d[at]) / (root + np.linalg.norm(w[at]) / 30))
            u[at] = f * difference[at]
        reserve = reserve + (1 - 1 / workers) * u
        g = release * reserve
        reserve = reserve - g
        w = w - (u + g)
        b = min(0.9, n / (n + 1))
        s = b * s + (1 - b) * ((u + g).reshape(SHAPE) ** 2).sum(0)
        n += 1
        held[worker] = w - phi * reserve
        found.append((w.copy(), held[worker].copy()))
    return found, reserve


def by_rule(workers, moves, start, **options):
    blocks = KernelBlocks([SHAPE], [False])
    rule = make_rule(resolve_algorithm("local-ddc", **options), OptimizerTraits("sgd"), blocks, workers=workers)
    w, state = start.copy(), rule.init_shard(np, start)
    held, found = {}, []
    for n, (worker, move) in enumerate(moves):
        push = Push(move, w, held.get(worker, start), np.float64(0.0), np.float64(n))
        correction = rule.correct(np, push, state, {})
        advance = rule.advance(np, correction.gradient, w, np.float64(1.0), np.float64(n), correction.shard)
        w, state = advance.weights, advance.shard
        held[worker] = rule.reply(np, w, np.float64(1.0), np.float64(0.0), state)
        found.append((w.copy(), held[worker].copy()))
    return found, state["reserve"]


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 8), pushes=st.lists(st.integers(0, 7), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_the_rule_is_the_equations(workers, pushes, seed):
    rng = np.random.default_rng(seed)
    moves = [(worker % workers, 0.1 * rng.normal(size=SIZE)) for worker in pushes]
    start = rng.normal(size=SIZE)
    expected, left = literal(workers, moves, start)
    found, reserve = by_rule(workers, moves, start)
    for (w, h), (wanted_w, wanted_h) in zip(found, expected, strict=True):
        np.testing.assert_allclose(w, wanted_w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(h, wanted_h, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(reserve, left, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99))
def test_the_weights_of_one_worker_are_its_own(seed):
    rng = np.random.default_rng(seed)
    moves = [(0, rng.normal(size=SIZE)) for _ in range(20)]
    start = rng.normal(size=SIZE)
    found, reserve = by_rule(1, moves, start)
    own = start
    for (w, h), (_, move) in zip(found, moves, strict=True):
        own = own - move
        np.testing.assert_allclose(w, own, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(h, w)
    assert not reserve.any()


def test_what_workers_agree_on_is_returned_and_what_they_differ_in_cancels():
    """In the end a reserve that was filled by one direction moves the weights (2 - 1/M) times as far."""
    workers, rng = 8, np.random.default_rng(0)
    common, start = np.ones(SIZE), 1000 * np.ones(SIZE)  # large weights: nothing is mistrusted
    agreed = [(n % workers, 1e-3 * common) for n in range(400)]
    found, reserve = by_rule(workers, agreed, start, dc_lambda=0.0)
    moved = start - found[-1][0]
    total = 400 * 1e-3 * (1 + 1 - 1 / workers)
    np.testing.assert_allclose(moved + reserve, total, rtol=0.02)
    noise = [(n % workers, 1e-3 * rng.choice([-1, 1], SIZE)) for n in range(400)]
    _, reserve = by_rule(workers, noise, start, dc_lambda=0.0)
    assert np.abs(reserve).mean() < 0.2 * 1e-3 * 10 * workers


def test_the_mean_takes_a_share_of_each_difference():
    rule = make_rule(resolve_algorithm("local-ddc", update_rule="plain"), OptimizerTraits("sgd"), workers=4)
    push = Push(np.full(3, 2.0), np.zeros(3), np.zeros(3), np.float64(0.0), np.float64(0.0))
    np.testing.assert_array_equal(rule.correct(np, push, {}, {}).gradient, 0.5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"update_rule": "dc"}, "update_rule: expected 'ddc' or 'plain'"),
        ({"consistency": "ssp"}, "consistency: expected 'free' or 'bsp'"),
        ({"consistency": "bsp", "overlap": 0}, "update_rule: expected 'plain'"),
        ({"batch": "dbs"}, "batch: expected 'fixed'"),
        ({"local_steps": 0}, "expected 'auto', or at least 1"),
        ({"topology": "groups", "overlap": 0}, "expected 'every-step'"),
    ],
)
def test_what_does_not_fit_is_refused(options, why):
    with pytest.raises(UsageError, match=why):
        resolve_algorithm("local-ddc", **options)
