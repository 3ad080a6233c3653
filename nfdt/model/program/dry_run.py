"""Trial runs of a model's own steps, whose effects are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nfdt.model.backends.contract import StepName, as_tensors, current
from nfdt.model.backends.variables import preserved
from nfdt.model.keras_internals.training import filter_traceback
from nfdt.model.program.optimizer import own_optimizers

_WITHOUT_UPDATES: dict[str, Any] = {
    "apply": lambda *args, **kwargs: None,
    "stateless_apply": lambda optimizer_variables, grads, trainable_variables: (
        trainable_variables,
        optimizer_variables,
    ),
}


@filter_traceback
def trace(model: Any, step: StepName, batch: Any) -> None:
    """Trace a step of a model for a batch of arrays as ``fit`` would; an eager model runs it."""
    current().trace(model, step, as_tensors(batch))


@contextmanager
def replaced_method(obj: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object in the block."""
    attributes = vars(obj)
    hidden = attributes.get(name)
    attributes[name] = method
    try:
        yield
    finally:
        del attributes[name]
        if hidden is not None:
            attributes[name] = hidden


@contextmanager
def without_updates(model: Any) -> Iterator[None]:
    """Disable ``apply`` and ``stateless_apply`` of the model's optimizers in the block; they need no variables."""
    with ExitStack() as undo:
        for optimizer in own_optimizers(model):
            for name, method in _WITHOUT_UPDATES.items():
                undo.enter_context(replaced_method(optimizer, name, method))
        yield


@contextmanager
def without_effects(model: Any) -> Iterator[None]:
    """Run eagerly in the block, then restore the model's variables and reset its metrics."""
    variables = [*model.variables, *(v for optimizer in own_optimizers(model) for v in optimizer.variables)]
    try:
        with preserved(variables), current().without_graphs(), without_updates(model):
            yield
    finally:
        model.reset_metrics()
