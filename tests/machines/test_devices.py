"""A script with a distribution of its own, on machines of several devices."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.scripts import DEADLINE_S, NFDT, answer

TWO = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
FLOAT = 2e-5
SCRIPT = """
import json
import sys

import keras
import numpy as np

layouts = keras.distribution.LayoutMap(
    keras.distribution.DeviceMesh((1, 2), ["batch", "model"], keras.distribution.list_devices())
)
layouts[".*dense.*kernel"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))

random = np.random.default_rng(0)
x, y = random.normal(size=(512, 20)).astype("float32"), random.integers(0, 8, 512)
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(8, "softmax")]
model = keras.Sequential([keras.Input((20,)), *layers])
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
history = model.fit(x, y, batch_size=int(sys.argv[1]), epochs=2, shuffle=False, verbose=0)
weights = [variable.tolist() for variable in model.get_weights()]
hosts = sorted(worker["host"] for worker in getattr(history, "nfdt", {}).values())
print(json.dumps(dict(weights=weights, loss=history.history["loss"], hosts=hosts)))
"""


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["bsp", "ddc-asgd"])
def test_a_model_divided_over_the_devices_of_each_of_two_machines_trains_as_on_one(machines, tmp_path, algorithm):
    server, *workers = machines(["server", "one", "two"])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with MachinesCluster(tmp_path, server) as cluster:
        for machine in workers:
            cluster.offer(machine, slots=1, **TWO)
        run = [*NFDT, "run", *cluster.connection, "--workers", "2", "--algorithm", algorithm]
        command = [*run, "--set", "emulate.devices=2", str(script), "32"]
        env = cluster.env(**TWO)
        done = server.run(command, env=env, cwd=tmp_path, timeout=DEADLINE_S, check=False)
        found = answer(done)
        plain = json.loads(server.run([NFDT[0], str(script), "64"], env=env, cwd=tmp_path, timeout=DEADLINE_S).stdout)
    assert "on 2 workers, each with 2 devices" in done.stderr
    assert found["hosts"] == ["one", "two"]
    assert found["loss"][1] < found["loss"][0]
    if algorithm == "bsp":  # a round is a batch of each worker
        flat, expected = (sum(map(_flat, each["weights"]), []) for each in (found, plain))
        assert flat == pytest.approx(expected, abs=FLOAT)


def _flat(nested):
    return sum(map(_flat, nested), []) if isinstance(nested, list) else [nested]
