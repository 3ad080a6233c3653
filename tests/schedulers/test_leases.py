"""Lease book: each task exactly once without failures; at least once, never dropped, when workers die."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import FedTasks, PlannedTasks
from nfdt.schedulers.tasks import TaskPlan


def book_of(steps, kind="dynamic", workers=3):
    rounds = kind == "rounds"
    plan = TaskPlan(steps * (3 if rounds else 1), 1, 3 if rounds else 1, synchronous=rounds)
    book = LeaseBook(PlannedTasks(plan), rounds=rounds)
    if kind == "static":
        book.divide({f"w{i}": 1.0 for i in range(workers)})
    return book


KINDS = ["dynamic", "static", "rounds"]
ACTIONS = st.lists(st.tuples(st.sampled_from(["issue", "finish", "lose"]), st.integers(0, 2), st.integers(1, 4)))
WITH_BACKUPS = st.lists(
    st.tuples(
        st.sampled_from(["issue", "finish", "lose", "back up", "give back"]), st.integers(0, 2), st.integers(1, 4)
    )
)


def lose(book, worker):
    """Lose a worker of whose tasks the shards have applied none; return their number."""
    lost = book.lose(worker)
    book.resolve(worker, [])
    return lost


@pytest.mark.parametrize("kind", KINDS)
@given(steps=st.integers(1, 30), actions=ACTIONS)
def test_every_row_is_finished_exactly_once_whatever_happens_to_leases(kind, steps, actions):
    book = book_of(steps, kind)
    finished = Counter()

    def finish(name, count):
        for task in book.held(name)[:count]:
            assert book.finish(name, task.task) == task
            finished.update(range(task.start, task.stop))

    for action, worker, count in actions:
        name = f"w{worker}"
        if action == "issue":
            book.issue(name, count)
        elif action == "finish":
            finish(name, count)
        else:
            held = len(book.held(name))
            assert lose(book, name) == held
            assert lose(book, name) == 0
    while not book.done:
        for name in ("w0", "w1", "w2"):
            book.issue(name, 2)
            finish(name, 2)
    assert finished == Counter(range(steps * (3 if kind == "rounds" else 1)))
    assert book.steps_finished == steps
    assert book.samples_finished == sum(finished.values())


@pytest.mark.parametrize("kind", KINDS)
@given(actions=ACTIONS)
def test_a_task_is_held_by_one_worker_at_a_time(kind, actions):
    book = book_of(12, kind)
    for action, worker, count in actions:
        name = f"w{worker}"
        if action == "issue":
            book.issue(name, count)
        elif action == "lose":
            lose(book, name)
        held = [t.task for w in ("w0", "w1", "w2") for t in book.held(w)]
        assert len(set(held)) == len(held)
        assert set(book.holders()) == {w for w in ("w0", "w1", "w2") if book.held(w)}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@given(steps=st.integers(1, 30), actions=WITH_BACKUPS)
def test_every_row_is_finished_exactly_once_whatever_is_leased_twice(kind, steps, actions):
    book, names, finished = book_of(steps, kind), ("w0", "w1", "w2"), Counter()

    def finish(name, count):
        for task in book.held(name)[:count]:
            finished.update([book.finish(name, task.task).start])
            assert all(task not in book.held(other) for other in names)

    for action, worker, count in actions:
        name, others = names[worker], set(names) - {names[worker]}
        match action:
            case "issue":
                book.issue(name, count)
            case "finish":
                finish(name, count)
            case "lose":
                lose(book, name)
            case "give back":
                book.give_back(name, begun={task.task for task in book.held(name)[:count]})
            case "back up":
                before = book.held(name)
                assert not set(book.back_up(name, others, count)) & set(before)
        assert book.leased == len({task for other in names for task in book.held(other)})
    while not book.done:
        for name in names:
            book.issue(name, 2)
            finish(name, 2)
    assert finished == Counter(range(steps))
    assert book.samples_finished == steps


def test_a_task_that_is_leased_twice_is_finished_by_the_first_and_lost_with_the_last():
    book = book_of(2)
    tasks = book.issue("slow", 2)
    assert book.back_up("idle", {"idle"}, 2) == (), "nobody who is not late"
    assert book.back_up("idle", {"slow"}, 2) == tasks
    assert book.back_up("idle", {"slow"}, 2) == (), "it holds them"
    assert book.back_up("third", {"slow"}, 2) == (), "the second one is not late"
    assert book.also_held_by("idle", tasks[0].task) == ("slow",)
    assert book.finish("idle", tasks[0].task) == tasks[0]
    assert book.finish("slow", tasks[0].task) is None
    assert lose(book, "slow") == 0
    assert book.held("idle") == (tasks[1],)
    assert lose(book, "idle") == 1
    assert book.issue("third") == (tasks[1],)


def test_shards_that_go_back_need_a_task_that_is_leased_twice_once():
    book = book_of(2)
    tasks = book.issue("slow", 2)
    book.back_up("idle", {"slow"}, 2)
    book.rewind()
    assert book.issue("third", 5) == tasks


def test_parts_of_a_round_are_leased_once():
    book = book_of(1, "rounds")
    book.issue("w0")
    assert book.back_up("w1", {"w0"}, 1) == ()


def test_only_the_holder_can_finish_a_task():
    book = book_of(2)
    (task,) = book.issue("a")
    assert book.finish("b", task.task) is None
    lose(book, "a")
    assert book.finish("a", task.task) is None
    assert book.issue("b") == (task,)
    assert book.finish("b", task.task) == task
    assert book.finish("b", task.task) is None


def test_lost_tasks_come_before_all_others_in_their_order():
    book = book_of(10)
    lost = book.issue("a", 3)
    book.issue("b", 2)
    assert book.remaining == 5
    lose(book, "a")
    assert book.remaining == 8
    assert book.issue("b", 3) == lost


def test_the_next_round_waits_for_every_part_of_this_one():
    book = book_of(2, "rounds")
    tasks = [book.issue(w)[0] for w in ("w0", "w1", "w2")]
    assert {t.round for t in tasks} == {1}
    for worker, task in list(zip(("w0", "w1", "w2"), tasks, strict=True))[:2]:
        book.finish(worker, task.task)
        assert not book.available("w0")
        assert book.issue("w0") == ()
        assert not book.exhausted("w0")
    lose(book, "w2")
    assert book.issue("w0") == (tasks[2],)
    assert book.steps_finished == 0
    book.finish("w0", tasks[2].task)
    assert book.steps_finished == 1
    assert book.issue("w0")[0].round == 2


def test_a_worker_gets_its_own_part_if_it_is_still_there():
    book = book_of(1, "rounds")
    assert book.issue("w2", part=2)[0].part == 2
    assert book.issue("w0", part=2)[0].part == 0


def test_stop_drops_what_is_not_leased_and_waits_for_what_is():
    book = book_of(10)
    (task,) = book.issue("a")
    book.stop()
    assert book.issue("b") == ()
    assert not book.done
    lose(book, "a")
    assert not book.done
    assert book.issue("b") == (task,)
    book.finish("b", task.task)
    assert book.done


@pytest.mark.parametrize("begun", [False, True])
def test_stop_completes_a_round_that_has_begun(begun):
    book = book_of(5, "rounds")
    assert book.available("w0")
    done = []
    if begun:
        done += book.issue("w0")
    book.stop()
    while tasks := book.issue("w1"):
        done += tasks
    for task in done:
        book.finish("w0", task.task) or book.finish("w1", task.task)
    assert len(done) == (3 if begun else 0)
    assert book.done


def test_stop_drops_a_round_that_has_not_begun_also_after_a_finished_one():
    book = book_of(5, "rounds")
    for task in book.issue("w0", 3):
        book.finish("w0", task.task)
    assert book.available("w0")  # the second round is open
    book.stop()
    assert book.issue("w0") == ()
    assert (book.done, book.steps_finished) == (True, 1)


def test_steps_are_counted_in_samples_where_that_is_asked_for_and_a_short_last_one_at_the_end():
    book = LeaseBook(PlannedTasks(TaskPlan(10, 2)), step_samples=4)
    counted = []
    for _ in range(5):
        (task,) = book.issue("a")
        book.finish("a", task.task)
        counted.append(book.steps_finished)
    assert counted == [0, 1, 1, 2, 3]


def test_what_is_reserved_for_a_worker_is_its_own_until_it_is_lost():
    book = book_of(6, "static", workers=2)
    assert [task.start for task in book.issue("w1", 9)] == [3, 4, 5]
    assert (book.available("w1"), book.exhausted("w1")) == (False, True)
    assert (book.available("w0"), book.exhausted("w0")) == (True, False)
    lose(book, "w0")
    assert [task.start for task in book.issue("w1", 9)] == [0, 1, 2]


def test_a_fed_book_is_not_exhausted_until_the_feed_has_ended():
    feed = FedTasks()
    book = LeaseBook(feed)
    assert not book.available("a")
    assert not book.exhausted("a")
    feed.feed(b"x", 4)
    (task,) = book.issue("a")
    feed.end()
    assert book.exhausted("a")
    assert not book.done
    book.finish("a", task.task)
    assert book.done
    assert book.samples_finished == 4


def test_what_a_worker_has_begun_stays_its_own_when_the_rest_goes_back():
    book = book_of(5)
    tasks = book.issue("a", 4)
    book.finish("a", tasks[0].task)
    begun = {tasks[1].task}
    assert book.held("a", begun=begun) == tasks[2:]
    assert book.give_back("a", begun=begun) == 2
    assert book.held("a") == tasks[1:2]
    assert book.issue("b", 2) == tasks[2:]
    assert lose(book, "a") == 1
    assert book.issue("b", 1) == tasks[1:2]


def test_the_tasks_of_the_last_lost_worker_come_first():
    book = LeaseBook(PlannedTasks(TaskPlan(6, 1)))
    book.issue("a", 2)
    book.issue("b", 2)
    lose(book, "a")
    lose(book, "b")
    assert [task.task for task in book.issue("c", 4)] == [2, 3, 0, 1]


def test_doubtful_tasks_are_finished_if_all_shards_have_applied_them_and_are_leased_again_as_they_were_if_not():
    book = book_of(6)
    tasks = book.issue("a", 4)
    assert book.lose("a") == 4
    assert book.doubtful("a") == (0, 1, 2, 3)
    assert (book.leased, book.holders(), book.done) == (4, (), False)
    assert book.issue("b", 1) != tasks[:1]  # before the shards have answered, no worker gets them
    assert book.resolve("a", [{0, 1, 3}, {0, 2, 3}]) == 2
    assert (book.samples_finished, book.steps_finished, book.doubtful("a")) == (2, 2, ())
    assert book.issue("b", 2) == tasks[1:3]
    assert book.resolve("a", [{1}, {1}]) == 0


def test_a_stop_completes_tasks_that_some_shards_have_applied():
    book = book_of(6)
    tasks = book.issue("a", 3)
    book.lose("a")
    book.resolve("a", [{0}, {0, 2}])
    book.stop()
    assert book.issue("b", 9) == tasks[2:]


def test_the_parts_of_a_round_of_a_lost_worker_are_leased_again_at_once():
    book = book_of(2, "rounds")
    (part,) = book.issue("w0")
    assert book.lose("w0") == 1
    assert book.doubtful("w0") == ()
    assert book.issue("w1", 1, part.part) == (part,)
