"""Data on the machines of the workers, over TLS: rows of a large array, and batches of a PyDataset."""

from __future__ import annotations

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.machines import Machine
from tests.support.scripts import DEADLINE_S, answer

POLL_S = 0.01
LEASE = 16  # batches of 0.02 s in the 0.25 s after which a worker reports

ROWS = """
import json, keras, nfdt, numpy as np
ROWS, WIDTH = 8000, 512
x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")  # 16 MB
y = (x[:, :1] > 0).astype("float32")
model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1, activation="sigmoid")])
model.compile(keras.optimizers.SGD(0.05), "binary_crossentropy", metrics=["accuracy"])
with nfdt.session(workers=2, algorithm="asgd", fetch_whole_mb=2):
    history = model.fit(x, y, batch_size=32, epochs=1, verbose=0)
print(json.dumps(dict(
    loss=history.history["loss"], accuracy=float(model.evaluate(x, y, verbose=0)[1]), where=history.nfdt.data["where"],
    samples={w["host"]: w["samples"] for w in history.nfdt.values()}, bytes=x.nbytes,
)))
"""

# The gradient of batch i is 1 for weight i alone: with a rate of 1 each weight counts how often its batch was applied.
COUNTED = """
import json, keras, nfdt, numpy as np, os, time
BATCHES, EPOCHS = 150, 2

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        with open(os.path.join({folder!r}, os.uname().nodename), "a") as log:
            log.write(f"{{index}}\\n")
        time.sleep(0.02)
        x = np.zeros((4, BATCHES), "float32")
        x[:, index] = 1
        return x, np.zeros((4, 1), "float32")

model = keras.Sequential([keras.Input((BATCHES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(1.0), loss=lambda y, out: out)
with nfdt.session(workers=3, algorithm="asgd", data="workers"):
    history = model.fit(Batches(), epochs=EPOCHS, verbose=0)
print(json.dumps(dict(
    counts=(-model.get_weights()[0][:, 0]).round(3).tolist(), data=history.nfdt.data,
    hosts=sorted(w["host"] for w in history.nfdt.values()),
)))
"""


def fetched(machine: Machine) -> int:
    """Return the bytes of artifacts that the workers of a machine have fetched, by their logs."""
    logs = "".join(path.read_text() for path in machine.from_outside(machine.home).rglob("*.log"))
    found = re.findall(r"fetched (\d+) bytes", logs)
    assert found, logs[-2000:]
    return sum(map(int, found))


@pytest.mark.long
def test_a_machine_fetches_only_the_rows_of_its_tasks(machines, tmp_path):
    server, one, two = machines(["server", "one", "two"])
    with MachinesCluster(tmp_path, server) as cluster:
        for machine in (one, two):
            cluster.offer(machine, slots=1)
        got = answer(cluster.run_script(ROWS))
        assert got["where"] == "server arrays"
        assert sum(got["samples"].values()) == 8000
        assert got["accuracy"] > 0.8, "the rows have arrived in the right places"
        cluster.__exit__()
        for machine in (one, two):
            own = got["samples"][machine.name] / 8000 * got["bytes"]
            assert own <= fetched(machine) < 1.1 * own + 200_000


@pytest.mark.long
def test_every_index_is_trained_although_a_machine_dies(machines, tmp_path):
    server, *workers = machines(["server", "one", "two", "three"])
    with TemporaryDirectory() as folder, MachinesCluster(tmp_path, server) as cluster:
        reads = Path(folder)
        reads.chmod(0o777)  # root's slots run the code of a job as another user
        for machine in workers:
            cluster.offer(machine, slots=1)
        script = cluster.start_script(COUNTED.format(folder=str(reads)))
        log, deadline = reads / "two", time.monotonic() + DEADLINE_S
        while not log.exists() or len(log.read_text().splitlines()) < 10:
            assert script.poll() is None, script.error_output()[-4000:]
            assert time.monotonic() < deadline, script.error_output()[-4000:]
            time.sleep(POLL_S)
        workers[1].kill()
        code = script.wait(DEADLINE_S)
        got = answer(SimpleNamespace(returncode=code, stdout=script.output(), stderr=script.error_output()))
        assert got["data"]["where"] == "workers"
        assert set((reads / "server").read_text().split()) == {"0"}, "the script reads a batch only to build the model"
        counts = got["counts"]
        assert min(counts) == 2, "every index in both epochs"
        again = sum(counts) - 2 * len(counts)
        assert again <= LEASE, "what the lost machine had applied and not yet reported is applied twice"
