"""Ratchet over every file: prose in plain technical English, and identifiers with the field's terms."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.words import counts, lowered, offences_in, project_files, read_table

CLEAN = '''"""Return the weights."""


class JobSlots:
    """Slots of a job.

    Attributes:
        clock: Clock of the server.
    """

    clock: float  # seconds
'''


def excess(path: str, text: str, allowed: Mapping[str, int]) -> list[str]:
    """Return the offences of the rules that a file breaks more often than the table allows."""
    offences = offences_in(path, text)
    broken = {rule for rule, count in counts(offences).items() if count > allowed.get(rule, 0)}
    return [f"{path}:{o.line}: {o.rule}: {o.text}" for o in offences if o.rule in broken]


def test_no_file_has_more_offences_than_the_table_allows():
    """Compare with the table. ``python -m tests.support.words`` lowers it after a clean-up; no count is raised."""
    table = read_table()
    assert [line for path, text in project_files().items() for line in excess(path, text, table.get(path, {}))] == []


def test_the_table_names_files_that_exist():
    assert set(read_table()) <= set(project_files())


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


def test_the_table_is_only_lowered():
    allowed = {"a.py": {"person": 2, "speech": 1}, "gone.py": {"person": 1}}
    found = {"a.py": {"person": 1, "speech": 3}, "new.py": {"person": 1}}
    assert lowered(allowed, found) == {"a.py": {"person": 1, "speech": 1}}
