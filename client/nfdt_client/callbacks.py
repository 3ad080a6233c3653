"""Inspects Keras' callbacks of a fit: which hooks they have, and whether they read batches or weights."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.own_modules import is_installed_file
from nfdt.model.program.state import Contents
from nfdt_client.reach import CodeSearch, reaches_model

HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF")
_TEST_HOOKS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end")
_CONTENTS: tuple[Contents, ...] = ("everything", "weights")
# Keras' own callbacks that neither read the weights nor change them by themselves.
_BLIND = ("Callback", "LambdaCallback", "ProgbarLogger", "History", "CSVLogger", "TerminateOnNaN", "RemoteMonitor")
_SAVERS = ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")
EVERY_EPOCH = "LearningRateScheduler"  # sets the rate at the beginning of each epoch
_SCHEDULERS = (EVERY_EPOCH, "ReduceLROnPlateau")


def each(callbacks: Any) -> list[Any]:
    """Return the callbacks passed to ``fit`` as a flat list."""
    if hasattr(callbacks, "callbacks") and hasattr(callbacks, "on_train_begin"):
        return list(callbacks.callbacks)
    return [callback for callback in keras.tree.flatten(callbacks or []) if callback is not None]


def watches_tests(callbacks: Any) -> bool:
    """Whether a callback hooks into evaluation; the model is then evaluated in this process."""
    return any(type(c).__name__ == "SwapEMAWeights" or has_own_hook(c, _TEST_HOOKS) for c in each(callbacks))


def contents_for(callbacks: Any, *, rates_are_state: bool = False, between_batches: bool = False) -> Contents | None:
    """Return what the callbacks may read or change of the model's state between epochs; None: nothing.

    Args:
        callbacks: The callbacks.
        rates_are_state: Whether learning rates are a part of the state, as of optimizers that step on workers.
        between_batches: Look at their hooks between batches of training, and at no others.
    """
    look = _contents_between_batches if between_batches else _contents_for
    found = {look(callback, rates_are_state) for callback in each(callbacks)}
    return next((one for one in _CONTENTS if one in found), None)


def _contents_for(callback: Any, rates_are_state: bool) -> Contents | None:
    optimizer = getattr(callback.model, "optimizer", None)
    rate_is_known = not rates_are_state and keras_training.has_fixed_learning_rate(optimizer)
    if reaches_model(callback, rate_is_known=rate_is_known):
        return "everything"
    name = _name_in_keras(callback)
    if name in _BLIND or (name in _SCHEDULERS and not rates_are_state):
        return None
    if name == "EarlyStopping":
        return "weights" if callback.restore_best_weights else None
    if name == "TensorBoard" and not callback.write_steps_per_second:
        return "weights" if callback.histogram_freq or callback.embeddings_freq else None
    return "everything"


def _contents_between_batches(callback: Any, rates_are_state: bool) -> Contents | None:
    if reaches_model(callback, HOOKS):
        return "everything"
    name = _name_in_keras(callback)
    has_hooks = any(not keras_training.is_default_hook(getattr(callback, hook)) for hook in HOOKS)
    if not has_hooks or name in _BLIND or (name in _SAVERS and not saves_at_batches(callback)):
        return None
    return _contents_for(callback, rates_are_state)


def _name_in_keras(callback: Any) -> str:
    """Return the name of the callback of Keras that this one is, or whose hooks it inherits."""
    return next((kind.__name__ for kind in type(callback).__mro__ if _is_of_keras(kind)), "Callback")


def saves_at_batches(callback: Any) -> bool:
    """Whether this is a callback of Keras, or a subclass of one, that saves the model after a number of batches."""
    return _name_in_keras(callback) in _SAVERS and isinstance(callback.save_freq, int)


def schedulers(callbacks: Any) -> list[str]:
    """Return the names of Keras' callbacks that set the learning rate of the model's optimizer."""
    return [type(callback).__name__ for callback in each(callbacks) if type(callback).__name__ in _SCHEDULERS]


def callback_list(
    model: Any, arguments: Mapping[str, Any], *, epochs: int, steps: int | None, history: bool = True
) -> Any:
    """Return the CallbackList that Keras' own method makes of its arguments."""
    callbacks, verbose = arguments["callbacks"], arguments["verbose"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def reads_batches(callback: Any) -> bool:
    """Whether a train-batch hook of the script's own code reads its arguments, or may reach the model.

    See :mod:`nfdt_client.reach`. A hook without Python code counts as one that reads. Hooks of Keras and of installed
    packages do not: their loggers and progress bars show what is newest.
    """
    hooks = list(_hooks(callback))
    if any(_reads_arguments(function, is_method) for function, is_method in hooks):
        return True
    return CodeSearch(callback).finds(function for function, _ in hooks)


def has_own_hook(callback: Any, hooks: Iterable[str]) -> bool:
    """Whether a callback has one of these hooks, and Keras did not write it."""
    methods = [getattr(callback, hook) for hook in hooks]
    return any(not _is_of_keras(method) and not keras_training.is_default_hook(method) for method in methods)


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.")


def _hooks(callback: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the hooks of the callback and of its bases, and whether their first argument is the callback."""
    for hook in HOOKS:
        own = vars(callback).get(hook)
        held = [(own, isinstance(own, types.MethodType))] if own is not None else []
        held += [(vars(kind)[hook], True) for kind in type(callback).__mro__ if hook in vars(kind)]
        for function, is_method in held:
            if not keras_training.is_default_hook(function) and not _is_of_a_package(function):
                yield function, is_method


def _is_of_a_package(function: Any) -> bool:
    code = _code(function)
    return _is_of_keras(function) or (code is not None and is_installed_file(code.co_filename))


def _code(function: Any) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def _reads_arguments(function: Any, is_method: bool) -> bool:
    code = _code(function)
    if code is None:
        return True
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return _loads(code, set(code.co_varnames[int(is_method) : code.co_argcount + code.co_kwonlyargcount + flags]))


def _loads(code: types.CodeType, names: set[str]) -> bool:
    """Whether code loads one of its arguments, except to pass it to the same hook of a base class."""
    of_base = passes = False
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if name == "super":
            of_base = True
        elif of_base and name in HOOKS:
            passes = True
        elif operation.startswith(_LOADS):
            if not passes and names & set(name if isinstance(name, tuple) else (name,)):
                return True
        elif operation in ("POP_TOP", "RETURN_VALUE") or operation.startswith("STORE"):
            of_base = passes = False
    return any(_loads(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType))
