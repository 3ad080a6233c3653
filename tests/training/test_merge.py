import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.model.training.merge import LARGE_BYTES, RULES, decode_arrays, encode_arrays, encode_changed, merge_untrained

EMA = {"rule": "ema", "decay": 0.9}


def moved(base, target, decay, steps):
    value = base
    for _ in range(steps):
        value = decay * value + (1 - decay) * target
    return value


@given(
    decay=st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]),
    base=st.floats(-10, 10),
    target=st.floats(-10, 10),
    steps=st.lists(st.integers(1, 60), min_size=2, max_size=6),
)
def test_ema_of_workers_equals_the_same_updates_one_after_the_other(decay, base, target, steps):
    states = [(i, k, [np.asarray([moved(base, target, decay, k)])]) for i, k in enumerate(steps)]
    merged = merge_untrained([{"rule": "ema", "decay": decay}], [np.asarray([base])], states)
    np.testing.assert_allclose(merged[0], [moved(base, target, decay, sum(steps))], rtol=1e-9, atol=1e-9)


def test_ema_weighs_what_each_worker_saw_by_its_steps():
    base = np.asarray([1.0])
    states = [(0, 3, [np.asarray([moved(1.0, 2.0, 0.9, 3)])]), (1, 1, [np.asarray([moved(1.0, 6.0, 0.9, 1)])])]
    np.testing.assert_allclose(merge_untrained([EMA], [base], states)[0], moved(base, 3.0, 0.9, 4), rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("idle", [[], [(0, 0, None)]])
def test_one_worker_returns_its_own_state_bit_for_bit(rule, idle):
    base = [np.asarray([0.1, 0.2], np.float32)]
    own = [np.asarray([0.1, np.float32(1) / 3], np.float32)]
    states = [(1, 7, own), *((i, k, base) for i, k, _ in idle)]
    assert merge_untrained([{"rule": rule, "decay": 0.99}], base, states)[0].tobytes() == own[0].tobytes()


def test_without_any_step_the_base_is_returned():
    base = [np.asarray([0.1])]
    assert merge_untrained([EMA], base, [(0, 0, [np.asarray([5.0])])])[0] == base[0]


def test_the_other_rules():
    rules = [{"rule": r, "decay": None} for r in ("seed", "max", "mean", "mean", "sum")]
    untouched, updates = np.asarray([0.3], np.float32), np.asarray(10)
    base = [np.asarray([1, 0], np.uint32), np.asarray(3), np.asarray([0.0], np.float16), untouched, updates]
    states = [
        (2, 1, [np.asarray([9, 9], np.uint32), np.asarray(5), np.asarray([4.0], np.float16), untouched, updates + 1]),
        (0, 3, [np.asarray([1, 7], np.uint32), np.asarray(4), np.asarray([8.0], np.float16), untouched, updates + 3]),
    ]
    seed, counter, mean, untouched, updates = merge_untrained(rules, base, states)
    assert updates == 14
    assert updates.dtype == base[4].dtype
    np.testing.assert_array_equal(seed, [1, 7])
    assert counter == 5
    assert counter.shape == ()
    assert mean.dtype == np.float16
    np.testing.assert_array_equal(mean, [7.0])
    np.testing.assert_array_equal(untouched, base[3])


def test_another_models_state_is_refused_by_name():
    with pytest.raises(ShapeMismatch, match="worker 3"):
        merge_untrained([EMA], [np.zeros(2)], [(3, 1, [np.zeros(3)])])


def test_lists_of_arrays_travel_in_order():
    arrays = [np.asarray(i, np.float32) for i in range(12)]
    assert [int(a) for a in decode_arrays(encode_arrays(arrays))] == list(range(12))
    assert decode_arrays(b"") == decode_arrays(encode_arrays([])) == []
    with pytest.raises(ProtocolError):
        decode_arrays(b"nonsense")


def test_large_arrays_that_did_not_change_are_left_out_and_come_back():
    frozen, moving, small = np.arange(LARGE_BYTES, dtype="f4"), np.zeros(LARGE_BYTES, "f4"), np.ones(3)
    after = [frozen.copy(), moving + 1, small]
    encoded = encode_changed(after, [frozen, moving, small])
    assert len(encoded) < 2 * frozen.nbytes
    decoded = decode_arrays(encoded, [frozen, moving, small])
    assert decoded[0] is frozen
    np.testing.assert_array_equal(decoded[1], after[1])
    with pytest.raises(ProtocolError):
        decode_arrays(encoded)


OF_AN_OPTIMIZER = [
    {"rule": "sum", "decay": None, "optimizer": 0, "applications": 1},
    {"rule": "ema", "decay": 0.9, "optimizer": 0, "applications": 1},
]


def test_steps_that_an_optimizer_counted_before_are_not_lost():
    """Regression: a worker without a step in the last epoch had kept its optimizer to itself in those before."""
    base = [np.array(10), np.array([0.0])]
    states = [(0, 3, [np.array(15), np.array([1.0])]), (1, 0, [np.array(14), np.array([1.0])])]
    count, average = merge_untrained(OF_AN_OPTIMIZER, base, states)
    assert count == 19
    assert average[0] > 1.0


def test_an_optimizer_that_one_worker_keeps_to_itself_is_not_merged():
    base = [np.array(10), np.array([0.5])]
    states = [(0, 3, [np.array(15), np.array([1.0])]), (1, 3, [None, None])]
    merged = merge_untrained(OF_AN_OPTIMIZER, base, states)
    assert [value.tolist() for value in merged] == [10, [0.5]]
