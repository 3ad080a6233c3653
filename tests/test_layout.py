"""Layout of the tests: helpers lie in tests/support, and no test imports a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TEST_MODULE = re.compile(r"(tests\.(.*\.)?)?(test_\w+|conftest)\b")
NAMES_A_TEST = re.compile(r"^\s*(?:from|import) +([\w.]+)", re.MULTILINE)


def imported_modules(source: str) -> set[str]:
    """Return the modules that a file imports; programs in its strings count as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(NAMES_A_TEST.findall(node.value))
    return found


def imported_tests(source: str) -> list[str]:
    return sorted(name for name in imported_modules(source) if TEST_MODULE.match(name))


def is_helper(path: Path) -> bool:
    return not path.name.startswith("test_") and path.name not in ("conftest.py", "__init__.py")


def test_no_file_imports_a_test():
    files = set(TESTS.rglob("*.py")) - {Path(__file__)}  # this file holds examples of forbidden imports
    found = {str(path.relative_to(TESTS)): imported_tests(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_helpers_lie_in_support():
    helpers = {path.relative_to(TESTS) for path in TESTS.rglob("*.py") if is_helper(path)}
    assert {str(path) for path in helpers if path.parts[0] != "support"} == set()


def test_imports_of_tests_are_found_in_code_and_in_strings():
    offences = [
        "from tests.shard.test_store import serve",
        "from tests.jobserver import conftest",
        "import tests.wire.test_channel as channel",
        "def f():\n    from tests.conftest import x",
        "PROGRAM = 'import test_store; test_store.run()'",
        'PROGRAM = """\nimport sys\nfrom tests.wire.test_channel import serve\n"""',
    ]
    assert all(len(imported_tests(source)) >= 1 for source in offences)
    assert imported_tests("from tests.support.scripts import answer") == []
