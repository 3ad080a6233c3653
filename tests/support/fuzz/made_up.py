"""Made-up traffic: random messages of a protobuf type, mutated bytes, and bytes that resemble protocols."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from nfdt.core.wire.shards_pb2 import PULL, PUSH, Frame
from tests.support.raw_stream import encode

MOST_BYTES = 2000
DEPTH = 3
SPOILT = 0.002  # part of the frames of a stream
WORDS = ("", "worker", "worker-0", "shard", "../../etc/passwd", "0" * 64, "{}", '{"epochs": -1}', "\x00", "é" * 100)
NUMBERS = (0, 1, 2, 3, 7, 2**31 - 1, 2**32 - 1, 2**63 - 1)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_SMALL = {FieldDescriptor.TYPE_INT32: 2**31, FieldDescriptor.TYPE_UINT32: 2**32}


def message(kind: Descriptor, random: Random, depth: int = DEPTH) -> Any:
    """Return a message of a type in which about half of the fields are set; of a ``oneof`` each is as likely."""
    made = GetMessageClass(kind)()
    chosen = {group.name: random.choice(group.fields).name for group in kind.oneofs}
    for field in kind.fields:
        if field.containing_oneof is not None and chosen[field.containing_oneof.name] != field.name:
            continue
        if random.random() < 0.5 or (field.message_type is not None and depth == 0):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        count = random.randrange(3) if field.is_repeated else 1
        for _ in range(count):
            _fill(made, field, random, depth)
    return made


def _fill(made: Any, field: FieldDescriptor, random: Random, depth: int) -> None:
    if field.message_type is not None:
        value = message(field.message_type, random, depth - 1)
        if field.is_repeated:
            getattr(made, field.name).append(value)
        else:
            getattr(made, field.name).CopyFrom(value)
        return
    value = _scalar(field, random)
    if field.is_repeated:
        getattr(made, field.name).append(value)
    else:
        setattr(made, field.name, value)


def _scalar(field: FieldDescriptor, random: Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(WORDS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.randbytes(random.randrange(MOST_BYTES))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    if field.type in _FLOATS:
        return random.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if field.enum_type is not None:
        return random.choice(field.enum_type.values).number
    return random.choice(NUMBERS) % _SMALL.get(field.type, 2**63)


def mutated(data: bytes, random: Random) -> bytes:
    """Return the bytes with some of them changed, removed, repeated or added; now and then unchanged."""
    changed = bytearray(data)
    for _ in range(random.randrange(4)):
        place = random.randrange(len(changed) + 1)
        match random.randrange(4):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1:
                del changed[place : place + random.randrange(1, 20)]
            case 2:
                changed[place:place] = changed[place : place + random.randrange(1, 20)]
            case _:
                changed[place:place] = random.randbytes(random.randrange(1, 20))
    return bytes(changed)


def connection(random: Random) -> bytes:
    """Return what a stranger may send on a new connection: noise, HTTP/2, TLS, HTTP/1.1, or a ticket and frames."""
    match random.randrange(5):
        case 0:
            return random.randbytes(random.randrange(1, MOST_BYTES))
        case 1:
            return HTTP2 + b"".join(_http2_frame(random) for _ in range(random.randrange(1, 6)))
        case 2:
            return b"\x16\x03\x01" + random.randbytes(random.randrange(1, 300))
        case 3:
            return request(random)
        case _:
            return random.randbytes(32) + frames(random)


def _http2_frame(random: Random) -> bytes:
    body = random.randbytes(random.randrange(60))
    size = len(body) if random.random() < 0.8 else random.randrange(2**24)
    head = size.to_bytes(3, "big") + bytes([random.randrange(12), random.randrange(256)])
    return head + random.randrange(8).to_bytes(4, "big") + body


def frames(random: Random, size: int = 64, worker: str = "bad", count: int = 4, first: int = 1) -> bytes:
    """Return a stream of gradients: valid pulls and pushes of ``size`` bytes, in order, few of which are spoilt.

    Nothing is read after the first that no shard takes. ``first`` is the number of the first request.
    """
    return b"".join(_frame(random, size, worker, sequence) for sequence in range(first, first + count))


def _frame(random: Random, size: int, worker: str, sequence: int) -> bytes:
    kind = random.choice((PULL, PUSH))
    header = Frame(kind=kind, sequence=sequence, worker=worker, want_weights=random.random() < 0.5)
    payload = b""
    if kind == PUSH:
        header.samples, header.total_bytes = 1, size
        payload = struct.pack("<f", random.gauss(0.0, 1.0)) * (size // 4)
    if random.random() < SPOILT:
        match random.randrange(3):
            case 0:
                replace_field(header, random)
            case 1:
                header = message(Frame.DESCRIPTOR, random)
            case _:
                return mutated(encode(header, payload), random)
        header.version = 0  # a pull waits for its version
    return encode(header, payload)


def replace_field(made: Any, random: Random) -> None:
    """Give one field of a message another value of its type."""
    field = random.choice([one for one in made.DESCRIPTOR.fields if one.message_type is None])
    _fill(made, field, random, 0)


METHODS = ("GET", "POST", "HEAD", "PUT", "OPTIONS", "TRACE", "get", "")
PATHS = ("/", "/open", "/metrics", "/api/jobs", "/static/page.js", "/static/../../etc/passwd", "/%2e%2e/%00", "//", "*")
OF_JOB = ("", "/epochs", "/weights.npz", "/priority", "/no-such-action")


def request(random: Random, job: str = "job-0", token: str = "") -> bytes:
    """Return requests of the page on one connection: valid ones, of which some are spoilt.

    None of them streams, cancels, or changes the job.
    """
    return b"".join(_request(random, job, token) for _ in range(random.randrange(1, 4)))


def _request(random: Random, job: str, token: str) -> bytes:
    of_job = f"/api/jobs/{random.choice((job, *WORDS))}{random.choice(OF_JOB)}"
    path = random.choice((*PATHS, f"/jobs/{job}", of_job, of_job))
    if random.random() < 0.3:
        path += f"?{random.choice(('key', 'after', 'n'))}={random.choice((*WORDS, *map(str, NUMBERS)))}"
    body = random.randbytes(random.choice((0, 0, 30)))
    fields = {
        "Host": random.choice(("localhost", "localhost", "evil/?#", "")),
        "Authorization": f"Bearer {random.choice((token, token, *WORDS))}",
        "Cookie": f"nfdt-1={random.choice(WORDS)}",
        "Content-Length": str(random.choice((len(body), len(body), *NUMBERS, -1))),
        "Range": random.choice(("bytes=0-1", "bytes=" + "0-," * 200, "bytes=9-1")),
        "Transfer-Encoding": random.choice(("chunked", "identity")),
        "X-Nfdt": "1",
        "Connection": random.choice(("keep-alive", "close", "upgrade")),
    }
    chosen = [f"{name}: {value}" for name, value in fields.items() if random.random() < 0.6]
    method = "GET" if random.random() < 0.6 else random.choice(METHODS)
    data = "\r\n".join([f"{method} {path} HTTP/1.1", *chosen, "", ""]).encode() + body
    return data if random.random() < 0.7 else mutated(data, random)
