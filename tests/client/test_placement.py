"""Place where the data of a fit are read: what goes with the job, what stays in the script, and why."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from nfdt_client.capture import capture
from nfdt_client.options import resolve
from nfdt_client.patch import bind
from nfdt_client.specify import specify

from nfdt.core.errors import UnreadableData, UsageError
from nfdt.model.program.manifest import Manifest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

X, Y = np.ones((10, 3), "float32"), np.ones((10, 1), "float32")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 4 : index * 4 + 4], Y[index * 4 : index * 4 + 4]


class Locked(Batches):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


SEEN: list[int] = []


class Recorded(Batches):
    def __getitem__(self, index):
        SEEN.append(index)
        return super().__getitem__(index)


class Endless(Batches):
    @property
    def num_batches(self):
        return None


def generator():
    while True:
        yield X, Y


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def read(model):
    def read(x, data="auto", allows_code=True, **arguments):
        return capture(
            model, bind(keras.Model.fit, model, (x,), arguments), resolve({"data": data}), lambda: allows_code
        )

    return read


def test_arrays_are_uploaded_whatever_the_option(read):
    for data in ("auto", "client", "workers"):
        assert read(X, data, y=Y).choice.where == "server arrays"


def test_a_dataset_goes_with_the_job_as_code_with_its_batches_and_their_size(read, model):
    captured = read(Batches(), validation_data=Batches(), steps_per_epoch=2, validation_steps=1)
    assert captured.choice.where == "workers"
    packed = SimpleNamespace(manifest=Manifest({"state": 64 * "0"}), files={}, state_parts=[], code=False)
    submission = specify(captured, packed, resolve({}), cluster=resolve({}).cluster, initial_epoch=0)
    spec = submission.spec
    assert spec.code, "workers load it only where the server allows code"
    assert (spec.train.kind, spec.train.batches, spec.fit.batch_size, spec.fit.steps_per_epoch) == ("indexed", 3, 4, 2)
    assert spec.train.reason == captured.choice.reason
    assert spec.validation.batches == 1
    assert {spec.train.code, spec.validation.code} <= set(submission.blobs)


@pytest.mark.parametrize(
    ("x", "allows_code", "reason"),
    [
        (Locked(), True, "cannot be pickled"),
        (Endless(), True, "how many batches"),
        (Batches(), False, "--allow-code"),
        (Recorded(), True, "changes variables of the script: SEEN"),
        (generator(), True, "a generator can be iterated only in the script's process"),
    ],
    ids=["unpicklable", "endless", "no code", "records", "generator"],
)
def test_what_only_the_script_can_read_stays_there_and_says_why(read, x, allows_code, reason):
    captured = read(x, allows_code=allows_code, steps_per_epoch=2)
    assert captured.choice.where == "client"
    assert reason in captured.choice.reason
    with pytest.raises(UnreadableData, match=f"data='workers': expected .* Received: .*{reason}.* use data='auto'"):
        read(x, "workers", allows_code=allows_code, steps_per_epoch=2)


def test_the_option_keeps_a_dataset_in_the_script(read):
    choice = read(Batches(), "client", validation_data=Batches())
    assert (choice.choice.where, choice.choice.reason) == ("client", "data='client'")
    assert choice.validation is None


def test_the_server_is_asked_only_about_code(read):
    def never():
        raise AssertionError

    model = read(X, y=Y).model
    capture(model, bind(keras.Model.fit, model, (X, Y), {}), resolve({}), never)


def test_another_place_is_refused():
    with pytest.raises(UsageError, match="data: expected one of auto, client, workers. Received: 'here'"):
        resolve({"data": "here"})
