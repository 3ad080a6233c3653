"""Lease book after the loss of the shards: what their snapshot lacks is leased again, in order."""

from dataclasses import replace

import pytest

from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers.group_shares import FixedSizes
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.pulled import PulledTasks
from nfdt.schedulers.sources import FedTasks, PlannedTasks, SizedTasks
from nfdt.schedulers.tasks import Position, TaskPlan


def book_of(rows=10, batch=1, **options):
    return LeaseBook(PlannedTasks(TaskPlan(rows, batch)), keeps=True, **options)


def rounds_of(rounds=5, parts=2):
    return LeaseBook(PlannedTasks(TaskPlan(rounds * parts, 1, parts, synchronous=True)), rounds=True, keeps=True)


def finish(book, worker, tasks):
    for task in tasks:
        assert book.finish(worker, task.task)


def numbers(tasks):
    return [task.task for task in tasks]


def train_round(book):
    for part in (0, 1):
        finish(book, f"w{part}", book.issue(f"w{part}", 1, part))


# ---- settling


def test_tasks_that_all_shards_have_in_the_snapshot_are_settled():
    book = book_of()
    finish(book, "a", book.issue("a", 3))
    finish(book, "b", book.issue("b", 3))
    book.settle([{0, 1, 4}, {0, 1, 5}])
    assert book.samples_finished == 6
    assert book.rewind() == 4
    assert (book.samples_finished, book.steps_finished) == (2, 2)
    assert numbers(book.issue("a", 4)) == [2, 3, 4, 5]


def test_everything_finished_can_be_settled_at_once():
    book = book_of()
    held = book.issue("a", 3)
    finish(book, "a", held[:2])
    book.settle()
    assert book.rewind() == 0
    assert book.issue("b", 1) == held[2:]


def test_a_task_that_is_reported_after_its_snapshot_was_stored_is_settled():
    book = book_of()
    (task,) = book.issue("a")
    book.settle([{0}])
    finish(book, "a", [task])
    assert book.rewind() == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_task_that_nobody_has_reported_is_finished_by_a_loss_if_the_snapshot_contains_it(lost):
    book = book_of()
    book.issue("a", 3)
    book.settle([{0, 1}, {0, 2}])
    if lost:
        book.lose("a")
    assert book.progress(0) == EpochProgress(epoch=0, samples=1, rows=((0, 0, 1),), partly=((1, 0, 1, 2), (2, 0, 2, 3)))
    assert book.rewind() == 0
    assert (book.samples_finished, book.steps_finished) == (1, 1)
    assert numbers(book.issue("b", 3)) == [1, 2]
    assert book.resolve("a", [{0, 1, 2}]) == 0


def test_a_stop_completes_tasks_that_are_in_a_part_of_the_snapshot():
    book = book_of()
    book.issue("a", 3)
    book.settle([{0, 1}, {0, 2}])
    book.rewind()
    book.stop()
    assert numbers(book.issue("b", 9)) == [1, 2]


def test_a_book_that_keeps_nothing_returns_only_what_is_held():
    feed = FedTasks()
    book = LeaseBook(feed)
    for text in (b"x", b"y"):
        feed.feed(text, 4)
    first, second = book.issue("a", 2)
    finish(book, "a", [first])
    assert book.rewind() == 0
    assert book.issue("b", 2) == (second,)
    assert book.progress(0) is None


# ---- order


def test_the_oldest_tasks_come_first_and_before_all_others():
    book = book_of()
    a, b = book.issue("a", 2), book.issue("b", 2)
    finish(book, "b", b)
    finish(book, "a", a[1:])
    book.lose("a")
    assert book.resolve("a", [set()]) == 0
    assert book.rewind() == 3
    assert book.remaining == 10
    assert numbers(book.issue("b", 9)) == [0, 1, 2, 3]
    assert numbers(book.issue("b", 9)) == [4, 5, 6, 7, 8, 9]


def test_a_second_rewind_keeps_the_order():
    book = book_of()
    finish(book, "a", book.issue("a", 4))
    book.rewind()
    finish(book, "b", book.issue("b", 2))
    book.issue("a", 1)
    assert book.rewind() == 2
    assert numbers(book.issue("a", 9)) == [0, 1, 2, 3]
    assert numbers(book.issue("a", 1)) == [4]


def test_a_late_report_of_a_task_that_was_taken_back_is_ignored():
    book = book_of()
    (task,) = book.issue("a")
    book.rewind()
    assert book.finish("a", task.task) is None


# ---- rounds


def test_rounds_are_leased_again_whole_with_their_numbers_before_others():
    book = rounds_of()
    train_round(book)
    train_round(book)
    finish(book, "w0", book.issue("w0", 1, 0))
    assert book.rewind() == 5
    assert (book.steps_finished, book.samples_finished) == (0, 0)
    assert book.remaining == 5
    leased = []
    while not book.done:
        for worker, part in (("w1", 1), ("w0", 0)):
            tasks = book.issue(worker, 1, part)
            leased += [(t.round, t.part, t.parts, t.start) for t in tasks]
            finish(book, worker, tasks)
    assert sorted(leased) == [(r + 1, p, 2, 2 * r + p) for r in range(5) for p in range(2)]
    assert [r for r, *_ in leased] == sorted(r for r, *_ in leased)
    assert book.steps_finished == 5


def test_a_second_rewind_keeps_the_order_of_rounds():
    book = rounds_of()
    for _ in range(3):
        train_round(book)
    assert book.rewind() == 6
    train_round(book)
    book.issue("w0")
    assert book.rewind() == 2
    rounds = []
    while not book.done:
        rounds.append(book.issue("w0")[0].round)
        finish(book, "w0", [*book.held("w0"), *book.issue("w0")])
    assert rounds == [1, 2, 3, 4, 5]


def test_only_rounds_before_a_quiet_moment_are_settled():
    book = rounds_of()
    train_round(book)
    first = book.issue("w0")
    book.quiesce()
    assert not book.is_quiet
    finish(book, "w0", first)
    assert book.available("w1")
    finish(book, "w1", book.issue("w1"))
    assert book.is_quiet
    assert not book.available("w0")
    assert book.issue("w0") == ()
    assert not book.exhausted("w0")
    assert book.decided
    book.go_on()
    train_round(book)
    book.settle([set()])
    assert book.rewind() == 2
    assert book.issue("w0")[0].round == 3
    assert book.progress(0).rows == ((0, 0, 4),)


def test_an_open_round_is_never_settled():
    book = rounds_of()
    finish(book, "w0", book.issue("w0"))
    book.settle()
    book.settle([{0, 1}])
    assert book.rewind() == 1
    assert [t.part for t in book.issue("w0", 2)] == [0, 1]


def test_no_round_is_open_after_a_rewind():
    book = rounds_of()
    book.issue("w0")
    book.rewind()
    assert book.is_quiet
    book.quiesce()
    assert book.issue("w0") == ()
    book.go_on()
    book.stop()
    assert book.done


def test_a_book_without_rounds_is_always_quiet():
    book = book_of()
    book.quiesce()
    assert book.issue("a")
    assert book.is_quiet


# ---- sources


def test_streamed_batches_are_kept_with_their_data():
    feed = FedTasks(parts=2, synchronous=True)
    book = LeaseBook(feed, rounds=True, keeps=True)
    for text in (b"a", b"b", b"c", b"d"):
        feed.feed(text, 4)
    feed.end()
    train_round(book)
    train_round(book)
    assert book.done
    assert book.rewind() == 16
    assert not book.done
    assert [(t.data, t.round) for t in book.issue("w0", 2)] == [(b"a", 1), (b"b", 1)]
    assert book.progress(0) is None


def test_batches_of_a_workers_own_iterator_are_replaced_by_further_ones():
    source = PulledTasks(steps=4)
    book = LeaseBook(source, counted=True, keeps=True)
    book.join("a")
    source.report("a", 3, over=False)
    tasks = book.issue("a", 3)
    book.finish("a", tasks[0].task, samples=5)
    book.settle([{0}])
    book.finish("a", tasks[1].task, samples=5)
    assert book.rewind() == 5
    assert (book.samples_finished, book.steps_finished, source.issued) == (5, 1, 1)
    source.report("a", 9, over=False)
    assert len(book.issue("a", 9)) == 3


def test_sized_tasks_are_leased_again_in_the_sizes_that_they_had():
    sizes = FixedSizes(2)
    book = LeaseBook(SizedTasks(TaskPlan(7, 2), sizes), step_samples=2, keeps=True)
    tasks = [*book.issue("a", 1)]
    sizes.state({"a": 3})
    tasks += book.issue("a", 1)
    finish(book, "a", tasks)
    assert book.steps_finished == 2
    assert book.rewind() == 5
    assert book.steps_finished == 0
    assert list(book.issue("a", 2)) == tasks


@pytest.mark.parametrize("rounds", [False, True])
def test_after_a_stop_what_was_finished_or_leased_is_computed_again_and_nothing_else(rounds):
    book = rounds_of(parts=1) if rounds else book_of()
    finish(book, "a", book.issue("a"))
    held = book.issue("a")
    book.stop()
    assert book.rewind() == 1
    assert not book.done
    again = []
    while tasks := book.issue("b"):
        again += tasks
        finish(book, "b", tasks)
    assert numbers(again) == [0, 1]
    assert held == tuple(again[1:])
    assert book.done


@pytest.mark.parametrize("rounds", [False, True])
def test_a_stop_drops_what_is_not_leased_again_yet(rounds):
    book = rounds_of(parts=1) if rounds else book_of()
    for _ in range(3):
        finish(book, "a", book.issue("a"))
    book.rewind()
    finish(book, "a", book.issue("a"))
    book.stop()
    assert book.done
    assert (book.steps_finished, book.samples_finished) == (1, 1)


# ---- progress


def test_progress_names_settled_rows_from_the_beginning_of_the_epoch():
    book = LeaseBook(PlannedTasks(TaskPlan(12, 2, begin=Position(3, 2))), keeps=True)
    assert book.progress(5) == EpochProgress(epoch=5, rows=((3, 2, 2),))
    tasks = book.issue("a", 4)
    finish(book, "a", tasks[1:3])
    finish(book, "b", book.issue("b"))
    assert book.progress(5).rows == ((3, 2, 2),)
    book.settle([{1, 4}])
    assert book.progress(5) == EpochProgress(epoch=5, samples=4, rows=((3, 2, 2), (3, 4, 6), (3, 10, 12)))
    finish(book, "a", tasks[:1])
    book.settle([{0, 1, 2, 4}])
    assert book.progress(5) == EpochProgress(epoch=5, samples=8, rows=((3, 2, 8), (3, 10, 12)))


def test_settled_rows_are_not_leased_after_a_restart():
    book = LeaseBook(PlannedTasks(TaskPlan(11, 2)), keeps=True)
    book.skip(EpochProgress(epoch=0, samples=5, rows=((0, 0, 0), (0, 2, 4), (0, 8, 11))))
    assert (book.samples_finished, book.steps_finished, book.remaining) == (5, 3, 3)
    tasks = book.issue("a", 9), book.issue("a", 9)
    assert [(t.start, t.stop, t.samples) for found in tasks for t in found] == [(0, 2, 2), (4, 6, 2), (6, 8, 2)]
    finish(book, "a", [t for found in tasks for t in found])
    assert book.done
    assert book.steps_finished == 6
    book.settle()
    assert book.progress(0) == EpochProgress(epoch=0, samples=11, rows=((0, 0, 11),))


def test_an_epoch_that_is_trained_has_no_tasks_after_a_restart():
    book = LeaseBook(PlannedTasks(TaskPlan(10, 4)), keeps=True)
    book.skip(EpochProgress(epoch=0, samples=10, rows=((0, 0, 10),)))
    assert (book.done, book.steps_finished, book.samples_finished) == (True, 3, 10)


def test_rounds_go_on_as_planned_after_a_restart_with_as_many_workers():
    plan = TaskPlan(10, 1, 2, synchronous=True)
    book = LeaseBook(PlannedTasks(plan), rounds=True, keeps=True)
    book.skip(EpochProgress(epoch=0, samples=4, rows=((0, 0, 4),)))
    assert book.steps_finished == 2
    assert book.issue("a", 2) == tuple(replace(task, round_samples=2) for task in plan.round(2))


def test_a_round_that_is_partly_trained_is_leased_without_the_trained_rows():
    book = LeaseBook(PlannedTasks(TaskPlan(12, 2, 3, synchronous=True)), rounds=True, keeps=True)
    book.skip(EpochProgress(epoch=0, samples=3, rows=((0, 0, 3),)))
    tasks = book.issue("a", 3)
    assert [(t.start, t.stop, t.samples, t.part, t.parts) for t in tasks] == [(3, 4, 1, 0, 2), (4, 6, 2, 1, 2)]
    assert (book.steps_finished, book.remaining) == (0, 1)


def test_sized_tasks_go_on_with_the_rows_that_are_left():
    book = LeaseBook(SizedTasks(TaskPlan(10, 3), FixedSizes(3)), step_samples=3, keeps=True)
    book.skip(EpochProgress(epoch=0, samples=6, rows=((0, 0, 2), (0, 5, 9))))
    assert book.steps_finished == 2
    rows = [(t.start, t.stop) for _ in range(2) for t in book.issue("a", 9)]
    assert rows == [(2, 5), (9, 10)]


@pytest.mark.parametrize("source", [FedTasks(), PulledTasks()])
def test_sources_without_rows_begin_at_their_beginning(source):
    book = LeaseBook(source, keeps=True)
    book.skip(EpochProgress(epoch=0, samples=6, rows=((0, 0, 6),)))
    assert (book.samples_finished, book.steps_finished) == (0, 0)


def test_tasks_that_some_shards_have_applied_are_leased_as_they_were_after_a_restart():
    book = LeaseBook(PlannedTasks(TaskPlan(10, 2, begin=Position(task=9))), keeps=True)
    book.skip(EpochProgress(epoch=0, samples=2, rows=((0, 0, 2),), partly=((3, 0, 6, 8),)))
    assert (book.samples_finished, book.steps_finished) == (2, 1)
    leased = [(t.task, t.start, t.stop, t.samples) for _ in range(3) for t in book.issue("a", 9)]
    assert leased == [(3, 6, 8, 2), (10, 2, 4, 2), (11, 4, 6, 2), (13, 8, 10, 2)]
    finish(book, "a", book.held("a"))
    assert (book.done, book.steps_finished, book.samples_finished) == (True, 5, 10)


def test_bytes_of_fed_batches_count_until_they_are_settled():
    feed = FedTasks()
    book = LeaseBook(feed, keeps=True)
    for size in (3, 4):
        feed.feed(bytes(size), 1)
    book.issue("a", 2)
    book.finish("a", 0)
    assert (book.unsettled_bytes, book.settled_bytes) == (3, 0)
    book.settle([{0}])
    assert (book.unsettled_bytes, book.settled_bytes) == (0, 3)
    book.issue("a")
    book.finish("a", 1)
    book.rewind()
    assert (book.unsettled_bytes, book.settled_bytes) == (0, 3)
    book.issue("a")
    book.finish("a", 1)
    assert (book.unsettled_bytes, book.settled_bytes) == (4, 3)
    book.settle()
    assert (book.unsettled_bytes, book.settled_bytes, feed.accepted_bytes) == (0, 7, 7)
