"""Construction of one shard: the program that it serves, its mode, its engine and its store.

The store has tables by rows where the job allows it; otherwise it is all dense. The engine may be that of the last job,
with its compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nfdt.consistency import ConsistencyPolicy, make_policy
from nfdt.core.arrays.layout import Array, ParameterLayout, Piece, Run
from nfdt.core.arrays.table_rows import TableLayout
from nfdt.core.errors import UsageError
from nfdt.core.sharding import GLOBAL, OptimizerSlot, ShardPlan, make_plan, sparse_tables, tables_on_shards
from nfdt.core.sharding.records import part_of_records, to_tree
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import FEW_WORKERS
from nfdt.core.work.spans import SpanRing
from nfdt.model.program.manifest import MadeTable, Manifest
from nfdt.model.program.state import State
from nfdt.shard.engine import Engine
from nfdt.shard.modes import AsynchronousMode, MergedMode, ModeFactory, RoundMode
from nfdt.shard.optimizer_state import plain_traits, traits_of_class
from nfdt.shard.row_optimizer import row_optimizer
from nfdt.shard.sparse_store import SparseStore
from nfdt.shard.store import ShardStore
from nfdt.shard.table import ShardTable
from nfdt.update_rules import UpdateRule, make_rule
from nfdt.update_rules.blocks import KernelBlocks, TableRows
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD

Store = ShardStore | SparseStore

OTHER: Final = "other"

_NOTHING = ParameterLayout.of({"nothing": (1,)})


@dataclass(frozen=True)
class EngineTerms:
    """Everything that the functions of an engine are compiled for.

    Attributes:
        manifest: The program; its initial state does not matter.
        algorithm: Algorithm of the job.
        part: Index of the shard, and number of shards as given in the job's specification.
        workers: Number of workers of the job.
    """

    manifest: Manifest
    algorithm: AlgorithmSpec
    part: tuple[int, int]
    workers: int

    def equal(self, other: EngineTerms) -> bool:
        """Whether both have the same functions."""
        same = (self.algorithm, self.part, self.workers) == (other.algorithm, other.part, other.workers)
        return same and self.manifest.is_same_program(other.manifest)


class KeptEngine:
    """Engine of the last job of this process, if another job may use it: SGD, Adam or AdamW of a program without code.

    Their whole state is in variables, which the initial state of a job replaces.
    """

    def __init__(self) -> None:
        self._held: tuple[EngineTerms, Engine] | None = None

    def get(
        self,
        terms: EngineTerms,
        weights: npt.NDArray[np.float32],
        optimizer: Mapping[int, npt.NDArray[Any]],
        make: Callable[[], Engine],
    ) -> Engine:
        """Return an engine with this state: the kept one, or a new one, which is kept.

        Args:
            terms: What the engine is for.
            weights: Weights of the shard, flat.
            optimizer: Variables of the whole optimizer, by index.
            make: Makes an engine with this state.
        """
        held, self._held = self._held, None
        if held is not None and held[0].equal(terms) and held[1].is_complete(optimizer):
            engine = held[1]
            engine.write(weights, optimizer)
        else:
            engine = make()
        if engine.traits.kind != OTHER and not terms.manifest.carries_code:
            self._held = (terms, engine)
        return engine


def build_store(
    manifest: Manifest,
    state: State,
    algorithm: AlgorithmSpec,
    index: int,
    shards: int,
    *,
    workers: int,
    policy: ConsistencyPolicy | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    records: Mapping[str, Array] | None = None,
    kept: KeptEngine | None = None,
    spans: SpanRing | None = None,
    stored: Callable[[str], State] | None = None,
) -> Store:
    """Build shard ``index`` of ``shards`` of a program.

    Args:
        manifest: The program's manifest.
        state: Weights of the whole model or of the shard, which may lack the tables that shards make; and, unless
            empty, the variables of the whole optimizer.
        algorithm: Algorithm of the job.
        index: Index of this shard.
        shards: Number of shards as given in the job's specification.
        workers: Number of workers of the job; sizes softsync's merge.
        policy: Consistency policy of the pushing workers; None: the algorithm's.
        custom_objects: The user's own classes.
        records: Records of all shards at the moment of ``state``, to continue from; see
            :mod:`nfdt.core.sharding.records`.
        kept: Engine of the last job of this process; used again if possible, and replaced by this shard's.
        spans: Takes the times of pushes.
        stored: Returns the state in an artifact; needed for tables that were trained before, see ``Manifest.made``.

    Raises:
        UsageError: the optimizer cannot be built or partitioned, or it needs all rows of a table that shards make.
        ProtocolError: the records belong to another number of shards.
        ShapeMismatch: the records belong to another program or rule.
    """
    if manifest.steps_on_workers and not algorithm.exchange_facts.local:
        # A difference of weights contains no information on curvature; delays still count.
        algorithm = algorithm.model_copy(update={"dc_lambda": 0.0})
    plan = make_plan(manifest, index, shards)
    weights = plan.own(state.weights)
    run = manifest.layout.cut(shards)[index]
    sparse = sparse_tables(manifest, algorithm, shards)
    layout = TableLayout.of_run(run, sparse)
    made = manifest.made
    if dense_ones := made.keys() - set(sparse):
        raise UsageError(
            f"Variables {sorted(dense_ones)}: expected tables that are exchanged by rows, as shards make them."
        )
    if lacks := weights.size != run.size:
        weights = TableLayout.of_run(run, list(made)).spread(weights)
    own, program = weights, manifest
    slots: list[tuple[OptimizerSlot, ...]] = []
    if layout.tables:
        (plan, slots), dense = _without_tables(plan, run, sparse), layout.dense(weights)
        own = dense if dense.size else np.zeros(1, np.float32)
        program = manifest if dense.size else _of_nothing(manifest)

    mode = mode_for(policy or make_policy(algorithm), workers)

    def make() -> Engine:
        blocks = blocks_of(manifest, run, sparse)
        engine = _loop_engine(program, plan, algorithm, blocks, own, workers) if mode is AsynchronousMode else None
        if engine is None:
            start = State(own, state.optimizer)
            return _keras_engine(program, plan, algorithm, blocks, start, custom_objects, workers)
        engine.write(own, state.optimizer)
        return engine

    if kept is None or layout.tables or records is not None:
        engine = make()
    else:
        engine = kept.get(EngineTerms(manifest, algorithm, (index, shards), workers), own, state.optimizer, make)
    backup_format = format_for(engine.rule, algorithm, workers)
    dense_store = ShardStore(engine, mode=mode, overlap=algorithm.overlap, backup_format=backup_format, spans=spans)
    make_table = partial(_table, manifest, algorithm, state.optimizer, made=made if lacks else {}, stored=stored)
    pieces = [piece for piece in run.pieces if piece.variable in sparse]
    tables = [make_table(*parts) for parts in zip(pieces, layout.views(weights), slots, strict=True)]
    # Also without a part of a table: workers send the format of rows to all shards of such a job.
    looked_up = tables_on_shards(manifest, algorithm, shards)
    store: Store = SparseStore(dense_store, engine, tables, layout, looked_up=looked_up) if sparse else dense_store
    if records is not None:
        store.restore(to_tree(part_of_records(records, index)))
    return store


def _table(
    manifest: Manifest,
    algorithm: AlgorithmSpec,
    optimizer: Mapping[int, Array],
    piece: Piece,
    values: Array,
    slots: Sequence[OptimizerSlot],
    *,
    made: Mapping[int, MadeTable],
    stored: Callable[[str], State] | None,
) -> ShardTable:
    """Return the part of a table on this shard: with ``values``; or, if it is one of those ``made``, with its own."""
    own, seeded = made.get(piece.variable), None
    if own is not None and own.state:
        assert stored is not None, "a table that was trained before needs its state"
        trained, start = stored(own.state), own.start + piece.start
        np.copyto(values, trained.weights[start : start + values.size].reshape(values.shape))
        optimizer = {index: trained.optimizer[there] for index, there in own.slots.items()}
    elif own is not None:
        seeded = own.rows
    table = ShardTable(
        values if made else values.copy(),
        _rule_of_rows(manifest, algorithm),
        row_optimizer(manifest),
        slots,
        made=piece.variable in manifest.made,
        seeded=seeded,
        first=piece.start // values.shape[1],
    )
    table.load_slots(optimizer)
    return table


def mode_for(policy: ConsistencyPolicy, workers: int) -> ModeFactory:
    """Return the mode of a job: rounds for a barrier, merged if an update has several gradients, else asynchronous."""
    if policy.facts.synchronous:
        return RoundMode
    count = policy.merge_count(workers)
    return partial(MergedMode, count=count) if count > 1 else AsynchronousMode


def format_for(rule: UpdateRule, algorithm: AlgorithmSpec, workers: int) -> str:
    """Return the name of the format of backups for the shards of a job."""
    if algorithm.encodes_replies:
        return "exact"
    if not rule.uses_backup:
        return "none"
    return "anchored" if workers > FEW_WORKERS else "exact"


def _loop_engine(
    manifest: Manifest, plan: ShardPlan, algorithm: AlgorithmSpec, blocks: KernelBlocks, weights: Array, workers: int
) -> Engine | None:
    """Return an engine without Keras; None if the rule or the optimizer needs Keras."""
    traits = plain_traits(manifest)
    if traits is None or not plan.flat:
        return None
    rule = make_rule(algorithm, traits, blocks, workers=workers)
    if not isinstance(rule, DelayedSGD | DelayedAdam):
        return None
    from nfdt.shard.loop_engine import LoopEngine  # Numba takes half a second to import

    anchored = format_for(rule, algorithm, workers) == "anchored"
    return LoopEngine(plan, traits, rule, blocks, weights, manifest.optimizer_options, anchored=anchored)


def _keras_engine(
    manifest: Manifest,
    plan: ShardPlan,
    algorithm: AlgorithmSpec,
    blocks: KernelBlocks,
    state: State,
    custom_objects: Mapping[str, Any] | None,
    workers: int,
) -> Engine:
    """Return an engine with the user's Keras optimizer, on the backend of this process."""
    from nfdt.shard.keras_engine import KerasEngine  # imports TensorFlow, which takes seconds
    from nfdt.shard.optimizer import build_optimizer

    built = build_optimizer(manifest, plan, state.weights, custom_objects)
    built.load(state.optimizer)
    return KerasEngine(built, make_rule(algorithm, built.traits, blocks, workers=workers))


def blocks_of(manifest: Manifest, run: Run, elsewhere: Sequence[int] = ()) -> KernelBlocks:
    """Return the blocks of an update rule for a run of a program's variables, without those handled by rows."""
    pieces = [piece for piece in run.pieces if piece.variable not in elsewhere]
    tables = set(manifest.tables)
    by_rows = [piece.variable in tables and len(piece.shape) == 2 for piece in pieces]
    return KernelBlocks([piece.shape for piece in pieces], by_rows)


def _rule_of_rows(manifest: Manifest, algorithm: AlgorithmSpec) -> UpdateRule:
    """Return the update rule of tables; to it, every optimizer with slots is a black box that steps on rows."""
    traits = traits_of_class(str(manifest.optimizer_class), manifest.optimizer_options)
    return make_rule(algorithm, traits if traits.kind == "sgd" else replace(traits, kind=OTHER), TableRows())


def _without_tables(
    plan: ShardPlan, run: Run, tables: Sequence[int]
) -> tuple[ShardPlan, list[tuple[OptimizerSlot, ...]]]:
    """Return the plan of the weights outside the tables, one flat vector, and the optimizer's slots of each table."""
    others = [place for place, piece in enumerate(run.pieces) if piece.variable not in tables]
    size = sum(run.pieces[place].stop - run.pieces[place].start for place in others)
    number = {GLOBAL: GLOBAL, **{place: position for position, place in enumerate(others)}}
    slots = plan.slots or ()
    rest = tuple(replace(slot, variable=number[slot.variable]) for slot in slots if slot.variable in number)
    own = [tuple(s for s in slots if s.variable == place) for place in range(len(run.pieces)) if place not in number]
    layout = ParameterLayout.of({"dense": (size,)}) if size else _NOTHING
    return replace(plan, layout=layout, slots=rest), own


def _of_nothing(manifest: Manifest) -> Manifest:
    """Return the program of a shard with tables only: its dense store counts updates and has the learning rate."""
    options = {"name": "sgd", "learning_rate": manifest.optimizer_options["learning_rate"]}
    config = {"module": "keras.optimizers", "class_name": "SGD", "config": options, "registered_name": None}
    own = [entry for entry in manifest.optimizer_variables or () if entry["variable"] == GLOBAL]
    return manifest.with_optimizer(config, own)
