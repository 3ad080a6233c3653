"""The program's manifest: a JSON object, and the only module that reads or writes its keys. No Keras here.

=======================  =====================================================================================
kind                     "config" (Keras only), or "code" (needs a worker that allows code)
model                    Keras' configuration of the model, without the arguments of compile(); of a model by value its
                         layers with their plain attributes, see ``described.py``
compile                  arguments of compile() that make what the model has, whichever call gave it; of a model by
                         value a description of them, with the optimizer's configuration
optimizer                configuration of the (inner) optimizer
optimizer_attributes     attributes of the (inner) optimizer that differ from those its configuration makes
optimizer_variables      shape, dtype and owner of each optimizer variable; null where unknown
elementwise              whether the optimizer treats every element alike
divisible                whether its options do so as well: shards may then cut a variable
constraints, decay       per trainable variable
loss_scale               null or {"initial_scale", "dynamic_growth_steps"}
auto_scale_loss          whether the optimizer is wrapped for float16
local_optimizers         null, or what workers need of the optimizers that step there, see ``local_optimizers.py``;
                         ``optimizer`` then subtracts differences of weights
tables                   trainable variables, by index, that a step looks up row by row: embeddings, see ``tables.py``
looked_up                those of them that may be on the shards: their row numbers follow from the batch alone
made                     those of them that shards make, by index, see :class:`MadeTable`; the initial state has neither
                         their weights nor their optimizer variables
globals                  Keras' own settings (floatx, default dtype policy, ...)
trainable                which layers, and which variables, are trainable
layout                   the trainable variables, see ``ParameterLayout``
untrained                path, shape, dtype, rule and decay of each untrained variable: those of the model, those of
                         optimizers on workers, those besides the model (as in a loss), then what is given as bytes
mesh                     null, or devices and layouts of the script's ModelParallel, see ``nfdt/model/backends/mesh.py``
input                    the pytree, shapes and dtypes of a batch; ``predicts``: true if it has no targets
versions                 versions of Python, Keras, TensorFlow
assets                   per layer index: file name -> artifact (vocabularies)
state, code              artifacts: safetensors, and the pickled custom objects of configurations or null
by_value                 artifact of the pickled, compiled model, or null: ``model`` is its configuration
sources                  digest of the source texts of functions and classes: pickles differ between processes
check                    artifact with inputs and outputs of the script's model, see ``forward_check.py``, or null
=======================  =====================================================================================
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypedDict, TypeVar

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.seeded_rows import SeededRows
from nfdt.core.errors import ProtocolError
from nfdt.model.backends.mesh import Mesh

GIVEN = "given"
"""Merge rule of what only the script changes, as bytes."""

SHARED_OBJECT = "shared_object_id"  # of Keras, for objects that occur several times in a configuration
CODE_ENTRIES = ("code", "by_value", "optimizer_attributes")

T = TypeVar("T")


@dataclass(frozen=True)
class MadeTable:
    """Table that the shards make.

    Attributes:
        rows: Its rows before it was trained.
        state: Artifact of the state that has the trained table; "": it is not trained.
        start: First element of the table in the weights of that state.
        slots: Optimizer variables of the table in the program, and their index in that state.
    """

    rows: SeededRows
    state: str = ""
    start: int = 0
    slots: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> MadeTable:
        """Inverse of :meth:`to_json`."""
        slots = {int(own): int(stored) for own, stored in entry["slots"].items()}
        return cls(SeededRows.from_json(entry["rows"]), str(entry["state"]), int(entry["start"]), slots)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {"rows": self.rows.to_json(), "state": self.state, "start": self.start, "slots": dict(self.slots)}


class OptimizerEntries(TypedDict):
    """Entries on the optimizer; see the table of this module."""

    optimizer: Mapping[str, Any]
    optimizer_attributes: Mapping[str, Any]
    optimizer_variables: Sequence[Mapping[str, Any]] | None
    elementwise: bool
    divisible: bool
    constraints: Sequence[Any]
    decay: Sequence[bool]
    loss_scale: Mapping[str, Any] | None
    auto_scale_loss: bool
    local_optimizers: Sequence[Mapping[str, Any] | None] | None


class ModelEntries(TypedDict):
    """Entries on the model, its variables and its environment; see the table of this module."""

    tables: Sequence[int]
    globals: Mapping[str, Any]
    trainable: Mapping[str, Sequence[bool]]
    layout: list[list[Any]]
    untrained: Sequence[Mapping[str, Any]]
    mesh: Mapping[str, Any] | None
    input: Mapping[str, Any]
    versions: Mapping[str, str]


class _Required(Generic[T]):
    """An entry of a manifest as its attribute; reading it raises KeyError where the manifest lacks it."""

    def __init__(self, *path: str) -> None:
        self._path = path

    def __get__(self, manifest: Manifest, owner: type) -> T:
        found: Any = manifest.entries
        for key in self._path:
            found = found[key]
        return found


class _Optional(Generic[T]):
    """An entry of a manifest as its attribute, or ``default`` where it is null or the manifest lacks it."""

    def __init__(self, key: str, default: Any = None) -> None:
        self._key, self._default = key, default

    def __get__(self, manifest: Manifest, owner: type) -> T:
        found = manifest.entries.get(self._key)
        return self._default if found is None else found


@dataclass(frozen=True)
class Manifest:
    """A program's manifest.

    Entries are read on access: a manifest of remote origin may lack any of them.

    Attributes:
        entries: Stored JSON object; read it through the attributes below.

    Raises:
        KeyError: (on access) a required entry is missing.
    """

    entries: Mapping[str, Any]

    # ---- code and artifacts

    code = _Required[str | None]("code")
    """Artifact of the pickled custom objects of configurations, if any."""

    by_value = _Optional[str | None]("by_value")
    """Artifact of the pickled model, if it is not sent as its configuration."""

    check = _Optional[Mapping[str, Any] | None]("check")
    """Artifact of the inputs and outputs of the script's model, and the state that it had; None if unknown."""

    state = _Required[str]("state")
    """Artifact of the state that the program starts with."""

    sources = _Optional[Mapping[str, str]]("sources", {})
    """Digest of the source texts of functions and classes by name; empty where unknown."""

    assets = _Required[Mapping[str, Mapping[str, str]]]("assets")
    """Per layer index: file name -> artifact."""

    python_version = _Required[str]("versions", "python")
    """Minor version of the Python that pickled the code."""

    # ---- configurations of Keras

    model = _Required[Any]("model")
    """Keras' configuration of the model."""

    compile_config = _Required[Any]("compile")
    """The arguments of ``compile``."""

    settings = _Required[Mapping[str, Any]]("globals")
    """Keras' own settings: floatx, default dtype policy, ..."""

    input = _Required[Mapping[str, Any]]("input")
    """Description of a batch; see ``building.describe_batch``."""

    # ---- variables

    trainable_layers = _Required[Sequence[bool]]("trainable", "layers")
    """Per layer, whether it is trainable."""

    trainable_variables = _Required[Sequence[bool]]("trainable", "variables")
    """Per variable of the model, whether it is trainable."""

    untrained = _Optional[Sequence[Mapping[str, Any]]]("untrained", ())
    """Path, shape, dtype, rule and decay of each untrained variable."""

    constraints = _Optional[Sequence[Any] | None]("constraints")
    """Configuration of the constraint of each trainable variable, or None; None where unknown."""

    decay = _Optional[Sequence[bool] | None]("decay")
    """Per trainable variable, whether weight decay applies; None where unknown."""

    # ---- optimizer

    optimizer = _Required[Mapping[str, Any]]("optimizer")
    """Keras' configuration of the (inner) optimizer."""

    optimizer_attributes = _Optional[Mapping[str, Any]]("optimizer_attributes", {})
    """Attributes of the (inner) optimizer that differ from those its configuration makes, as configurations."""

    optimizer_variables = _Optional[Sequence[Mapping[str, Any]] | None]("optimizer_variables")
    """Shape, dtype and owner of each optimizer variable; None where they cannot be attributed."""

    local_optimizers = _Optional[Sequence[Mapping[str, Any] | None] | None]("local_optimizers")
    """Per optimizer of the model its description, or None if it does not step; None if shards have the only one."""

    loss_scale = _Required[Mapping[str, Any] | None]("loss_scale")
    """Dynamic loss scale to start from, if any."""

    # ---- conversions

    @classmethod
    def of(
        cls, model: Any, compilation: Mapping[str, Any], optimizer: OptimizerEntries, rest: ModelEntries
    ) -> Manifest:
        """Make the manifest of a program without code and without artifacts."""
        code: dict[str, Any] = {"kind": "config", "code": None, "by_value": None, "sources": {}}
        return cls({**code, "model": model, "compile": compilation, **optimizer, **rest})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Manifest:
        """Inverse of :meth:`to_bytes`.

        Raises:
            ProtocolError: the bytes are no JSON object.
        """
        try:
            entries = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"Program: expected JSON. Received something else: {error}.") from None
        if not isinstance(entries, dict):
            raise ProtocolError(f"Program: expected a JSON object. Received: {type(entries).__name__}.")
        return cls(entries)

    def to_bytes(self) -> bytes:
        """Return the manifest in its stored form."""
        return json.dumps(self.entries).encode()

    def normalized(self) -> Manifest:
        """Return the manifest in the form after decoding: tuples are lists, keys are strings.

        Raises:
            TypeError: an entry cannot be written as JSON.
            ValueError: an entry contains itself.
        """
        return Manifest(dict(json.loads(json.dumps(self.entries))))

    def copied(self) -> Manifest:
        """Return a deep copy for Keras, which empties some of the configurations that it reads."""
        return Manifest(copy.deepcopy(dict(self.entries)))

    def replaced(self, **entries: Any) -> Manifest:
        """Return the manifest with some entries replaced."""
        return Manifest({**self.entries, **entries})

    def with_optimizer(self, optimizer: Mapping[str, Any], variables: Sequence[Mapping[str, Any]]) -> Manifest:
        """Return the manifest with an elementwise optimizer, without loss scaling, in place of the model's own."""
        return self.replaced(
            optimizer=optimizer,
            optimizer_attributes={},
            optimizer_variables=variables,
            elementwise=True,
            loss_scale=None,
        )

    def is_same_program(self, other: Manifest) -> bool:
        """Whether two manifests differ in the initial state, its outputs, and the sample batch at most."""
        mine, others = (one.replaced(state="", check=None, input=None) for one in (self, other))
        return _numbered(mine.entries, {}) == _numbered(others.entries, {})

    # ---- code and artifacts

    @property
    def is_code(self) -> bool:
        """Whether the program needs a worker that allows code."""
        return bool(self.entries["kind"] == "code")

    @property
    def is_plain(self) -> bool:
        """Whether the program is declared as configuration and contains no code."""
        return self.entries["kind"] == "config" and not self.code and not self.by_value

    @property
    def carries_code(self) -> bool:
        """Whether a manifest of remote origin, which may lack entries, declares or contains code."""
        carried = (self.entries.get(key) is not None for key in ("code", "by_value"))
        return self.entries.get("kind") == "code" or any(carried)

    # ---- configurations of Keras

    @property
    def predicts(self) -> bool:
        """Whether the program is for ``predict`` only: its batch has no targets."""
        return bool(self.input.get("predicts"))

    def for_prediction(self) -> Manifest:
        """Return the program for ``predict`` only."""
        return self.replaced(input={**self.input, "predicts": True})

    def configurations(self) -> dict[str, Any]:
        """Return every entry that Keras deserialises, by key; None where it is missing."""
        keys = ("model", "compile", "optimizer", "constraints", "globals", "local_optimizers")
        return {key: self.entries.get(key) for key in keys}

    def architecture(self) -> dict[str, Any]:
        """Return every entry on the model's structure, by key; None where it is missing."""
        return {key: self.entries.get(key) for key in ("model", "trainable", "layout", "untrained", "input", "assets")}

    def compilation(self) -> dict[str, Any]:
        """Return every entry on ``compile`` except the optimizer, by key; None where it is missing."""
        compiled = dict(self.entries.get("compile") or {})
        compiled.pop("optimizer", None)
        return {"compile": compiled, "constraints": self.entries.get("constraints")}

    def code_entries(self) -> dict[str, Any]:
        """Return every entry that only a program with code may have, by key; None where it is missing."""
        local = [entry for entry in self.local_optimizers or () if entry is None or entry["attributes"]]
        return {**{key: self.entries.get(key) for key in CODE_ENTRIES}, "local_optimizers": local}

    # ---- variables

    @property
    def layout(self) -> ParameterLayout:
        """Layout of the trainable variables."""
        layout = ParameterLayout.from_json(self.entries["layout"])
        return replace(layout, divisible=bool(self.entries.get("divisible")))

    @property
    def mesh(self) -> Mesh | None:
        """Devices among which each worker divides the variables; None: every device has all of them."""
        entry = self.entries.get("mesh")
        return None if entry is None else Mesh.from_json(entry)

    @property
    def tables(self) -> list[int]:
        """Trainable variables, by index, that are looked up row by row."""
        return [int(index) for index in self.entries.get("tables") or ()]

    @property
    def has_rows(self) -> bool:
        """Whether the program is of a backend whose gradients of tables may be rows: TensorFlow."""
        return {*(self.entries.get("versions") or ())} <= {"python", "keras", "tensorflow"}

    @property
    def looked_up(self) -> list[int]:
        """Those of the :attr:`tables` whose row numbers follow from the batch alone."""
        return [int(index) for index in self.entries.get("looked_up") or ()]

    @property
    def made(self) -> dict[int, MadeTable]:
        """Those of the :attr:`tables` that shards make, by index; states on the way to or from the script lack them."""
        entries = self.entries.get("made") or {}
        return {int(index): MadeTable.from_json(entry) for index, entry in entries.items()}

    @property
    def untrained_rules(self) -> list[dict[str, Any]]:
        """Merge rule and decay of each untrained variable; see :func:`nfdt.model.training.merge.merge_untrained`."""
        optional = ("optimizer", "applications")
        return [
            {"rule": entry["rule"], "decay": entry.get("decay"), **{k: entry[k] for k in optional if k in entry}}
            for entry in self.untrained
        ]

    @property
    def given(self) -> list[str]:
        """Names of what only the script changes, as bytes; the last entries of :attr:`untrained`."""
        return [entry["path"] for entry in self.untrained if entry["rule"] == GIVEN]

    @property
    def sources_by_value(self) -> list[str]:
        """Names of the data among :attr:`given`."""
        return [name for name in self.given if name in ("train", "validation")]

    # ---- optimizer

    @property
    def optimizer_class(self) -> str | None:
        """Class name of the optimizer, if known."""
        return (self.entries.get("optimizer") or {}).get("class_name")

    @property
    def optimizer_options(self) -> Mapping[str, Any]:
        """Constructor arguments of the optimizer; empty where unknown."""
        return (self.entries.get("optimizer") or {}).get("config") or {}

    @property
    def optimizer_owners(self) -> list[int] | None:
        """Per optimizer variable the trainable variable it belongs to, -1 for none; None where unknown."""
        described = self.optimizer_variables
        return None if described is None else [int(entry["variable"]) for entry in described]

    @property
    def is_elementwise(self) -> bool:
        """Whether the optimizer treats every element alike."""
        return bool(self.entries.get("elementwise"))

    @property
    def steps_on_workers(self) -> bool:
        """Whether workers push differences of weights, because the optimizers step there."""
        return self.local_optimizers is not None

    @property
    def scales_loss(self) -> bool:
        """Whether the loss of a step is scaled, which small gradients of float16 need."""
        return self.loss_scale is not None or bool(self.entries.get("auto_scale_loss"))


def _numbered(value: Any, numbers: dict[Any, int]) -> Any:
    """Return a configuration whose shared objects are numbered as they appear; Keras gives them memory addresses."""
    if isinstance(value, Mapping):
        return {
            key: numbers.setdefault(each, len(numbers)) if key == SHARED_OBJECT else _numbered(each, numbers)
            for key, each in value.items()
        }
    return [_numbered(each, numbers) for each in value] if isinstance(value, list | tuple) else value
