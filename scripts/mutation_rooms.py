"""Mutation testing of the pure rooms: one room after the other, each against its own tests.

mutmut's processes load this module as a pytest plugin, too: the quickest tests run first, as one failure is enough.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutation"
LEAST = 0.9
KILLED = {1: "killed", 3: "killed", -24: "timeout", 24: "timeout", 152: "timeout", 255: "timeout", 36: "timeout"}
"""Exit codes of pytest under a mutant that was noticed; one that never ends is."""

# Files of each room and their tests.
ROOMS: dict[str, tuple[list[str], list[str]]] = {
    "consistency": (
        [f"nfdt/consistency/{name}.py" for name in ("__init__", "base", "policies")],
        ["tests/consistency", "tests/contract/test_consistency_contract.py"],
    ),
    "codecs": (
        ["nfdt/codecs/*.py"],
        ["tests/codecs", "tests/contract/test_codec_contract.py"],
    ),
    "schedulers": (
        ["nfdt/schedulers/*.py"],
        ["tests/schedulers"],
    ),
    "update_rules": (
        ["nfdt/update_rules/*.py"],
        ["tests/update_rules", "tests/contract/test_update_rule_contract.py", "tests/golden/test_ddc_vector.py"],
    ),
    "coordinator": (
        ["nfdt/coordinator/*.py"],
        ["tests/coordinator"],
    ),
}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Sort the tests of a mutant by what they took before (mutmut has measured it)."""
    measured = Path("mutmut-stats.json")
    if measured.exists():
        took = json.loads(measured.read_text())["duration_by_test"]
        items.sort(key=lambda item: took.get(item.nodeid, 0.0))


class Mutable(ast.NodeTransformer):
    """Rewrite a program so that each of its mutants is meaningful."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Write ``x = property(x)`` below a property: mutmut leaves decorated functions alone."""
        self.generic_visit(node)
        body: list[ast.stmt] = []
        for statement in node.body:
            body.append(statement)
            if isinstance(statement, ast.FunctionDef):
                kept = [decorator for decorator in statement.decorator_list if ast.unparse(decorator) != "property"]
                if kept != statement.decorator_list:
                    statement.decorator_list = kept
                    body += ast.parse(f"{statement.name} = property({statement.name})").body
        node.body = body
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave ``zip(strict=...)`` out: an assertion that no correct caller can observe."""
        self.generic_visit(node)
        if ast.unparse(node.func) == "zip":
            node.keywords = []
        return node


def prepare(room: str) -> Path:
    """A fresh folder in which mutmut finds the room's sources, tests and configuration."""
    folder = BUILD / room
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "nfdt", folder / "nfdt", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(ROOT / "tests")
    files, tests = ROOMS[room]
    for path in (path for pattern in files for path in folder.glob(pattern)):
        tree = Mutable().visit(ast.parse(path.read_text(encoding="utf-8")))
        path.write_text(ast.unparse(tree) + "\n", encoding="utf-8")
    options = {
        "source_paths": ["nfdt"],
        "only_mutate": files,
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-k", "not tensorflow"],  # its threads do not outlive a fork
        "timeout_multiplier": 5,
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    shared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text("\n".join([shared, "[tool.mutmut]", *lines, ""]), encoding="utf-8")
    return folder


def test(folder: Path, jobs: int) -> dict[str, Counter[str]]:
    """Try every mutant of the folder; what became of them, by file."""
    environment = {
        **os.environ,
        "CI": "1",  # examples follow from the tests
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTEST_ADDOPTS": f"-p {Path(__file__).stem} -p no:cacheprovider --hypothesis-profile=mutation",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(jobs)]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    found = {}
    for path in sorted(folder.glob("mutants/nfdt/*/*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"].values()
        if codes:
            found[path.name.removesuffix(".meta")] = Counter(KILLED.get(code, "lived") for code in codes)
    return found


def share(outcomes: Counter[str]) -> float:
    """Return the share of mutants that a test noticed."""
    return 1 - outcomes["lived"] / outcomes.total()


def main() -> int:
    """Run the rooms that are named; 1 where one of them is under 90 %."""
    parser = argparse.ArgumentParser(prog="scripts/mutation")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; none: all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants tried at once")
    options = parser.parse_args()
    if unknown := set(options.rooms) - set(ROOMS):
        parser.error(f"expected rooms of {', '.join(ROOMS)}. Received: {', '.join(sorted(unknown))}.")
    table: dict[str, Counter[str]] = {}
    rooms: dict[str, Counter[str]] = {}
    for room in options.rooms or ROOMS:
        files = test(prepare(room), options.jobs)
        rooms[room] = sum(files.values(), Counter())
        table |= {f"{room}/{name}": outcomes for name, outcomes in files.items()} | {f"**{room}**": rooms[room]}
    print("\n| file | mutants | killed | timed out | lived | noticed |\n|---|---|---|---|---|---|")
    for name, outcomes in table.items():
        counts = (outcomes.total(), *(outcomes[kind] for kind in ("killed", "timeout", "lived")))
        print(f"| {name} | {' | '.join(map(str, counts))} | {share(outcomes):.1%} |")
    print(f"\nThose that lived: (cd {BUILD.relative_to(ROOT)}/ROOM && ../../../.venv/bin/mutmut results)")
    return int(any(share(outcomes) < LEAST for outcomes in rooms.values()))


if __name__ == "__main__":
    sys.exit(main())
