"""Effects of one ``train_step`` on optimizers, variables and Python objects."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import current
from nfdt.model.backends.recording import not_of_the_model
from nfdt.model.keras_internals.training import optimized_variables, variable_key
from nfdt.model.program.dry_run import replaced_method, trace, without_effects
from nfdt.model.program.optimizer import own_optimizers, unscaled

logger = logging.getLogger(__name__)
MOST = 10_000  # items of a container, and bytes of an array, that are compared; of others their number is
_DEPTH = 3
_PLAIN = (int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Application:
    """One call of an optimizer's ``apply``.

    Attributes:
        optimizer: The optimizer.
        variables: Trainable variables that the call names, by index; also those without a gradient.
        repeats: Whether the call is the body of a loop of the graph.
        rows: Those of the variables whose gradient is of single rows.
    """

    optimizer: Any
    variables: list[int]
    repeats: bool
    rows: set[int]


@dataclass(frozen=True)
class StepEffects:
    """Effects of one step.

    Attributes:
        applied: Calls of optimizers, in order.
        assigned: Trainable variables that the step itself assigns, by index.
        groups: Names of the dictionaries within the returned logs that hold a log, outermost first, by its name.
    """

    applied: list[Application] = field(default_factory=list)
    assigned: set[int] = field(default_factory=set)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def applications(self, optimizer: Any) -> list[Application]:
        """Return the calls of one optimizer."""
        return [call for call in self.applied if call.optimizer is optimizer]

    @property
    def by_rows(self) -> set[int]:
        """Trainable variables, by index, whose gradient is of single rows in every call."""
        rows = set().union(*(call.rows for call in self.applied))
        return rows.difference(*(set(call.variables) - call.rows for call in self.applied))

    def is_one_update(self, model: Any) -> bool:
        """Return whether one gradient for each trainable variable, given to the model's optimizer, does the same."""
        seen: set[int] = set()
        for call in self.applied:
            if call.optimizer is not model.optimizer or call.repeats or seen.intersection(call.variables):
                return False
            seen.update(call.variables)
        return not self.assigned


def trace_step(model: Any, batch: Any) -> StepEffects:
    """Trace ``train_step`` as ``fit`` would, without an update; an eager model runs it, without effects.

    Args:
        model: A compiled, built model.
        batch: A batch as ``train_step`` receives it.

    Raises:
        CaptureError: the step uses an optimizer that is no attribute of the model, or updates another variable.
        Exception: any exception of the model's own code for such a batch, as in ``fit``.
    """
    _refuse_optimizers_outside(model)
    effects = StepEffects()
    with ExitStack() as undo:
        if model.run_eagerly:
            undo.enter_context(_warned_of_changes(model))
            undo.enter_context(without_effects(model))
        for optimizer in own_optimizers(model):
            undo.enter_context(replaced_method(optimizer, "apply", _recorded(model, optimizer, effects.applied)))
        for place, variable in enumerate(model.trainable_variables):
            assigned = _assigned(variable.assign, place, effects.assigned)
            undo.enter_context(replaced_method(variable, "assign", assigned))
        undo.enter_context(replaced_method(model, "train_step", _with_groups(model.train_step, effects.groups)))
        trace(model, "train_step", batch)
    return effects


@contextmanager
def _warned_of_changes(model: Any) -> Iterator[None]:
    """Undo what a run changes in the script's Python objects, and log a warning that names it."""
    with python_effects(model) as changed:
        yield
    if changed:
        logger.warning(
            "train_step() of %s %r changes %s. With run_eagerly=True plain Keras makes these changes in this process, "
            "with each batch; here they happen on the workers only, and do not come back. Count in a keras.Variable, "
            "in a metric or in a callback.",
            type(model).__name__,
            model.name,
            ", ".join(changed),
        )


def _recorded(model: Any, optimizer: Any, applied: list[Application]) -> Callable[..., None]:
    places = {variable_key(optimizer, variable): place for place, variable in enumerate(model.trainable_variables)}

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:  # a model without trainable variables
            return
        named = optimized_variables(unscaled(optimizer)) if trainable_variables is None else list(trainable_variables)
        for variable in named:
            if variable_key(optimizer, variable) not in places:
                raise not_of_the_model(variable)
        found = [places[variable_key(optimizer, variable)] for variable in named]
        rows = {place for place, gradient in zip(found, grads, strict=False) if current().is_of_rows(gradient)}
        applied.append(Application(optimizer, found, _is_in_a_loop(), rows))

    return apply


def _assigned(assign: Callable[..., Any], place: int, found: set[int]) -> Callable[..., Any]:
    def recorded(value: Any) -> Any:
        found.add(place)
        return assign(value)

    return recorded


def _with_groups(step: Callable[..., Any], groups: dict[str, tuple[str, ...]]) -> Callable[..., Any]:
    def recorded(batch: Any) -> Any:
        logs = step(batch)
        groups.update(_groups(logs))
        return logs

    return recorded


def _groups(logs: Any, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, value in logs.items() if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            yield from _groups(value, (*outer, name))
        elif outer:
            yield name, outer


def _is_in_a_loop() -> bool:
    """Return whether the graph that is being built is, or is within, the body of a ``tf.while_loop``."""
    import tensorflow as tf

    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _refuse_optimizers_outside(model: Any) -> None:
    """Raise CaptureError if ``train_step`` names an optimizer of the script that is no attribute of the model."""
    own = {id(optimizer) for optimizer in own_optimizers(model)}
    step = inspect.unwrap(getattr(model.train_step, "__func__", model.train_step))
    for name, value in _outer_variables(step).items():
        if isinstance(value, keras.optimizers.Optimizer) and id(value) not in own:
            raise CaptureError(
                f"{type(model).__name__} {model.name!r}: expected optimizers that are attributes of the model. "
                f"Received: a train_step() that uses {name!r}, a variable of the script, whose state would not come "
                f"back. Assign it before fit, as in model.{name} = {name}, and use self.{name}."
            )


@contextmanager
def python_effects(model: Any) -> Iterator[list[str]]:
    """Find and undo what a run of ``train_step`` in the block changes in Python objects.

    Finds attributes that are set, lists, dictionaries, sets and arrays that are modified, and variables that are
    rebound; it does not look into other objects. Rebound variables, and the contents of a container within another
    container, are not restored.

    Args:
        model: A model with a ``train_step`` of the script.

    Yields:
        A list, filled at the end of the block with the names of what has changed.
    """
    own = set(vars(keras.Model()))
    attributes, outside = dict(vars(model)), _names_around(model)
    watched = {f"self.{name}": value for name, value in attributes.items() if name not in own} | outside
    before = {name: _state(value) for name, value in watched.items()}
    contents = {name: _contents(value) for name, value in watched.items()}
    found: list[str] = []
    try:
        yield found
    finally:
        after = {f"self.{name}": value for name, value in vars(model).items() if name not in own}
        after |= _names_around(model)
        found += sorted(name for name, value in after.items() if before.get(name, _MISSING) != _state(value))
        for name in found:
            _restore(watched.get(name), contents.get(name))
        for name in [each.removeprefix("self.") for each in found if each.startswith("self.")]:
            if name in attributes:
                vars(model)[name] = attributes[name]
            else:
                del vars(model)[name]


_MISSING = object()


def _names_around(model: Any) -> dict[str, Any]:
    """Return the variables of the script that its ``train_step`` methods use, by name."""
    steps = [vars(each)["train_step"] for each in type(model).__mro__ if "train_step" in vars(each)]
    return {name: value for step in steps for name, value in _names_used(step).items()}


def _names_used(method: Any) -> dict[str, Any]:
    """Return the variables of the script with numbers, texts and containers that one of its methods uses, by name."""
    function = inspect.unwrap(method)
    is_own = inspect.isfunction(function) and not function.__module__.startswith("keras.")
    found = _outer_variables(function) if is_own else {}
    return {name: value for name, value in found.items() if isinstance(value, _PLAIN) or _contents(value) is not None}


def _outer_variables(function: Any) -> dict[str, Any]:
    """Return the global and enclosing variables that a function of Python reads, by name."""
    if not inspect.isfunction(function):
        return {}
    names = inspect.getclosurevars(function)
    return {**names.globals, **names.nonlocals}


def changes_of_script(method: Any, run: Callable[[], object]) -> list[str]:
    """Return the names of the script's variables that a method uses and that a run of it changes."""
    before = {name: _state(value) for name, value in _names_used(method).items()}
    run()
    return sorted(name for name, value in _names_used(method).items() if before.get(name, _MISSING) != _state(value))


def _state(value: Any, depth: int = _DEPTH) -> Any:
    """Return something that is equal for an object as long as the object is not changed."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray):
        return (id(value), value.tobytes() if value.nbytes <= MOST else value.shape)
    if not isinstance(value, list | tuple | dict | set) or not depth:
        return id(value)
    if len(value) > MOST:
        return (id(value), len(value))
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return (0 if isinstance(value, tuple) else id(value), tuple(_state(item, depth - 1) for item in items))


def _contents(value: Any) -> Any:
    """Return a copy of a container; None for other objects."""
    if isinstance(value, list | dict | set):
        return value.copy()
    return value.copy() if isinstance(value, np.ndarray) and value.nbytes <= MOST else None


def _restore(value: Any, contents: Any) -> None:
    """Give a container what it held; the methods are those of Python's own classes, as Keras' would track the items."""
    if contents is None:
        return
    if isinstance(value, np.ndarray):
        value[...] = contents
    elif isinstance(value, list):
        list.clear(value)
        list.extend(value, contents)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, contents)
    else:
        set.clear(value)
        set.update(value, contents)
