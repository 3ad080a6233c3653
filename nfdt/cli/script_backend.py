"""Backend of Keras that a script chooses before its own import of Keras, which is too late in ``nfdt run``."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from nfdt.cli.script import Script
from nfdt.core.host.keras_backend import VARIABLE


def set_backend_of(script: Script, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set KERAS_BACKEND as the first statements of a file do, which name it in text; a module is not read.

    ``os.environ["KERAS_BACKEND"] = "jax"`` and ``os.environ.setdefault("KERAS_BACKEND", "jax")`` are found outside of
    functions and classes.
    """
    if script.is_module:
        return
    try:
        tree = ast.parse(Path(script.name).read_bytes())
    except (OSError, SyntaxError, ValueError):  # the script's own run reports it
        return
    for name, is_default in _settings(tree):
        if not (is_default and environ.get(VARIABLE)):
            environ[VARIABLE] = name


def _settings(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the backends that a file names, and whether an inherited one comes first."""
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Subscript(value=environ, slice=ast.Constant(value=variable))],
                value=ast.Constant(value=str(name)),
            ) if variable == VARIABLE and _is_environ(environ):
                yield name, False
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=environ, attr="setdefault"),
                    args=[ast.Constant(value=variable), ast.Constant(value=str(name))],
                )
            ) if variable == VARIABLE and _is_environ(environ):
                yield name, True


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
