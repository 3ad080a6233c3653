"""A Keras model's mutable state, read and written as the State that the system transports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces, give_back
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.model.backends.variables import Values, views_of
from nfdt.model.keras_internals.models import has_no_rows
from nfdt.model.keras_internals.training import raw_learning_rate
from nfdt.model.program.local_optimizers import create_variables, learning_rates, state_variables
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import NO_WEIGHTS, State, dump_state_parts
from nfdt.model.training.metrics import ModelMetrics
from nfdt_client.outside import Outside


class ModelState:
    """Weights, optimizer variables and untrained variables of one model object; reads and writes in place.

    Tables that are on the shards only are left out.

    The constructor fixes the set of trained variables. A later change of ``layer.trainable`` has no effect, as in
    Keras, whose traced step keeps its variables.

    Args:
        model: A built and compiled Keras model.
        manifest: Its program; None: its only optimizer steps on shards.
        outside: What the program has besides the model; default: nothing.

    Attributes:
        outside: As given.
    """

    def __init__(self, model: Any, manifest: Manifest | None = None, outside: Outside | None = None) -> None:
        local = manifest.local_optimizers if manifest is not None else None
        create_variables(model, local)
        self._model, self._local = model, local is not None
        self._trainable = [variable for variable in model.trainable_variables if not has_no_rows(variable)]
        self._untrained = state_variables(model, manifest)
        self.outside = outside or Outside()
        self._local_rates = learning_rates(model, local)
        self._metrics, self._counted = ModelMetrics(model), b""
        self._known: dict[str, Values] = {}
        self._layout = ParameterLayout.of([(v.path, tuple(v.shape)) for v in self._trainable])

    @classmethod
    def of(cls, model: Any, manifest: Manifest | None, outside: Outside | None = None) -> ModelState:
        """Return the state of a model; ``manifest`` is that of its program, None if unknown.

        Raises:
            UsageError: the model's trainable variables have other shapes than the manifest's.
        """
        if manifest is None:
            return cls(model)
        layout = manifest.layout
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        if [slot.shape for slot in layout.slots] != shapes:
            raise UsageError(
                f"The model is not the one that was trained. Expected trainable variables of the shapes "
                f"{[slot.shape for slot in layout.slots]}. Received: {shapes}."
            )
        return cls(model, manifest, outside)

    def mark_known(self) -> None:
        """Record that the cluster has the present state."""
        self._known = {group: Values(variables) for group, variables in self._groups().items()}

    def forget_known(self) -> None:
        """Free what :meth:`mark_known` has recorded."""
        self._known = {}

    def changed_groups(self) -> set[str]:
        """Return those of "weights", "optimizer" and "untrained" that have changed since :meth:`mark_known`.

        The learning rate, and what is outside of the model, do not count.
        """
        changed = {group: known.changed() for group, known in self._known.items()}
        for index in self._learning_rate_index() if changed else ():
            changed["optimizer"][index] = False
        return {group for group, found in changed.items() if any(found)}

    def dump(self, groups: Collection[str]) -> list[bytes | memoryview]:
        """Return the current weights, and the other groups as asked for, as the parts of an artifact.

        They share memory with the model where the backend allows it.
        """
        own = self._groups()
        others = [*views_of(own["untrained"]), *self.outside.read()] if "untrained" in groups else []
        slots = {i: variable for i, variable in enumerate(own["optimizer"]) if not has_no_rows(variable)}
        optimizer = dict(zip(slots, views_of(slots.values()), strict=True)) if "optimizer" in groups else {}
        weights = Pieces.flat(views_of(own["weights"]))
        return dump_state_parts(weights, optimizer, dict(enumerate(others)))

    def _groups(self) -> dict[str, list[Any]]:
        return {"weights": self._trainable, "optimizer": self._optimizer_variables(), "untrained": self._untrained}

    def write(self, state: State, *, keep_learning_rate: bool = False) -> None:
        """Write a state into the model; variables that it does not hold are unchanged.

        Args:
            state: The new state.
            keep_learning_rate: Leave the optimizers' learning rates unchanged.
        """
        # Local learning rates are a part of the untrained state, which is assigned whole: keep them aside.
        rates = self.local_learning_rates
        if state.weights is not NO_WEIGHTS:
            _assign(self._trainable, dict(enumerate(self._layout.unflatten(state.weights))))
        skip = self._learning_rate_index() if keep_learning_rate else set()
        _assign(self._optimizer_variables(), {i: a for i, a in state.optimizer.items() if i not in skip})
        _assign(self._untrained, state.untrained)
        if state.untrained:
            self.outside.assign_new([a for i, a in sorted(state.untrained.items()) if i >= len(self._untrained)])
        if keep_learning_rate:
            _assign(self._local_rates, dict(enumerate(rates)))
        self.show_metrics(state.metrics)

    def metric_logs(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logs of the metrics that were written; ``logs`` unchanged if there are none."""
        return self._metrics.logs(self._counted, logs)

    def show_metrics(self, counted: bytes) -> None:
        """Load metrics into the model; a model compiled with other metrics, or without any, keeps its own."""
        self._counted = counted if self._model.compiled else b""
        if self._counted:
            try:
                self._metrics.load(self._counted)
            except ShapeMismatch:
                self._counted = b""

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the optimizer on the shards; None if there is none, or a schedule decides it."""
        variable = self._learning_rate_variable()
        return None if variable is None else float(np.asarray(variable))

    @property
    def local_learning_rates(self) -> list[float]:
        """Learning rates of the optimizers that step on workers, of those without a schedule."""
        return [float(np.asarray(rate)) for rate in self._local_rates]

    def _optimizer(self) -> Any:
        optimizer = None if self._local else self._model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    def _optimizer_variables(self) -> list[Any]:
        optimizer = self._optimizer()
        return list(optimizer.variables) if optimizer is not None else []

    def _learning_rate_index(self) -> set[int]:
        rate = self._learning_rate_variable()
        return {i for i, v in enumerate(self._optimizer_variables()) if v is rate}

    def _learning_rate_variable(self) -> Any:
        variable = raw_learning_rate(self._optimizer())
        return variable if hasattr(variable, "assign") else None


def _assign(variables: Sequence[Any], arrays: Mapping[int, Any]) -> None:
    for index, array in arrays.items():
        if index < len(variables):
            variables[index].assign(array)
            give_back(array)
