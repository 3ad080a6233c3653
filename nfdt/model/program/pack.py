"""Conversion of a compiled Keras model to a program: a manifest and the artifacts that it names."""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import MIN_TABLE_SIZE
from nfdt.core.errors import CaptureError, PolicyRefused
from nfdt.model.backends.contract import current
from nfdt.model.backends.embedding import zero_rows
from nfdt.model.backends.variables import views_of
from nfdt.model.keras_internals.models import (
    flatten_layers,
    has_no_rows,
    making_variables,
    require_compiled,
    serialization_lib,
)
from nfdt.model.keras_internals.training import seeded
from nfdt.model.program.attributes import Attributes, runs_eagerly
from nfdt.model.program.building import build_model, describe_batch, save_assets
from nfdt.model.program.code import digest_sources, dump_objects
from nfdt.model.program.collect import CustomObjects, collecting
from nfdt.model.program.compiling import describe_compilation, overrides
from nfdt.model.program.described import describe_layers, is_configured
from nfdt.model.program.distribution import describe_mesh
from nfdt.model.program.dry_run import without_updates
from nfdt.model.program.forward_check import record_outputs
from nfdt.model.program.local_optimizers import (
    Described,
    describe_every_step,
    describe_local_optimizers,
    describe_optimizer_state,
    local_entries,
    state_variables,
    trace_own_step,
    with_configuration,
)
from nfdt.model.program.manifest import Manifest, ModelEntries
from nfdt.model.program.optimizer import (
    INNER_OPTIMIZER,
    OPTIMIZER,
    build_optimizer_variables,
    describe_optimizer,
    inner_optimizer,
    require_optimizer,
)
from nfdt.model.program.policy import check_policy
from nfdt.model.program.state import dump_state_parts
from nfdt.model.program.step_effects import StepEffects
from nfdt.model.program.tables import made_tables, plain_tables, traced_tables
from nfdt.model.program.untrained import describe_given, describe_untrained, describe_variable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedProgram:
    """A program ready to be uploaded.

    Attributes:
        manifest: The program's manifest.
        files: Artifacts that the manifest names, by sha256, without the state: the code, vocabularies.
        state_parts: The artifact of the state in parts, which share memory with the model.
        code: Whether the program needs a server that allows code.
        outside: Variables that the program has besides the model's, in the order of its ``untrained``.
        fixed: Variables of schedules and other objects of the optimizer, whose values are sent once.
        functions: The script's functions and classes in it.
        log_groups: Names of the dictionaries within the logs of ``train_step`` that hold a log, by its name.
    """

    manifest: Manifest
    files: dict[str, bytes]
    code: bool
    state_parts: Sequence[bytes | memoryview] = ()
    outside: tuple[Any, ...] = ()
    fixed: tuple[Any, ...] = ()
    functions: tuple[Any, ...] = ()
    log_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def artifacts(self) -> dict[str, bytes]:
        """All artifacts that the manifest names, by sha256; the state is copied."""
        return {**self.files, self.manifest.state: b"".join(self.state_parts)}


def pack(
    model: Any,
    sample_batch: Any,
    *,
    predicts: bool = False,
    sources: Sequence[str] = (),
    sparse: bool | Literal["lazy"] = False,
    outer: tuple[float, float] | None = None,
) -> PackedProgram:
    """Make a program of a compiled model; build the model first if necessary.

    Args:
        model: The user's model.
        sample_batch: One batch as ``train_step`` will receive it: x, (x, y) or (x, y, sample_weight).
        predicts: Whether the program is for ``predict`` only, whose batches have no targets.
        sources: Names of the job's data that are code and that the script may change; see ``describe_given``.
        sparse: Whether the gradients of embeddings may travel as rows, and of Adam as well.
        outer: Learning rate and Nesterov momentum of the shards if the model's optimizer steps on the workers in any
            case; None: only if a step is more than one update.

    Raises:
        CaptureError: a part of the model cannot be sent; the message names it and the remedy.
        ValueError: Keras' own error: the model is not compiled, or its code does not fit the batch.
    """
    with zero_rows():
        local, effects = _prepare(model, sample_batch, predicts=predicts, always=outer is not None)
    with zero_rows(), seeded(0):  # what the script makes later has the seeds that it has in Keras
        program = _pack_prepared(model, sample_batch, local, predicts, sources, outer or (1.0, 0.0))
        manifest = traced_tables(model, sample_batch, program.manifest, effects, False if predicts else sparse)
        manifest = manifest.replaced(looked_up=_looked_up(model, manifest.tables, sample_batch, predicts))
    return replace(program, manifest=manifest, log_groups=effects.groups if effects is not None else {})


def _pack_prepared(
    model: Any,
    sample_batch: Any,
    local: Described | None,
    predicts: bool,
    sources: Sequence[str],
    outer: tuple[float, float],
) -> PackedProgram:
    configured = _by_config(model, sample_batch, local, outer) if local is None or len(local) == 1 else None
    program = configured or _by_value(model, sample_batch, local, outer)
    manifest, artifacts = program.manifest, program.files
    outside = [*program.outside, *([Attributes(model)] if runs_eagerly(model) and not predicts else ())]
    given = [*(member.path for member in outside if isinstance(member, Attributes)), *sources]
    manifest = manifest.replaced(untrained=[*manifest.untrained, *describe_given(given)])
    if made := made_tables(model, manifest.optimizer_owners):
        manifest = manifest.replaced(made=made)
    state_parts = _dump_state(model, manifest, outside)
    state = name_of(*state_parts)
    outputs = record_outputs(model, sample_batch, may_vary=manifest.is_code)
    manifest = manifest.replaced(
        assets=save_assets(model, lambda data: _store(artifacts, data)),
        state=state,
        check=None if outputs is None else {"state": state, "artifact": _store(artifacts, outputs)},
    )
    manifest = manifest.for_prediction() if predicts else manifest
    return replace(program, manifest=_normalized(manifest), outside=tuple(outside), state_parts=state_parts)


def _by_config(
    model: Any, sample_batch: Any, local: Described | None, outer: tuple[float, float]
) -> PackedProgram | None:
    """Return the program with the model's configuration, or None if that is not all that the model is."""
    if not is_configured(model):
        return None
    found = CustomObjects()
    try:
        with collecting(found):
            config = serialization_lib.serialize_keras_object(model)
            config.pop("compile_config", None)  # the arguments of the last call
            compilation = describe_compilation(model)
            if local is not None:
                entries = local_entries(model, with_configuration(model, local), outer)
            else:
                entries = describe_optimizer(model)
            manifest = Manifest.of(config, compilation, entries, _describe(model, sample_batch, local))
        check_policy(manifest)
    except (CaptureError, PolicyRefused) as error:
        logger.debug("%s has no configuration: %s", model.name, error)
        return None
    return None if found.by_name else PackedProgram(manifest, {}, code=False)


def _by_value(model: Any, sample_batch: Any, local: Described | None, outer: tuple[float, float]) -> PackedProgram:
    """Return the program with the pickled model; its optimizer is a configuration, from which shards make theirs.

    Optimizers that step on the workers, ``local``, are pickled with the model.
    """
    found, artifacts = CustomObjects(), dict[str, bytes]()
    with collecting(found):
        compilation = describe_compilation(model, by_value=True)
        entries = describe_optimizer(model) if local is None else local_entries(model, local, outer)
        manifest = Manifest.of(describe_layers(model), compilation, entries, _describe(model, sample_batch, local))
    # By name, not by value: each shard makes an optimizer for its own variables from the configuration (decision 47).
    optimizers = {id(inner_optimizer(model)): INNER_OPTIMIZER, id(model.optimizer): OPTIMIZER} if local is None else {}
    pickled = dump_objects(model, optimizers, {id(variable) for variable in model.variables})
    custom = dump_objects(found.by_name)
    manifest = manifest.replaced(
        kind="code",
        by_value=_store(artifacts, pickled.data),
        code=_store(artifacts, custom.data) if found.by_name else None,
        sources=digest_sources([*pickled.code, *custom.code]),
    )
    outside = pickled.variables
    manifest = manifest.replaced(untrained=[*manifest.untrained, *map(describe_variable, outside)])
    known = {id(variable) for variable in outside}
    fixed = tuple(variable for variable in custom.variables if id(variable) not in known)
    return PackedProgram(
        manifest, artifacts, code=True, outside=tuple(outside), fixed=fixed, functions=tuple(pickled.code)
    )


def _prepare(
    model: Any, sample_batch: Any, *, predicts: bool, always: bool
) -> tuple[Described | None, StepEffects | None]:
    """Check the model and create its and its optimizers' variables, as the first step of ``fit`` would.

    ``always``: the optimizers step on the workers, whatever a step is.

    Returns:
        The optimizers that step on the workers, None if the model has one, which steps on the shards, or predicts;
        and the effects of the step, if it was traced.

    Raises:
        CaptureError: the model cannot be distributed.
        ValueError: Keras' own error.
    """
    require_compiled(model)
    if not overrides(model, "train_step") or predicts:
        require_optimizer(model)
    with making_variables(model):
        build_model(model, sample_batch, predicts=predicts)
    if not model.trainable_variables and not overrides(model, "train_step"):
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)  # as Keras' train_step does
    effects = None if predicts else trace_own_step(model, sample_batch)
    local = describe_local_optimizers(model, effects)
    if local is None:
        require_optimizer(model)
        with making_variables(model):
            build_optimizer_variables(model)
        local = describe_every_step(model) if always else None
    return local, effects


def _describe(model: Any, sample_batch: Any, local: Described | None = None) -> ModelEntries:
    layers = flatten_layers(model)
    return ModelEntries(
        tables=plain_tables(model) if local is None else [],
        globals=_globals(),
        trainable={
            "layers": [bool(layer.trainable) for layer in layers],
            "variables": [bool(v.trainable) for v in model.variables],
        },
        layout=layout_of(model).to_json(),
        untrained=[*describe_untrained(model), *describe_optimizer_state(model, local)],
        mesh=describe_mesh(model),
        input=describe_batch(sample_batch),
        versions={
            "python": ".".join(platform.python_version_tuple()[:2]),
            "keras": keras.__version__,
            current().name: current().version,
        },
    )


def _looked_up(model: Any, tables: Sequence[int], batch: Any, predicts: bool) -> list[int]:
    """Return those of the tables whose rows are looked up by numbers that follow from the batch alone."""
    shapes = {index: math.prod(model.trainable_variables[index].shape) for index in tables}
    large = [index for index, size in shapes.items() if size >= MIN_TABLE_SIZE]
    if not large:
        return []  # none of them travels by rows
    steps = [model.predict_step] if predicts else [model.train_step, model.test_step]
    try:
        with without_updates(model):
            return current().looked_up_ahead(model, large, steps, batch)
    except Exception as error:  # code of the script that needs the values of a batch
        logger.info("Workers hold the tables of %s, as its steps cannot be traced: %s", model.name, error)
        return []


def layout_of(model: Any) -> ParameterLayout:
    """Return the layout of a built model's trainable variables.

    Raises:
        CaptureError: float32 cannot represent a variable.
    """
    for variable in model.trainable_variables:
        if keras.backend.standardize_dtype(variable.dtype) not in ("float32", "float16", "bfloat16"):
            raise CaptureError(
                f"Variable {variable.path!r}: expected float32, bfloat16 or float16. Received: {variable.dtype}. "
                "Weights travel as float32; use dtype='float32'."
            )
    return ParameterLayout.of([(v.path, tuple(v.shape)) for v in model.trainable_variables])


def _globals() -> dict[str, Any]:
    policy = serialization_lib.serialize_keras_object(keras.config.dtype_policy())
    policy.pop("shared_object_id", None)  # differs from process to process, and nothing here is shared
    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": policy,
    }


def _dump_state(model: Any, manifest: Manifest, outside: Sequence[Any]) -> list[bytes | memoryview]:
    optimizer = [] if manifest.steps_on_workers else inner_optimizer(model).variables
    no_changes = [np.zeros(0, np.uint8)] * len(manifest.sources_by_value)
    held = [variable for variable in model.trainable_variables if not has_no_rows(variable)]
    slots = {index: variable for index, variable in enumerate(optimizer) if not has_no_rows(variable)}
    return dump_state_parts(
        Pieces.flat(views_of(held)),
        dict(zip(slots, views_of(slots.values()), strict=True)),
        dict(enumerate([*views_of([*state_variables(model, manifest), *outside]), *no_changes])),
    )


def name_of(*parts: bytes | memoryview) -> str:
    """Return the name of the artifact with these bytes, one part behind the other: their sha256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _store(artifacts: dict[str, bytes], data: bytes) -> str:
    artifacts[name := name_of(data)] = data
    return name


def _normalized(manifest: Manifest) -> Manifest:
    try:
        return manifest.normalized()
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"The model's configuration cannot be written as JSON: {error}. A get_config() of the script returns "
            "something else than numbers, strings, lists, dictionaries and Keras objects."
        ) from error
