"""Private names of Keras, which only one module uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from nfdt.model.keras_internals import models as keras_models
from nfdt.model.keras_internals import training as keras_training

ROOT = Path(__file__).parents[2]
HOME = ROOT / "nfdt" / "model" / "keras_internals"
SOURCES = sorted(
    path
    for room in ("nfdt", "client/nfdt_client", "hfdt")
    for path in (ROOT / room).rglob("*.py")
    if path.parent != HOME and "_pb2" not in path.name
)
OWN = ("self", "cls", "other", "sys", "os", "hashlib", "mpi_ops", "gloo_run")
OF_PYTHON = {"_replace", "_asdict", "_fields", "_exit"}
OBJECTS = (
    *(keras.Model(name="m"), keras.Sequential(), keras.layers.Lambda(abs), keras.optimizers.Adam()),
    *(keras.metrics.Mean(), keras.callbacks.CallbackList(), keras.Variable(0.0)),
)
OF_KERAS = {
    name for each in OBJECTS for name in dir(each) if name.startswith("_") and not name.startswith(("__", "_abc"))
}
# Names so common that classes of this project have them as well.
COMMON = {"_lock", "_name", "_path", "_layers", "_metrics", "_model", "_variables", "_call", "_tracker", "_dtype"}


def private_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        yield from (name for name in names if name.startswith("keras.src"))


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in OF_PYTHON


def private_names(tree: ast.AST) -> Iterator[str]:
    """Return private attributes of other objects, and private names of Keras' methods in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            held = node.value
            base = held.func if isinstance(held, ast.Call) else held
            if not (isinstance(base, ast.Name) and base.id in (*OWN, "super")):
                yield node.attr
            elif node.attr in OF_KERAS - COMMON and _is_optimizer(tree, node):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in OF_KERAS - COMMON:
            yield str(node.value)


def _is_optimizer(tree: ast.AST, node: ast.Attribute) -> bool:
    """Return whether the attribute is read in a class with a base class of Keras."""
    return any(
        isinstance(each, ast.ClassDef)
        and any(ast.unparse(base).startswith("keras.") for base in each.bases)
        and any(child is node for child in ast.walk(each))
        and not _defines(each, node.attr)
        for each in ast.walk(tree)
    )


def _defines(kind: ast.ClassDef, name: str) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in ast.walk(kind)) or any(
        isinstance(each, ast.Attribute) and each.attr == name and isinstance(each.ctx, ast.Store)
        for each in ast.walk(kind)
    )


def offences(source: str) -> list[str]:
    """Return the private modules and names of Keras that a module uses."""
    tree = ast.parse(source)
    return [*private_modules(tree), *private_names(tree)]


def test_private_names_of_keras_stay_in_their_module():
    found = {str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from keras.src.models.functional import Functional",
        "import keras.src.saving",
        "model._flatten_layers()",
        "get(model)._initial_epoch",
        'getattr(optimizer, "_learning_rate", None)',
        "class Recording(keras.optimizers.Optimizer):\n    def f(self):\n        self._var_key(1)",
    ],
)
def test_a_private_name_elsewhere_is_found(source):
    assert offences(source) != []


def test_every_private_part_documents_what_it_relies_on():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HOME.glob("*.py"))]
    assert len(trees) > 1
    defined = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [node.name for node in defined if not ast.get_docstring(node)] == []


def test_the_methods_that_are_replaced_by_name_exist():
    optimizer = keras.optimizers.SGD()
    names = (keras_training.RATE_METHOD, keras_training.CLIP_METHOD)
    names += (keras_training.UPDATE_METHOD, keras_training.DECAY_METHOD)
    assert all(callable(getattr(optimizer, name)) for name in names)
    assert callable(getattr(keras.layers.Lambda, keras_models.LAMBDA_METHOD))
