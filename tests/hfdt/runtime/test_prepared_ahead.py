from __future__ import annotations

import contextlib
import threading

import pytest

from hfdt.runtime.batch_split import prepared_ahead

HANGS_S = 30.0


def test_results_come_in_the_order_of_their_items():
    assert list(prepared_ahead(lambda item: item * item, range(5))) == [0, 1, 4, 9, 16]


def test_no_items_give_no_results():
    assert list(prepared_ahead(lambda item: item, [])) == []


def test_the_next_item_is_prepared_while_the_current_result_is_used():
    prepared = [threading.Event() for _ in range(3)]
    results = prepared_ahead(lambda item: prepared[item].set() or item, range(3))
    for result in results:
        assert all(event.wait(HANGS_S) for event in prepared[: result + 2])
        assert not any(event.is_set() for event in prepared[result + 2 :])


def test_a_failure_is_raised_when_its_item_is_due():
    results = prepared_ahead(lambda item: 1 // (2 - item), range(4))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_waits_for_the_call_that_runs_and_begins_no_other():
    began, may_end = threading.Event(), threading.Event()
    calls = []

    def prepare(item):
        calls.append(item)
        if item == 1:
            began.set()
            assert may_end.wait(HANGS_S)
            calls.append("end")
        return item

    with contextlib.closing(prepared_ahead(prepare, range(4))) as results:
        assert next(results) == 0
        assert began.wait(HANGS_S)
        threading.Timer(0.01, may_end.set).start()
    assert calls == [0, 1, "end"]
