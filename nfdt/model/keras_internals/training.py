"""Private parts of Keras 3 in training: losses, seeds, optimizers, metrics and callbacks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

# loss: Loss.__call__ looks reduce_weighted_values up in this module; apply_mask makes weights of a mask.
from keras.src.losses import loss as loss_module

# Decorator that removes frames of Keras from tracebacks, as fit() does.
from keras.src.utils.traceback_utils import filter_traceback

__all__ = ["filter_traceback"]

RATE_METHOD = "_get_current_learning_rate"
"""Method of an optimizer through which schedules, functions and numbers all pass when it steps."""

CLIP_METHOD = "_clip_gradients"
"""Method of an optimizer that clips all gradients at once, before anything else is done with them."""

UPDATE_METHOD = "_backend_update_step"
"""Method of an optimizer that moves the variables; it gets gradients, variables and the learning rate."""

DECAY_METHOD = "_apply_weight_decay"
"""Method of an optimizer that applies decoupled weight decay to all variables, before they are moved."""

TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers."
"""Prefix of the modules in which Keras on PyTorch defines subclasses of its optimizers, under the same names."""


# ---- losses

ReductionObserver = Callable[..., Any]
"""Function of a reduced loss, the shape of what was reduced, its weights, its mask (or None), and its reduction."""

_OBSERVER: ContextVar[ReductionObserver | None] = ContextVar("reduction_observer", default=None)


def compiled_loss(model: Any) -> Any:
    """Return the object that computes the losses of ``compile``, by its method ``call``; None without a loss."""
    return getattr(model, "_compile_loss", None)


@contextmanager
def observed_reductions(observer: ReductionObserver) -> Iterator[None]:
    """Pass each loss that is reduced in the block, in this thread, to ``observer``, whose result replaces it.

    Relies on ``Loss.__call__``, which looks ``reduce_weighted_values`` up in its module; it is wrapped once for all.
    """
    if not hasattr(loss_module.reduce_weighted_values, "__wrapped__"):
        loss_module.reduce_weighted_values = _observed(loss_module.reduce_weighted_values)
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def _observed(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``reduce_weighted_values`` with its result passed through the observer of :func:`observed_reductions`."""

    @functools.wraps(reduce)
    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        result = reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        observer = _OBSERVER.get()
        if observer is None:
            return result
        shape = values.shape if hasattr(values, "shape") else keras.ops.convert_to_tensor(values).shape
        return observer(result, shape, sample_weight, mask, reduction)

    return reduced


def sum_of_weights(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    """Return the sum by which ``mean_with_sample_weight`` divides, with ``sample_weight``, ``mask`` or both."""
    # A copy, because Keras multiplies PyTorch's tensors in place, and the backward pass needs what the loss has used.
    given = None if sample_weight is None else keras.ops.copy(keras.ops.convert_to_tensor(sample_weight, dtype=dtype))
    return keras.ops.sum(loss_module.apply_mask(given, mask, dtype=dtype, reduction=reduction))


# ---- forward passes


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy in the block, and restore them."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and Keras in the block, and restore them: Keras' attribute ``global_seed_generator``."""
    from keras.src.backend.common import global_state

    name = "global_seed_generator"
    held = global_state.get_global_attribute(name)
    with seeded_globals(seed):
        global_state.set_global_attribute(name, keras.random.SeedGenerator(seed))
        try:
            yield
        finally:
            global_state.set_global_attribute(name, held)


@contextmanager
def tensorflow_seeded(seed: int) -> Iterator[None]:
    """Seed TensorFlow in the block, and restore its generator: relies on ``_seed`` and ``_rng`` of its context."""
    from tensorflow.python.eager.context import context

    eager = context()
    held = {key: vars(eager).pop(key) for key in ("_seed", "_rng") if key in vars(eager)}
    eager._set_global_seed(seed)
    try:
        yield
    finally:
        del eager._seed, eager._rng
        vars(eager).update(held)


# ---- optimizers


def optimized_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for: ``_trainable_variables`` is set by ``build``."""
    return list(optimizer._trainable_variables)


def public_class(optimizer: Any) -> type:
    """Return the class of an optimizer, or that from which Keras on PyTorch has made it: see ``TORCH_OPTIMIZERS``."""
    classes = type(optimizer).__mro__
    return next(cls for cls in classes if not f"{cls.__module__}.".startswith(TORCH_OPTIMIZERS))


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Return whether decay applies: ``exclude_from_weight_decay`` affects only ``_use_weight_decay``."""
    return bool(optimizer._use_weight_decay(variable))


def set_weight_decay_use(optimizer: Any, variables: Sequence[Any], uses: Sequence[Any]) -> None:
    """Set for each variable whether decay applies: ``apply`` calls ``_use_weight_decay`` of the instance."""
    key = optimizer._var_key
    known = {key(variable): bool(use) for variable, use in zip(variables, uses, strict=True)}
    object.__setattr__(optimizer, "_use_weight_decay", lambda variable: known[key(variable)])


def variable_key(optimizer: Any, variable: Any) -> Any:
    """Return the key of a variable: ``_var_key`` is the same for all of its aliases."""
    return optimizer._var_key(variable)


def raw_learning_rate(optimizer: Any) -> Any:
    """Return the stored rate: ``_learning_rate`` is a variable, schedule or function; its getter evaluates these."""
    return getattr(optimizer, "_learning_rate", None)


def has_fixed_learning_rate(optimizer: Any) -> bool:
    """Return whether the rate is a plain number that may be replaced; see :func:`raw_learning_rate`."""
    return isinstance(raw_learning_rate(optimizer), keras.Variable)


def learning_rate_method(optimizer: Any) -> Callable[[], Any]:
    """Return the method with which an optimizer's step reads its rate; see :data:`RATE_METHOD`."""
    return getattr(optimizer, RATE_METHOD)


def replace_learning_rate_method(optimizer: Any, method: Callable[[], Any]) -> None:
    """Replace :func:`learning_rate_method` on one optimizer."""
    object.__setattr__(optimizer, RATE_METHOD, method)


def own_iterations(optimizer: Any) -> Any:
    """Return the counter of applied updates: ``_iterations`` counts them also where gradients are accumulated."""
    return optimizer._iterations


def momentums(optimizer: Any) -> list[Any]:
    """Return the momentum variables: ``_momentums`` in older releases, ``momentums`` in newer ones."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
    return [variable for variable in found if variable is not None]


def moving_averages(optimizer: Any) -> dict[int, float]:
    """Return the slots that are moving averages of gradients or of their squares, by ``id``, with their decay.

    Adam, AdamW and RMSprop hold averages of squares in ``_velocities``; see also :func:`momentums`.
    """
    decays = {"momentum": momentums(optimizer), "beta_1": momentums(optimizer)}
    decays |= dict.fromkeys(("beta_2", "rho"), getattr(optimizer, "_velocities", []))
    names = {"SGD": ["momentum"], "Adam": ["beta_1", "beta_2"], "AdamW": ["beta_1", "beta_2"], "RMSprop": ["rho"]}
    known = names.get(type(optimizer).__name__, []) if type(optimizer).__module__.startswith("keras.") else []
    return {id(v): float(getattr(optimizer, name)) for name in known for v in decays[name] if v is not None}


def set_path(variable: Any, path: str) -> None:
    """Set a variable's path, which its name cannot contain: ``Variable.path`` returns ``_path``."""
    variable._path = path


def clipped(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Clip all gradients as the optimizer does; see :data:`CLIP_METHOD`."""
    return list(getattr(optimizer, CLIP_METHOD)(gradients))


# ---- metrics and callbacks


def is_built_metric(metric: Any) -> bool:
    """Return whether a metric has its variables: F1Score, R2Score and AUC clear ``_built`` until their first update."""
    return bool(getattr(metric, "_built", True))


def is_default_hook(method: Any) -> bool:
    """Return whether a callback's hook is empty: Keras marks its own empty hooks with ``_is_default``."""
    return bool(getattr(method, "_is_default", False))


def progress_bar(callbacks: Any) -> Any:
    """Return the bar of a CallbackList, or None: ``_progbar`` is its ProgbarLogger."""
    return getattr(getattr(callbacks, "_progbar", None), "progbar", None)


def batches_seen(saver: Any, default: int) -> int:
    """Return the batches since the last save: ModelCheckpoint counts them in ``_batches_seen_since_last_saving``."""
    return int(getattr(saver, "_batches_seen_since_last_saving", default))


def back_up(saver: Any, epoch: int) -> None:
    """Save the model within an epoch: BackupAndRestore's ``_save_model`` writes ``_current_epoch``, to begin with."""
    saver._current_epoch = max(saver._current_epoch, epoch)
    saver._save_model()
