"""Reduction of the gradients of all ranks, in groups and in a transfer format, and accumulation before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hfdt.keras.compression import BrainFloat, NoCompression
from hfdt.keras.horovod_api import horovod, is_elastic
from nfdt.core.errors import UsageError


@dataclass(frozen=True)
class Reduction:
    """Reduction of the gradients of all ranks to a common result.

    Attributes:
        name: Prefix of the operations' names; the same on every rank.
        op: Horovod's ``Average``, ``Sum`` or ``Adasum``.
        process_set: Ranks that participate.
        compression: A compressor; see :mod:`hfdt.keras.compression`. Sparse gradients are sent uncompressed.
        sparse_as_dense: Convert the gradients of embeddings to dense ones before the reduction.
        predivide_factor: Average only: divide by this before the sum, and by ``size / factor`` after it.
        groups: None: one group per dtype; a number: that many groups; or lists of variables.
        device_dense: Device that reduces dense gradients; empty: TensorFlow chooses.
        device_sparse: Device that reduces sparse gradients.
    """

    name: str
    op: Any
    process_set: Any
    compression: Any = NoCompression
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    device_dense: str = ""
    device_sparse: str = ""

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients, in order, equal on all ranks; None stays None.

        Args:
            gradients: Tensors, ``tf.IndexedSlices`` or None; the same shapes and order on every rank.
            variables: The variable of each gradient.
        """
        if not self._others():
            return list(gradients)
        found = {i: self._prepared(g) for i, g in enumerate(gradients) if g is not None}
        sparse = {i: g for i, g in found.items() if isinstance(g, tf.IndexedSlices)}
        dense = {i: g for i, g in found.items() if i not in sparse}
        reduced = {**self._reduce_sparse(sparse), **self._reduce_dense(dense, variables)}
        return [reduced.get(i) for i in range(len(gradients))]

    def world_size(self) -> Any:
        """Return the number of ranks; a tensor if ranks may join and leave while the graph stays."""
        return horovod().size_op(self.process_set.process_set_id) if is_elastic() else self.process_set.size()

    def _others(self) -> bool:
        return is_elastic() or (self.process_set.included() and self.process_set.size() > 1)

    def _prepared(self, gradient: Any) -> Any:
        adasum = self.op == horovod().Adasum
        sparse = isinstance(gradient, tf.IndexedSlices) and not (self.sparse_as_dense or adasum)
        gradient = gradient if sparse else tf.convert_to_tensor(gradient)
        # Horovod does not support bfloat16; summed dense gradients can be sent in the way of BrainFloat.
        return tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 and (sparse or adasum) else gradient

    def _reduce_sparse(self, sparse: Mapping[int, Any]) -> dict[int, Any]:
        """Gather the rows of all ranks on every rank; rows of the same index are added when they are applied."""
        reduced = {}
        with tf.device(self.device_sparse):
            for i, slices in sparse.items():
                values = self._gather(slices.values, f"{i}.values")
                if self.op == horovod().Average:
                    values /= tf.cast(self.world_size(), values.dtype)
                indices = self._gather(slices.indices, f"{i}.indices")
                reduced[i] = tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
        return reduced

    def _gather(self, tensor: Any, name: str) -> Any:
        return horovod().allgather(tensor, name=f"{self.name}.sparse{name}", process_set=self.process_set)

    def _reduce_dense(self, dense: Mapping[int, Any], variables: Sequence[Any]) -> dict[int, Any]:
        reduced: dict[int, Any] = {}
        with tf.device(self.device_dense):
            for number, group in enumerate(self._grouped(dense, variables)):
                results = self.reduce_group([dense[i] for i in group], f"{self.name}.group{number}")
                reduced.update(zip(group, results, strict=True))
        return reduced

    def _grouped(self, dense: Mapping[int, Any], variables: Sequence[Any]) -> list[list[int]]:
        """Return the indices of the gradients that are sent together; Horovod requires one dtype per group."""
        by_dtype: dict[tuple[Any, int], list[int]] = {}
        group_of = self._group_of(list(dense), variables)
        for i, gradient in dense.items():
            by_dtype.setdefault((gradient.dtype, group_of[i]), []).append(i)
        return list(by_dtype.values())

    def _group_of(self, places: list[int], variables: Sequence[Any]) -> dict[int, int]:
        if not self.groups:
            return dict.fromkeys(places, 0)
        if isinstance(self.groups, int):
            return {place: n * self.groups // len(places) for n, place in enumerate(places)}
        named = {id(variable): n for n, group in enumerate(self.groups) for variable in group}
        return {place: named.get(id(variables[place]), len(self.groups) + place) for place in places}

    def reduce_group(self, tensors: Sequence[Any], name: str) -> list[Any]:
        """Reduce dense tensors of one dtype in one operation."""
        hvd = horovod()
        compression = BrainFloat if tensors[0].dtype == tf.bfloat16 else self.compression
        if not getattr(compression, "summable", True) and tensors[0].dtype.is_floating:
            return self._exchange(tensors, compression, name)
        op, before, after = self.op, 1.0, 1.0
        if self.predivide_factor != 1.0:
            op, before = hvd.Sum, 1.0 / self.predivide_factor
            after = self.predivide_factor / self.process_set.size()
        sent = [compression.compress(tensor) for tensor in tensors]
        wires = [wire for wire, _ in sent]
        if op == hvd.Adasum:  # Horovod 0.28 does not support it for a group
            summed = [hvd.allreduce(w, op=op, name=f"{name}.{n}") for n, w in enumerate(wires)]
        else:
            summed = hvd.grouped_allreduce(
                wires, op=op, prescale_factor=before, postscale_factor=after, process_set=self.process_set, name=name
            )
        return [
            tf.ensure_shape(compression.decompress(total, context), tensor.shape)
            for total, (_, context), tensor in zip(summed, sent, tensors, strict=True)
        ]

    def _exchange(self, tensors: Sequence[Any], compression: Any, name: str) -> list[Any]:
        """Reduce types that Horovod cannot add: each rank adds one part in float32, then the parts are gathered."""
        hvd = horovod()
        size = self.world_size()
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        length = tf.size(flat)
        flat = tf.pad(flat, [[0, -length % size]])
        wire, context = compression.compress(flat)
        shares = hvd.alltoall(wire, name=f"{name}.shares", process_set=self.process_set)
        rows = tf.cast(tf.reshape(compression.decompress(shares, context), [size, -1]), tf.float32)
        total = tf.reduce_sum(rows, 0)
        if self.op == hvd.Average:
            total /= tf.cast(size, total.dtype)
        wire, _ = compression.compress(total)
        gathered = hvd.allgather(wire, name=f"{name}.sum", process_set=self.process_set)
        whole = compression.decompress(gathered, context)[:length]
        parts = tf.split(whole, [tf.size(tensor) for tensor in tensors])
        return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]


def check_reduction(reduction: Reduction) -> None:
    """Check that the options can work before training starts.

    Raises:
        UsageError: an unknown op, or options that exclude each other.
    """
    hvd = horovod()
    if reduction.op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise UsageError(f"Expected op to be Average, Sum or Adasum. Received: {reduction.op!r}.")
    if reduction.predivide_factor != 1.0 and reduction.op != hvd.Average:
        raise UsageError("gradient_predivide_factor works with op=Average only: leave it out, or change op.")
    if isinstance(reduction.groups, int) and reduction.groups < 0:
        raise UsageError(f"Expected groups to be a number >= 0, or lists of variables. Received: {reduction.groups}.")
    if reduction.process_set.process_set_id is None:
        raise UsageError(
            f"Expected process_set to be one that all ranks have. Received: {reduction.process_set}. "
            "Give that object to init(process_sets=[...]) or to add_process_set() first."
        )
    if reduction.op == hvd.Adasum:
        _check_adasum(reduction)


def _check_adasum(reduction: Reduction) -> None:
    hvd = horovod()
    size = hvd.size()
    if size & (size - 1):
        raise UsageError(f"Adasum needs 2, 4, 8, ... ranks. Received: {size}. Start another number of them.")
    if reduction.process_set.process_set_id != 0:
        raise UsageError("Adasum works on all ranks only: leave process_set out.")
    if not getattr(reduction.compression, "summable", True):
        raise UsageError("Adasum cannot be compressed to bf16: use 'fp16' or 'none'.")
    if size > 1 and not hvd.mpi_enabled():
        raise UsageError("Adasum needs MPI: start the ranks with mpirun, or with horovodrun --mpi.")


class Accumulation:
    """Accumulator of the gradients of ``passes`` calls, the last of which passes on their sum.

    The sums are variables of this rank: neither saved nor broadcast. Training that ends between two updates drops the
    gradients accumulated since the last one.

    Args:
        passes: Calls per update, at least 2.
        average: Divide the sum by ``passes``.
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._done: Any = None
        self._sums: dict[int, Any] = {}

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[list[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        """Add the gradients of one pass; then call ``update`` with the sums after the last pass, else ``skip``.

        Args:
            gradients: Gradients of the same variables in the same order at each call. Sparse ones become dense.
            variables: The variable of each gradient.
            update: Receives the sums, None for variables without a gradient.
            skip: Runs in the passes that only accumulate.
        """
        self._prepare(gradients, variables)
        sums = {i: self._sums[i] for i, gradient in enumerate(gradients) if gradient is not None}
        for i, total in sums.items():
            total.assign_add(tf.convert_to_tensor(gradients[i]))
        self._done.assign_add(1)
        divisor = self._passes if self._average else 1

        def finish() -> None:
            update([sums[i] / divisor if i in sums else None for i in range(len(gradients))])
            for total in (*sums.values(), self._done):
                total.assign(tf.zeros_like(total))

        tf.cond(self._done >= self._passes, finish, skip)

    def _prepare(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._done is None:
                self._done = tf.Variable(0, trainable=False)
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None and i not in self._sums:
                    self._sums[i] = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
