"""Batches that workers make: rows once each, and leases of batches that exist."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.pulled import PulledTasks, RowSplits


@given(
    rows=st.integers(1, 300),
    size=st.integers(1, 40),
    calls=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=200),
)
def test_every_row_of_a_pass_is_given_once(rows, size, calls):
    splits = RowSplits(rows, size)
    splits.begin(4)
    number: dict[tuple[str, int], int] = {}
    given_rows: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for worker, pass_index, again in calls:
        count = number.get((worker, pass_index), 0)
        split = splits.take(worker, 4, pass_index, count)
        if again:
            assert splits.take(worker, 4, pass_index, count) == split
        number[worker, pass_index] = count + 1
        given_rows[pass_index] += split or ()
    for pass_index, found in given_rows.items():
        assert found == list(range(len(found)))
        while (split := splits.take("last", 4, pass_index, len(found))) is not None:
            found += split
        assert found == list(range(rows))


def test_an_iteration_that_is_over_gives_nothing():
    splits = RowSplits(10, 4)
    splits.begin(0)
    assert splits.take("a", 0, 0, 0).stop == 4
    splits.begin(1)
    assert splits.take("a", 0, 0, 1) is None
    assert splits.take("a", 1, 0, 0).start == 0


def test_a_worker_leases_only_batches_that_it_has():
    source = PulledTasks()
    book = LeaseBook(source, counted=True)
    book.join("a")
    book.join("b")
    assert not book.available("a")
    assert not book.exhausted("a")
    assert not book.done
    source.report("a", 2, False)
    source.report("b", 0, True)
    assert book.exhausted("b")
    assert not book.issue("b", 1)
    one, two = book.issue("a", 5)
    assert not book.available("a")
    assert book.finish("a", one.task, 7).samples == 7
    source.report("a", 0, True)
    assert not book.done
    book.finish("a", two.task, 3)
    assert book.done
    assert (book.steps_finished, book.samples_finished) == (2, 10)


def test_the_batches_of_a_lost_worker_are_lost_and_steps_are_made_up_for():
    source = PulledTasks(steps=3)
    book = LeaseBook(source, counted=True)
    book.join("a")
    book.join("b")
    source.report("a", 2, False)
    source.report("b", 2, False)
    book.issue("a", 2)
    assert book.lose("a") == 2
    assert book.resolve("a", [frozenset()]) == 0
    assert not book.available("a")
    tasks = book.issue("b", 5)
    assert len(tasks) == 2
    for task in tasks:
        book.finish("b", task.task, 1)
    assert not book.done
    source.report("b", 1, True)
    (last,) = book.issue("b", 5)
    book.finish("b", last.task, 1)
    assert book.done


def test_returned_tasks_wait_at_their_worker():
    source = PulledTasks(steps=2)
    book = LeaseBook(source, counted=True)
    book.join("a")
    source.report("a", 2, False)
    first, _ = book.issue("a", 2)
    book.finish("a", first.task, 1)
    source.report("a", 1, False)
    assert book.give_back("a") == 0
    assert len(book.issue("a", 2)) == 1
