"""Division of a model among shards: the variables and optimizer state that each holds, and how states are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import Array, ParameterLayout, Run
from nfdt.core.arrays.safetensors_io import ArrayEntry
from nfdt.core.arrays.table_rows import MIN_TABLE_SIZE
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.row_updates import why_dense
from nfdt.model.program.state import WEIGHTS, State

GLOBAL = -1
_REASONS = {
    "global norm": "global_clipnorm needs the norm over all variables",
    "unattributed": "its state cannot be attributed to single variables",
}
StatePart = tuple[Array, dict[int, Array]]
"""One shard's weights, and of the optimizer's variables what it holds, by index."""


@dataclass(frozen=True)
class OptimizerSlot:
    """One variable of the whole optimizer of which this shard holds a part.

    Attributes:
        index: Index in the whole optimizer's variables.
        variable: Variable of *this shard* that it belongs to, or ``GLOBAL`` (iterations, learning rate).
        shape: Shape of the part that this shard holds.
        start: Offset of that part, in elements; None if it is the whole variable.
    """

    index: int
    variable: int
    shape: tuple[int, ...]
    start: int | None = None


@dataclass(frozen=True)
class ShardPlan:
    """One shard's share of a program.

    Attributes:
        layout: The shard's variables, laid out from 0.
        start: Start of the shard in the model's flat vector, in elements.
        model_size: Number of elements of that vector.
        flat: Whether one flat variable is enough, because the optimizer treats every element alike.
        constraints: Per variable the constraint's configuration, or None.
        decay: Per variable, whether weight decay applies.
        slots: The optimizer's variables; None when they cannot be attributed (then there is one shard only).
        sent: Part of the shard in weights without the tables that shards make; see :func:`sent_parts`.
        sent_size: Number of elements of such weights.
    """

    layout: ParameterLayout
    start: int
    model_size: int
    flat: bool
    constraints: tuple[Any, ...]
    decay: tuple[bool, ...]
    slots: tuple[OptimizerSlot, ...] | None
    sent: slice
    sent_size: int

    def own(self, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the shard's part of weights of the whole model; weights of the shard's size are returned unchanged.

        Both may lack the tables that shards make: the part then lacks them as well.

        Raises:
            ShapeMismatch: the weights have neither size.
        """
        size = self.layout.size
        if weights.size == self.model_size:
            return weights[self.start : self.start + size]
        if weights.size in (size, self.sent.stop - self.sent.start):
            return weights
        if weights.size == self.sent_size:
            return weights[self.sent]
        raise ShapeMismatch(
            f"State: expected {self.model_size} weights (model) or {size} (shard). Received: {weights.size}."
        )

    def bindings(self, variables: int) -> list[tuple[OptimizerSlot, ...]]:
        """Return, for each optimizer variable of the shard in order, the whole optimizer's variables that it holds.

        A flat optimizer's k-th slot is the concatenation of the k-th slot of every variable.

        Args:
            variables: Number of variables of the shard's optimizer.

        Raises:
            UsageError: the shard's optimizer has other variables than the program states.
        """
        if self.slots is None:
            return [(OptimizerSlot(index, GLOBAL, ()),) for index in range(variables)]
        found: list[tuple[OptimizerSlot, ...]] = [(slot,) for slot in self.slots]
        if self.flat:
            found = _merge_slots(self.slots)
        if len(found) != variables:
            raise UsageError(
                f"The shard's optimizer has {variables} variables; the program says it has {len(found)}. "
                "Keras differs between client and shard, or the optimizer creates variables on its own; use shards=1."
            )
        return found


def _merge_slots(slots: Sequence[OptimizerSlot]) -> list[tuple[OptimizerSlot, ...]]:
    own: dict[int, list[OptimizerSlot]] = {}
    for slot in slots:
        own.setdefault(slot.variable, []).append(slot)
    per_variable = [members for variable, members in own.items() if variable != GLOBAL]
    ranks = zip(*per_variable, strict=True)
    # A single variable's slots come in the order in which a flat optimizer creates them.
    return [(slot,) if slot.variable == GLOBAL else next(ranks) for slot in slots if slot.variable in (GLOBAL, 0)]


def why_uncuttable(manifest: Manifest) -> Literal["global norm", "unattributed"] | None:
    """Return why a program needs a single shard; None if several shards may hold its optimizer.

    ``global norm``: the optimizer clips by a norm over all variables. ``unattributed``: its variables cannot be
    attributed to trainable variables.
    """
    if manifest.optimizer_options.get("global_clipnorm"):
        return "global norm"
    return "unattributed" if manifest.optimizer_variables is None else None


def count_shards(manifest: Manifest, shards: int) -> int:
    """Return the number of shards that a program is cut into when ``shards`` are requested.

    Raises:
        UsageError: the optimizer cannot be cut (``global_clipnorm``, variables that cannot be attributed).
    """
    count = len(manifest.layout.cut(shards))
    reason = why_uncuttable(manifest)
    if count > 1 and reason:
        raise UsageError(f"shards={shards}: this optimizer needs one shard, because {_REASONS[reason]}. Use shards=1.")
    return count


def _is_flat(manifest: Manifest, constraints: Sequence[Any], decay: Sequence[bool]) -> bool:
    options = manifest.optimizer_options
    per_variable = options.get("clipnorm") or options.get("global_clipnorm") or any(constraints)
    some_decay = options.get("weight_decay") and not all(decay)
    attributed = manifest.optimizer_variables is not None
    return bool(manifest.is_elementwise and attributed and not per_variable and not some_decay)


def make_plan(manifest: Manifest, index: int, shards: int) -> ShardPlan:
    """Return the plan of shard ``index`` of ``shards`` of a program.

    Raises:
        UsageError: the optimizer cannot be cut, or there is no such shard (see :func:`count_shards`).
    """
    layout = manifest.layout
    count = count_shards(manifest, shards)
    if not 0 <= index < count:
        raise UsageError(
            f"Shard {index}: expected an index below {count}, because the model has {len(layout.slots)} "
            f"variables and shards={shards}."
        )
    run = layout.cut(shards)[index]
    constraints = tuple(_of_pieces(run, manifest.constraints, None))
    decay = tuple(_of_pieces(run, manifest.decay, True))
    flat = bool(run.pieces) and _is_flat(manifest, constraints, decay)
    if not flat and not all(piece.whole for piece in run.pieces):
        raise UsageError(
            f"Shard {index}: the program cuts a variable, but its optimizer does not treat elements alike."
        )
    parts = sent_parts(layout, shards, manifest.made)
    slots = _own_slots(manifest, run)
    return ShardPlan(run.layout, run.start, layout.size, flat, constraints, decay, slots, parts[index], parts[-1].stop)


def sent_parts(layout: ParameterLayout, shards: int, made: Collection[int]) -> list[slice]:
    """Return the part of each shard in weights without the tables that shards make, by index: ``made``."""
    sizes = [sum(p.stop - p.start for p in run.pieces if p.variable not in made) for run in layout.cut(shards)]
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _of_pieces(run: Run, values: Sequence[Any] | None, default: Any) -> list[Any]:
    return [values[piece.variable] if values else default for piece in run.pieces]


def _own_slots(manifest: Manifest, run: Run) -> tuple[OptimizerSlot, ...] | None:
    described = manifest.optimizer_variables
    if described is None:
        return None
    places = {piece.variable: place for place, piece in enumerate(run.pieces)}
    found = []
    for index, entry in enumerate(described):
        shape, variable = tuple(entry["shape"]), entry["variable"]
        if variable == GLOBAL:
            found.append(OptimizerSlot(index, GLOBAL, shape))
        elif variable in places:
            piece = run.pieces[places[variable]]
            part = (shape, None) if piece.whole else (piece.shape, piece.start)
            found.append(OptimizerSlot(index, places[variable], *part))
    return tuple(found)


def sparse_tables(manifest: Manifest, algorithm: AlgorithmSpec, shards: int) -> tuple[int, ...]:
    """Return the variables, by index, whose gradients are sent as rows and whose untouched rows do not change.

    Only where the algorithm (``rows``), the backend and the optimizer (``why_dense``) permit it.
    """
    if not (algorithm.rows and manifest.has_rows) or why_dense(manifest, lazy=algorithm.rows == "lazy"):
        return ()
    layout = manifest.layout
    pieces = [piece for run in layout.cut(shards) for piece in run.pieces]
    # A table is sent as rows only if every shard holds whole rows of it.
    cut_rows = {piece.variable for piece in pieces if len(piece.shape) != len(piece.slot.shape)}
    return tuple(i for i in manifest.tables if layout.slots[i].size >= MIN_TABLE_SIZE and i not in cut_rows)


def tables_on_shards(manifest: Manifest, algorithm: AlgorithmSpec, shards: int) -> bool:
    """Return whether workers do not hold the tables of :func:`sparse_tables`, but look up the rows of their batches.

    This needs row numbers that follow from the batch alone; see ``Manifest.looked_up``. It is so for all tables where
    shards make one.
    """
    tables = sparse_tables(manifest, algorithm, shards)
    size = 4 * sum(manifest.layout.slots[index].size for index in tables)
    large = size > algorithm.worker_tables_mb * 2**20 or bool(manifest.made)
    return large and set(tables) <= set(manifest.looked_up)


def held_by_workers(manifest: Manifest, algorithm: AlgorithmSpec, shards: int) -> ParameterLayout:
    """Return the layout of the weights that a worker holds: all of them, or those beside tables on the shards."""
    on_shards = tables_on_shards(manifest, algorithm, shards)
    return manifest.layout.without(sparse_tables(manifest, algorithm, shards) if on_shards else ())


@dataclass(frozen=True)
class JoinedArray:
    """Array of a whole state, and the shards whose parts it consists of, in order."""

    entry: ArrayEntry
    shards: tuple[int, ...]


class StateCut:
    """Division of a state into one part per shard.

    Args:
        layout: Layout of all trainable variables.
        shards: Number of shards.
        owners: See :attr:`nfdt.model.program.manifest.Manifest.optimizer_owners`.
        made: See :attr:`nfdt.model.program.manifest.Manifest.made`; a state to be cut may lack these tables.
    """

    def __init__(
        self, layout: ParameterLayout, shards: int, owners: Sequence[int] | None, made: Collection[int] = ()
    ) -> None:
        self._layout, self._owners = layout, owners
        self._runs, self._sent = layout.cut(shards), sent_parts(layout, shards, made)

    def size(self, index: int) -> int:
        """Return the number of weights of this shard."""
        return self._runs[index].size

    def check(self, state: State) -> None:
        """Raise ShapeMismatch unless the state has the model's weights."""
        if state.weights.shape not in ((self._layout.size,), (self._sent[-1].stop,)):
            raise ShapeMismatch(f"State: expected {self._layout.size} weights. Received: {state.weights.size}.")

    def own(self, state: State, index: int) -> StatePart:
        """Return a shard's part: its weights, its variables' whole optimizer variables, and those without owner."""
        own = {-1, *(piece.variable for piece in self._runs[index].pieces)}
        owners = self._owners or [-1] * (max(state.optimizer, default=-1) + 1)
        optimizer = {i: array for i, array in state.optimizer.items() if i < len(owners) and owners[i] in own}
        whole = state.weights.size == self._layout.size
        return state.weights[self._runs[index].elements if whole else self._sent[index]], optimizer

    def joined(self, parts: Sequence[StatePart]) -> State:
        """Return the whole state from the parts of all shards, in order; see :meth:`table`."""
        named = [{WEIGHTS: weights, **{f"optimizer/{i}": array for i, array in own.items()}} for weights, own in parts]
        table = self.table([{name: ArrayEntry(a.dtype, a.shape) for name, a in part.items()} for part in named])
        whole = {
            name: np.concatenate([named[i][name].reshape(-1) for i in joined.shards]).reshape(joined.entry.shape)
            for name, joined in table.items()
        }
        weights = whole.pop(WEIGHTS)
        return State(weights, {int(name.partition("/")[2]): array for name, array in whole.items()})

    def table(self, parts: Sequence[Mapping[str, ArrayEntry]]) -> dict[str, JoinedArray]:
        """Return the arrays of the whole state by name, given those of all shards in order.

        Each shard has the variables without owner; those of the first one count.

        Raises:
            ShapeMismatch: a shard sends other weights than its own.
        """
        for index, part in enumerate(parts):
            entry = part.get(WEIGHTS)
            received = "none" if entry is None else str(math.prod(entry.shape))
            if received != str(self.size(index)):
                raise ShapeMismatch(f"Shard {index}: expected {self.size(index)} weights. Received: {received}.")
        holders: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            for name in part:
                if name.partition("/")[0] in (WEIGHTS, "optimizer"):
                    holders.setdefault(name, []).append(index)
        return {name: self._joined(name, found, parts) for name, found in holders.items()}

    def _joined(self, name: str, holders: list[int], parts: Sequence[Mapping[str, ArrayEntry]]) -> JoinedArray:
        first = parts[holders[0]][name]
        if name == WEIGHTS:
            return JoinedArray(ArrayEntry(first.dtype, (self._layout.size,)), tuple(holders))
        index = int(name.partition("/")[2])
        owner = self._owners[index] if self._owners and index < len(self._owners) else -1
        if owner < 0 or len(holders) == 1:
            return JoinedArray(first, (holders[0],))
        return JoinedArray(ArrayEntry(first.dtype, self._layout.slots[owner].shape), tuple(holders))
