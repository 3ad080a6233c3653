"""Manifest: the same JSON in and out, and no other module that uses its keys."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nfdt.core.errors import ProtocolError
from nfdt.model.program.manifest import Manifest, ModelEntries, OptimizerEntries

ROOT = Path(__file__).parents[2]
HOME = ROOT / "nfdt" / "model" / "program" / "manifest.py"
GROUPS = (OptimizerEntries, ModelEntries)
KEYS = {
    "kind",
    "model",
    "compile",
    "by_value",
    "assets",
    "state",
    "code",
    *(name for group in GROUPS for name in group.__annotations__),
}
HOLDERS = ("manifest", "program", "entries")
SOURCES = sorted(
    path for room in ("nfdt", "client/nfdt_client", "hfdt") for path in (ROOT / room).rglob("*.py") if path != HOME
)


def test_bytes_are_those_of_the_object():
    data = b'{"kind": "config", "layout": [["w", [2, 3]]], "divisible": true, "more": [1.5, null]}'
    assert Manifest.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("data", [b"\xff", b"{", b"[1]", b"3", b"[" * 100_000])
def test_bytes_that_are_no_object_are_refused(data):
    with pytest.raises(ProtocolError, match="Program: expected"):
        Manifest.from_bytes(data)


def test_a_missing_entry_is_named_when_it_is_read():
    with pytest.raises(KeyError, match="layout"):
        _ = Manifest({}).layout


def test_a_manifest_of_remote_origin_may_lack_what_is_optional():
    empty = Manifest({})
    assert (empty.tables, empty.untrained_rules, empty.optimizer_owners, empty.optimizer_class) == ([], [], None, None)
    assert not empty.carries_code
    assert Manifest({"code": "x"}).carries_code
    assert Manifest({"by_value": "x"}).carries_code
    assert Manifest({"kind": "code"}).carries_code


def test_another_optimizer_leaves_the_rest_as_it_is():
    before = Manifest({"layout": [["w", [2]]], "optimizer": {"class_name": "Adam"}, "loss_scale": {"a": 1}})
    after = before.with_optimizer({"class_name": "SGD"}, [])
    assert (after.optimizer_class, after.loss_scale, after.layout) == ("SGD", None, before.layout)
    assert before.optimizer_class == "Adam"
    assert json.loads(after.to_bytes())["elementwise"] is True


def look_ups(tree: ast.AST) -> Iterator[str]:
    """Return keys of a manifest that a module reads from objects with a manifest's usual names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = node.func.value, node.args[0]
            if node.func.attr not in ("get", "pop", "setdefault"):
                continue
        else:
            continue
        name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
        if name.lstrip("_").endswith(HOLDERS) and isinstance(key, ast.Constant) and key.value in KEYS:
            yield str(key.value)


def literals(tree: ast.AST) -> Iterator[str]:
    """Return dictionaries that look like those of a manifest."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            named = {key.value for key in node.keys if isinstance(key, ast.Constant)} & KEYS
            if len(named) > 3:
                yield ", ".join(sorted(named))


def offences(source: str) -> list[str]:
    """Return the keys of a manifest that a module other than the manifest's names."""
    tree = ast.parse(source)
    return [*look_ups(tree), *literals(tree)]


def test_no_other_module_knows_the_keys():
    found = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: keys for path, keys in found.items() if keys} == {}


@pytest.mark.parametrize(
    "source",
    [
        'manifest["layout"]',
        'self._manifest["state"]',
        'result.manifest.get("untrained")',
        'program["optimizer"]["config"]',
        '(manifest.get("optimizer") or {}).get("config")',
        '{"layout": 1, "optimizer": 2, "tables": 3, "state": 4}',
    ],
)
def test_a_look_up_elsewhere_is_found(source):
    assert offences(source) != []
