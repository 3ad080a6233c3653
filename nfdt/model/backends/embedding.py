"""A layer whose table is on the shards alone, which also make it; the script has neither the table nor its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.seeded_rows import SeededRows
from nfdt.core.arrays.table_rows import MIN_TABLE_SIZE
from nfdt.core.errors import UsageError
from nfdt.model.keras_internals.models import has_no_rows, initialize_variable, is_symbolic, without_rows

_REFUSED = ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank", "quantization_config")
_UNTRUNCATED = 0.87962566103423978  # standard deviation of a normal distribution that is truncated at 2 of its own

_zero_rows: ContextVar[bool] = ContextVar("zero_rows", default=False)


@dataclass(frozen=True)
class StoredRows:
    """Place of a trained table: in a state that a server stores.

    Attributes:
        server: ``HOST:PORT`` of the server.
        state: Artifact of the state.
        start: First element of the table in the weights of the state.
        slots: Variables of the optimizer that belong to the table, by their index in the state.
        optimizer: Returns the optimizer whose variables these are; None once it no longer exists.
    """

    server: str
    state: str
    start: int
    slots: Sequence[int]
    optimizer: Callable[[], Any]


stored_rows: weakref.WeakKeyDictionary[Any, StoredRows] = weakref.WeakKeyDictionary()
"""Place of the table of each layer that has been trained; others have the rows of their seed."""


@keras.saving.register_keras_serializable("nfdt")
class Embedding(keras.layers.Embedding):
    """Embedding layer whose table the shards make, and only they hold; the script has no memory for it.

    Takes the arguments of ``keras.layers.Embedding``. The rows follow from the seed of the initializer, by blocks, and
    are other ones than those of Keras' layer with this seed. Within ``nfdt.session`` and ``nfdt.distribute``, ``fit``,
    ``evaluate`` and ``predict`` go on with the trained rows, which ``nfdt.save_tables`` writes to files. A table with
    fewer than 65,536 elements is an ordinary variable.

    Args:
        input_dim: Number of rows.
        output_dim: Number of elements of a row.
        embeddings_initializer: One of Keras' random ones, ``"zeros"``, ``"ones"`` or a constant; its seed is a number.
        mask_zero: As in Keras.
        **kwargs: Keras' other arguments, without regularizer, constraint, weights, LoRA and quantization.

    Raises:
        UsageError: an argument is none of these, or Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in _REFUSED:
            if kwargs.pop(name, None) is not None:
                raise UsageError(
                    f"nfdt.Embedding: expected no {name}, which concerns all rows in each step. Received: one. Leave "
                    "it out, or use keras.layers.Embedding."
                )
        super().__init__(input_dim, output_dim, embeddings_initializer, mask_zero=mask_zero, **kwargs)
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"nfdt.Embedding: expected Keras on TensorFlow. Received: {keras.backend.backend()}. Set "
                "KERAS_BACKEND=tensorflow, or use keras.layers.Embedding."
            )
        self._rows = rows_by(self.embeddings_initializer, (input_dim, output_dim))

    @property
    def seeded_rows(self) -> SeededRows:
        """Rows of the table before it is trained."""
        return self._rows

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config: dict[str, Any] = super().get_config()
        return {name: value for name, value in config.items() if name not in (*_REFUSED, "lora_alpha")}

    def build(self, input_shape: Any = None) -> None:
        """Create the table, without memory for its rows if it is large."""
        shape = (self.input_dim, self.output_dim)
        if self.built:
            return
        with without_rows({shape} if self.input_dim * self.output_dim >= MIN_TABLE_SIZE else ()):
            super().build(input_shape)
        if not has_no_rows(self._embeddings):
            self._fill()

    def make_rows(self) -> None:
        """Make the table in this process, where it is an ordinary variable from now on.

        Call it before the model is compiled. Training in this process then begins with the rows that shards make.

        Raises:
            UsageError: the table has been trained on shards.
        """
        if self in stored_rows:
            raise UsageError(
                f"Layer {self.name!r}: expected a table that is not trained yet. Received: one that was trained on "
                "shards. Write it with nfdt.save_tables, and read it with nfdt.load_tables into a new model, after "
                "make_rows of its layer."
            )
        self.build()
        if has_no_rows(self._embeddings):
            self._fill()

    def _fill(self) -> None:
        rows = np.empty((self.input_dim, self.output_dim), np.float32)
        self._rows.fill(rows)
        initialize_variable(self._embeddings, keras.ops.convert_to_tensor(rows, self._embeddings.dtype))

    def call(self, inputs: Any) -> Any:
        """Look rows up; where the process has none of them, in shapes only, or as zeros: see :func:`zero_rows`.

        Raises:
            UsageError: the rows are on the shards, and the values matter.
        """
        if has_no_rows(self._embeddings):
            if not _zero_rows.get() and not is_symbolic():
                size = 4 * self.input_dim * self.output_dim / 2**20
                raise UsageError(
                    f"Layer {self.name!r}: expected a call on the cluster, as its rows are on the shards alone. "
                    "Received: one in this process. Use fit, evaluate and predict of the model within nfdt.session or "
                    "nfdt.distribute, or make the table here, before compile(): layer.make_rows(), which takes "
                    f"{size:.0f} MB."
                )
            inputs = keras.ops.zeros_like(inputs, dtype="int32")
        return super().call(inputs)

    def save_own_variables(self, store: Any) -> None:
        """Store the table, unless it is on the shards."""
        if not has_no_rows(self._embeddings):
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the table, if the file has it.

        Raises:
            UsageError: the file has it, but the table is on the shards.
        """
        if not len(store.keys()):
            return
        if has_no_rows(self._embeddings):
            raise UsageError(
                f"Layer {self.name!r}: expected a file without its table, which is on the shards. Received: one with "
                "it. Call make_rows() of the layer before loading."
            )
        super().load_own_variables(store)


LOOKUPS = (keras.layers.Embedding, Embedding)
"""Classes of layers whose ``call`` looks rows up and does nothing else; subclasses may do more."""


@contextmanager
def zero_rows() -> Iterator[None]:
    """Let layers whose rows are on the shards return zeros in this block, which tries out or describes a model."""
    token = _zero_rows.set(True)
    try:
        yield
    finally:
        _zero_rows.reset(token)


def rows_by(initializer: Any, shape: tuple[int, int]) -> SeededRows:
    """Return the rows of a table of this shape by one of Keras' initializers.

    Raises:
        UsageError: it is no initializer of Keras with independent elements, or its seed is no number.
    """
    name = type(initializer).__name__
    seed = getattr(initializer, "seed", 0)
    if type(initializer).__module__.startswith("keras.") and isinstance(seed, int):
        parts = _parameters(initializer, shape)
        if parts is not None:
            distribution, shift, scale = parts
            return SeededRows(distribution, float(shift), float(scale), seed)
    raise UsageError(
        "nfdt.Embedding: expected an embeddings_initializer of Keras whose elements are independent (uniform, normal, "
        "truncated normal, variance scaling, zeros, ones, a number), with a number as its seed, as shards make the "
        f"rows. Received: {name} with the seed {seed!r}. Use keras.layers.Embedding for others."
    )


def _parameters(initializer: Any, shape: tuple[int, int]) -> tuple[Any, float, float] | None:
    kinds = keras.initializers
    match initializer:
        case kinds.RandomUniform():
            return "uniform", initializer.minval, initializer.maxval - initializer.minval
        case kinds.RandomNormal():
            return "normal", initializer.mean, initializer.stddev
        case kinds.TruncatedNormal():
            return "truncated_normal", initializer.mean, initializer.stddev
        case kinds.VarianceScaling():
            return _of_variance(initializer, shape)
        case kinds.Zeros() | kinds.Ones():
            return "uniform", float(isinstance(initializer, kinds.Ones)), 0.0
        case kinds.Constant() if isinstance(initializer.value, int | float):
            return "uniform", initializer.value, 0.0
    return None


def _of_variance(initializer: Any, shape: tuple[int, int]) -> tuple[Any, float, float]:
    """Return the distribution of Keras' ``VarianceScaling`` for a table of this shape."""
    fans = {"fan_in": shape[0], "fan_out": shape[1], "fan_avg": sum(shape) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = (3.0 * variance) ** 0.5
        return "uniform", -limit, 2 * limit
    if initializer.distribution == "untruncated_normal":
        return "normal", 0.0, variance**0.5
    return "truncated_normal", 0.0, variance**0.5 / _UNTRUNCATED
