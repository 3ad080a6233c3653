"""Members of the contract of a backend: every backend has them, with the parameters that callers pass."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nfdt.core.host.keras_backend import TRAINING
from nfdt.model.backends import contract
from nfdt.model.backends.contract import KerasBackend

CONTRACT = {
    "name": "attribute",
    "version": "attribute",
    "is_eager": "attribute",
    "traces_steps": "attribute",
    "has_rows": "attribute",
    "has_meshes": "attribute",
    "copies_models": "attribute",
    "gradient_step": "each",
    "call": "each",
    "run_step": "each",
    "trace": "each",
    "to_tensor": "each",
    "full_precision": "each",
    "use_rows": "default",
    "lookups": "default",
    "looked_up_ahead": "default",
    "is_of_rows": "default",
    "local_step": "each",
    "lanes": "default",
    "batched_step": "default",
    "reduce": "default",
    "without_graphs": "default",
    "seeded": "default",
    "seed_worker": "default",
    "limit_threads": "default",
    "share_gpus": "default",
    "emulate_devices": "default",
    "devices": "default",
    "distributed": "default",
    "on": "default",
    "settle": "default",
}
"""Members: attributes, what each backend must define, and what has a default."""


def source_of(name: str) -> ast.Module:
    """Return the module of a backend as text: it need not be installed."""
    return ast.parse(Path(contract.__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))


def backend_class(name: str) -> ast.ClassDef:
    (found,) = (
        node
        for node in source_of(name).body
        if isinstance(node, ast.ClassDef) and "KerasBackend" in map(ast.unparse, node.bases)
    )
    return found


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def test_the_contract_has_these_members():
    own = [name for name in {**vars(KerasBackend), **KerasBackend.__annotations__} if not name.startswith("_")]
    assert set(own) == set(CONTRACT)
    assert {name for name, kind in CONTRACT.items() if kind == "each"} == KerasBackend.__abstractmethods__


@pytest.mark.parametrize("name", TRAINING)
def test_every_backend_defines_what_has_no_default(name):
    """Read from the source, so that it holds for backends that are not installed here."""
    defined = {node.name for node in backend_class(name).body if isinstance(node, ast.FunctionDef)}
    assigned = {ast.unparse(node.targets[0]) for node in backend_class(name).body if isinstance(node, ast.Assign)}
    assert {member for member, kind in CONTRACT.items() if kind == "each"} <= defined
    assert {"name", "version"} <= assigned
    assert defined | assigned <= set(CONTRACT)


@pytest.mark.parametrize("name", TRAINING)
def test_members_of_a_backend_take_the_arguments_of_the_contract(name):
    for node in backend_class(name).body:
        if isinstance(node, ast.FunctionDef) and callable(member := getattr(KerasBackend, node.name)):
            assert parameters(node) == list(inspect.signature(member).parameters), node.name


@pytest.mark.parametrize("name", TRAINING)
def test_the_module_of_a_backend_has_one_object(name):
    (made,) = (
        ast.unparse(node.value)
        for node in source_of(name).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BACKEND"
    )
    assert made == f"{backend_class(name).name}()"


def test_the_loaded_backend_is_the_one_of_keras():
    import keras

    assert isinstance(contract.current(), KerasBackend)
    assert contract.current().name == keras.backend.backend()


def test_no_other_module_compares_the_name_of_the_loaded_backend():
    """Code that differs by backend belongs to the backend's object."""
    core = Path(contract.__file__).parents[1]
    files = [*core.joinpath("program").rglob("*.py"), *core.joinpath("training").rglob("*.py")]
    assert [file.name for file in files if "backend.backend()" in file.read_text(encoding="utf-8")] == []


def test_workers_on_pytorch_drop_out_different_units(monkeypatch):
    torch, seen = ModuleType("torch"), []
    torch.__version__, torch.manual_seed = "for the test", seen.append
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "nfdt.model.backends.torch", raising=False)
    backend = importlib.import_module("nfdt.model.backends.torch").BACKEND
    monkeypatch.delitem(sys.modules, "nfdt.model.backends.torch")
    for worker in range(2):
        backend.seed_worker(worker)
    assert seen == [0, 1]
