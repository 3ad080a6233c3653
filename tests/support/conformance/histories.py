"""Record of all ``fit`` calls of a script: run as ``sitecustomize`` it writes their histories to a JSON file.

It also seeds the generators that models take their first weights from, so that two runs begin alike.
Its folder is in PYTHONPATH, and ``CONFORMANCE_OUT`` names the file. It imports nothing
of NFDT, as it also runs in the plain script.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

WATCHED = "keras.src.callbacks.history"


class HistoryFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder that changes Keras' History when its module is imported."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _seed()
        out = self._out

        def on_train_end(history: Any, logs: Any = None) -> None:
            logs = [[name, [_plain(value) for value in values]] for name, values in history.history.items()]
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps({"epochs": [int(epoch) for epoch in history.epoch], "logs": logs}) + "\n")

        module.History.on_train_end = on_train_end  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    """Return a value of a history as numbers and lists of numbers; what is no number, as its text."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float) else str(value)


def _seed() -> None:
    """Seed Python, NumPy and TensorFlow, where they are imported; Keras takes its seeds from Python."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(0)


if out := os.environ.get("CONFORMANCE_OUT"):
    sys.meta_path.insert(0, HistoryFinder(out))
