"""Tests of a file that call ``fit``, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def find_fitting_tests(source: str) -> frozenset[str]:
    """Return the names of the tests that call a method ``fit``, or a function of the same file that does.

    Functions of the file count by name, be they methods or not. Methods of base classes in other files do not count.

    Args:
        source: Text of a test file.
    """
    functions: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, set()).update(_called(node))
    fitting = {"fit"}
    while more := {name for name, called in functions.items() if called & fitting} - fitting:
        fitting |= more
    return frozenset(name for name in fitting if name.startswith("test"))


def _called(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names that a function calls: ``f`` of ``f()``, ``self.f()`` and ``x.fit()``."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="fit")):
                yield "fit"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name) | ast.Name(id=name)):
                yield name
