"""Type names: each has one meaning in the whole project."""

from __future__ import annotations

import json

from tests.support.type_names import MEANT, TABLE, ambiguous, meanings, project_files, unmeant


def test_no_type_name_means_several_things_but_those_still_to_be_renamed():
    """Compare with the table; after a rename, ``python -m tests.support.type_names`` removes the name from it."""
    found = meanings(project_files())
    unexpected = {
        name: sorted(found[name])
        for name, count in unmeant(project_files()).items()
        if count > json.loads(TABLE.read_text()).get(name, 1)
    }
    assert unexpected == {}, "rename all but one of each"


def test_the_table_names_no_type_that_has_been_renamed():
    found = unmeant(project_files())
    done = {name for name, count in json.loads(TABLE.read_text()).items() if found.get(name, 1) < count}
    assert done == set(), "python -m tests.support.type_names takes them from the table"


def test_names_that_are_meant_to_have_several_meanings_have_them():
    assert set(MEANT) <= set(ambiguous(project_files()))


def test_private_names_nested_classes_and_aliases_are_found():
    files = {"a.py": "class Slot: pass\nPart = tuple[int, int]\nSame = int", "b.py": "class _Slot: pass\nSame = int"}
    assert ambiguous(files) == {"Slot": 2}
    files["c.py"] = "class Outer:\n    class Part: pass\nLIMIT = 3\nT = 4"
    assert ambiguous(files) == {"Part": 2, "Slot": 2}
