"""Formats of gradients for transfer; Horovod's own compressors and the user's have the same two methods."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from nfdt.core.errors import UsageError


class NoCompression:
    """Uncompressed gradients."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, here unchanged, and the context for :meth:`decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class HalfPrecision:
    """float16: half the bytes, summed by Horovod in float16; values above 65504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16; integers unchanged."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor in its original dtype."""
        return tf.cast(tensor, context)


class BrainFloat:
    """bfloat16: half the bytes and the range of float32.

    Horovod cannot add bfloat16. The values are sent as 16-bit integers, each rank adds its part of them in float32, and
    the rounded parts are gathered: as many bytes as a ring allreduce of float16.
    """

    summable = False

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the bits of the tensor in bfloat16, as int16; integers unchanged."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.int16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor in its original dtype."""
        return tf.cast(tf.bitcast(tensor, tf.bfloat16), context) if context.is_floating else tensor


class Compression:
    """Compressors, by the names that ``compression=`` accepts as strings, too."""

    none = NoCompression
    fp16 = HalfPrecision
    bf16 = BrainFloat


def find_compressor(wanted: Any) -> Any:
    """Return the compressor for a name, a class of :class:`Compression` or one of Horovod's; None is no compression.

    Raises:
        UsageError: the value is none of these.
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
