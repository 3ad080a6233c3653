"""Objects of Keras, pickled as they are: class and attributes, without their configuration or their constructor.

A pickle of layers is a sequence: the root, then the record of each Keras object, in the order in which the objects
were met, then the list of the variables that were pickled with their values. Everywhere else an object is a number.
This preserves identity, and a deep graph of layers does not exceed the recursion limit.

Weights of the trained model are not part of it: the program's state has them.
"""

from __future__ import annotations

import collections
import pickle
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras

from nfdt.core.errors import ProtocolError
from nfdt.model.backends.contract import current
from nfdt.model.backends.variables import values_of
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.program.collect import CustomObjects, collecting

# Containers that Keras substitutes for a model's own.
_TRACKED = {
    keras_models.tracking.TrackedList: list,
    keras_models.tracking.TrackedOrderedDict: collections.OrderedDict,
    keras_models.tracking.TrackedDict: dict,
    keras_models.tracking.TrackedSet: set,
}


@dataclass(frozen=True)
class ObjectRecord:
    """One Keras object.

    Attributes:
        attributes: Its attributes by name.
        value: Value of a variable; shape and dtype where the program's state holds the value; else None.
        config: Configuration from which a new object gets the attributes ``missing``.
        missing: Attributes that cannot be sent.
    """

    attributes: dict[str, Any]
    value: Any = None
    config: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()


class ObjectPickler(cloudpickle.Pickler):
    """Pickler of code and of Keras objects.

    Args:
        file: Writable binary file.
        references: Name of each object, by its ``id``, that the reader gets by this name.
        valueless: ``id`` of each variable that is sent without its value.
        missing: Per object, by its ``id``, the attributes that are not sent, and its configuration.

    Attributes:
        met: The Keras objects, in order.
        code: The functions and classes, by their ``id``.
        variables: The variables of numbers that are pickled with their values, except those of metrics, in order.
    """

    def __init__(
        self,
        file: Any,
        references: Mapping[int, str] | None = None,
        valueless: Collection[int] = (),
        missing: Mapping[int, tuple[tuple[str, ...], dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__(file)
        self._references, self._valueless, self._missing = references or {}, valueless, missing or {}
        self._numbers: dict[int, int] = {}
        self.met: list[Any] = []
        self.code: dict[int, Any] = {}
        self.modules: set[str] = set()
        self.variables: list[Any] = []

    def dump_all(self, root: Any) -> None:
        """Pickle an object and the Keras objects that it refers to, each once, then the list of the variables."""
        self.dump(root)
        # One record after the other: a nested pickle reaches the recursion limit at about 60 layers (decision 47).
        done = 0
        while done < len(self.met):
            self.dump(self._record(self.met[done]))
            done += 1
        counting = {id(variable) for obj in self.met if isinstance(obj, keras.Metric) for variable in obj.variables}
        self.variables = [variable for variable in self.variables if id(variable) not in counting]
        self.dump(self.variables)

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference that replaces an object; None to pickle it."""
        if id(obj) in self._references:
            return self._references[id(obj)]
        if not is_recorded(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.met)
            self.met.append(obj)
            if isinstance(obj, keras.Variable) and id(obj) not in self._valueless:
                self._note_variable(obj)
        return self._numbers[id(obj)], type(obj), isinstance(obj, keras_models.Functional)

    def reducer_override(self, obj: Any) -> Any:
        """Return another form of an object that cannot be pickled as it is."""
        if isinstance(obj, type | types.FunctionType):
            self.code[id(obj)] = obj
            self.modules.add(str(obj.__module__))
            return super().reducer_override(obj)
        if isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        if isinstance(obj, types.CodeType):
            # In brackets: another file may have that name where the code runs, and nothing reads its text from there.
            name = obj.co_filename if obj.co_filename.startswith("<") else sys.intern(f"<{obj.co_filename}>")
            return _code_of_file, (*self.dispatch_table[types.CodeType](obj), name)
        if type(obj) in _TRACKED:
            plain = _TRACKED[type(obj)]
            members = plain(obj.items()) if issubclass(plain, dict) else list(obj)
            return type(obj), (), (members, obj.tracker), None, None, _fill
        if (plain := keras_models.unwrapped(obj)) is not obj:
            return _same, (plain,)
        if isinstance(obj, keras.optimizers.Optimizer):
            return _revive_optimizer, _describe_optimizer(obj)
        if (reduced := current().reduce(obj)) is not None:
            if hasattr(obj, "assign"):
                self._note_variable(obj)
            return reduced
        if (backend := keras_models.backend_choice(obj)) is not None:
            return type(obj), (backend,)
        return super().reducer_override(obj)

    def _note_variable(self, variable: Any) -> None:
        dtype = str(getattr(variable.dtype, "name", variable.dtype))
        if dtype.startswith(("bool", "int", "uint", "float", "bfloat")) and None not in tuple(variable.shape):
            self.variables.append(variable)

    def _record(self, obj: Any) -> ObjectRecord:
        missing, config = self._missing.get(id(obj), ((), None))
        attributes = attributes_of(obj)
        for name in missing:
            del attributes[name]
        return ObjectRecord(attributes, self._value(obj), config, missing)

    def _value(self, obj: Any) -> Any:
        if not isinstance(obj, keras.Variable):
            return None
        if id(obj) in self._valueless:
            return tuple(int(n) for n in obj.shape), keras.backend.standardize_dtype(obj.dtype)
        return values_of([obj])[0]


class ObjectUnpickler(pickle.Unpickler):
    """Reader of :meth:`ObjectPickler.dump_all`.

    Args:
        file: Readable binary file.
        find: Returns the object of a reference by its name.

    Attributes:
        variables: The variables that were pickled with their values, in order.
    """

    def __init__(self, file: Any, find: Callable[[str], Any]) -> None:
        super().__init__(file)
        self._find = find
        self._made: dict[int, Any] = {}
        self.variables: list[Any] = []

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of a reference, empty if it has not been read yet."""
        if isinstance(pid, str):
            return self._find(pid)
        number, cls, functional = pid
        if number not in self._made:
            if functional:  # no constructor runs here, in which Keras changes the bases of an installed class
                keras_models.make_functional(cls)
            self._made[number] = _blank(cls)
        return self._made[number]

    def load_all(self) -> Any:
        """Return the root with the Keras objects that it refers to."""
        root = self.load()
        done = 0
        while done in self._made:
            _restore(self._made[done], self.load())
            done += 1
        self.variables = self.load()
        for obj in self._made.values():
            keras_models.renew(obj)
        return root


def is_recorded(obj: Any) -> bool:
    """Return whether an object is pickled as a record; an optimizer is pickled as its configuration instead."""
    if isinstance(obj, keras_models.KerasSaveable):
        return not isinstance(obj, keras.optimizers.Optimizer)
    return isinstance(obj, keras.Variable | keras_models.tracking.Tracker)


def attributes_of(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object that another process can have, by name."""
    found = {name: value for name, value in vars(obj).items() if name not in keras_models.CHECKPOINT_ATTRIBUTES}
    found.update(keras_models.attributes_of_one_process(obj))
    for name in keras_models.SET_BY_KERAS:
        if keras_models.is_built_by(obj, found.get(name)):
            del found[name]
    return found


def _blank(cls: type) -> Any:
    return keras_models.blank_layer(cls) if issubclass(cls, keras.Layer) else object.__new__(cls)


def _restore(obj: Any, record: ObjectRecord) -> None:
    if record.config is not None:
        made = vars(type(obj).from_config(record.config))
        if lacking := [name for name in record.missing if name not in made]:
            raise ProtocolError(
                f"{type(obj).__name__}: its attribute {lacking[0]!r} cannot be sent to another process, and its "
                "constructor does not create it. Create it in the constructor."
            )
        vars(obj).update({name: made[name] for name in record.missing})
    vars(obj).update(record.attributes)
    if isinstance(obj, keras.Variable):
        if isinstance(record.value, tuple):
            keras_models.initialize_zeros(obj, *record.value)
        else:
            keras_models.initialize_variable(obj, record.value)


def _fill(container: Any, state: tuple[Any, Any]) -> None:
    members, container.tracker = state[0], None
    container.extend(members) if isinstance(container, list) else container.update(members)
    container.tracker = state[1]


def _code_of_file(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], name: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=name)  # cloudpickle leaves the name out, which tracebacks show


def _same(obj: Any) -> Any:
    return obj


def _describe_optimizer(optimizer: Any) -> tuple[dict[str, Any], Any]:
    found = CustomObjects()
    with collecting(found):
        config = keras_models.serialization_lib.serialize_keras_object(optimizer)
    return found.by_name, config


def _revive_optimizer(objects: dict[str, Any], config: Any) -> Any:
    with keras.saving.custom_object_scope(objects), keras_models.serialization_lib.ObjectSharingScope():
        return keras_models.serialization_lib.deserialize_keras_object(config, safe_mode=False)
