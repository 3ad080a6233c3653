"""Offences that ``scripts/words`` lists: prose that is no plain technical English, identifiers with unusual terms."""

from __future__ import annotations

import pytest

from tests.support.words import offences_in

CLEAN = '''"""Return the weights."""


class JobSlots:
    """Slots of a job.

    Attributes:
        clock: Clock of the server.
    """

    clock: float  # seconds
'''


def test_plain_english_is_no_offence():
    assert offences_in("a.py", CLEAN) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("old word", "crew = 1"),
        ("old word", "class RingCrew: pass"),
        ("old word", "from x import JobDesk"),
        ("old word", "run.recruit()"),
        ("docstring begins with", '"""Of a job."""'),
        ("docstring begins with", 'def f():\n    """What it wrote."""'),
        ("person", "x = 1  # nobody reads it"),
        ("speech", "x = 1  # what the server told"),
        ("fragment", '"""A slot.\n\nAttributes:\n    clock: Of the server.\n"""'),
    ],
)
def test_offences_in_code_are_found(rule, source):
    assert [offence.rule for offence in offences_in("a.py", source)] == [rule]


@pytest.mark.parametrize("source", ["import itertools\nitertools.chain()", "whole = 1", "overlaps = {}", "x = 'crew'"])
def test_words_with_another_meaning_are_no_offence(source):
    assert offences_in("a.py", source) == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("long line", "word " * 30),
        ("several sentences", "It trains. It ends."),
        ("several sentences", "It trains (fast). `fit` returns."),
        ("speech", "The server says so."),
    ],
)
def test_offences_in_documents_are_found(rule, line):
    assert [offence.rule for offence in offences_in("a.md", line)] == [rule]


@pytest.mark.parametrize(
    "text", ["1. Install it.", "See Zheng et al. The", "| a. B | c. D |", "```\nrun. Then\n```", f"[x]({'y' * 200}) is"]
)
def test_lists_tables_code_and_links_are_no_offence(text):
    assert offences_in("a.md", text) == []
