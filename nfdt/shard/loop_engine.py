"""The engine for rules that own the optimizer: compiled loops on NumPy arrays; see :mod:`nfdt.shard.engine`.

A push takes its place in the order of updates under the store's lock: the numbers that hold for the whole push are
computed there. The vectors are updated afterwards, without the lock, stripe by stripe. A stripe is updated by one push
at a time, in the order of the pushes, so that every push is applied as a whole, in version order, to each stripe, and
its reply has each stripe at its own version. Several pushes work on different stripes at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import ArrayEntry, Pieces, give_back
from nfdt.core.sharding import GLOBAL, ShardPlan
from nfdt.core.sharding.records import RecordTree
from nfdt.shard import update_loops as loops
from nfdt.shard.buffers import VectorPool
from nfdt.shard.engine import LARGE, AnchoredBf16, EngineReply, Vector
from nfdt.shard.held_state import HeldState, HeldVectors, StateHolder
from nfdt.shard.optimizer_state import OptimizerPart, joined
from nfdt.shard.pending_update import PendingUpdate
from nfdt.shard.push_numbers import PushNumbers
from nfdt.update_rules.base import OptimizerTraits, RuleState, UpdateRule, check_state
from nfdt.update_rules.blocks import KernelBlocks
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD

STRIPE = 2**18
"""Elements of a stripe: some 0.5 ms of work."""

_SLOTS = {"sgd": ("momentum",), "adam": ("m", "v")}

_IN_STRIPES = ("reserve", "second_moment")
"""State of the rules with a number for each weight."""
_SAME_AS_SLOTS = ("second_moment",)
"""State that a slot of the optimizer equals; it is read once."""

LOAD_S = 600.0
"""Longest wait for the compilation of the loops."""


class LoopEngine(StateHolder):
    """Implementation of :class:`~nfdt.shard.engine.Engine`, see there for the methods.

    Args:
        plan: Part of the program on this shard; flat.
        traits: Traits of the user's optimizer.
        rule: The update rule.
        blocks: Its blocks.
        weights: Weights of the shard, flat; copied.
        options: Options of the user's optimizer.
        anchored: Whether backups will be relative to anchors; only the loops for that are loaded ahead.
    """

    def __init__(
        self,
        plan: ShardPlan,
        traits: OptimizerTraits,
        rule: DelayedSGD | DelayedAdam,
        blocks: KernelBlocks,
        weights: npt.NDArray[np.float32],
        options: Mapping[str, Any],
        *,
        anchored: bool = False,
    ) -> None:
        self.traits = traits
        self.rule: UpdateRule = rule
        self._plan = plan
        self._slots = _SLOTS[traits.kind] if traits.kind == "adam" or traits.momentum else ()
        self._part = OptimizerPart(plan, 2 + len(self._slots))
        self._decay = float(options.get("weight_decay") or 0.0)
        self._numbers = PushNumbers(rule, self._decay)
        self._rate, self._updates = np.float32(options["learning_rate"]), 0
        self._weights = np.array(weights, np.float32)
        self._stripes = _stripes(blocks.parts)
        self._ends = _ends(self._stripes, weights.size)
        self._held: list[HeldVectors] = []
        self._vectors, self._differences = VectorPool(weights.size), VectorPool(weights.size, np.uint16)
        self._last = PendingUpdate(None, 0)  # done; so every update has one before it
        self._shard: RuleState = {}
        self._take_over({})
        # Compiling takes seconds, and more on a busy machine; the first pushes wait for it only if they come earlier.
        self._loader = threading.Thread(target=self._load_loops, args=(anchored,), name="load-loops")
        self._loader.start()

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._weights.size

    @property
    def updates(self) -> int:
        """Number of updates that the optimizer has applied."""
        return self._updates

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self._rate)

    def weights(self) -> Vector:
        """Return a copy of the weights, after all pushes before."""
        self.wait_for_steps()
        copy = self._vectors.new_vector()
        np.copyto(copy, self._weights)
        return copy

    @staticmethod
    def tensor(vector: npt.NDArray[np.float32]) -> Vector:
        """Return the array itself."""
        return vector

    def array(self, vector: Vector | AnchoredBf16) -> npt.NDArray[np.float32]:
        """Return a read-only view of a vector, or the sum of an anchor and its difference."""
        if isinstance(vector, AnchoredBf16):
            out = self._vectors.new_vector()
            loops.widen(vector.anchor, vector.difference, out)
        else:
            out = vector.view()
        out.flags.writeable = False
        return out

    def no_difference(self) -> Any:
        """Return a difference of zeros, as the bits of bfloat16."""
        return np.zeros(self.size, np.uint16)

    @staticmethod
    def new_worker() -> RuleState:
        """Return no state: the rules have none for each worker."""
        return {}

    def step(
        self,
        gradient: Vector,
        backup: Any,
        staleness: int,
        worker: RuleState,
        *,
        length: float,
        rate: float = 1.0,
        anchor: Any = None,
    ) -> EngineReply | None:
        """Reserve the place of an update; the result's ``finish`` does it."""
        if length * rate >= LARGE:
            return self._try(gradient, backup, staleness, worker, rate, anchor)
        numbers, scalars = self._numbers.of(self._shard, float(self._rate), rate, staleness, self._updates)
        self._shard.update(scalars)
        self._updates += 1
        reply = self._vectors.new_vector()
        narrow = None if anchor is None else AnchoredBf16(anchor, self._differences.new_vector())
        self._last = update = PendingUpdate(self._last, len(self._stripes))
        vectors = self._vectors_of(gradient, backup, reply, narrow, numbers)
        parts = partial(self._complete_parts, update) if len(self._stripes) > 1 else None
        return EngineReply(reply, narrow, worker, partial(self._update, update, vectors), parts)

    def reply(self, staleness: int, *, anchor: Any = None) -> EngineReply:
        """Return weights without an update, after all pushes before."""
        self.wait_for_steps()
        ahead = self.rule.reply(
            np, self._weights, self._rate, np.float32(staleness), self._shard, self._decayed(self._weights)
        )
        out = self._vectors.new_vector()
        np.copyto(out, ahead)
        if anchor is None:
            return EngineReply(out)
        difference = self._differences.new_vector()
        loops.narrow(out, anchor, difference)
        return EngineReply(out, AnchoredBf16(anchor, difference))

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate, which is always a number here."""
        self._rate = np.float32(value)

    def wait_for_steps(self) -> None:
        """Wait until the updates of all pushes so far are done."""
        if not self._last.is_complete:
            self._loader.join(LOAD_S)
        self._last.complete()

    def hold(self, *, weights_only: bool = False) -> HeldState:
        """Return the present state; see :class:`Engine`."""
        self.wait_for_steps()
        state = {} if weights_only else self._shard
        names = [name for name in _IN_STRIPES if name in state]
        held = HeldVectors({"weights": self._weights, **{name: state[name] for name in names}}, self._ends)
        self._held.append(held)
        flat = ArrayEntry(np.dtype("<f4"), (self.size,))

        def vector(name: str) -> Pieces:
            return Pieces(flat, (piece[name] for piece in held.read([name], 0, self.size)))

        def slot(name: str, begin: int, end: int) -> Iterator[Array]:
            for piece in held.read(names, begin, end):
                yield np.asarray(self.rule.leave(np, {**rest, **piece})[name], np.float32)

        rest = {name: np.array(value) for name, value in state.items() if name not in names}
        optimizer: dict[int, Any] = {}
        if not weights_only:
            optimizer |= self._part.cut([np.array(self._updates, np.int64), np.array(self._rate)])
            for place, name in enumerate(self._slots, 2):
                for index, shape, begin, end in self._part.places(place):
                    optimizer[index] = Pieces(ArrayEntry(flat.dtype, shape), slot(name, begin, end))
        own = {str(s.index): optimizer[s.index] for s in self._plan.slots or () if s.variable == GLOBAL and optimizer}
        rule = {**rest, **{name: vector(name) for name in names if name not in _SAME_AS_SLOTS}}
        return HeldState(
            vector("weights"), optimizer, {"rule": rule, "optimizer": own}, lambda: self._held.remove(held)
        )

    def write(self, weights: npt.NDArray[np.float32], optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the weights, and the optimizer's variables where they are given."""
        self.wait_for_steps()
        kept = self.read()[1] if optimizer and not self.is_complete(optimizer) else {}
        self._keep_held(range(len(self._ends)))
        np.copyto(self._weights, weights)
        give_back(weights)
        if optimizer:
            self._take_over({**kept, **optimizer})

    def is_complete(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> bool:
        """Whether the variables are all that the optimizer has."""
        return self._part.is_complete(optimizer)

    def restore(self, records: RecordTree) -> None:
        """Continue from records, after the weights were loaded."""
        self._load({int(index): array for index, array in records.get("optimizer", {}).items()})
        same = {name: self._shard[name] for name in _SAME_AS_SLOTS if name in self._shard}
        self._shard = self.restored({**same, **records.get("rule", {})}, self._shard)

    @staticmethod
    def restored(state: RecordTree, initial: RuleState) -> RuleState:
        """Return a state from records."""
        check_state(state, initial)
        return {name: np.array(value, np.float32)[()] for name, value in state.items()}

    def _update(self, update: PendingUpdate, vectors: tuple[Any, ...]) -> None:
        """Update stripe by stripe, each after the push before."""
        try:
            self._loader.join(LOAD_S)  # so that no push counts the compilation as the time of the push before
            for index, parts in enumerate(self._stripes):
                update.wait(index)
                self._keep_held([index])
                loops.update(parts, *vectors)
                update.advance(index + 1)
        finally:
            update.end()

    def _keep_held(self, stripes: Iterable[int]) -> None:
        """Copy stripes that are about to change where somebody may still read them."""
        for held in tuple(self._held):
            for stripe in stripes:
                held.keep(stripe)

    def _complete_parts(self, update: PendingUpdate) -> Iterator[slice]:
        """Yield the range of each stripe when it is updated."""
        self._loader.join(LOAD_S)
        start = 0
        for index, stop in enumerate(self._ends):
            update.reach(index + 1)
            yield slice(start, stop)
            start = stop

    def _vectors_of(
        self, gradient: Vector, backup: Any, reply: Vector, narrow: AnchoredBf16 | None, numbers: Any
    ) -> tuple[Any, ...]:
        """Return the arguments of the loops behind the parts."""
        state, old = self._shard, None
        if isinstance(backup, AnchoredBf16):
            backup, old = backup
        anchor, difference = narrow or (None, None)
        owned = [state.get(name) for name in ("second_moment", "step_square", "factor", "factor_square")]
        return gradient, self._weights, backup, old, reply, anchor, difference, state["reserve"], *owned, numbers

    def _load_loops(self, anchored: bool) -> None:
        """Compile the loops for such arguments, or load them, which a call does that updates nothing."""
        vector = np.empty(0, np.float32)
        narrow = AnchoredBf16(vector, np.empty(0, np.uint16)) if anchored else None
        numbers = np.zeros(loops.NUMBERS, np.float32)
        loops.update(np.empty((0, 5), np.int64), *self._vectors_of(vector, narrow or vector, vector, narrow, numbers))

    def _try(
        self, gradient: Vector, backup: Any, staleness: int, worker: RuleState, rate: float, anchor: Any
    ) -> EngineReply | None:
        """Apply a large gradient at once; undo it if it leaves values that are not finite."""
        self.wait_for_steps()
        kept = {name: np.array(value)[()] for name, value in self._shard.items()}
        weights = self._weights.copy()
        result = self.step(gradient, backup, staleness, worker, length=0.0, rate=rate, anchor=anchor)
        assert result is not None, "only a large gradient is tried"
        assert result.finish is not None, "a step is never done at once"
        with np.errstate(all="ignore"):
            result.finish()
        if all(bool(np.isfinite(value).all()) for value in (self._weights, *self._shard.values())):
            return replace(result, finish=None, parts=None)
        self._weights, self._shard = weights, kept
        self._updates -= 1
        return None

    def _decayed(self, weights: Vector) -> Vector | None:
        return np.float32(self._decay) * weights if self._decay else None

    def _load(self, state: Mapping[int, npt.NDArray[Any]]) -> dict[str, Vector]:
        """Take over the counter and the learning rate; return the slots, by the rule's names."""
        shapes = [(), (), *[(self.size,)] * len(self._slots)]
        names = ["iterations", "learning_rate", *self._slots]
        held = [
            None if parts is None else joined(parts, shape, name)
            for parts, shape, name in zip(self._part.held(state), shapes, names, strict=True)
        ]
        if held[0] is not None:
            self._updates = int(held[0])
        if held[1] is not None:
            self._rate = np.float32(held[1])
        return {name: values for name, values in zip(self._slots, held[2:], strict=True) if values is not None}

    def _take_over(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Start the rule, from the optimizer's variables where they are given; they are copied, the old state is freed.

        A vector is never there twice: a shard of a large model fits where its finished state does.
        """
        slots = self._load(optimizer)
        self._shard.clear()
        state = self.rule.init_shard(np, self._weights)
        if len(slots) == len(self._slots):
            state = self.rule.enter(np, slots, np.float32(self._updates), state)
        slots.clear()
        for name in tuple(state):
            value = np.asarray(state.pop(name), np.float32)
            others = (*optimizer.values(), *self._shard.values())
            shared = not value.flags.writeable or any(np.may_share_memory(value, other) for other in others)
            self._shard[name] = (value.copy() if shared else value)[()]
        for array in optimizer.values():
            give_back(array)


def _stripes(parts: Sequence[tuple[int, int, int, int, int]]) -> list[npt.NDArray[np.int64]]:
    """Return the parts of each stripe, shape ``(k, 5)``, in order: a stripe ends with the block that makes it full."""
    found: list[list[tuple[int, int, int, int, int]]] = [[]]
    room = STRIPE
    for start, first, blocks, rows, columns in parts:
        begin = 0
        while begin < blocks:
            count = min(blocks - begin, max(1, -(-room // (rows * columns))))
            found[-1].append((start + begin * rows * columns, first + begin * columns, count, rows, columns))
            begin += count
            room -= count * rows * columns
            if room <= 0:
                found.append([])
                room = STRIPE
    return [np.array(stripe, np.int64) for stripe in found if stripe]


def _ends(stripes: Sequence[npt.NDArray[np.int64]], size: int) -> list[int]:
    """Return the ends of the stripes, as elements; the last one is ``size``."""
    starts = [int(parts[0, 0]) for parts in stripes]
    return [*starts[1:], size]
