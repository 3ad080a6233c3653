"""Codec decisions of workers: each report holds all decisions so far, and each decision becomes one event."""

from __future__ import annotations

import pytest

from nfdt.jobserver.worker_calls import new_decisions


def report(*pushes):
    return {"codecs": {"decisions": [{"at_push": push, "push": "int8", "reply": "bf16"} for push in pushes]}}


def test_only_new_decisions_are_reported():
    assert [d["at_push"] for d in new_decisions({}, report(12))] == [12]
    assert [d["at_push"] for d in new_decisions(report(12), report(12, 40, 90))] == [40, 90]
    assert new_decisions(report(12), report(12)) == []
    assert new_decisions(report(12), {}) == []


@pytest.mark.parametrize(
    "unreadable",
    [
        {"codecs": None},
        {"codecs": 3},
        {"codecs": {"decisions": None}},
        {"codecs": {"decisions": [3, {"at_push": "x"}, {}]}},
        {"codecs": {"decisions": 5}},
    ],
)
def test_what_cannot_be_read_decides_nothing(unreadable):
    assert new_decisions({}, unreadable) == []
    assert new_decisions(unreadable, report(7))[0]["at_push"] == 7
