"""Rows of an array that is elsewhere: right values, few bytes, bounded memory."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nfdt.core.errors import ServerUnreachable
from nfdt.core.work.remote_rows import RemoteRows, read_header

ARRAY = np.random.default_rng(0).normal(size=(500, 7)).astype("float32")
ROW = ARRAY[0].nbytes


def stored(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Server:
    """A stored array, with the ranges that were asked for."""

    def __init__(self, array=ARRAY, piece=1000):
        self.content, self.piece = stored(array), piece
        self.calls: list[list[tuple[int, int]]] = []
        self.fails = False

    def fetch(self, ranges):
        self.calls.append(ranges)
        if self.fails:
            raise ServerUnreachable("the server is gone")
        data = b"".join(self.content[offset : offset + length] for offset, length in ranges)
        for at in range(0, len(data), self.piece):
            yield data[at : at + self.piece]

    def rows(self, keep_bytes=2**20) -> RemoteRows:
        return RemoteRows(read_header(self.content[:4096], len(self.content)), self.fetch, keep_bytes)

    @property
    def sent(self) -> int:
        return sum(length for call in self.calls for _, length in call)


@settings(deadline=None, max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, 499), min_size=1, max_size=40), min_size=1, max_size=8),
    room=st.integers(1, 300),
    ahead=st.booleans(),
)
def test_any_rows_in_any_order_are_those_of_the_array(batches, room, ahead):
    rows = Server().rows(room * ROW)
    if ahead:
        rows.prefetch([np.array(batch) for batch in batches])
    for batch in batches:
        assert np.array_equal(rows.take(np.array(batch)), ARRAY[batch])


def test_a_pass_in_any_order_fetches_each_row_once():
    server = Server()
    rows, order = server.rows(), np.random.default_rng(1).permutation(500)
    batches = [order[at : at + 32] for at in range(0, 500, 32)]
    for at in range(0, len(batches), 4):
        rows.prefetch(batches[at : at + 4])
        for batch in batches[at : at + 4]:
            assert np.array_equal(rows.take(batch), ARRAY[batch])
    assert server.sent == ARRAY.nbytes
    rows.take(slice(0, 500))
    assert server.sent == ARRAY.nbytes, "they are kept"


def test_neighbours_are_one_range_and_a_lease_one_call():
    server = Server()
    rows = server.rows()
    rows.prefetch([np.array([5, 4, 6, 20]), np.array([100, 101])])
    rows.take(np.array([100, 101]))
    assert [[length // ROW for _, length in call] for call in server.calls] == [[3, 1, 2]]


def test_rows_that_do_not_come_raise_where_they_are_needed():
    server = Server()
    rows = server.rows()
    server.fails = True
    rows.prefetch([np.arange(4)])
    with pytest.raises(ServerUnreachable):
        rows.take(np.arange(4))
    server.fails = False
    assert np.array_equal(rows.take(np.arange(4)), ARRAY[:4])


def test_a_batch_is_there_as_soon_as_its_own_rows_are():
    server, go_on = Server(piece=4 * ROW), threading.Event()
    original = server.fetch

    def slow(ranges):
        for number, piece in enumerate(original(ranges)):
            if number:
                assert go_on.wait(30)
            yield piece

    server.fetch = slow
    rows = server.rows()
    rows.prefetch([np.arange(4), np.arange(4, 8)])
    assert np.array_equal(rows.take(np.arange(4)), ARRAY[:4])
    go_on.set()
    assert np.array_equal(rows.take(np.arange(4, 8)), ARRAY[4:8])


@pytest.mark.parametrize(
    "array",
    [np.array(1.0), np.asfortranarray(ARRAY), np.array([{}], dtype=object)],
    ids=["scalar", "columns", "objects"],
)
def test_other_files_have_no_rows(array):
    content = stored(array)
    assert read_header(content[:4096], len(content)) is None
    assert read_header(b"no array", 8) is None
    assert read_header(stored(ARRAY)[:4096], 10) is None
