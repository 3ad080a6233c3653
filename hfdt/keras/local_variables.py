"""Variables that each rank keeps for itself: their gradients are not reduced, their values not sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from nfdt.core.errors import UsageError


class LocalVariables:
    """Set of variables by identity. A layer in it stands for the variables that it has when the set is read."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def add_variables(self, given: Any) -> None:
        """Add one variable or several.

        Raises:
            UsageError: something else is among them.
        """
        self._variables += _members(given, (keras.Variable, tf.Variable), "local variables", "Keras variables")

    def add_layers(self, given: Any) -> None:
        """Add one layer or several; they need not be built.

        Raises:
            UsageError: something else is among them.
        """
        self._layers += _members(given, keras.Layer, "local_layers", "Keras layers")

    def __bool__(self) -> bool:
        return bool(self._variables or self._layers)

    def __contains__(self, variable: Any) -> bool:
        layers = [found for layer in self._layers for found in layer.variables]
        return any(variable is found for found in [*self._variables, *layers])


def _members(given: Any, kind: Any, name: str, expected: str) -> list[Any]:
    if given is None or isinstance(given, kind):
        found = [] if given is None else [given]
    else:
        found = list(given) if isinstance(given, Iterable) else [given]
    wrong = [member for member in found if not isinstance(member, kind)]
    if wrong:
        raise UsageError(f"Expected {name} to be {expected}. Received: {wrong[0]!r}. Leave it out.")
    return found
