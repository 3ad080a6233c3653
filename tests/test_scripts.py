"""Shell scripts are parsed, commands in ``scripts`` explain themselves, and no tracked file has marks of a conflict."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.scripts import DEADLINE_S

ROOT = Path(__file__).parents[1]
SHEBANG = re.compile(rb"#!.*\b(ba|da)?sh\n")
CONFLICT = re.compile(rb"^(<{7}|\|{7}|>{7})( |\r?$)", re.MULTILINE)
COMMANDS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=DEADLINE_S)
    paths = (ROOT / name.decode() for name in listed.stdout.split(b"\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]  # as it is here: some may be deleted


def shell_scripts() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".sh" or SHEBANG.match(path.read_bytes()[:80])]


def conflicts(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths if CONFLICT.search(path.read_bytes())]


def test_shell_scripts_are_parsed_by_bash():
    scripts = shell_scripts()
    assert {ROOT / ".ci" / "run", *(ROOT / "scripts" / name for name in COMMANDS)} <= set(scripts)
    parsed = {path: subprocess.run(["bash", "-n", path], capture_output=True, text=True) for path in scripts}
    assert {str(path): done.stderr for path, done in parsed.items() if done.returncode or done.stderr} == {}


def test_no_tracked_file_has_marks_of_a_conflict():
    assert conflicts(tracked()) == []


def test_marks_of_a_conflict_are_found(tmp_path):
    ours, theirs, base = "<" * 7, ">" * 7, "|" * 7
    texts = {
        "left": f"a\n{ours} HEAD\nb\n",
        "right": f"b\n{theirs} 926def3 (Describe)\n",
        "base": f"{base}\r\nb\n",
        "heading": "Title\n=======\n",
        "inside": f"say {ours} HEAD\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = conflicts([tmp_path / name for name in texts])
    assert [Path(name).name for name in found] == ["left", "right", "base"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself_before_it_installs_anything(tmp_path, name):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    before = set(tmp_path.rglob("*"))
    done = subprocess.run(
        [tmp_path / "scripts" / name, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"scripts/{name}")
    assert set(tmp_path.rglob("*")) == before
