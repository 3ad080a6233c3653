"""``scripts/audit``: minimum versions, the advisories that they answer, and the versions of this environment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
DEADLINE_S = 240


@pytest.fixture
def audit(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    import minimum_versions

    return minimum_versions


def test_this_environment_and_all_minimums_are_without_a_known_fault():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "minimum_versions.py")], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^keras +>=3\.14 +installed: \d", done.stdout, re.M)
    assert (
        "    CVE-2025-1550 (fixed in 3.9.0): a configuration imports and calls any function in safe mode\n"
        in done.stdout
    )


def test_an_installed_version_below_its_minimum_is_an_error(audit, monkeypatch, capsys):
    monkeypatch.setattr(audit, "_installed", lambda name: Version("3.13.2") if name == "keras" else None)
    assert audit.main() == 1
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


def test_every_advisory_has_an_identifier_and_is_about_a_dependency(audit):
    advisories = audit.published(SCRIPTS / "advisories.toml")
    assert set(advisories) <= set(audit.declared(ROOT))
    for each in (one for found in advisories.values() for one in found):
        assert re.fullmatch(r"CVE-\d{4}-\d{4,}|GHSA(-[0-9a-z]{4}){3}", each.name)
        assert each.effect
