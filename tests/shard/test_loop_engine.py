"""The engine of compiled loops: equal to the rules' NumPy form, in any order of pushes and by any number of threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import stream_parts
from nfdt.core.errors import NfdtError
from nfdt.core.sharding import make_plan
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, name_arrays
from nfdt.shard import loop_engine, pending_update
from nfdt.shard.building import build_store
from nfdt.shard.engine import AnchoredBf16
from nfdt.shard.loop_engine import LoopEngine
from nfdt.shard.messages import Gradient
from nfdt.shard.optimizer_state import plain_traits
from nfdt.update_rules import make_rule
from nfdt.update_rules.base import Push
from nfdt.update_rules.blocks import KernelBlocks

OPTIMIZERS = {
    "sgd": ("SGD", {"momentum": 0.0, "nesterov": False}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": False}),
    "nesterov with decay": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}),
    "adamw": ("AdamW", {"beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-7, "weight_decay": 0.02}),
}
SLOTS = {"sgd": 0, "momentum": 1, "nesterov with decay": 1, "adam": 2, "adamw": 2}
SHAPES = [(37, 5), (5,), (3, 3, 2, 40), (40,), (33, 1), (7, 70), (50, 1300)]
TABLES = [False, False, False, False, False, True, False]


def manifest_of(name, shapes, tables=None):
    class_name, options = OPTIMIZERS[name]
    layout = ParameterLayout.of([(f"v{i}", shape) for i, shape in enumerate(shapes)])
    scalar = {"shape": [], "variable": -1}
    described = [{**scalar, "dtype": "int64"}, {**scalar, "dtype": "float32"}]
    for slot in range(SLOTS[name]):
        del slot
        described += [{"shape": list(s), "dtype": "float32", "variable": i} for i, s in enumerate(shapes)]
    config = {"learning_rate": 0.05, **options}
    return Manifest(
        {
            "kind": "config",
            "layout": layout.to_json(),
            "optimizer": {"module": "keras.optimizers", "class_name": class_name, "config": config},
            "optimizer_attributes": {},
            "optimizer_variables": described,
            "elementwise": True,
            "divisible": True,
            "constraints": [None] * len(shapes),
            "decay": [True] * len(shapes),
            "tables": [i for i, table in enumerate(tables or []) if table],
        }
    )


class NumpyForm:
    """A shard that runs a rule as it is written, in single or double precision."""

    def __init__(self, rule, weights, decay, dtype):
        self.dtype, self.rule, self.weights, self.decay = dtype, rule, weights.astype(dtype), decay
        self.state, self.updates = rule.init_shard(np, self.weights), 0

    def push(self, gradient, backup, staleness, rate):
        tau, updates = self.dtype(staleness), self.dtype(self.updates)
        push = Push(gradient.astype(self.dtype), self.weights, backup.astype(self.dtype), tau, updates)
        made = self.rule.correct(np, push, self.state, {})
        args = (made.gradient, self.weights, self.dtype(0.05 * rate), updates, made.shard, self._decayed())
        moved = self.rule.advance(np, *args)
        self.weights, self.state = moved.weights, moved.shard
        self.updates += 1
        return self.rule.reply(np, self.weights, self.dtype(0.05), tau, self.state, self._decayed())

    def _decayed(self):
        return self.dtype(self.decay) * self.weights if self.decay else None


class Reference:
    """A rule in double precision, and the distance from it that single precision explains.

    A small difference of a sum can move a factor, and with it a block: the greatest errors are compared.
    """

    def __init__(self, rule, weights, decay):
        self.exact = NumpyForm(rule, weights, decay, np.float64)
        self.single = NumpyForm(rule, weights, decay, np.float32)

    def push(self, gradient, backup, staleness, rate=1.0):
        with np.errstate(all="ignore"):
            found = [form.push(gradient, backup, staleness, rate) for form in (self.exact, self.single)]
        return found

    def check(self, values, exact, single):
        tolerance = 4 * np.abs(single - exact).max(initial=0.0) + 1e-6 * (1.0 + np.abs(exact).max(initial=0.0))
        assert np.abs(values - exact).max(initial=0.0) <= tolerance


def engine_and_reference(name, shapes=SHAPES, tables=TABLES, seed=0):
    manifest = manifest_of(name, shapes, tables)
    blocks = KernelBlocks(shapes, tables)
    traits = plain_traits(manifest)
    rule = make_rule(resolve_algorithm("ddc-asgd"), traits, blocks)
    plan = make_plan(manifest, 0, 1)
    weights = np.random.default_rng(seed).normal(size=plan.layout.size).astype(np.float32)
    engine = LoopEngine(plan, traits, rule, blocks, weights, manifest.optimizer_options)
    return engine, Reference(rule, weights, manifest.optimizer_options.get("weight_decay"))


def pushed(engine, gradient, backup, staleness, rate=1.0, anchor=None):
    length = float(np.linalg.norm(gradient))
    result = engine.step(gradient, backup, staleness, {}, length=length, rate=rate, anchor=anchor)
    if result is not None and result.finish is not None:
        result.finish()
    return result


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sequence_of_delayed_pushes_equals_the_rule(name):
    engine, reference = engine_and_reference(name)
    rng, held = np.random.default_rng(1), [engine.weights()]
    for number in range(12):
        gradient = rng.normal(size=engine.size).astype(np.float32)
        staleness = int(rng.integers(0, len(held)))
        backup = held[-1 - staleness]
        reply = pushed(engine, gradient, backup, staleness, rate=1.0 + number % 2).weights
        reference.check(reply, *reference.push(gradient, backup, staleness, 1.0 + number % 2))
        held.append(reply)
    weights, optimizer = engine.read()
    reference.check(weights, reference.exact.weights, reference.single.weights)
    exact, single = (engine.rule.leave(np, form.state).values() for form in (reference.exact, reference.single))
    for own, *expected in zip(_slots(optimizer, engine.size), exact, single, strict=True):
        reference.check(own, *expected)
    assert engine.updates == 12


def _slots(optimizer, size):
    parts = [values.reshape(-1) for index, values in optimizer.items() if index > 1]
    per_slot = len(SHAPES)
    found = [np.concatenate(parts[i : i + per_slot]) for i in range(0, len(parts), per_slot)]
    assert all(slot.size == size for slot in found)
    return found


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    scale=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e6]),
    seed=st.integers(0, 9),
)
def test_any_shapes_and_magnitudes_equal_the_rule(shapes, name, scale, seed):
    shapes = [*shapes, (3,)]
    engine, reference = engine_and_reference(name, shapes, [False] * len(shapes), seed)
    rng, backup = np.random.default_rng(seed), engine.weights()
    for staleness in (0, 2):
        gradient = (scale * rng.normal(size=engine.size)).astype(np.float32)
        reply = pushed(engine, gradient, backup, staleness).weights
        reference.check(reply, *reference.push(gradient, backup, staleness))
        backup = reply


def test_anchored_backups_hold_what_was_sent():
    engine, reference = engine_and_reference("momentum")
    rng, anchor = np.random.default_rng(3), engine.weights()
    backup = AnchoredBf16(anchor, engine.no_difference())
    for staleness in range(4):
        gradient = rng.normal(size=engine.size).astype(np.float32)
        result = pushed(engine, gradient, backup, staleness, anchor=anchor)
        expected, _ = reference.push(gradient, engine.array(backup), staleness)
        backup = result.compressed
        np.testing.assert_array_equal(engine.array(backup), result.weights)
        moved = np.abs(expected - anchor)
        assert (np.abs(result.weights - expected) <= moved / 256 + 1e-5).all()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_pushes_of_several_threads_equal_their_replay_in_version_order(name, monkeypatch):
    """Each push is applied as a whole in version order to each stripe, and its reply is of its own version.

    A part of the reply may leave when the stripe is updated: later pushes change nothing of it.
    """
    monkeypatch.setattr(loop_engine, "STRIPE", 4096)
    engine, _ = engine_and_reference(name)
    again, _ = engine_and_reference(name)
    assert len(engine._stripes) > 3
    lock, record, threads = threading.Lock(), [], []
    first = engine.weights()

    def work(seed):
        rng, backup, version = np.random.default_rng(seed), first, 0
        for _ in range(20):
            gradient = rng.normal(size=engine.size).astype(np.float32)
            with lock:
                staleness = engine.updates - version
                result = engine.step(gradient, backup, staleness, {}, length=1.0)
                version = engine.updates
                sent = np.zeros_like(result.weights)
                record.append((gradient, backup, staleness, sent))
            update = threading.Thread(target=result.finish)
            update.start()
            for part in result.parts():
                sent[part] = result.weights[part]
            backup = result.weights
            update.join(120)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert max(staleness for _, _, staleness, _ in record) > 0
    for gradient, backup, staleness, reply in record:
        np.testing.assert_array_equal(pushed(again, gradient, backup, staleness).weights, reply)
    np.testing.assert_array_equal(engine.read()[0], again.read()[0])


def test_a_stripe_of_the_reply_is_complete_before_the_next_one_is_updated(monkeypatch):
    monkeypatch.setattr(loop_engine, "STRIPE", 4096)
    engine, _ = engine_and_reference("momentum")
    twin, _ = engine_and_reference("momentum")
    gradient, first = np.ones(engine.size, np.float32), engine.weights()
    expected = pushed(twin, gradient, first, 0).weights
    update, may_go_on = loop_engine.loops.update, threading.Semaphore(0)

    def update_when_asked(*arguments):
        assert may_go_on.acquire(timeout=60)
        update(*arguments)

    monkeypatch.setattr(loop_engine.loops, "update", update_when_asked)
    result = engine.step(gradient, first, 0, {}, length=1.0)
    thread = threading.Thread(target=result.finish)
    thread.start()
    parts, stop = result.parts(), 0
    for _ in engine._stripes:
        may_go_on.release()
        part = next(parts)
        assert part.start == stop
        np.testing.assert_array_equal(result.weights[part], expected[part])
        stop = part.stop
    assert (stop, list(parts)) == (engine.size, [])
    thread.join(60)


def test_a_push_that_fails_sends_no_reply_and_no_push_follows_it(monkeypatch):
    monkeypatch.setattr(loop_engine, "STRIPE", 4096)
    engine, _ = engine_and_reference("momentum")
    gradient, backup = np.ones(engine.size, np.float32), engine.weights()
    failing, following = [engine.step(gradient, backup, 0, {}, length=1.0) for _ in range(2)]
    with monkeypatch.context() as broken:
        broken.setattr(loop_engine.loops, "update", lambda *given: [][0])
        with pytest.raises(IndexError):
            failing.finish()
    with pytest.raises(NfdtError, match="all parts of the push before"):
        list(failing.parts())
    with pytest.raises(NfdtError, match="all parts of the push before"):
        following.finish()
    with pytest.raises(NfdtError, match="all parts of the push before"):
        engine.read()


def test_a_large_gradient_that_overflows_is_undone():
    engine, _ = engine_and_reference("momentum")
    before = engine.read()
    huge = np.full(engine.size, 3e38, np.float32)
    assert engine.step(huge, engine.weights(), 1, {}, length=3e38) is None
    after = engine.read()
    np.testing.assert_array_equal(before[0], after[0])
    assert engine.updates == 0
    large = np.full(engine.size, 1e8, np.float32)
    assert pushed(engine, large, engine.weights(), 0) is not None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_read_and_restored_continues_alike(name):
    engine, _ = engine_and_reference(name)
    other, _ = engine_and_reference(name, seed=5)
    rng = np.random.default_rng(4)
    gradients = rng.normal(size=(6, engine.size)).astype(np.float32)
    for gradient in gradients[:3]:
        pushed(engine, gradient, engine.weights(), 1)
    held = engine.hold().copied()
    other.write(held.weights, held.optimizer)
    other.restore(held.records)
    for gradient in gradients[3:]:
        replies = [pushed(one, gradient, one.weights(), 1).weights for one in (engine, other)]
        np.testing.assert_array_equal(*replies)


def test_a_state_is_taken_over_without_a_second_copy_of_it():
    engine, _ = engine_and_reference("adam", [(1000, 500)], [False])
    weights, optimizer = engine.read()
    engine._loader.join()
    tracemalloc.start()
    try:
        engine.write(weights, optimizer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * weights.nbytes, "two vectors are kept, one is at work"
    pushed(engine, np.ones_like(weights), engine.weights(), 0)
    assert not any(array.any() for index, array in optimizer.items() if index >= 2), "the given state is not changed"


def test_rows_that_no_longer_change_do_not_become_subnormal():
    engine, _ = engine_and_reference("momentum")
    gradient = np.full(engine.size, 1e-36, np.float32)
    for _ in range(100):
        pushed(engine, gradient, engine.weights(), 0)
        gradient = np.zeros_like(gradient)
    assert not engine._shard["reserve"].any()


def test_duplicates_wait_for_the_first_push_and_get_its_reply():
    manifest = manifest_of("momentum", SHAPES)
    size = manifest.layout.size
    store = build_store(manifest, State(np.zeros(size, np.float32)), resolve_algorithm("ddc-asgd"), 0, 1, workers=2)
    assert isinstance(store._engine, LoopEngine)
    store.pull("a", sequence=1)
    gradient = np.ones(size, np.float32)
    first = store.push("a", Gradient(2, gradient))
    again = store.push("a", Gradient(2, gradient))
    assert (first.applied, again.applied, store.version) == (True, False, 1)
    np.testing.assert_array_equal(first.weights, again.weights)


def test_a_push_may_go_on_in_another_thread_while_its_reply_leaves_and_others_arrive(monkeypatch):
    monkeypatch.setattr(loop_engine, "STRIPE", 4096)
    manifest = manifest_of("momentum", SHAPES)
    size, algorithm = manifest.layout.size, resolve_algorithm("ddc-asgd")
    store, twin = [build_store(manifest, State(np.zeros(size, np.float32)), algorithm, 0, 1, workers=2) for _ in "ab"]
    for worker in "ab":
        store.pull(worker, sequence=1), twin.pull(worker, sequence=1)
    gradients, started = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32), []
    replies = [store.push(w, Gradient(2, g), start=started.append) for w, g in zip("ab", gradients, strict=True)]
    assert [(reply.version, reply.staleness) for reply in replies] == [(1, 0), (2, 1)]
    assert store.statistics()["latency_s"]["sum_s"] == 0, "no update has ended"
    threads = [threading.Thread(target=update) for update in reversed(started)]  # the later push waits for the first
    for thread in threads:
        thread.start()
    again = store.push("a", Gradient(2, gradients[0]), start=started.append)
    assert (again.applied, again.parts, len(started)) == (False, None, 2)
    for worker, gradient, reply in zip("ab", gradients, replies, strict=True):
        sent = np.concatenate([reply.weights[part] for part in reply.parts()])
        np.testing.assert_array_equal(sent, twin.push(worker, Gradient(2, gradient)).weights)
    np.testing.assert_array_equal(again.weights, replies[0].weights)
    for thread in threads:
        thread.join(60)
    assert sum(store.statistics()["latency_s"]["counts"]) == 3
    np.testing.assert_array_equal(store.read()[0], twin.read()[0])


def test_a_push_without_a_reply_holds_up_no_other(monkeypatch):
    manifest = manifest_of("momentum", SHAPES)
    size = manifest.layout.size
    store = build_store(manifest, State(np.zeros(size, np.float32)), resolve_algorithm("ddc-asgd"), 0, 1, workers=2)
    for worker in "ab":
        store.pull(worker, sequence=1)
    gradient = np.ones(size, np.float32)
    with monkeypatch.context() as broken:
        broken.setattr(store._backups, "add", lambda *given: [][0])
        with pytest.raises(IndexError):
            store.push("a", Gradient(2, gradient))
    monkeypatch.setattr(pending_update, "UPDATE_S", 1.0)
    assert store.push("b", Gradient(2, gradient)).applied
    assert store.version == 2


def test_a_push_does_not_count_the_compilation_as_the_time_of_the_push_before(monkeypatch):
    compiled, waited = threading.Event(), []
    update, wait = loop_engine.loops.update, pending_update.PendingUpdate.wait

    def update_once_compiled(*arguments):
        assert compiled.wait(60)
        update(*arguments)

    def noted_wait(pending, stripe):
        waited.append(compiled.is_set())
        wait(pending, stripe)

    monkeypatch.setattr(loop_engine.loops, "update", update_once_compiled)
    monkeypatch.setattr(pending_update.PendingUpdate, "wait", noted_wait)
    engine, _ = engine_and_reference("sgd")
    gradient, backup = np.ones(engine.size, np.float32), np.zeros(engine.size, np.float32)
    steps = [engine.step(gradient, backup, 0, {}, length=1.0) for _ in range(2)]
    threads = [threading.Thread(target=step.finish) for step in steps]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)
    assert waited == []
    compiled.set()
    for thread in threads:
        thread.join(60)
    assert waited
    assert engine.updates == 2


def test_a_shard_with_a_rule_that_owns_the_optimizer_loads_neither_keras_nor_tensorflow():
    probe = """
import sys
sys.path.insert(0, '.')
import numpy as np
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.core.specs.job import resolve_algorithm
from nfdt.shard.messages import Gradient
from nfdt.shard.servicer import start_shard
entries = %r
state = State(np.zeros(12, np.float32))
shard = start_shard(Manifest(entries), state, resolve_algorithm('ddc-asgd'), 0, 1, workers=1, token='t', leased=False)
shard.store.pull('a', sequence=1)
assert shard.store.push('a', Gradient(2, np.ones(12, np.float32))).applied
shard.stop()
print(sorted({'tensorflow', 'keras', 'jax'} & set(sys.modules)))
"""
    entries = dict(manifest_of("adam", [(4, 3)]).entries)
    done = subprocess.run([sys.executable, "-c", probe % entries], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_held_state_is_that_of_its_moment_whatever_comes_later(name):
    engine, _ = engine_and_reference(name, [(1200, 500)], [False])  # several stripes
    rng = np.random.default_rng(4)
    for gradient in rng.normal(size=(2, engine.size)).astype(np.float32):
        pushed(engine, gradient, engine.weights(), 1)
    at_once, held = engine.hold().copied(), engine.hold()
    begun = iter(held.weights.arrays)
    first = next(begun)
    pushed(engine, rng.normal(size=engine.size).astype(np.float32), engine.weights(), 1)
    np.testing.assert_array_equal(np.concatenate([first, *begun]), at_once.weights)
    engine.write(np.zeros(engine.size, np.float32), at_once.optimizer)
    for index, pieces in held.optimizer.items():
        found = pieces if isinstance(pieces, np.ndarray) else pieces.joined()
        np.testing.assert_array_equal(found, at_once.optimizer[index])
    for rule_name, value in held.records["rule"].items():
        found = value if isinstance(value, np.ndarray) else value.joined()
        np.testing.assert_array_equal(found, at_once.records["rule"][rule_name])
    held.release()
    assert not engine._held


def test_a_state_is_read_without_a_copy_of_it():
    engine, _ = engine_and_reference("adam", [(2000, 1000)], [False])
    held = engine.hold()
    tracemalloc.start()
    try:
        size, parts = stream_parts(name_arrays(held.weights, held.optimizer))
        assert sum(len(part) for part in parts) == size
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        held.release()
    assert peak < 4 * engine.size
