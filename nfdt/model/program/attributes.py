"""Python values that an eager model reads at every step, whereas a graph keeps those of its first step.

Attributes of layers and losses are sent as JSON, which needs no code. Values of globals and closures are only watched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError
from nfdt.model.backends.contract import current
from nfdt.model.keras_internals.models import SET_LATER, flatten_layers
from nfdt.model.program.source_watch import globals_of

NAME = "attributes"
_PLAIN = (bool, int, float, str, type(None))


def runs_eagerly(model: Any) -> bool:
    """Whether Python code of the model runs at every step."""
    return bool(model.run_eagerly) or current().is_eager


class Attributes:
    """Plain attributes of a model's layers and losses, as one variable.

    The value is a JSON object as bytes, shape ``(n,)`` uint8: the attributes that the script has changed since the
    program was made, by the number of their object and their name. n = 0: none.

    Args:
        model: The model, in the script or on a worker.

    Attributes:
        path: Name in the program.
    """

    path = NAME

    def __init__(self, model: Any) -> None:
        losses = [
            loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if isinstance(loss, keras.losses.Loss)
        ]
        self._objects = [*flatten_layers(model), *losses]
        self._first = dict(self._present())
        self._given: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.numpy().shape

    def numpy(self) -> Array:
        """Return the value."""
        for key, value in self._present():
            if key in self._given or not _same(value, self._first.get(key, _MISSING)):
                self._given[key] = value
        return np.frombuffer(json.dumps(self._given).encode() if self._given else b"", np.uint8)

    def assign(self, value: Array) -> None:
        """Set the attributes whose values are new; the others keep what the steps have assigned.

        Raises:
            ProtocolError: the value has another form.
        """
        try:
            given = json.loads(value.tobytes()) if value.size else {}
            for key, one in given.items():
                number, _, name = key.partition(".")
                if not _same(one, self._given.get(key, _MISSING)) and isinstance(one, _PLAIN):
                    setattr(self._objects[int(number)], name, one)
        except (ValueError, IndexError, AttributeError) as error:
            raise ProtocolError(f"Attributes: expected a JSON object of plain values. Received: {error}.") from None
        self._given = given

    def _present(self) -> Iterator[tuple[str, Any]]:
        for number, obj in enumerate(self._objects):
            for name, value in list(vars(obj).items()):
                if type(value) in _PLAIN and name not in _of_keras():
                    yield f"{number}.{name}", value


class CodeValues:
    """Watches plain values in globals and closures of functions, which cannot be sent again.

    Args:
        code: Functions and classes of the program.

    Attributes:
        path: Names of what has changed since, for messages.
    """

    def __init__(self, code: Iterable[Any]) -> None:
        self._functions = [one for one in code if isinstance(one, FunctionType)]
        self._first = self._present()
        self.path = ""

    def numpy(self) -> Array:
        """Return 0 until a value has changed, then 1."""
        now = self._present()
        changed = [key for key, value in now.items() if not _same(value, self._first.get(key, value))]
        self.path = ", ".join(f"{name!r} in {function}()" for function, name in changed)
        return np.asarray(int(bool(changed)))

    def _present(self) -> dict[tuple[str, str], Any]:
        return {
            (function.__name__, name): value
            for function in self._functions
            for name, value in globals_of(function).items()
            if type(value) in _PLAIN
        }


_MISSING = object()


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


@cache
def _of_keras() -> frozenset[str]:
    """Return the names of attributes that Keras sets on every layer and model."""
    model = keras.Sequential()
    model.compile()
    return frozenset([*vars(model), *vars(keras.Layer()), *vars(keras.losses.Loss()), *SET_LATER])
