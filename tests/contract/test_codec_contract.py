"""Promises of every codec: its error, its size, and its treatment of forged bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nfdt.codecs import DECODERS, IDENTITY, ErrorFeedback, find_decoder, make_codec
from nfdt.codecs.base import BUCKET, relative_error
from nfdt.codecs.sparse import TopK
from nfdt.codecs.widths import is_finite
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.specs.presets import AXES

FRACTION = 0.1
CODECS = [make_codec(name, top_k=FRACTION) for name in DECODERS]
LOSSY = [codec for codec in CODECS if codec.name != "identity"]
BITS = {"identity": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "top-k": 64 * FRACTION}
SIZES = (0, 1, 2, 3, BUCKET - 1, BUCKET, BUCKET + 1, 2**16 + 7)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, st.integers(0, 1100), elements=finite, fill=finite)


def ids(codec):
    return codec.name


every_codec = pytest.mark.parametrize("codec", CODECS, ids=ids)
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=ids)


def test_every_choice_of_the_axis_can_be_made_and_decoded():
    assert set(AXES["codec"]) == {*DECODERS, "adaptive"}


def decoded(codec, vector):
    payload = codec.encode(vector)
    assert payload.dtype == np.uint8
    codec.check(payload.size, vector.size)
    out = np.full(vector.size, 7, np.float32)
    find_decoder(codec.name).decode(np.array(payload), out)
    return out


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def greatest(vector):
    """Return the greatest magnitude in each element's bucket."""
    padded = np.zeros(-(-vector.size // BUCKET) * BUCKET)
    padded[: vector.size] = np.abs(vector)
    return padded.reshape(-1, BUCKET).max(1).repeat(BUCKET)[: vector.size]


BOUNDS = {
    "identity": lambda x: np.zeros(x.shape),
    "bf16": lambda x: np.abs(x) * 2**-8 + 2.0**-134,
    "fp16": lambda x: np.maximum(np.abs(x) * 2**-11, greatest(x) * 2.0**-39) + 2.0**-149,
    "int8": lambda x: np.minimum(np.abs(x), greatest(x) / 254) * 1.00001 + 127 * 2.0**-126,
    "int4": lambda x: np.minimum(np.abs(x), greatest(x) / 14) * 1.00001 + 7 * 2.0**-126,
    "top-k": lambda x: np.sort(np.abs(x))[::-1][min(x.size - 1, TopK(FRACTION).kept(x.size))] if x.size else 0,
}


@every_codec
@settings(max_examples=60, deadline=None)
@given(vector=vectors)
def test_the_error_of_every_element_is_bounded(codec, vector):
    error = np.abs(decoded(codec, vector).astype(np.float64) - vector)
    assert (error <= BOUNDS[codec.name](vector.astype(np.float64))).all()


@every_codec
@settings(max_examples=60, deadline=None)
@given(vector=vectors)
def test_it_is_a_contraction(codec, vector):
    exact = vector.astype(np.float64)
    error = np.linalg.norm(decoded(codec, vector) - exact)
    assert error <= np.linalg.norm(exact) * (1 + 1e-6)
    if codec.name == "top-k" and vector.size:
        assert error**2 <= (1 - codec.kept(vector.size) / vector.size) * np.linalg.norm(exact) ** 2 * (1 + 1e-6)


@pytest.mark.parametrize(("name", "omega"), [("bf16", 4e-6), ("fp16", 6e-8), ("int8", 1e-4), ("int4", 0.03)])
def test_the_loss_on_noise_is_small(name, omega):
    vector = normal(100_000)
    assert 0 < relative_error(vector, decoded(make_codec(name, top_k=FRACTION), vector)) < omega


@pytest.mark.parametrize("pair", [(3e38, -3e38), (np.inf, np.inf), (np.nan, 0)])
def test_the_loss_on_numbers_that_overflow_is_not_a_number(pair):
    assert np.isnan(relative_error(*(np.full(9, number, np.float32) for number in pair)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "bits", "unit", "most"),
    [("bf16", 8, 1, 2**11), ("bf16", 8, 2.0**117, 2**11 - 8), ("fp16", 11, 1, 2**14 - 8)],
)
def test_halves_are_rounded_to_the_nearest_and_ties_to_even(name, bits, unit, most, sign):
    numbers = np.arange(2 ** (bits + 2), 2 ** (bits + 3), dtype=np.float64)  # three bits more than a half holds
    wanted = np.minimum(8 * np.round(numbers / 8), most)  # the greatest does not become infinity
    codec = make_codec(name, top_k=FRACTION)
    assert np.array_equal(decoded(codec, (sign * unit * numbers).astype(np.float32)), sign * unit * wanted)


def test_infinities_and_nan_stay_what_they_are_in_bfloat16():
    almost_infinity = np.array([0x7F80_0001], np.uint32).view(np.float32)[0]  # still a NaN
    found = decoded(make_codec("bf16", top_k=FRACTION), np.array([np.inf, -np.inf, almost_infinity], np.float32))
    assert np.array_equal(found, [np.inf, -np.inf, np.nan], equal_nan=True)


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_encoded_bytes_have_the_declared_size_for_any_vector(codec, size):
    vector = normal(size)
    assert codec.encode(vector).size == codec.encoded_bytes(size)
    assert decoded(codec, vector).shape == (size,)
    assert codec.encoded_bytes(10**6) == pytest.approx(10**6 * BITS[codec.name] / 8, rel=0.02)


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 5, 3 * BUCKET])
def test_what_is_not_finite_stays_so_and_finite_numbers_stay_finite(codec, bad, size):
    vector = normal(size)
    clean = decoded(codec, vector)
    vector[size // 2] = bad
    found = decoded(codec, vector)
    assert not np.isfinite(found).all()
    elsewhere = np.arange(size) // BUCKET != size // 2 // BUCKET
    assert np.isfinite(found[elsewhere]).all()
    if codec.name != "top-k":  # which leaves one place fewer for the others
        assert np.array_equal(found[elsewhere], clean[elsewhere])
    largest = np.full(size, np.finfo(np.float32).max) * np.where(np.arange(size) % 2, 1, -1).astype(np.float32)
    assert np.isfinite(decoded(codec, largest)).all()


@every_codec
def test_zeros_and_the_smallest_numbers_stay_harmless(codec):
    assert not decoded(codec, np.zeros(600, np.float32)).any()
    smallest = np.full(600, 2.0**-149, np.float32)
    assert np.abs(decoded(codec, smallest)).max() <= 2.0**-149


@every_codec
def test_both_ends_compute_the_same_bits(codec):
    vector = normal(5000)
    assert np.array_equal(codec.encode(vector), codec.encode(vector.copy()))
    unaligned = np.empty(5000 * 4 + 1, np.uint8)[1:].view(np.float32)
    unaligned[:] = vector
    assert np.array_equal(codec.encode(unaligned), codec.encode(vector))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "top-k"])
def test_encoding_what_was_decoded_loses_nothing_more(name):
    codec = make_codec(name, top_k=FRACTION)
    once = decoded(codec, normal(5000))
    np.testing.assert_allclose(decoded(codec, once), once, rtol=1e-6)


def sent(codec, feedback, vector, bounds=None):
    """Return one push as its receivers decode it."""
    bounds = bounds or [slice(0, vector.size)]
    out = np.full(vector.size, 7, np.float32)
    for payload, bound in zip(feedback.encode(codec, vector, bounds), bounds, strict=True):
        find_decoder(codec.name).decode(payload, out[bound])
    return out


@every_lossy_codec
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 1300), count=st.integers(1, 40), cut=st.floats(0, 1))
def test_error_feedback_loses_nothing_in_the_long_run(codec, seed, size, count, cut):
    feedback = ErrorFeedback(size)
    inputs = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    bounds = [slice(0, int(cut * size)), slice(int(cut * size), size)]
    total = sum(sent(codec, feedback, vector, bounds).astype(np.float64) for vector in inputs)
    np.testing.assert_allclose(total + feedback.residual, inputs.astype(np.float64).sum(0), atol=1e-3)


@every_lossy_codec
def test_the_residual_stays_bounded(codec):
    feedback = ErrorFeedback(2000)
    norms = []
    for step in range(400):
        sent(codec, feedback, normal(2000, step))
        norms.append(np.linalg.norm(feedback.residual))
    assert max(norms[200:]) < 1.2 * max(norms[:200])


@every_codec
@pytest.mark.parametrize("size", [1000, 2**15, 2**15 + 1, 2**17 + 700])
def test_a_payload_is_that_of_its_blocks(codec, size):
    vector = normal(size)
    parts = [codec.encode(vector[part]) for part, _ in codec.blocks(size)]
    assert np.array_equal(np.concatenate(parts), codec.encode(vector))
    assert [coded.stop - coded.start for _, coded in codec.blocks(size)] == [part.size for part in parts]
    feedback = ErrorFeedback(size)
    assert np.array_equal(sent(codec, feedback, vector), decoded(codec, vector))
    assert np.array_equal(feedback.residual, vector - decoded(codec, vector))


def test_the_identity_sends_what_is_owed_and_then_nothing_is():
    feedback, vector = ErrorFeedback(3), np.array([1, 2, 3], np.float32)
    assert np.shares_memory(feedback.encode(IDENTITY, vector, [slice(0, 3)])[0], vector)
    sent(make_codec("top-k", top_k=0.1), feedback, vector)
    assert feedback.residual.tolist() == [1, 2, 0]
    assert sent(IDENTITY, feedback, vector).tolist() == [2, 4, 3]
    assert not feedback.residual.any()
    assert feedback.residual.dtype == np.float32
    assert np.shares_memory(feedback.encode(IDENTITY, vector, [slice(0, 3)])[0], vector)


@every_lossy_codec
def test_a_sum_that_overflows_is_not_sent_and_the_residual_stays_finite(codec):
    feedback, largest = ErrorFeedback(2**16), np.full(2**16, np.finfo(np.float32).max)
    feedback.residual[-1] = largest[-1]
    assert feedback.encode(codec, largest, [slice(0, 2**16)]) is None
    assert np.isfinite(feedback.residual).all()


@pytest.mark.parametrize(
    ("values", "finite"), [([1, 2], 1), ([], 1), ([3e38] * 9, 1), ([1, np.nan], 0), ([np.inf, -np.inf], 0)]
)
def test_what_is_finite_is_known(values, finite):
    assert is_finite(np.array(values, np.float32)) == bool(finite)


@every_codec
@pytest.mark.parametrize("wrong", [1, -1, 2**40])
def test_another_number_of_bytes_is_refused_before_memory_is_taken(codec, wrong):
    received = codec.encoded_bytes(1000) + wrong
    with pytest.raises(ShapeMismatch, match=f"{codec.name}: .*1000 elements.*Received: {received} bytes"):
        codec.check(received, 1000)


def test_more_elements_than_places_of_32_bits_are_refused():
    with pytest.raises(ShapeMismatch, match=f"fewer than {2**32} elements.*Received: {2**32}. Use more shards."):
        TopK(FRACTION).encode(np.broadcast_to(np.float32(0), 2**32))


@every_codec
@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 700), data=st.data())
def test_any_bytes_of_the_right_number_are_decoded_or_refused(codec, size, data):
    count = codec.encoded_bytes(size)
    payload = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8)
    try:
        codec.decode(payload, np.empty(size, np.float32))
    except ProtocolError as error:
        assert codec.name == "top-k", error  # noqa: PT017


@pytest.mark.parametrize("places", [[3, 5], [2, 2], [4, 1], [0, 9, 3], [0, 2**32 - 1]])
def test_places_outside_or_out_of_order_are_refused(places):
    payload = np.concatenate([np.array(places, "<u4").view(np.uint8), np.ones(len(places), "<f4").view(np.uint8)])
    with pytest.raises(ProtocolError, match="places below 5"):
        find_decoder("top-k").decode(payload, np.empty(5, np.float32))


def test_an_unknown_codec_is_refused():
    with pytest.raises(ProtocolError, match="bf16"):
        find_decoder("gzip")
