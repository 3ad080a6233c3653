"""Metrics of every kind on a cluster, equal to Keras' on one machine with the same weights."""

from __future__ import annotations

import pytest

from tests.support.scripts import DIGITS, answer

pytestmark = pytest.mark.processes

SCRIPT = (
    DIGITS
    + """
import sys
import nfdt
from keras import metrics, ops

x, y, more, labels = x[:500], np.eye(10, dtype="f4")[y[:500]], x[500:670], np.eye(10, dtype="f4")[y[500:670]]

class Greatest(metrics.Metric):
    def __init__(self, name="greatest", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(name="value", initializer="zeros")
    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(prediction)))
    def result(self):
        return {"greatest": 1 * self.value, "twice": 2 * self.value}
    def merge_state(self, metrics):
        for other in metrics:
            self.value.assign(ops.maximum(self.value, other.value))

class OwnLogs(keras.Sequential):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.f1 = metrics.F1Score(name="f1")
    def train_step(self, data):
        self.f1.update_state(data[1], self(data[0]))
        logs = super().train_step(data)
        return {**logs, "more": logs["loss"] + 1, "both": {"pair": ops.stack([logs["loss"], 2 * logs["loss"]])}}
    def test_step(self, data):
        logs = super().test_step(data)
        return {"loss": logs["loss"], "more": logs["loss"] + 1}

def build(kind):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = kind([keras.layers.Dense(16, "tanh"), keras.layers.Dense(10, "softmax")])
    arrays = [metrics.F1Score(name="f1"), metrics.R2Score(class_aggregation=None), metrics.Precision([0.1, 0.3])]
    given = [] if kind is OwnLogs else [*arrays, metrics.AUC(), Greatest()]
    model.compile(keras.optimizers.SGD(0.0), "categorical_crossentropy", metrics=given, weighted_metrics=["mae"])
    return model

def trained(kind):
    validation = (more, labels, np.linspace(1, 2, 170, dtype="f4"))
    return build(kind).fit(x, y, epochs=2, batch_size=32, shuffle=False, verbose=0, validation_data=validation).history

plain = [trained(kind) for kind in (keras.Sequential, OwnLogs)]
with nfdt.session(workers=2, algorithm=sys.argv[1]):
    ours = [trained(kind) for kind in (keras.Sequential, OwnLogs)]

def difference(one, other):
    assert (type(one), np.shape(one)) == (type(other), np.shape(other)), (one, other)
    assert getattr(one, "dtype", None) == getattr(other, "dtype", None), (one, other)
    return float(np.max(np.abs(one - other)))

print()
print(json.dumps({
    "keys": [[sorted(history) for history in histories] for histories in (plain, ours)],
    "differences": {
        name: max(map(difference, history[name], reference[name]))
        for history, reference in zip(ours, plain) for name in set(history) & set(reference)
    },
}))
"""
)


@pytest.mark.feature("Metrics of Keras in `History`, also arrays", area="Losses and metrics")
@pytest.mark.parametrize(
    "algorithm", ["ddc-asgd", pytest.param("allreduce", marks=[pytest.mark.long, pytest.mark.horovod])]
)
def test_history_holds_what_it_holds_in_keras(algorithm, tmp_path, script_fork_server):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = answer(script_fork_server.run(script, algorithm))
    plain, ours = found["keys"]
    assert ours == plain
    assert {"val_f1", "twice", "val_r2_score"} <= set(ours[0])
    assert {"more", "pair", "val_more"} <= set(ours[1])
    assert {name: value for name, value in found["differences"].items() if value > 1e-4} == {}
