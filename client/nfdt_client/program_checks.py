"""Checks of a model, its first batch and its packed program, before anything is sent."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.table_rows import MIN_TABLE_SIZE
from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.sharding import sparse_tables, why_uncuttable
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire.channel import MAX_REPORT_BYTES
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.program.distribution import devices_asked
from nfdt.model.program.evaluation_check import check_metrics
from nfdt.model.program.local_optimizers import state_variables
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.row_updates import why_dense
from nfdt.model.program.untrained import carrying_layers
from nfdt.model.training.host_batches import leaves, map_arrays
from nfdt_client.capture import Capture

logger = logging.getLogger(__name__)

OTHER_FIELDS_BYTES = 2**20  # of a message that contains the state of a worker


def check_batch(model: Any, batch: Any) -> None:
    """Run one batch through a built model symbolically, so that wrong shapes are reported before anything is sent.

    Done only for Functional and Sequential models with Keras' own ``train_step``, and for data that are not ragged.
    For others the symbolic run could fail although the real one does not.

    Raises:
        UsageError: model, loss and data do not fit together.
    """
    known = isinstance(model, keras_models.Functional | keras.Sequential) and type(model).__module__.startswith(
        "keras."
    )
    if not known or not model.built or any(isinstance(leaf, RaggedArray) for leaf in leaves(batch)):
        return

    def symbolic(leaf: Any) -> Any:
        dtype = "string" if leaf.dtype.kind in "OSU" else keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype, sparse=isinstance(leaf, SparseArray))

    try:
        x, y, sample_weight = keras_data.unpack_batch(map_arrays(symbolic, batch))
        keras_models.loss_spec(model, x, y, sample_weight)
    except ValueError as error:
        raise UsageError(f"Model, loss and training data do not fit together: {error}") from error
    except Exception as error:  # the symbolic run is optional: the workers do the real one
        logger.debug("The shapes could not be checked beforehand: %s", error)


def move_validation(captured: Capture, batch: Any, *, interactive: bool) -> None:
    """Move the validation into this process if ``test_step`` returns logs that workers cannot compute.

    Raises:
        CaptureError: a metric cannot be merged.
        UsageError: a detached job has no process that validates.
    """
    validation = captured.validation
    sample = None if validation is None else validation.first()
    own = check_metrics(captured.model, batch, sample)
    if not own:
        return
    what = f"test_step returns logs that are no results of metrics: {', '.join(own)}."
    if not interactive:
        raise UsageError(
            f"submit: {what} Workers validate with metrics alone. Expected: for instance keras.metrics.Mean, updated "
            "and returned by test_step; or nfdt.distribute, which validates such a model in this script."
        )
    logger.warning("%s The model is therefore validated in this process, not on the workers.", what)
    captured.validation = None


def cluster_for(model: Any, algorithm: AlgorithmSpec, cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster of a model's job: one worker where a state crosses from each batch to the next.

    Raises:
        UsageError: the algorithm trains on a fixed number of ranks.
    """
    layers = ", ".join(repr(layer.name) for layer in carrying_layers(model))
    if not layers or cluster.workers == 1:
        return cluster
    reason = f"with stateful=True (layers: {layers}) each batch begins with the state that the batch before it left"
    if not algorithm.topology_facts.flat:
        raise UsageError(
            f"algorithm={algorithm.name!r}: expected one worker, because {reason}. Received: {cluster.workers} ranks, "
            "which would each carry a state of their own. Use algorithm='ddc-asgd', which trains on one worker then."
        )
    logger.warning("This fit trains on one worker, not on %d, because %s.", cluster.workers, reason)
    return cluster.model_copy(update={"workers": 1})


def with_devices(model: Any, manifest: Manifest, cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with the number of devices that the script's own distribution has, unless the options do.

    Raises:
        UsageError: the options have another number than the mesh of the script's ModelParallel.
    """
    given, mesh = cluster.devices_per_worker, manifest.mesh
    if mesh is not None and given not in (None, "all", mesh.size):
        raise UsageError(
            f"devices_per_worker: expected {mesh.size}, the devices in the mesh of the script's ModelParallel. "
            f"Received: {given}. Leave the option out, or change the mesh."
        )
    if isinstance(given, int):
        return cluster
    asked = mesh.size if mesh is not None else devices_asked(model)
    return cluster if asked is None else cluster.model_copy(update={"devices_per_worker": asked})


def check_shards(model: Any, manifest: Manifest, cluster: ClusterSpec) -> None:
    """Raise UsageError if the optimizer needs all variables in one place but there are several shards."""
    if cluster.shards == 1:
        return
    obstacle, name = why_uncuttable(manifest), type(model.optimizer).__name__
    if obstacle is None:
        return
    reason = {
        "global norm": f"global_clipnorm of {name} is a norm over all variables",
        "unattributed": f"the variables of {name} cannot be attributed to the model's variables",
    }[obstacle]
    raise UsageError(f"shards={cluster.shards}: expected 1, because {reason}. Remove the option shards.")


def check_rows(manifest: Manifest, algorithm: AlgorithmSpec) -> None:
    """Check that ``sparse="lazy"`` has its effect, and log a warning where no table is large enough.

    Raises:
        UsageError: the optimizer has no lazy form, or the backend has no rows.
    """
    if algorithm.rows != "lazy":
        return
    if not manifest.has_rows:
        raise UsageError("sparse='lazy': expected Keras on TensorFlow. Set KERAS_BACKEND=tensorflow, or leave it out.")
    if reason := why_dense(manifest, lazy=True):
        raise UsageError(
            "sparse='lazy': expected SGD without momentum, Adagrad, or Adam or AdamW without amsgrad, weight decay, "
            f"clipping, use_ema and gradient accumulation. Received: {manifest.optimizer_class}; {reason}. Use another "
            "optimizer, or leave the option out."
        )
    if not any(manifest.layout.slots[index].size >= MIN_TABLE_SIZE for index in manifest.tables):
        logger.warning("sparse='lazy' has no effect: no table of the model has %d numbers or more.", MIN_TABLE_SIZE)


def check_made_tables(manifest: Manifest, algorithm: AlgorithmSpec, cluster: ClusterSpec) -> None:
    """Raise UsageError if tables that shards make cannot be looked up there."""
    if not manifest.made:
        return
    tables = {*sparse_tables(manifest, algorithm, cluster.shards)}
    if not algorithm.rows:
        reason = (
            "an algorithm that sends gradients of tables as rows (flat workers, codec='identity', not sparse=False). "
            f"Received: {algorithm.name!r}. Use algorithm='ddc-asgd', 'asgd' or 'bsp'"
        )
    elif why := why_dense(manifest, lazy=algorithm.rows == "lazy"):
        reason = f"SGD without momentum, Adagrad, or Adam with sparse='lazy'. {why}. Use one of these"
    elif elsewhere := _named(manifest, manifest.made.keys() - tables):
        reason = f"a model that only looks rows up. Received: another use of {elsewhere}. Remove it"
    elif elsewhere := _named(manifest, tables - {*manifest.looked_up}):
        reason = (
            "row numbers that follow from the batch alone, in a graph. Received: others, or run_eagerly=True, for "
            f"{elsewhere}. Look up numbers of the batch"
        )
    else:
        return
    raise UsageError(f"nfdt.Embedding: expected {reason}, or use keras.layers.Embedding.")


def _named(manifest: Manifest, variables: Collection[int]) -> str:
    return ", ".join(repr(manifest.layout.slots[index].name) for index in sorted(variables))


def check_local_optimizers(
    model: Any, manifest: Manifest, algorithm: AlgorithmSpec, schedulers: Sequence[str] = ()
) -> None:
    """Check a model whose optimizers step on the workers.

    Args:
        model: The model.
        manifest: Its program.
        algorithm: Algorithm of the job.
        schedulers: Callbacks of a detached job that set the learning rate, by name.

    Raises:
        UsageError: the workers of the algorithm do not push to shards on their own, or there are such callbacks.
        CaptureError: the variables of the optimizers do not fit into a message, in which workers report them.
    """
    if not manifest.steps_on_workers:
        return
    name = f"{type(model).__name__} {model.name!r}"
    if not algorithm.topology_facts.flat:
        raise UsageError(
            f"algorithm={algorithm.name!r}: expected one whose workers push to shards on their own, as 'bsp' or "
            f"'ddc-asgd', because train_step() of {name} is more than one update by one optimizer. Ranks of an "
            "allreduce ring or of a group compute one gradient per step."
        )
    if schedulers:
        raise UsageError(
            f"submit: expected no callback that sets the learning rate, because the optimizers of {name} step on the "
            f"workers. Received: {', '.join(schedulers)}. Use schedules in the optimizers, or nfdt.distribute."
        )
    variables = state_variables(model, manifest)
    sizes = [math.prod(v.shape) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables]
    most = MAX_REPORT_BYTES - OTHER_FIELDS_BYTES
    if sum(sizes) > most:
        raise CaptureError(
            f"{name}: expected at most {most >> 20} MiB of variables of its optimizers and other untrained "
            f"state, which every worker reports at the end of an epoch. Received: {sum(sizes) / 2**20:.0f} MiB. Use "
            "optimizers without slots (SGD without momentum), or a smaller model."
        )


def algorithm_for(manifest: Manifest, algorithm: AlgorithmSpec) -> AlgorithmSpec:
    """Return the algorithm of a program's job: workers whose optimizers step there do not turn to groups."""
    if manifest.steps_on_workers and algorithm.plan == "topology":
        logger.info("The job's workers push on their own: its train_step is more than one update by one optimizer.")
        return algorithm.model_copy(update={"plan": "overlap"})
    return algorithm
