"""``scripts/audit``: minimum versions, the advisories that they answer, and the versions of this environment."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def audit(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import minimum_versions

    return minimum_versions


@pytest.fixture
def known(audit):
    return audit.Advisories.read(audit.ADVISORIES)


def test_this_environment_and_all_minimums_are_without_a_known_fault(audit, known, capsys):
    code = audit.main(known.looked)
    found = capsys.readouterr()
    assert code == 0, found.err
    assert re.search(r"^keras +>=3\.14 +installed: \d", found.out, re.M)
    for line in (
        "CVE-2025-1550 (fixed in 3.9.0): a configuration imports and calls any function in safe mode",
        f"CVE-2024-10190 of horovod until {known.accepted[1].until}: horovodrun's store",
    ):
        assert f"    {line}" in found.out


def test_an_accepted_advisory_fails_after_its_date_and_not_on_it(audit, known, capsys):
    last = min(one.until for one in known.accepted)
    assert audit.main(last) == 0
    assert audit.main(last + timedelta(days=1)) == 1
    errors = capsys.readouterr().err
    assert f"keras: CVE-2026-12481 was accepted until {last}. Expected: a decision." in errors


def test_advisories_are_looked_up_again_after_half_a_year(audit, known, capsys):
    one = audit.Advisories(known.looked, (), {})
    assert one.problems(known.looked + audit.LOOK_AGAIN) == []
    (problem,) = one.problems(known.looked + audit.LOOK_AGAIN + timedelta(days=1))
    assert f"Received: one of {known.looked}." in problem


def test_an_installed_version_below_its_minimum_is_an_error(audit, known, monkeypatch, capsys):
    monkeypatch.setattr(audit, "_installed", lambda name: Version("3.13.2") if name == "keras" else None)
    assert audit.main(known.looked) == 1
    assert capsys.readouterr().err == (
        "keras: expected 3.14 or newer. Received: 3.13.2. Run: pip install 'keras>=3.14'\n"
    )


def test_a_minimum_below_the_fix_of_an_advisory_is_an_error(audit):
    advisory = audit.Advisory("CVE-1-1", Version("2.0.1"), "runs code")
    for minimum in (Version("2.0"), None):
        (problem,) = audit.Dependency("it", minimum, Version("3"), (advisory,)).problems()
        assert "minimum of 2.0.1 or newer, because of CVE-1-1" in problem
    assert audit.Dependency("it", Version("2.0.1"), Version("3"), (advisory,)).problems() == []


def test_minimums_come_from_both_files_and_all_extras(audit):
    found = audit.declared(ROOT)
    assert {"keras", "cryptography", "tensorflow-cpu", "ray", "setuptools"} <= set(found)
    assert found["keras"] == Version("3.14")
    assert found["grpc-stubs"] is None


def test_every_advisory_has_an_identifier_and_is_about_a_dependency(audit, known):
    assert set(known.fixed) <= set(audit.declared(ROOT))
    for each in (*known.accepted, *(one for found in known.fixed.values() for one in found)):
        assert re.fullmatch(r"CVE-\d{4}-\d{4,}|GHSA(-[0-9a-z]{4}){3}", each.name)
    assert all(one.effect for found in known.fixed.values() for one in found)


def test_the_audit_is_a_part_of_all_checks():
    assert "./scripts/audit" in (SCRIPTS / "test").read_text()
    done = subprocess.run([sys.executable, str(SCRIPTS / "minimum_versions.py")], capture_output=True, text=True)
    assert "advisories of 20" in done.stdout
