"""Calls of the training phase to the consistency policy and the speeds, from workers' reports."""

from types import SimpleNamespace

import pytest

from nfdt.consistency.policies import Free
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.training import Gate, TrainingPhase
from nfdt.core.work.instructions import BeginEpoch, Report, TaskTime, Wait, Work
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.tasks import TaskPlan

W = "worker-0"


class Policy(Free):
    """Policy that records its calls."""

    def __init__(self):
        self.calls = []

    def finished(self, worker, tasks=1):
        self.calls.append(("finished", worker, tasks))

    def idle(self, worker):
        self.calls.append(("idle", worker))


class Phase:
    """Epoch of some tasks with one worker and leases of ``lease`` tasks."""

    def __init__(self, tasks, lease, *, ahead=False):
        self.policy, self.stepped, self.begins = Policy(), [], []
        decisions = SimpleNamespace(
            policy=self.policy,
            leases=SimpleNamespace(
                divides=False,
                backs_up=False,
                size=lambda *_: lease,
                looks_ahead=lambda *_: ahead,
                step_s=lambda _: 0.0,
            ),
            plan=SimpleNamespace(overlap=1),
            speeds=SimpleNamespace(
                stepped=lambda worker, samples, time: self.stepped.append((samples, time)),
                step_s=lambda worker, samples=1: 5.0 * samples,
                look=lambda now: None,
                leased=lambda worker, tasks, begins: self.begins.append(begins),
            ),
        )
        members = Membership(1, 0.0)
        self.member = members.join(W, 0, 0.0)
        self.book = LeaseBook(PlannedTasks(TaskPlan(tasks, 1)))
        self.training = TrainingPhase(BeginEpoch(0, b"", 0), self.book, decisions, members, {}, Gate(0))
        self.training.instruct(self.member, 0.0)

    def ask(self, now=0.0):
        return self.training.instruct(self.member, now)

    def report(self, now=0.0, **report):
        self.member.in_flight = report.get("in_flight", frozenset())
        self.training.absorb(self.member, Report(**report), now)


def test_the_policy_counts_every_task_of_a_report():
    phase = Phase(4, lease=3)
    assert len(phase.ask().tasks) == 3
    phase.report(finished=(0, 1, 2))
    assert phase.policy.calls == [("finished", W, 3)]


def test_tasks_without_times_of_their_own_share_the_time_of_their_lease():
    phase = Phase(4, lease=3)
    phase.ask(now=10.0)
    phase.report(now=13.0, finished=(0, 1, 2), times={2: TaskTime(0.25)})
    assert [time.compute_s for _, time in phase.stepped] == [1.0, 1.0, 0.25]


def test_a_task_that_is_requested_ahead_begins_when_the_one_before_it_ends():
    phase = Phase(3, lease=1, ahead=True)
    (first,) = phase.ask(now=10.0).tasks
    phase.report(now=11.0, in_flight=frozenset([first.task]))  # nothing else is on its way
    (second,) = phase.ask(now=11.0).tasks
    phase.report(now=17.0, finished=(first.task,), in_flight=frozenset())
    assert second.task != first.task
    assert phase.begins == [10.0, 16.0]


def test_a_push_that_is_unanswered_keeps_no_worker_busy():
    phase = Phase(3, lease=1)
    (first,) = phase.ask().tasks
    phase.report(now=11.0, in_flight=frozenset([first.task]))
    phase.ask(now=11.0)
    assert phase.begins == [0.0, 11.0]


def test_a_worker_for_which_nothing_is_left_blocks_no_other():
    phase = Phase(1, lease=1)
    phase.ask()
    phase.report(finished=(0,))
    phase.policy.calls.clear()
    assert phase.ask() == Wait()
    assert phase.policy.calls == [("idle", W)]


def test_a_worker_that_leaves_the_rest_to_others_blocks_no_other():
    phase = Phase(1, lease=0)
    assert phase.ask() == Wait()
    assert phase.policy.calls == [("idle", W)]


def test_a_worker_with_pushes_in_flight_is_not_idle():
    phase = Phase(1, lease=1)
    (task,) = phase.ask().tasks
    phase.report(in_flight=frozenset([task.task]))
    assert phase.ask() == Wait()
    assert phase.policy.calls == []


@pytest.mark.parametrize("answers", [(True, False), (False, True)])
def test_the_pulls_that_the_policy_requires_are_in_the_instruction_and_in_its_repetition(answers):
    phase = Phase(1, lease=1)
    phase.policy.must_pull, phase.policy.will_pull = (lambda *_, a=a: a for a in answers)
    instruction = phase.ask()
    assert isinstance(instruction, Work)
    assert (instruction.pull, instruction.no_weights) == answers
    assert phase.ask() == instruction
