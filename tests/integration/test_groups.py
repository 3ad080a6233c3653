"""Groups with real Horovod worlds: formed by speed, independent, and lost one by one."""

from __future__ import annotations

import secrets

import pytest

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed
from nfdt.jobserver.main import ServerOptions, serve
from nfdt.jobserver.slot_ring import SlotRing
from nfdt.launch import horovod
from nfdt.launch.horovod_command import ring_command
from nfdt.planning.cost_model import PlanChoice, PlannedPreset, Prediction
from tests.support.scripts import answer

pytestmark = pytest.mark.horovod

DIGITS = """
import json
import keras
import numpy as np
from sklearn.datasets import load_digits
import nfdt

x, y = load_digits(return_X_y=True)
order = np.random.RandomState(0).permutation(len(x))
x, y = (x / 16).astype("float32")[order], y[order].astype("int64")
train, test = (x[:1344], y[:1344]), (x[1347:], y[1347:])

def build(rate, momentum):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    optimizer = keras.optimizers.SGD(rate, momentum=momentum)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def accuracy(model):
    return model.evaluate(*test, verbose=0)[1]

def groups(history):
    return sorted(row["group"] for row in history.nfdt.values())

def samples(history):
    return sum(row["samples"] for row in history.nfdt.values())
"""


@pytest.mark.long
@pytest.mark.feature("`group-sync`", area="Algorithms")
def test_workers_are_grouped_by_measured_speed_and_train_as_well_as_one_process(run_script):
    got = answer(
        run_script(
            DIGITS
            + """
with nfdt.session(algorithm="group-sync", workers=4, emulate={"step_ms": [25, 100, 25, 100]}):
    model = build(0.1, 0.9)
    history = model.fit(*train, batch_size=16, epochs=12, verbose=0, validation_data=test)
alone = build(0.1, 0.9)
alone.fit(*train, batch_size=16, epochs=12, verbose=0)
print(json.dumps(dict(
    groups=groups(history), samples=samples(history), rows=[r["batch_sizes"] for r in history.nfdt.values()],
    accuracy=accuracy(model), alone=accuracy(alone), val=history.history["val_accuracy"][-1],
)))
"""
        )
    )
    assert got["groups"] == [[0, 2], [1, 3]]
    assert got["samples"] == 12 * 1344
    assert got["accuracy"] == pytest.approx(got["val"], abs=1e-6)
    assert got["accuracy"] > got["alone"] - 0.025
    usual = [max(sizes, key=sizes.get) for sizes in got["rows"]]
    assert max(map(int, usual)) > 2 * min(map(int, usual))


def test_a_rank_that_is_killed_takes_its_group_and_no_other_and_the_group_is_formed_again(run_script):
    done = run_script(
        DIGITS
        + """
import io, logging
import psutil

class Killing(keras.callbacks.Callback):
    since = 0
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            lines = [(p, p.cmdline()) for p in psutil.Process().children(recursive=True)]
            ranks = [p for p, line in lines if "hfdt.runtime.rank" in line and "0,1" in line]
            ranks[-1].kill()  # mpirun comes first
        elif "group was formed again" in news.getvalue():
            self.since += 1
            self.model.stop_training = self.since > 20

news = io.StringIO()
logging.getLogger("nfdt_client").addHandler(logging.StreamHandler(news))
logging.getLogger("nfdt_client").setLevel("INFO")
options = dict(algorithm="group-sync", workers=3, groups="0,1;2", batch="fixed")
with nfdt.session(**options, emulate={"step_ms": [10, 10, 10]}):
    model = build(0.02, 0.9)
    history = model.fit(*train, batch_size=32, epochs=2000, verbose=0, callbacks=[Killing()])
rows = [(row["group"], row["steps"]) for row in history.nfdt.values()]
print(json.dumps(dict(rows=rows, samples=samples(history), epochs=len(history.epoch), accuracy=accuracy(model))))
"""
    )
    got = answer(done)
    assert sorted(members for members, _ in got["rows"]) == [[0, 1], [0, 1], [2]]
    assert all(steps > 0 for _, steps in got["rows"])
    # A lost group's own row may lack the last update of 2 x 32 samples, which the shards know and it had not reported.
    assert got["samples"] in (got["epochs"] * 1344 - 64, got["epochs"] * 1344)
    assert got["accuracy"] > 0.5


@pytest.fixture
def server_that_plans(tmp_path, monkeypatch):
    """Provide a server with three slots whose planner prefers these groups to flat workers at its first review.

    It does so whether each worker is measured or not: a slow start leaves a worker too few of the short epochs' steps.
    """

    def plan(self, load, remaining_s, machines=None):
        assert load.busy_s > 0
        row = PlannedPreset("free", "dbs", 0, ((0, 2), (1,)))
        return PlanChoice(row, Prediction(1000.0, 1.0, 1.0, 1.5), "groups, set by the test")

    monkeypatch.setattr(Coordinator, "plan_groups", plan)
    options = ServerOptions(tmp_path / "state", (secrets.token_hex(16),), workers=3)
    server = serve(options)
    yield {"NFDT_SERVER": server.address, "NFDT_TOKEN": options.tokens[0]}
    server.stop()


AUTO = (
    DIGITS
    + """
with nfdt.session(algorithm="auto", workers=3, launcher="LAUNCHER", emulate={"step_ms": [10, 10, 10]}):
    model = build(0.1, 0.0)
    history = model.fit(*train, batch_size=16, epochs=8, verbose=0)
rows = list(history.nfdt.values())
print(json.dumps(dict(
    flat=[row["samples"] for row in rows if "group" not in row],
    groups=[row["samples"] for row in rows if "group" in row], members=[row.get("group") for row in rows],
    accuracy=accuracy(model), loss=history.history["loss"],
)))
"""
)


@pytest.mark.parametrize("launcher", ["slots", pytest.param("mpirun", marks=pytest.mark.long)])
def test_auto_turns_to_groups_between_two_epochs_and_loses_nothing(run_script, server_that_plans, launcher):
    got = answer(run_script(AUTO.replace("LAUNCHER", launcher), **server_that_plans))
    groups = [members for members in got["members"] if members]
    assert sorted(groups) == [[0, 2], [1]]  # in the order in which the groups joined
    assert not any(got["members"][: -len(groups)])
    flat, grouped = (sum(got[part]) / 1344 for part in ("flat", "groups"))
    assert grouped in range(1, 8)
    # Workers also count what they trained of the epoch ahead, which begins again when groups form.
    assert 8 <= flat + grouped < 9
    assert len(got["loss"]) == 8
    assert got["accuracy"] > 0.8


def refused_command(shape, program, host, **options):
    return ring_command(shape, [*program, "--no-such-option"], host, **options)


def refuse_ranks(self, slots, start):
    raise JobFailed("these slots are no ranks")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["slots", "mpirun"])
def test_auto_stays_flat_where_worlds_do_not_come_up(run_script, server_that_plans, monkeypatch, launcher):
    monkeypatch.setattr(horovod, "ring_command", refused_command)
    monkeypatch.setattr(SlotRing, "assign", refuse_ranks)
    done = run_script(AUTO.replace("LAUNCHER", launcher), **server_that_plans)
    got = answer(done)
    assert sum(got["flat"]) == 8 * 1344
    assert got["groups"] == []
    assert "stay flat, because groups did not come up" in done.stderr
