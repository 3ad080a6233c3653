"""A ``tf.data.Dataset`` on workers of several machines, over TLS."""

from __future__ import annotations

import pytest

from tests.support.cluster_of_machines import MachinesCluster
from tests.support.scripts import answer

TRAIN = """
import json
import keras
import numpy as np
import tensorflow as tf
import nfdt

def build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[itself])
    return model

def itself(y_true, y_pred):
    return y_true

def fit(dataset, **options):
    with nfdt.session(workers=2, algorithm="asgd", **options):
        history = build().fit(dataset, epochs=2, verbose=0)
    return dict(
        itself=history.history["itself"],
        hosts={w["host"]: w["samples"] for w in history.nfdt.values()},
        data=history.nfdt.data,
    )

def parsed(record):
    value = tf.reshape(tf.io.parse_tensor(record, tf.float32), [1])
    return value, value
"""

RECORDS = """
folder = {folder!r}
for number in range(8):
    with tf.io.TFRecordWriter(f"{{folder}}/{{number}}.tfrecord") as file:
        for value in range(number * 50, number * 50 + 50):
            file.write(tf.io.serialize_tensor(np.float32(value)).numpy())
files = tf.data.Dataset.list_files(f"{{folder}}/*.tfrecord")
dataset = files.interleave(tf.data.TFRecordDataset).map(parsed).batch(16)
got = dict(auto=fit(dataset))
try:
    fit(dataset, data="workers")
except TypeError as error:
    got["refused"] = str(error)
print(json.dumps(got))
"""

ARRAYS = """
ids = np.arange(1000, dtype="float32")[:, None]
dataset = tf.data.Dataset.from_tensor_slices((ids, ids)).shuffle(1000).map(lambda x, y: (x + 0, y)).batch(32)
print(json.dumps(fit(dataset)))
"""


@pytest.mark.long
def test_two_machines_share_a_dataset(machines, tmp_path):
    server, one, two = machines(["server", "one", "two"])
    with MachinesCluster(tmp_path, server) as cluster:
        for machine in (one, two):
            cluster.offer(machine, slots=1)
        got = answer(cluster.run_script(TRAIN + ARRAYS))
        assert got["data"]["where"] == "workers"
        assert got["itself"] == [499.5, 499.5]
        assert sum(got["hosts"].values()) == 2000
        assert set(got["hosts"]) == {"one", "two"}
        assert all(got["hosts"].values())


@pytest.mark.long
def test_files_that_a_machine_lacks_are_named_before_the_first_epoch(machines, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    server, one, two = machines(["server", "one", "two"], private=[private])
    with MachinesCluster(tmp_path, server) as cluster:
        for machine in (one, two):
            cluster.offer(machine, slots=1)
        got = answer(cluster.run_script(TRAIN + RECORDS.format(folder=str(private))))
        assert got["auto"]["data"]["where"] == "client"
        assert sum(got["auto"]["hosts"].values()) == 800
        for text in (got["auto"]["data"]["reason"], got["refused"]):
            assert f"{private}/" in text
            assert "no such file on" in text
            assert "expected a file of" in text
