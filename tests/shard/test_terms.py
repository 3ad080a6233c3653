from __future__ import annotations

import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire.shards_pb2 import PUSH, Frame
from nfdt.shard.exchange import Terms


def terms(preset, workers=4, **options):
    return Terms.of(resolve_algorithm(preset, **options), workers)


def push(**fields):
    return Frame(kind=PUSH, **fields)


@pytest.mark.parametrize("fields", [{}, {"parts": 1}, {"rate": 1.0}, {"samples": 7, "computed_on": 3}])
@pytest.mark.parametrize("preset", ["asgd", "ddc-asgd", "ssp", "n-softsync"])
def test_an_asynchronous_job_takes_asynchronous_pushes(preset, fields):
    terms(preset).check_push("w", push(**fields), 0)


@pytest.mark.parametrize("fields", [{"parts": 2}, {"part": 1}, {"round": 1, "parts": 1}])
def test_an_asynchronous_job_takes_no_parts(fields):
    with pytest.raises(ProtocolError, match="Push from worker w: expected an asynchronous one"):
        terms("asgd").check_push("w", push(**fields), 0)


@pytest.mark.parametrize(("round_", "parts"), [(1, 4), (5, 4), (6, 1)])
def test_a_job_in_rounds_takes_parts_of_the_open_round_and_late_ones(round_, parts):
    terms("bsp").check_push("w", push(round=round_, parts=parts), 5)


@pytest.mark.parametrize(
    "fields", [{}, {"parts": 1}, {"round": 7, "parts": 4}, {"round": 2**32 - 1, "parts": 1}, {"round": 6, "parts": 5}]
)
def test_a_job_in_rounds_takes_nothing_else(fields):
    with pytest.raises(ProtocolError, match="expected a part of round 6, which has at most 4 parts"):
        terms("bsp").check_push("w", push(**fields), 5)


def test_rounds_that_are_cut_by_speed_may_have_more_parts_than_workers():
    terms("bsp", batch="dbs").check_push("w", push(round=1, parts=16), 0)


@pytest.mark.parametrize(
    ("preset", "options", "most"),
    [("asgd", {}, 1.0), ("bsp", {}, 1.0), ("dbs-sgd", {}, 4.0), ("group-sync", {}, 4.0)],
)
def test_rates_are_for_jobs_with_unequal_batches(preset, options, most):
    found = terms(preset, **options)
    header = {"round": 1, "parts": 1} if found.rounds else {}
    found.check_push("w", push(**header, rate=most), 0)
    wrong = [most * 1.01, 3e38, float("inf"), float("nan"), -1.0, *([] if most > 1 else [0.5])]
    for rate in wrong:
        with pytest.raises(ProtocolError, match="factor of the learning rate"):
            found.check_push("w", push(**header, rate=rate), 0)


def test_requests_on_a_stream_are_numbered_without_gaps():
    found = terms("asgd")
    for before, sequence in [(None, 1), (1, 2), (2, 3)]:
        found.check_order("w", sequence, before)
    for sequence in (0, 2, 3, 5, 2**64 - 1):
        with pytest.raises(ProtocolError, match="Request of worker w: expected number 4,"):
            found.check_order("w", sequence, 3)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_new_stream_goes_on_where_the_one_before_broke(overlap):
    found = terms("asgd", overlap=overlap)
    for sequence in range(1, 6):
        found.check_order("w", sequence, sequence - 1 or None)
    most = 5 + overlap + 2
    for sequence in (0, most + 1, 2**64 - 1):
        with pytest.raises(ProtocolError, match=f"expected number 1 to {most}"):
            found.check_order("w", sequence, None)
    found.check_order("w", 5, None)  # its answer was lost
    found.check_order("w", most, None)  # the earlier ones were abandoned
    found.check_order("another", 1, None)


@pytest.mark.parametrize("denominator", [0.0, 1e-20, 640.0, float("inf")])
def test_a_denominator_is_a_number_or_infinite(denominator):
    terms("n-softsync").check_push("w", push(denominator=denominator), 0)


@pytest.mark.parametrize("denominator", [-1.0, 1e30, float("nan"), float("-inf")])
def test_other_denominators_are_refused(denominator):
    with pytest.raises(ProtocolError, match="expected a denominator"):
        terms("n-softsync").check_push("w", push(denominator=denominator), 0)
