"""The loop of a worker as a generator: what it wants in which order, and that it ends defined whatever is answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ServerUnreachable
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.driver import LoopDriver, Step
from nfdt.worker.loop import WorkerLoop, drive
from nfdt.worker.pipeline import ShardsMoved

OVERLAP = 2
STOP, END, MOVE, LOSE = "stop", "end", "move", "lose the server"


def job(preset="asgd"):
    return JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm(preset, overlap=OVERLAP),
        cluster=ClusterSpec(workers=1),
        fit=FitSpec(epochs=1, batch_size=1),
        train=DataSpec(kind="arrays", samples=100),
    )


def work(*tasks, epoch=0, **options):
    return ins.Work(epoch, tuple(Task(task, task, task + 1) for task in tasks), **options)


def counted_in(metrics):
    """Return the tasks in a state of a driver's metrics."""
    return set(load_arrays(metrics)["each/task"].tolist())


@dataclass
class Push:
    """Push to the shards of an incarnation."""

    tasks: tuple
    incarnation: int
    arrived: bool
    options: dict

    def result(self):
        return Pushed(np.zeros(1, np.float32), (0,), 0, True)


class Shards:
    """Client of the shards of a driver."""

    def __init__(self, driver):
        self.driver = driver

    def pull(self, *, exact, kept=False):
        assert not self.driver.pipeline.in_flight, "a pull while pushes are unanswered"
        return Pulled(np.ones(1, np.float32), (0,), 0)

    def begin_push(self, gradient, *, tasks, **options):
        driver = self.driver
        if driver.moves:
            raise ShardsMoved
        arrived = driver.arrivals.pop() if driver.arrivals else False
        driver.pushed.append(Push(tuple(tasks), driver.incarnation, arrived, options))
        driver.unpushed = []
        return driver.pushed[-1]


@dataclass
class Driver(LoopDriver):
    """Driver of a loop, and its server; it checks every want.

    ``instructions`` are the answers to ``ask``, then Leave. ``events`` happen at the wants of these numbers.
    ``arrivals`` says of each push whether it is answered at once. ``due`` makes the steps local: whether each is to be
    pushed.
    """

    instructions: list
    events: dict = field(default_factory=dict)
    arrivals: list = field(default_factory=list)
    due: list | None = None
    stops = ends = moves = False
    incarnation = 0

    def __post_init__(self):
        super().__init__(job("asgd" if self.due is None else "local-ddc"), Shards(self))
        self.wanted, self.computed, self.flying, self.pushed, self.reported = [], [], [], [], []
        self.unpushed, self.ahead, self.last_begun = [], None, None
        self.metered, self.others, self.aparts = [], None, set()
        self.parts, self.early = [], []
        self.loop = WorkerLoop(self, lambda: float(len(self.wanted)))

    def run(self):
        return drive(self.watched(self.loop.run()))

    def watched(self, loop):
        """Yield what a loop wants; events happen before it."""
        resume, answer = loop.send, None
        while True:
            try:
                wanted, *arguments = resume(answer)
            except StopIteration as end:
                return end.value
            try:
                resume, answer = loop.send, (yield self.meet, wanted, *arguments)
            except ShardsMoved as moved:
                resume, answer = loop.throw, moved

    def meet(self, wanted, *arguments):
        self.happen(self.events.get(len(self.wanted)))
        self.wanted.append(wanted.__name__)
        if self.moves and wanted.__name__ in ("pull", "pull_exactly", "await_replies"):
            raise ShardsMoved
        return wanted(*arguments)

    def stopped(self):
        return self.stops

    def ending(self):
        return self.ends

    def moved(self):
        return self.moves

    def metrics(self):
        return dump_arrays({"each/task": np.array(self.metered)}) if self.metered else b""

    def begin_apart(self):
        self.others, self.metered = self.metered, []

    def end_apart(self):
        counted, self.metered, self.others = self.metrics(), self.others, None
        return counted

    # ---- the wants

    def ask(self, report):
        self.early.append(report.early)
        self.check(report)
        return self.instructions.pop(0) if self.instructions else ins.Leave("done")

    def ask_ahead(self, report):
        self.check(report, begun=True)
        assert self.ahead is None
        self.ahead = self.instructions.pop(0) if self.instructions else ins.Leave("done")

    def await_ahead(self):
        instruction, self.ahead = self.ahead, None
        return instruction if isinstance(instruction, ins.Work) else None

    def prepare(self, tasks):
        self.last_begun = tasks[-1].task

    def compute(self, task, held):
        assert not self.unpushed or self.due is not None, "a step whose gradient was not pushed"
        assert len(self.pipeline.in_flight) <= OVERLAP
        self.computed.append(task.task)
        self.parts.append((task.task, task.start, task.stop))
        self.metered.append(task.task)
        self.flying.append(len(self.pipeline.in_flight))
        self.unpushed.append(task.task)
        if self.due is None:
            return Step(np.ones(1, np.float32), 1, {}, 0.5)
        return Step(None, 1, {}, 0.5, due=self.due.pop() if self.due else False)

    def difference(self, held):
        return np.ones(1, np.float32)

    def forget(self):
        assert not self.pipeline.in_flight
        self.unpushed = []

    def execute(self, instruction):
        assert isinstance(instruction, ins.Work | ins.MoveShards) or not self.pipeline.in_flight
        self.moves |= isinstance(instruction, ins.MoveShards)
        return ins.Report()

    def move(self):
        self.moves, self.incarnation, self.ahead, self.unpushed = False, self.incarnation + 1, None, []

    def happen(self, event):
        self.stops |= event == STOP
        self.ends |= event == END
        self.moves |= event == MOVE
        if event == LOSE:
            raise ServerUnreachable("gone")

    def check(self, report, *, begun=False):
        """Check a report: only of the present shards, every task once, and those in flight are known."""
        in_flight = report.in_flight - {self.last_begun} if begun else report.in_flight
        assert not begun or self.last_begun in report.in_flight
        assert self.moves or sorted([*self.reported_here, *report.finished, *in_flight]) == self.pushed_here
        assert set(report.times) <= set(report.samples) == set(report.finished)
        assert begun or report.early or not self.unpushed or self.moves, (
            "work that is reported as finished is not on the shards"
        )
        self.reported += [(self.incarnation, task) for task in report.finished]
        self.check_metrics(report)

    def check_metrics(self, report):
        """Check that a report's metrics count what was reported and what it names, and each task that counts apart."""
        assert all(counted_in(metrics) == {task} for task, metrics in report.apart.items())
        self.aparts |= report.apart.keys()
        if report.metrics and not self.incarnation:
            whole = {task for _, task in self.reported} | report.counted
            assert counted_in(report.metrics) == whole - self.aparts

    @property
    def pushed_here(self):
        return sorted(task for push in self.pushed if push.incarnation == self.incarnation for task in push.tasks)

    @property
    def reported_here(self):
        return sorted(task for number, task in self.reported if number == self.incarnation)


STEP = ["compute", "overlap", "await_replies"]


def test_a_lease_is_prepared_computed_and_reported():
    driver = Driver([ins.BeginEpoch(0, b"", 0), work(0, 1)])
    assert driver.run() == "done"
    assert driver.wanted == ["ask", "await_replies", "execute", "ask", "prepare", "pull", *STEP, *STEP, "ask"]
    assert driver.reported == [(0, 0), (0, 1)]


def test_the_next_lease_is_requested_before_the_last_task_and_needs_no_other_request():
    driver = Driver([work(0, 1, look_ahead=True), work(2)])
    driver.run()
    ahead = ["ask", "prepare", "pull", *STEP, "ask_ahead", *STEP, "await_ahead", "prepare", *STEP, "ask"]
    assert driver.wanted == ahead


@pytest.mark.parametrize(
    ("due", "pushes"),
    [([True, True, True], [(0,), (1,), (2,)]), ([False, True, False], [(0, 1), (2,)]), ([False] * 3, [(0, 1, 2)])],
)
def test_local_steps_are_pushed_when_due_and_before_their_lease_is_reported(due, pushes):
    driver = Driver([work(0, 1, 2)], due=due[::-1])
    driver.run()
    assert [push.tasks for push in driver.pushed] == pushes
    assert driver.reported == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(("overlap", "flying"), [(0, [0, 0, 0, 0]), (1, [0, 1, 1, 1]), (OVERLAP + 1, [0, 1, 2, 2])])
def test_a_gradient_is_computed_while_as_many_pushes_as_allowed_are_unanswered(overlap, flying):
    driver = Driver([work(0, 1, 2, 3, overlap=overlap)])
    driver.run()
    assert driver.flying == flying


@pytest.mark.parametrize("overlap", [0, 1])
def test_tasks_that_another_worker_may_count_are_counted_apart(overlap):
    lease = work(2, 3, overlap=overlap, apart=True)
    driver = Driver([ins.BeginEpoch(0, b"", 0), work(0, 1, overlap=overlap), lease, ins.Wait(), work(4)])
    driver.run()
    assert driver.aparts == {2, 3}
    assert driver.metered == [0, 1, 4]


BEGIN, COLLECT, NEXT = ins.BeginEpoch(0, b"", 0), ins.CollectState(0, over=True), ins.BeginEpoch(1, b"", 0, ahead=True)
EARLY = [ins.Work(1, (Task(5, 10, stop),), overlap=1) for stop in (12, 13)]
WHOLE = Task(5, 10, 14)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_part_of_a_task_is_computed_before_its_epoch_and_pushed_with_the_rest(overlap):
    own, whole = work(0, overlap=overlap), ins.Work(1, (WHOLE, Task(7, 14, 15)))
    driver = Driver([BEGIN, own, *EARLY, COLLECT, NEXT, whole], due=[True] * 5)
    driver.run()
    assert driver.parts == [(0, 0, 1), (5, 10, 12), (5, 12, 13), (5, 13, 14), (7, 14, 15)]
    assert [push.tasks for push in driver.pushed] == [(0,), (5,), (7,)]
    assert driver.early == [0, 0, 0, 2, 3, 3, 3, 0]
    assert driver.aparts == {5}
    assert driver.loop.epoch_steps == 4


@pytest.mark.parametrize(
    "between",
    [[work(1)], [COLLECT, NEXT, work(8, epoch=1)], [COLLECT, ins.Evaluate(0, (Task(0, 0, 1),), b"")]],
    ids=["of the epoch", "other tasks", "evaluation"],
)
def test_what_was_computed_early_is_forgotten_if_something_else_comes_before(between):
    driver = Driver([BEGIN, work(0), EARLY[0], *between, NEXT, ins.Work(1, (WHOLE,))], due=[True] * 5)
    driver.run()
    assert [part for part in driver.parts if part[0] == 5] == [(5, 10, 12), (5, 10, 14)]
    assert [task for push in driver.pushed for task in push.tasks].count(5) == 1
    assert not driver.aparts


def test_steps_count_from_the_state_that_a_worker_was_given():
    driver = Driver([ins.BeginEpoch(0, b"", 0), work(0, 1), work(2, untrained=b"state")])
    driver.run()
    assert driver.loop.epoch_steps == 1


def test_a_budget_ends_a_lease_after_one_task_at_least():
    driver = Driver([work(0, 1, 2, budget_s=1.0)])
    driver.run()
    assert driver.computed == [0]


def test_a_worker_that_shall_end_takes_the_replies_in_flight_and_reports_them():
    driver = Driver([work(0, 1, overlap=1), work(2), work(3)], {8: END})
    assert driver.run() == "its process shall end"
    assert driver.reported_here == driver.computed == [0, 1]


EVALUATE = ins.Evaluate(0, (Task(0, 0, 1),), b"")
MOVE_SHARDS = ins.MoveShards("job", 1, (), "token")


@pytest.mark.parametrize(
    ("script", "pulls"),
    [
        ([work(0), work(1)], 1),
        ([work(0), work(1, pull=True)], 2),
        ([work(0), ins.BeginEpoch(1, b"", 0), work(1, epoch=1)], 2),
        ([work(0), COLLECT, ins.BeginEpoch(1, b"", 0), work(1, epoch=1)], 2),
        ([work(0), COLLECT, NEXT, work(1, epoch=1)], 1),
        ([EVALUATE, EVALUATE], 1),
        ([work(0), EVALUATE, EVALUATE, ins.CollectState(0), work(1)], 3),
        ([EVALUATE, MOVE_SHARDS, EVALUATE], 2),
        ([EVALUATE, MOVE_SHARDS, work(0), EVALUATE], 3),
    ],
)
def test_weights_are_pulled_when_those_of_the_last_reply_do_not_serve(script, pulls):
    driver = Driver(script)
    driver.run()
    assert driver.wanted.count("pull") + driver.wanted.count("pull_exactly") == pulls


def test_a_lease_of_shards_that_are_gone_is_not_begun():
    driver = Driver([work(0), work(1)], {7: MOVE})
    driver.run()
    assert driver.wanted[6:] == ["ask", "prepare", "move", "ask"]


@pytest.mark.parametrize(
    ("lease", "wanted"),
    [
        (work(0), True),
        (work(0, no_weights=True), False),
        (ins.Work(0, (Task(0, 0, 1, round=1, parts=2),)), False),
    ],
)
def test_weights_are_wanted_unless_they_would_be_stale_or_come_with_the_next_round(lease, wanted):
    driver = Driver([lease])
    driver.run()
    (push,) = driver.pushed
    assert push.options["want_weights"] == wanted
    assert push.options["compute_s"] == 0.5


def test_nothing_of_shards_that_are_gone_is_reported_pushed_or_awaited():
    driver = Driver([work(0, 1, look_ahead=True), work(2), work(3), work(4)], {9: MOVE}, due=[True, False, False])
    driver.run()
    assert driver.wanted[9:14] == ["await_replies", "move", "ask", "prepare", "pull"]
    assert [push.tasks for push in driver.pushed] == [(3,), (4,)]
    assert driver.reported == [(1, 3), (1, 4)]


@pytest.mark.parametrize("error", [StopIteration, ValueError])
def test_an_error_of_a_driver_is_its_own(error):
    driver = Driver([work(0)])

    def prepare(tasks):
        raise error

    driver.prepare = prepare
    with pytest.raises(error):
        driver.run()


TASKS = st.integers(1, 4)
OPTIONS = st.fixed_dictionaries(
    {
        "overlap": st.integers(0, OVERLAP + 1),
        "budget_s": st.sampled_from([0.0, 8.0]),
        "untrained": st.sampled_from([b"", b"state"]),
        "pull": st.booleans(),
        "no_weights": st.booleans(),
        "look_ahead": st.booleans(),
    }
)
LEASES = st.tuples(TASKS, OPTIONS)
OTHERS = st.sampled_from(
    [
        ins.Wait(),
        BEGIN,
        NEXT,
        ins.CollectState(0),
        ins.CollectState(0, over=True),
        EVALUATE,
        ins.Evaluate(1, (Task(0, 0, 1),), b""),
        ins.Summarise(0, b"", b"", {}),
        MOVE_SHARDS,
        ins.Leave("sent away"),
    ]
)


@st.composite
def instructions(draw):
    """Return instructions in any order; every lease has tasks of its own."""
    found, task, epoch = [], 0, 0
    for one in draw(st.lists(LEASES | OTHERS, min_size=1, max_size=10)):
        if isinstance(one, tuple):
            found.append(work(*range(task, task + one[0]), epoch=epoch, **one[1]))
            task += one[0]
        else:
            epoch = one.epoch if isinstance(one, ins.BeginEpoch) else epoch
            found.append(one)
    return found


EVENTS = st.dictionaries(st.integers(0, 25), st.sampled_from([STOP, END, MOVE, LOSE]), max_size=3)
ARRIVALS = st.lists(st.booleans(), max_size=30)
DUE = st.none() | st.lists(st.booleans(), max_size=30)


@settings(max_examples=300)
@given(instructions(), EVENTS, ARRIVALS, DUE)
def test_any_order_of_answers_and_events_ends_defined(script, events, arrivals, due):
    driver = Driver(script, events, arrivals, due)
    try:
        reason = driver.run()
    except ServerUnreachable:
        assert LOSE in events.values()
        return
    assert reason in ("done", "sent away", "the job is over", "its process shall end")
    assert reason != "the job is over" or driver.stops
    if reason == "its process shall end":
        assert driver.ends
        assert driver.moves or driver.reported_here == driver.pushed_here
    assert MOVE in events.values() or driver.loop.statistics.steps == len(driver.computed)


@settings(max_examples=300)
@given(instructions(), EVENTS, ARRIVALS, DUE)
def test_after_a_stop_a_move_or_the_request_to_end_no_step_begins(script, events, arrivals, due):
    events = {at: event for at, event in events.items() if event != LOSE}
    driver = Driver(script, events, arrivals, due)
    driver.run()
    computed = [at for at, wanted in enumerate(driver.wanted) if wanted == "compute"]
    for begun, event in events.items():
        for at in (at for at in computed if at > begun):
            between = set(driver.wanted[begun:at])
            assert between <= {"ask_ahead", "pull"} or (event == MOVE and "move" in between)
    for event in (at for at, event in events.items() if event == STOP):
        later = driver.wanted[event:]
        assert (
            "ask" not in later[2 if later[:1] == ["await_ahead"] else 1 :]
        )  # which another request may follow at once
