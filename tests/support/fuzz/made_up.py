"""Made-up traffic: random messages of a protobuf type, mutated bytes, and bytes that resemble protocols."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from nfdt.core.wire.shards_pb2 import PULL, PUSH, Frame
from tests.support.raw_stream import encode

MOST_BYTES = 2000
DEPTH = 3
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
    """Return what a stranger may send on a new connection: noise, HTTP/2, TLS, or a ticket and frames."""
    match random.randrange(4):
        case 0:
            return random.randbytes(random.randrange(1, MOST_BYTES))
        case 1:
            return HTTP2 + b"".join(_http2_frame(random) for _ in range(random.randrange(1, 6)))
        case 2:
            return b"\x16\x03\x01" + random.randbytes(random.randrange(1, 300))
        case _:
            return random.randbytes(32) + frames(random)


def _http2_frame(random: Random) -> bytes:
    body = random.randbytes(random.randrange(60))
    size = len(body) if random.random() < 0.8 else random.randrange(2**24)
    head = size.to_bytes(3, "big") + bytes([random.randrange(12), random.randrange(256)])
    return head + random.randrange(8).to_bytes(4, "big") + body


def frames(random: Random, size: int = 64, worker: str = "bad", count: int = 4) -> bytes:
    """Return frames of a stream of gradients: made up, or pushes of ``size`` bytes, some of them mutated."""
    return b"".join(_frame(random, size, worker) for _ in range(count))


def _frame(random: Random, size: int, worker: str) -> bytes:
    if random.random() < 0.5:
        header = message(Frame.DESCRIPTOR, random)
        header.version = 0  # a pull waits for its version
        payload = random.randbytes(random.randrange(size))
    else:
        kind = random.choice((PULL, PUSH))
        fields = {"sequence": random.randrange(1, 9), "worker": worker, "parts": 1, "want_weights": True}
        header = Frame(kind=kind, total_bytes=size if kind == PUSH else 0, **fields)
        payload = random.randbytes(size) if kind == PUSH else b""
    data = encode(header, payload)
    return data if random.random() < 0.5 else mutated(data, random)
