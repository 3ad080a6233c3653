import numpy as np
import pytest

from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ShapeMismatch
from nfdt.model.training.metric_states import merge_metric_states, own_logs


def state(total, rows, log, samples, steps=1):
    return dump_arrays(
        {
            "steps": np.asarray(steps, np.int64),
            "sum/0": np.asarray(total, np.float32),
            "mean/1": np.asarray(total * steps, np.float64),
            "each/2": np.asarray([rows], np.int32),
            "log/own": np.asarray(log, np.float64) * samples,
            "samples/own": np.asarray(samples, np.float64),
        }
    )


THREE = [state(1.5, [1, 2], 1.0, 8), state(2.5, [3, 4], 4.0, 16, steps=3), state(8.0, [5, 6], 0.0, 8)]


def test_sums_add_up_and_rows_stand_side_by_side():
    merged = load_arrays(merge_metric_states(THREE))
    assert (merged["sum/0"], merged["sum/0"].dtype) == (12.0, np.float32)
    assert merged["mean/1"] / merged["steps"] == (1.5 + 3 * 2.5 + 8.0) / 5
    np.testing.assert_array_equal(merged["each/2"], [[1, 2], [3, 4], [5, 6]])
    assert own_logs(merged) == {"own": 2.25}


def test_the_order_of_merges_does_not_matter():
    whole = load_arrays(merge_metric_states(THREE))
    parts = load_arrays(merge_metric_states([merge_metric_states(THREE[:2]), THREE[2]]))
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)


def test_a_worker_without_steps_adds_nothing():
    assert merge_metric_states([b"", THREE[0], b""]) == THREE[0]
    assert merge_metric_states([b"", b""]) == merge_metric_states([]) == b""


def test_of_logs_of_different_shapes_those_like_the_first_count():
    states = [state(1.0, [0], log, 8) for log in ([1.0, 2.0], [9.0], [3.0, 4.0])]
    np.testing.assert_array_equal(own_logs(load_arrays(merge_metric_states(states)))["own"], [2.0, 3.0])


@pytest.mark.parametrize("other", [{"sum/0": np.zeros(2)}, {"sum/1": np.zeros(())}, {"mean/0": np.zeros(())}, {}])
def test_states_of_different_models_are_refused(other):
    with pytest.raises(ShapeMismatch, match="another model"):
        merge_metric_states([dump_arrays({"sum/0": np.zeros(())}), dump_arrays({"steps": np.ones(()), **other})])
