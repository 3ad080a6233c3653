"""Callbacks of a detached job, as the coordinator hands their state on and obeys their decisions."""

from __future__ import annotations

from dataclasses import replace

from nfdt.core.specs.callbacks import CallbackSpec, CallbacksSpec
from nfdt.core.work.instructions import CallbackDecision, EpochDone, Summarise, TrainingDone
from tests.support.simulated_cluster import SimulatedCluster, SimulatedWorker, job


class DecidingWorker(SimulatedWorker):
    """Worker with callbacks that count epochs, and stop after the third."""

    def execute(self, instruction):
        report = super().execute(instruction)
        if not isinstance(instruction, Summarise):
            return report
        self.cluster.orders.append(instruction)
        stop = instruction.epoch == 2
        messages = ("enough",) if stop else ()
        decision = CallbackDecision(f"after {instruction.epoch}", stop=stop, messages=messages)
        return replace(report, summary=replace(report.summary, decision=decision))


class DecidingCluster(SimulatedCluster):
    worker_type = DecidingWorker

    def __init__(self, spec):
        self.orders = []
        super().__init__(spec)


def run(**fit):
    members = (CallbackSpec(kind="EarlyStopping"),)
    spec = job(samples=8, **fit).model_copy(update={"callbacks": CallbacksSpec(members=members, state="at first")})
    cluster = DecidingCluster(spec)
    cluster.join(spec.cluster.workers)
    cluster.coordinator.proceed(spec.fit.initial_epoch)
    cluster.run()
    return cluster


def test_each_epoch_gets_the_state_of_the_one_before_and_the_number_of_its_steps():
    cluster = run(epochs=2)
    assert [(order.callbacks, order.steps) for order in cluster.orders] == [("at first", 2), ("after 0", 2)]
    done = [effect for effect in cluster.effects if isinstance(effect, EpochDone)]
    assert [effect.decision.state for effect in done] == ["after 0", "after 1"]


def test_no_epoch_begins_after_the_decision_to_stop():
    cluster = run(epochs=9)
    assert [data["epoch"] for data in cluster.of("epoch_end")] == [0, 1, 2]
    assert cluster.effects[-1] == TrainingDone()
    assert cluster.of("log") == [{"worker": None, "level": "info", "text": "enough"}]


def test_a_job_without_callbacks_has_no_state_and_no_decision():
    cluster = SimulatedCluster(job(workers=1, samples=8))
    cluster.join()
    cluster.coordinator.proceed(0)
    cluster.run()
    assert EpochDone(0, None) in cluster.effects
