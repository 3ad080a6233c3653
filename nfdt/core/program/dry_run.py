"""Trial runs of a model's own steps without their effects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from nfdt.core.program.untrained import values_of


@contextmanager
def without_updates(model: Any) -> Iterator[None]:
    """Disable the optimizer's ``apply`` in the block; its variables need not exist."""
    attributes = vars(model.optimizer)
    hidden = attributes.get("apply")
    attributes["apply"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del attributes["apply"]
        if hidden is not None:
            attributes["apply"] = hidden


@contextmanager
def without_effects(model: Any) -> Iterator[None]:
    """Run eagerly in the block, then restore the model's variables and reset its metrics."""
    variables = list(model.variables)
    held = values_of(variables)
    eager = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with without_updates(model):
            yield
    finally:
        tf.config.run_functions_eagerly(eager)
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)
        model.reset_metrics()
