"""Keras on TensorFlow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import keras
import tensorflow as tf

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.contract import KerasBackend, LocalStep, ModelCall, StepName, TrainingStep, switched
from nfdt.model.backends.direct_call import Prepared
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.lookups import LookedUpTables, looked_up_ahead, use_rows
from nfdt.model.backends.tensorflow_devices import DividedStep
from nfdt.model.backends.tensorflow_step import GradientStep, GraphLocalStep, WeightSetter, direct_call, step_logs
from nfdt.model.keras_internals.models import has_no_rows, table_default
from nfdt.model.keras_internals.training import tensorflow_seeded

logger = logging.getLogger(__name__)


class TensorFlowBackend(KerasBackend):
    """TensorFlow, which also has local steps and gradients by rows."""

    name = "tensorflow"
    version = str(tf.__version__)
    traces_steps = True
    has_rows = True
    copies_models = True

    def gradient_step(
        self,
        model: Any,
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
        tables: Sequence[int],
        copies: Sequence[Any] = (),
    ) -> TrainingStep:
        """Return a step whose gradient is a tensor, or rows of tables."""
        if copies:
            return DividedStep(model, layout, loss_scale, copies)
        return GradientStep(model, layout, loss_scale=loss_scale, tables=tables, in_pieces=True)

    def local_step(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> LocalStep:
        """Return a step of one graph."""
        return GraphLocalStep(model, layout, progress)

    def call(self, model: Any, layout: ParameterLayout, method: str) -> ModelCall:
        """Return a step as a graph, traced once per signature of the batch."""
        looked_up = LookedUpTables.of(model)
        tables = [index for index, variable in enumerate(model.trainable_variables) if has_no_rows(variable)]
        assign = WeightSetter(model, layout, tables)

        def traced(weights: Any, batch: Any) -> Any:
            assign(weights)
            found = getattr(model, method)(batch)
            return step_logs(found, method) if method == "test_step" else list(keras.tree.flatten(found))

        run = direct_call(traced, model)

        def call(weights: Any, batch: Any) -> Any:
            prepared = batch if isinstance(batch, Prepared) else run.prepare(batch)
            return run(weights if looked_up is None else looked_up.assign(weights), prepared)

        return call

    def use_rows(self, model: Any, tables: Sequence[int]) -> None:
        """Replace the lookups of the embeddings."""
        use_rows(model, tables)

    def lookups(self, model: Any) -> LookedUpTables | None:
        """Return the tables that layers of the model have."""
        return LookedUpTables.of(model)

    def looked_up_ahead(
        self, model: Any, tables: Sequence[int], steps: Sequence[Callable[[Any], object]], batch: Any
    ) -> list[int]:
        """Trace the steps; an eager model has no graph."""
        return [] if model.run_eagerly else looked_up_ahead(model, tables, steps, batch)

    def is_of_rows(self, gradient: Any) -> bool:
        """Whether the gradient is of lookups alone; TensorFlow makes any other one dense."""
        return isinstance(gradient, tf.IndexedSlices)

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array as a ``tf.Tensor``, ``tf.SparseTensor`` or ``tf.RaggedTensor``."""
        if isinstance(leaf, SparseArray):
            return tf.SparseTensor(leaf.indices, leaf.values, leaf.shape)
        if isinstance(leaf, RaggedArray):
            return tf.RaggedTensor.from_nested_row_splits(leaf.values, leaf.splits)
        return tf.convert_to_tensor(leaf)

    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step, which works on the model's variables."""
        return getattr(model, step)(batch)

    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Build the graph of a step; an eager model runs it."""
        if model.run_eagerly:
            getattr(model, step)(batch)
        else:
            tf.function(tf.autograph.experimental.do_not_convert(getattr(model, step))).get_concrete_function(batch)

    def without_graphs(self) -> AbstractContextManager[None]:
        """Run ``tf.function`` eagerly in the block."""
        return switched(True, tf.config.functions_run_eagerly, tf.config.run_functions_eagerly)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Seed TensorFlow's context."""
        return tensorflow_seeded(seed)

    def full_precision(self) -> AbstractContextManager[None]:
        """Disable TensorFloat-32."""
        config = tf.config.experimental
        return switched(False, config.tensor_float_32_execution_enabled, config.enable_tensor_float_32_execution)

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the form of a ``tf.Variable`` or a lookup table.

        A tensor of a graph, which was traced in this process, becomes None.
        """
        if isinstance(obj, tf.Variable):
            return _make_variable, (obj.numpy(), bool(obj.trainable), obj.name.partition(":")[0])
        if isinstance(obj, tf.lookup.StaticHashTable | tf.lookup.experimental.MutableHashTable):
            keys, values = obj.export()
            types = obj.key_dtype.name, obj.value_dtype.name
            is_static = isinstance(obj, tf.lookup.StaticHashTable)
            return _make_table, (is_static, types, keys.numpy(), values.numpy(), table_default(obj).numpy())
        return (_nothing, ()) if isinstance(obj, tf.Tensor) and not hasattr(obj, "numpy") else None

    def limit_threads(self, threads: int) -> None:
        """Limit the threads of operations; only the first job of a process can."""
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError:
            logger.debug("TensorFlow runs already; its thread count stays")

    def emulate_devices(self, count: int) -> None:
        """Divide the processor, unless TensorFlow has computed already."""
        (processor, *_) = tf.config.list_physical_devices("CPU")
        with contextlib.suppress(RuntimeError):
            tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * count)

    def devices(self) -> list[str]:
        """Return the logical GPUs of this process, or its logical processors."""
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return [device.name.rpartition("device:")[2].lower() for device in found]

    def on(self, device: str) -> AbstractContextManager[None]:
        """Use ``tf.device``."""
        return cast("AbstractContextManager[None]", tf.device(device))

    def share_gpus(self) -> None:
        """Let the memory of GPUs grow with its use."""
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)


def _make_variable(value: Any, trainable: bool, name: str) -> Any:
    return tf.Variable(value, trainable=trainable, name=name)


def _make_table(is_static: bool, types: tuple[str, str], keys: Any, values: Any, default: Any) -> Any:
    keys, values = tf.constant(keys, types[0]), tf.constant(values, types[1])
    if is_static:
        return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)
    table = tf.lookup.experimental.MutableHashTable(*types, default)
    table.insert(keys, values)
    return table


def _nothing() -> None:
    return None


BACKEND = TensorFlowBackend()
