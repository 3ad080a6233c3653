"""Formats of gradients on the wire."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from nfdt.core.errors import UsageError


class Compressor(Protocol):
    """Format of a tensor on the wire; Horovod's own compressors and the user's have this shape too."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what :meth:`decompress` needs to know."""

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor as it was before, as far as the numbers allow."""


class NoCompression:
    """Gradients travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor itself."""
        return tensor


class HalfPrecision:
    """float16: half the bytes, summed by Horovod in float16; values above 65504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor in float16; integers as they are."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor in the dtype it had."""
        return tf.cast(tensor, context)


class BrainFloat:
    """bfloat16: half the bytes and the range of float32.

    Horovod cannot add bfloat16. The values travel as 16-bit integers, each rank adds up its share of them in float32,
    and the rounded shares are gathered: as many bytes as a ring allreduce of float16.
    """

    summable = False

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The bits of the tensor in bfloat16, as int16; integers as they are."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.int16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor in the dtype it had."""
        return tf.cast(tf.bitcast(tensor, tf.bfloat16), context) if context.is_floating else tensor


class Compression:
    """The choices for ``compression=``; their names as strings will do as well."""

    none = NoCompression
    fp16 = HalfPrecision
    bf16 = BrainFloat


def find_compressor(wanted: Any) -> Any:
    """The compressor behind a name, a class of :class:`Compression` or one of Horovod's; None is no compression.

    Raises:
        UsageError: it is none of these.
    """
    named = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}
    if wanted is None:
        return Compression.none
    if isinstance(wanted, str) and wanted in named:
        return named[wanted]
    if callable(getattr(wanted, "compress", None)) and callable(getattr(wanted, "decompress", None)):
        return wanted
    raise UsageError(
        f"Expected compression to be one of {', '.join(named)}, or a class with compress() and decompress(). "
        f"Received: {wanted!r}."
    )
