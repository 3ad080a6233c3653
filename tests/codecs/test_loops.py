"""Compiled codecs: bit by bit the same as their NumPy form, alone and together with residuals and bases."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from nfdt.codecs import ErrorFeedback, make_codec
from nfdt.codecs.base import BLOCK, BUCKET
from nfdt.codecs.widths import FusedCodec
from nfdt.core.errors import ShapeMismatch
from tests.support.codec_exchange import PARAMETERS, STEPS, of_all_sizes, step_vectors
from tests.support.numpy_codecs import NUMPY_CODECS

SIZES = (0, 1, 2, 7, BUCKET - 1, BUCKET, BUCKET + 1, 5 * BUCKET + 3, BLOCK, BLOCK + 1, 3 * BLOCK + 701)
every_codec = pytest.mark.parametrize("name", NUMPY_CODECS)
every_size = pytest.mark.parametrize("size", SIZES)


def bits(vector):
    return vector.view(np.uint32).tolist()


def any_bits(size, seed=0):
    """Return numbers of any bits, NaN and infinities among them."""
    return np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)


def denormal(size, seed=0):
    return (any_bits(size, seed).view(np.uint32) & 0x80FF_FFFF).view(np.float32)


def greatest(size, seed=0):
    """Return the largest finite numbers, and what lies just below."""
    numbers = np.uint32(0x7F7F_FFFF) - np.random.default_rng(seed).integers(0, 2**17, size, dtype=np.uint32)
    return numbers.view(np.float32)


def one_bad(size, seed=0):
    """Return normal numbers with one that is none."""
    numbers = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    numbers[size // 2 : size // 2 + 1] = (np.nan, np.inf, -np.inf)[seed % 3]
    return numbers


KINDS = (any_bits, denormal, of_all_sizes, greatest, one_bad)
FINITE = (denormal, of_all_sizes)


@every_codec
def test_the_codecs_of_the_registry_are_compiled(name):
    assert isinstance(make_codec(name, top_k=1.0), FusedCodec)


@every_codec
@every_size
@pytest.mark.parametrize("numbers", KINDS)
def test_payloads_and_decoded_numbers_are_those_of_numpy(name, size, numbers):
    codec, reference = make_codec(name, top_k=1.0), NUMPY_CODECS[name]
    for seed in range(3):
        vector = numbers(size, seed)
        payload = codec.encode(vector)
        assert payload.tolist() == reference.encode(vector).tolist()
        decoded, wanted = np.empty((2, size), np.float32)
        codec.decode(payload, decoded)
        reference.decode(payload, wanted)
        assert bits(decoded) == bits(wanted)


@every_codec
@every_size
def test_forged_payloads_are_decoded_as_by_numpy(name, size):
    codec, reference = make_codec(name, top_k=1.0), NUMPY_CODECS[name]
    payload = np.random.default_rng(size).integers(0, 256, codec.encoded_bytes(size), dtype=np.uint8)
    decoded, wanted = np.empty((2, size), np.float32)
    codec.decode(payload, decoded)
    reference.decode(payload, wanted)
    assert bits(decoded) == bits(wanted)


@every_codec
@every_size
@pytest.mark.parametrize("numbers", FINITE)
def test_error_feedback_in_one_pass_is_that_of_numpy(name, size, numbers):
    codec, reference = make_codec(name, top_k=1.0), NUMPY_CODECS[name]
    residual = np.zeros(size, np.float32)
    wanted = residual.copy()
    for seed in range(4):
        vector = numbers(size, seed) / 4
        payload, right = np.empty((2, codec.encoded_bytes(size)), np.uint8)
        assert codec.encode_owed(vector, residual, payload)
        assert reference.encode_owed(vector, wanted, right)
        assert payload.tolist() == right.tolist()
        assert bits(residual) == bits(wanted)


@every_codec
@every_size
@pytest.mark.parametrize("numbers", FINITE)
def test_differences_in_one_pass_are_those_of_numpy(name, size, numbers):
    codec, reference = make_codec(name, top_k=1.0), NUMPY_CODECS[name]
    base, vector = numbers(size, 1) / 4, numbers(size, 2) / 4
    payload, right = np.empty((2, codec.encoded_bytes(size)), np.uint8)
    reached, wanted, added, also = np.empty((4, size), np.float32)
    assert codec.encode_difference(base, vector, payload, reached)
    assert reference.encode_difference(base, vector, right, wanted)
    assert payload.tolist() == right.tolist()
    codec.decode_and_add(payload, base, added)
    reference.decode_and_add(payload, base, also)
    assert bits(reached) == bits(wanted) == bits(added) == bits(also)


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("at", [0, BUCKET + 3, 2 * BLOCK])
def test_what_is_not_finite_stops_before_its_bucket(name, bad, at):
    codec, size = make_codec(name, top_k=1.0), 2 * BLOCK + 1
    vector, residual = np.ones(size, np.float32), np.ones(size, np.float32)
    vector[at], residual[at] = bad, 3.4e38
    payload = np.empty(codec.encoded_bytes(size), np.uint8)
    bucket = at // BUCKET * BUCKET
    assert not codec.encode_owed(vector, residual, payload)
    assert np.isfinite(residual).all()
    assert (residual[bucket:] == np.where(np.arange(bucket, size) == at, np.float32(3.4e38), 1)).all()
    assert not codec.encode_difference(-residual, vector, payload, np.empty(size, np.float32))


@every_codec
def test_blocks_are_encoded_and_decoded_in_any_order(name):
    codec, size = make_codec(name, top_k=1.0), 5 * BLOCK + 1234
    vector, base = of_all_sizes(size, 1), of_all_sizes(size, 2)
    whole, parts = np.empty((2, codec.encoded_bytes(size)), np.uint8)
    left, residual, decoded, found = np.zeros((4, size), np.float32)
    assert codec.encode_owed(vector, left, whole)
    codec.decode_and_add(whole, base, decoded)
    for part, coded in reversed(list(codec.blocks(size))):
        assert codec.encode_owed(vector[part], residual[part], parts[coded])
        codec.decode_and_add(parts[coded], base[part], found[part])
    assert parts.tolist() == whole.tolist()
    assert bits(residual) == bits(left)
    assert bits(found) == bits(decoded)


@every_codec
def test_arrays_of_any_place_in_memory_give_the_same_bits(name):
    codec, vector = make_codec(name, top_k=1.0), of_all_sizes(5000)
    payload = codec.encode(vector)
    unaligned = np.empty(payload.size + 1, np.uint8)[1:]
    unaligned[:] = payload
    unaligned.flags.writeable = False
    decoded, found = np.empty((2, 5000), np.float32)
    codec.decode(payload, decoded)
    codec.decode(unaligned, found)
    assert bits(found) == bits(decoded)
    shifted = np.empty(4 * 5000 + 1, np.uint8)[1:].view(np.float32)
    shifted[:] = vector
    assert codec.encode(shifted).tolist() == codec.encode(np.repeat(vector, 2)[::2]).tolist() == payload.tolist()


@every_codec
@pytest.mark.parametrize("change", [-1, 1])
def test_memory_beyond_a_payload_or_vector_is_never_touched(name, change):
    codec, vector = make_codec(name, top_k=1.0), np.ones(1000, np.float32)
    short, other = np.zeros(codec.encoded_bytes(1000) + change, np.uint8), np.ones(1000 + change, np.float32)
    payload = codec.encode(vector)
    for attempt in (
        lambda: codec.decode(short, vector),
        lambda: codec.decode_and_add(short, vector, vector),
        lambda: codec.decode_and_add(payload, other, vector),
        lambda: codec.encode_owed(vector, vector, short),
        lambda: codec.encode_owed(vector, other, payload),
        lambda: codec.encode_difference(vector, other, payload, vector),
    ):
        with pytest.raises(ShapeMismatch):
            attempt()


def test_threads_encode_at_the_same_time():
    codec, vectors = make_codec("int8", top_k=1.0), [of_all_sizes(4 * BLOCK, seed) for seed in range(4)]
    wanted = [codec.encode(vector).tolist() for vector in vectors]
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: [codec.encode(vectors[n]) for _ in range(20)]}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(payload.tolist() == wanted[n] for n in range(4) for payload in found[n])


WORKER = """
import sys
from tests.support.codec_exchange import exchange_as_worker
exchange_as_worker(*sys.argv[1:])
"""


@every_codec
def test_two_processes_hold_the_same_bits(name, tmp_path):
    codec, reference = make_codec(name, top_k=1.0), NUMPY_CODECS[name]
    base, reached = np.zeros((2, PARAMETERS), np.float32)
    for step in range(STEPS):  # the shard's side: differences to what the worker holds
        payload = np.empty(codec.encoded_bytes(PARAMETERS), np.uint8)
        assert codec.encode_difference(base, step_vectors(step)[1], payload, reached)
        np.save(tmp_path / f"reply{step}.npy", payload)
        base, reached = reached, base
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tmp_path), name], capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout or "{}") == {"compiled": True}, done.stderr
    assert bits(np.load(tmp_path / "weights.npy")) == bits(base)
    feedback = ErrorFeedback(PARAMETERS)
    for step in range(STEPS):
        (payload,) = feedback.encode(reference, step_vectors(step)[0], [slice(0, PARAMETERS)])
        sent = np.load(tmp_path / f"push{step}.npy")
        assert sent.tolist() == payload.tolist()
        here, there = np.empty((2, PARAMETERS), np.float32)
        codec.decode(sent, here)
        reference.decode(sent, there)
        assert bits(here) == bits(there)
    assert bits(np.load(tmp_path / "residual.npy")) == bits(feedback.residual)


def test_programs_without_a_codec_do_not_import_numba():
    probe = "import sys, nfdt.transport.stream, nfdt.cli; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
