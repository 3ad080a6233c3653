"""Trial runs of a model's own steps without their effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nfdt.core.backends.contract import current
from nfdt.core.program.untrained import values_of

_WITHOUT_UPDATES: dict[str, Any] = {
    "apply": lambda *args, **kwargs: None,
    "stateless_apply": lambda optimizer_variables, grads, trainable_variables: (
        trainable_variables,
        optimizer_variables,
    ),
}


@contextmanager
def without_updates(model: Any) -> Iterator[None]:
    """Disable the optimizer's ``apply`` and ``stateless_apply`` in the block; its variables need not exist."""
    attributes = vars(model.optimizer)
    held = {name: attributes[name] for name in _WITHOUT_UPDATES if name in attributes}
    attributes.update(_WITHOUT_UPDATES)
    try:
        yield
    finally:
        for name in _WITHOUT_UPDATES:
            del attributes[name]
        attributes.update(held)


@contextmanager
def without_effects(model: Any) -> Iterator[None]:
    """Run eagerly in the block, then restore the model's variables and reset its metrics."""
    variables = list(model.variables)
    held = values_of(variables)
    try:
        with current().without_graphs(), without_updates(model):
            yield
    finally:
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)
        model.reset_metrics()
