"""Arbitrary bytes on a stream: a clear error, only that stream ends, the shard is intact, and little memory is used."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import dataclass, field

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nfdt.codecs import DECODERS
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import Rows, RowVector, TableLayout
from nfdt.core.errors import NfdtError, ProtocolError, Refused, ShapeMismatch
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.model.program.state import State
from nfdt.shard.servicer import start_shard
from nfdt.shard.sparse_store import SparseStore
from nfdt.transport.stream import StreamClient
from tests.support.raw_stream import encode, exchange
from tests.support.shard_cluster import LAYOUT, Reference, gradients, rule_spec, start_again, start_weights

TOKEN = "job-token"
SIZE = 4 * LAYOUT.size
EMBEDDING = ParameterLayout.of([("table", (1030, 64)), ("bias", (4,))])
CODECS = [*DECODERS, "rows"]
WORKERS = 5  # so many that backups of ddc have the anchored format
fuzz = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass
class Shard:
    """Real shard with a valid worker, and its answers to any frames."""

    address: str
    store: object
    good: StreamClient
    answers: list[Frame] = field(default_factory=list)

    def send(self, messages) -> NfdtError | None:
        """Send frames; return the error that ends the stream, or None."""
        self.answers = exchange(self.address, worker_token(TOKEN, "bad"), messages)
        if self.answers and self.answers[-1].kind == ERROR:
            return ProtocolError(self.answers[-1].error)
        return None

    def weights(self):
        return self.store.read()[0]

    def check_the_good_worker_goes_on(self, layout=LAYOUT):
        version = self.store.version
        answer = self.good.push(gradients(1, layout=layout)[0], samples=1)
        assert (answer.applied, self.store.version) == (True, version + 1)
        self.store.write(start_weights(layout), {})
        assert np.array_equal(self.good.pull().weights, start_weights(layout))
        start_again(self.store, "bad")


@contextlib.contextmanager
def served(reference, rule, tables=(), **options):
    layout, state = reference.layout, State(reference.weights, reference.state)
    manifest = reference.manifest().replaced(tables=list(tables))
    running = start_shard(manifest, state, rule_spec(rule, **options), 0, 1, workers=WORKERS, token=TOKEN, leased=False)
    good = StreamClient([running.address], layout, "good", worker_token(TOKEN, "good"), timeout_s=30)
    good.pull()
    yield Shard(running.address, running.store, good)
    good.close()
    running.stop(0)


@pytest.fixture(scope="module", params=["plain", "ddc"])
def shard(request):
    with served(Reference(keras.optimizers.SGD(0.1, momentum=0.9)), request.param) as made:
        yield made


@pytest.fixture(scope="module")
def shard_with_a_table():
    with served(Reference(keras.optimizers.SGD(0.1), layout=EMBEDDING), "plain", tables=[0]) as made:
        assert isinstance(made.store, SparseStore)
        yield made


def pull(**fields):
    return encode(Frame(**{"kind": PULL, "sequence": 1, "worker": "bad", **fields}))


def push(payload=b"", **fields):
    header = {"kind": PUSH, "sequence": 2, "total_bytes": SIZE, "parts": 1, "want_weights": True}
    return encode(Frame(**{**header, **fields}), payload)


def whole_push(**fields):
    return push(gradients(1, seed=5)[0].tobytes(), **fields)


@st.composite
def broken_pushes(draw):
    """Draw a push that is corrupted so that it is no longer valid, and the frames that follow it."""
    good = whole_push()
    length = int.from_bytes(good[:4], "little")
    match draw(st.integers(0, 4)):
        case 0:  # the connection ends in the middle
            return [good[: draw(st.integers(1, len(good) - 1))]]
        case 1:
            wrong = draw(st.integers(0, 2**64 - 1).filter(lambda n: n != SIZE))
            return [push(b"1234", total_bytes=wrong), whole_push()]
        case 2:
            return [draw(st.integers(2**16 + 1, 2**32 - 1)).to_bytes(4, "little"), good[4:], whole_push()]
        case 3:  # field 2 as a group that never ends, which no parser takes
            return [length.to_bytes(4, "little"), b"\x13" * length, good[4 + length :], whole_push()]
        case _:
            return [whole_push(worker=draw(st.text(min_size=1).filter(lambda name: name != "bad"))), whole_push()]


@fuzz
@given(frames=broken_pushes())
def test_a_broken_push_is_not_applied(shard, frames):
    before = shard.store.version
    error = shard.send([pull(), *frames])
    assert isinstance(error, ProtocolError | ShapeMismatch), error
    assert len(str(error)) > 20
    assert [answer.kind for answer in shard.answers if answer.kind != ERROR] == [WEIGHTS]
    assert shard.store.version == before
    assert np.array_equal(shard.weights(), start_weights())
    shard.check_the_good_worker_goes_on()


texts = st.text(max_size=300)
numbers = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
large_numbers = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
headers = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.integers(0, 8),
        "sequence": large_numbers,
        "worker": st.one_of(st.just("bad"), texts),
        "samples": numbers,
        "round": numbers,
        "part": numbers,
        "parts": numbers,
        "want_weights": st.booleans(),
        "total_bytes": st.one_of(st.just(SIZE), large_numbers),
        "segment": texts,
        "boot_id": texts,
        "shared": st.booleans(),
        "codec": st.one_of(st.sampled_from(CODECS), texts),
        "reply_codec": st.one_of(st.sampled_from(CODECS), texts),
        "base": large_numbers,
        "rate": st.floats(width=32),
        "computed_on": large_numbers,
    },
)


@fuzz
@given(
    made_up=st.lists(st.tuples(headers, st.binary(max_size=2 * SIZE)), max_size=4),
    garbage=st.lists(st.binary(max_size=300), max_size=2),
    order=st.randoms(use_true_random=False),
)
def test_made_up_frames_in_any_order_leave_a_shard_that_works(shard, made_up, garbage, order):
    frames = [encode(Frame(**{"kind": PUSH, **fields}), payload) for fields, payload in made_up]
    frames += [*garbage, whole_push(), pull(sequence=3)]
    order.shuffle(frames)
    error = shard.send([pull(), *frames])
    assert error is None or isinstance(error, ProtocolError | ShapeMismatch | Refused), repr(error)
    shard.check_the_good_worker_goes_on()


@fuzz
@given(
    numbers=st.lists(st.tuples(st.integers(4, 7), st.integers(-(2**31), 2**31 - 1)), max_size=3),
    cut=st.one_of(st.just(0), st.integers(-100, 100)),
)
def test_made_up_rows_are_refused_or_applied_as_a_whole(shard_with_a_table, numbers, cut):
    """Case: three rows of a table, whose number and places, elements 4 to 7 of the payload, are forged."""
    shard, version = shard_with_a_table, shard_with_a_table.store.version
    split = TableLayout.of(EMBEDDING, [0])
    rows = Rows(np.array([1, 5, 1029], np.int32), np.ones((3, 64), np.float32))
    payload = split.encode(RowVector(np.ones(4, np.float32), (rows,))).copy()
    for place, number in numbers:
        payload.view("<i4")[place] = number
    data = payload.tobytes()[:cut] if cut < 0 else payload.tobytes() + bytes(cut)
    error = shard.send([pull(), push(payload=data, codec="rows", total_bytes=len(data), reply_codec="rows")])
    assert error is None or isinstance(error, ProtocolError | ShapeMismatch), repr(error)
    assert shard.store.version == version + (error is None)
    if error is not None:
        assert np.array_equal(shard.weights(), start_weights(EMBEDDING))
    shard.check_the_good_worker_goes_on(EMBEDDING)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (lambda: [push(payload=bytes(SIZE), rate=float("nan"))], "factor of the learning rate"),
        (lambda: [push(payload=bytes(SIZE), rate=float("inf"))], "factor of the learning rate"),
        (lambda: [push(payload=bytes(SIZE), rate=-1.0)], "factor of the learning rate"),
        (lambda: [push(payload=bytes(SIZE), parts=2**32 - 1, part=7)], "no rounds"),
        (lambda: [push(payload=bytes(SIZE), computed_on=77)], "on answer 77"),
        (lambda: [push(payload=bytes(SIZE), worker="another")], "this worker's name"),
        (lambda: [encode(Frame(kind=77, sequence=2))], "push, pull or lookup"),
        (lambda: [encode(Frame(kind=OFFER, total_bytes=2**50, segment="../x")), push()], "truncated"),
        (lambda: [push(shared=True)], "no segment"),
    ],
    ids=["rate nan", "rate inf", "rate below 0", "parts", "answer", "name", "kind", "offer", "shared"],
)
def test_numbers_that_make_no_sense_are_refused(shard, frames, message):
    before = shard.store.version
    error = shard.send([pull(), *frames()])
    assert message.lower() in str(error).lower()
    assert shard.store.version == before
    assert np.array_equal(shard.weights(), start_weights())
    shard.check_the_good_worker_goes_on()


@pytest.mark.parametrize("codec", ["", *CODECS])
@pytest.mark.parametrize("total_bytes", [SIZE + 4, 2**31, 2**40, 2**63])
def test_a_size_that_is_claimed_takes_no_memory(shard, codec, total_bytes):
    tracemalloc.start()
    try:
        error = shard.send([pull(), push(payload=b"1234", codec=codec, total_bytes=total_bytes)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, ProtocolError | ShapeMismatch), error
    assert peak < 8 * 2**20
    shard.check_the_good_worker_goes_on()


def test_parts_of_a_round_that_never_ends_are_bounded():
    data = bytes(SIZE)
    with served(Reference(keras.optimizers.SGD(0.1)), "plain", consistency="bsp") as shard:
        frames = [
            push(payload=data, sequence=1 + part, round=1, part=part, parts=WORKERS, want_weights=False)
            for part in range(1, WORKERS)
        ]
        assert shard.send([pull(), *frames]) is None
        more = push(payload=data, sequence=WORKERS + 1, round=1, part=WORKERS, parts=WORKERS + 1)
        assert "at most 5 parts" in str(shard.send([more]))
        shard.store.flush()
        assert shard.good.push(gradients(1)[0], samples=1, round=2, parts=1).applied
