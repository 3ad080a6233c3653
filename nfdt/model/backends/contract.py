"""The contract that each backend fulfils, what backends share, and access to the one that Keras has loaded.

A backend is one object, ``BACKEND`` of the module with its name in Keras. To add a backend, write that module and add
the name to ``TRAINING`` of :mod:`nfdt.core.host.keras_backend`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import keras
import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import RowVector, Vector
from nfdt.core.errors import CaptureError, ShapeMismatch
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.lanes import BatchedStep
from nfdt.model.backends.mesh import Mesh
from nfdt.model.backends.variables import assign_values, views_of

StepName = Literal["train_step", "test_step", "predict_step"]

ModelCall = Callable[[Any, Any], Any]
"""A step of a model as a function of flat weights, shape ``(P,)`` float32, and a batch, a pytree of arrays."""

RowNumbersOf = Callable[[Any], list[Any]]
"""Row numbers of each table, ascending, shape ``(k,)`` int32, as a function of a batch, also a prepared one."""


@dataclass(frozen=True)
class PreparedBatch:
    """A batch in the form that a step takes.

    Attributes:
        pytree: The batch as a pytree, of tensors unless ``tensors`` are what the step takes.
        tensors: Its leaves as tensors, except those that are None.
    """

    pytree: Any
    tensors: list[Any]

    @property
    def samples(self) -> int:
        """Number of samples in the batch."""
        return int(self.tensors[0].shape[0])


@dataclass(frozen=True)
class GradientResult:
    """Result of one step.

    Attributes:
        gradient: Gradient of the loss, flat, shape ``(P,)``, float32: a tensor, or
            :class:`~nfdt.core.arrays.safetensors_io.Pieces` of a large one; a ``RowVector`` of a step with tables.
        logs: Logs that ``train_step`` returned: name -> 0-d float32 tensor, or an array.
        finite: False where a float16 gradient overflowed: the gradient must not be pushed.
        denominator: Denominator of the loss: None for the number of samples, ``SUM``, or a 0-d float32 tensor; see
            :mod:`nfdt.model.backends.denominator`.
    """

    gradient: Any
    logs: dict[str, Any]
    finite: bool
    denominator: Any = None

    @property
    def vector(self) -> Vector:
        """The gradient as one array of NumPy."""
        return self.gradient.joined() if isinstance(self.gradient, Pieces) else np.asarray(self.gradient)


class Lookups(Protocol):
    """The tables of a model that are on the shards, in the order of its trainable variables."""

    def numbers_of(self, step: Callable[[Any], object]) -> RowNumbersOf:
        """Return what a step of the model looks up, a function of a pytree of tensors."""

    def assign(self, weights: RowVector) -> Any:
        """Take over the rows of a batch, for steps that the model runs next; return the other weights."""


class TrainingStep(ABC):
    """One training step of a model: the gradient of a batch at given weights.

    The step updates metrics, BatchNorm statistics and seeds of the model as in Keras.

    Attributes:
        model: A compiled, built model.
    """

    model: Any
    _version = 0

    @property
    def traces(self) -> int:
        """Number of traces of the step; 0 where none is counted, as for an eager model on TensorFlow."""
        return 0

    @property
    def row_numbers(self) -> RowNumbersOf | None:
        """Row numbers of each table that the step looks up for a batch; None if no table is on the shards."""
        return None

    def prepare(self, batch: Any) -> PreparedBatch:
        """Convert a pytree of arrays to the tensors that the step needs, before it is called."""
        pytree = as_tensors(batch)
        return PreparedBatch(pytree, [leaf for leaf in keras.tree.flatten(pytree) if leaf is not None])

    def __call__(self, weights: Any, batch: Any, *, version: int | None = None, share: float = 1.0) -> GradientResult:
        """Compute the gradient of one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32; copied. A step with tables takes ``RowWeights`` as well, and
                one whose tables are on the shards a ``RowVector`` with the rows of the batch.
            batch: Argument of ``train_step``: a pytree of arrays, or a prepared one.
            version: Number of updates applied so far, the value of ``optimizer.iterations``; None: one more than last.
            share: Fraction of the samples of a union of batches in this one, whose gradients are combined by their
                denominators; see :mod:`nfdt.model.backends.denominator`.

        Raises:
            CaptureError: ``train_step`` contains an operation that cannot be distributed.
            Exception: any exception of the user's code.
        """
        self._version = self._version + 1 if version is None else version + 1
        prepared = batch if isinstance(batch, PreparedBatch) else self.prepare(batch)
        return self._compute(weights, prepared, self._version - 1, share)

    @abstractmethod
    def _compute(self, weights: Any, batch: Any, version: int, share: float) -> GradientResult:
        """Compute the gradient of a prepared batch after ``version`` updates; see :meth:`__call__`."""


class LocalStep(TrainingStep):
    """A training step that runs as it is, with the optimizers of the model, which must be built.

    Optimizers, as many as there are, step in the order of ``train_step``, and later parts of the step see their
    updates. Assignments to weights count as well, as those of a moving average. See
    :mod:`nfdt.model.program.local_optimizers`. Its gradient is the weights before minus the weights after the step.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        progress: Position in the job at which schedules of the optimizers are evaluated.

    Raises:
        ShapeMismatch: the model has other trainable variables than the layout.
    """

    def __init__(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> None:
        check_layout(model, layout)
        self.model, self.layout, self.progress = model, layout, progress

    def load(self, weights: Array) -> None:
        """Replace the weights of the model, flat, shape ``(P,)``, float32."""
        assign_values(self.model.trainable_variables, self.layout.unflatten(weights))

    def read(self) -> Array:
        """Return a copy of the weights of the model, flat, shape ``(P,)``, float32, as its dtypes hold them."""
        parts = [np.asarray(part, np.float32).reshape(-1) for part in views_of(self.model.trainable_variables)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @abstractmethod
    def train(self, batch: Any, position: int | None) -> dict[str, Any]:
        """Train on a prepared batch, and return the logs of ``train_step``; see :class:`GradientResult`.

        ``position``: number of the job's steps before this one; None: as many as the optimizers have made.
        """

    def _compute(self, weights: Any, batch: Any, version: int, share: float) -> GradientResult:
        """Train on one batch as plain Keras does, whatever its ``share``; ``version`` is the position in the job."""
        self.load(np.asarray(weights))
        before = self.read()
        logs = self.train(batch, version)
        return GradientResult(before - self.read(), logs, finite=True)


class KerasBackend(ABC):
    """The steps and operations that Keras itself does not offer in the same form on every backend.

    Attributes:
        name: Name of the backend in Keras.
        version: Version of its library.
        is_eager: Whether the model's Python code runs at every step, also without ``run_eagerly``.
        traces_steps: Whether a step of several optimizers can be traced, to run on workers as it is.
        has_rows: Whether gradients of embeddings can be rows.
        has_meshes: Whether variables can be divided among devices.
        copies_models: Whether a step on several devices needs a copy of the model on each.
    """

    name: str
    version: str
    is_eager = False
    traces_steps = False
    has_rows = False
    copies_models = False
    has_meshes = False

    # ---- steps

    @abstractmethod
    def gradient_step(
        self,
        model: Any,
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
        tables: Sequence[int],
        copies: Sequence[Any] = (),
    ) -> TrainingStep:
        """Return the training step of a compiled, built model, whose optimizer it replaces.

        Args:
            model: The model.
            layout: Layout of its trainable variables.
            loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.
            tables: Variables, by index, whose gradients are returned as rows; empty without :attr:`has_rows`.
            copies: The model on other devices, among which each batch is divided; empty without :attr:`copies_models`.

        Raises:
            ShapeMismatch: the model has other trainable variables than the layout.
        """

    @abstractmethod
    def local_step(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> LocalStep:
        """Return a training step in which the model's own optimizers update the weights; see :class:`LocalStep`."""

    @abstractmethod
    def call(self, model: Any, layout: ParameterLayout, method: Literal["test_step", "predict_step"]) -> ModelCall:
        """Return a step of a compiled, built model.

        Args:
            model: The model; ``test_step`` updates its metrics as in Keras.
            layout: Layout of its trainable variables.
            method: ``test_step`` returns its logs, name -> 0-d float32 tensor, or an array; ``predict_step`` the leaves
                of its outputs.

        Raises:
            ShapeMismatch: the model has other trainable variables than the layout.
        """

    def use_rows(self, model: Any, tables: Sequence[int]) -> None:
        """Let a built model look up rows of these trainable variables, by index, in those of a batch."""
        raise CaptureError(f"Tables on the shards: expected Keras on TensorFlow. Received: {self.name}.")

    def lookups(self, model: Any) -> Lookups | None:
        """Return the tables of a model that are on the shards; None if there is none."""
        return None

    def looked_up_ahead(
        self, model: Any, tables: Sequence[int], steps: Sequence[Callable[[Any], object]], batch: Any
    ) -> list[int]:
        """Return those of the tables, by index, whose rows each of the steps looks up by numbers of the batch alone.

        Args:
            model: A built model, whose optimizers change nothing meanwhile.
            tables: Trainable variables, by index, that are tables of embeddings.
            steps: Steps of the model, functions of a pytree of tensors.
            batch: A batch of arrays.
        """
        return []

    @property
    def lanes(self) -> int:
        """Number of gradients that this backend computes fastest in one call."""
        return 1

    def batched_step(self, step: TrainingStep) -> BatchedStep | None:
        """Return a step that computes several gradients in one call; None if there is none with the same results."""
        return None

    @abstractmethod
    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step of the model with a batch of tensors, and return its logs, or the outputs.

        The caller restores the model's variables.
        """

    @abstractmethod
    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Trace a step of the model for a batch of tensors, as ``fit`` would."""

    # ---- tensors

    def is_of_rows(self, gradient: Any) -> bool:
        """Whether a gradient states single rows of its variable; others of the variable were not looked up."""
        return False

    @abstractmethod
    def to_tensor(self, leaf: Any) -> Any:
        """Return an array, dense, sparse or ragged, as the tensor that the model's own steps expect."""

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return a function and its arguments that recreate an object of the backend in another process.

        None if the object does not belong to the backend, or can be pickled as it is.
        """
        return None

    # ---- devices and modes

    def without_graphs(self) -> AbstractContextManager[None]:
        """Execute operations eagerly in the block."""
        return nullcontext()

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Seed the backend's own random generators in the block, and restore them afterwards."""
        return nullcontext()

    @abstractmethod
    def full_precision(self) -> AbstractContextManager[None]:
        """Multiply float32 numbers in full precision in the block, also on accelerators."""

    def seed_worker(self, worker: int) -> None:
        """Seed the generator that models draw from, so that workers drop out different units, the same in every run."""
        return

    def limit_threads(self, threads: int) -> None:
        """Limit the process to this number of threads, where the backend can."""
        return

    def emulate_devices(self, count: int) -> None:
        """Let the processor be this number of devices, if this process has not computed anything yet."""
        return

    def devices(self) -> list[str]:
        """Return the devices of this process, on which one step can be divided: accelerators, or else processors.

        One, whatever there is, of a backend whose steps cannot be divided.
        """
        return [f"{self.name}:0"]

    def distributed(self, devices: Sequence[str], mesh: Mesh | None) -> AbstractContextManager[None]:
        """Let models and steps that are made in the block compute on several devices, each step with a whole batch.

        Args:
            devices: Some of :meth:`devices`.
            mesh: Divides the variables too; None: every device has all of them.
        """
        if mesh is not None:
            raise CaptureError(f"ModelParallel: expected workers on JAX. Received: one on {self.name}.")
        return nullcontext()

    def on(self, device: str) -> AbstractContextManager[None]:
        """Make models in the block on one of :meth:`devices`; only with :attr:`copies_models`."""
        return nullcontext()

    def settle(self, model: Any) -> None:
        """Give a built model's variables the places that the mesh of :meth:`distributed` has for them."""
        return

    def share_gpus(self) -> None:
        """Leave unused GPU memory to other processes, if the backend would allocate all of it."""
        return


def current() -> KerasBackend:
    """Return the backend that Keras has loaded."""
    return _load(keras.backend.backend())


@cache
def _load(name: str) -> KerasBackend:
    return importlib.import_module(f"nfdt.model.backends.{name}").BACKEND


def to_tensor(leaf: Any) -> Any:
    """Return an array, dense, sparse or ragged, as a tensor of Keras' backend."""
    return current().to_tensor(leaf)


def as_tensors(batch: Any) -> Any:
    """Return the pytree with tensors at its leaves, as the model's own steps expect them; None stays None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else to_tensor(leaf), batch)


# ---- what backends share


@contextmanager
def switched(value: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> Iterator[None]:
    """Give a setting of a backend another value in the block."""
    held = read()
    write(value)
    try:
        yield
    finally:
        write(held)


def unsupported_data(leaf: Any, supported: str, library: str) -> CaptureError:
    """Return the error for an array that a library has no tensors for."""
    kinds = {RaggedArray: "a ragged array", SparseArray: "a sparse array"}
    return CaptureError(
        f"Training data: expected numbers in {supported} arrays, as Keras on {library} has them. Received: "
        f"{kinds.get(type(leaf), 'an array of texts')}. Convert it before fit(), or set KERAS_BACKEND=tensorflow."
    )


def own_loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """Return the loss scaling of the optimizer itself, in the form of the program's ``loss_scale``, or None."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return {"initial_scale": optimizer.initial_scale, "dynamic_growth_steps": optimizer.dynamic_growth_steps}


def flat_logs(logs: Any, method: str, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a step's logs, nested dictionaries flattened as in Keras, each value converted.

    Raises:
        CaptureError: the logs are not a dictionary.
    """
    if not isinstance(logs, Mapping):
        raise CaptureError(
            f"{method}() must return a dictionary of logs, as in {{'loss': ...}}. Received: {type(logs).__name__}."
        )
    found: dict[str, Any] = {}
    for name, value in logs.items():
        nested = isinstance(value, Mapping)
        found.update(flat_logs(value, method, convert) if nested else {str(name): convert(str(name), value)})
    return found


def check_layout(model: Any, layout: ParameterLayout) -> None:
    """Check that the model has the trainable variables of the layout.

    Raises:
        ShapeMismatch: it has others.
    """
    shapes = [tuple(int(n) for n in v.shape) for v in model.trainable_variables]
    if shapes != [slot.shape for slot in layout.slots]:
        raise ShapeMismatch(
            f"Expected a model with {len(layout.slots)} trainable variables of the program's shapes. "
            f"Received: {len(shapes)}: {shapes[:8]}."
        )
