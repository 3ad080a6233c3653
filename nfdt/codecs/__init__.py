"""Codecs by name: encodings of gradients and weights on the wire; pure."""

from __future__ import annotations

from nfdt.codecs.base import Codec, ErrorFeedback, IdentityCodec
from nfdt.codecs.sparse import ROWS, TopK
from nfdt.codecs.widths import BFloat16, Float16, Int4, Int8
from nfdt.core.errors import ProtocolError

__all__ = ["DECODERS", "IDENTITY", "WIDTHS", "Codec", "ErrorFeedback", "find_decoder", "make_codec", "make_encoders"]

IDENTITY = IdentityCodec()
WIDTHS: tuple[Codec, ...] = (IDENTITY, BFloat16(), Int8(), Int4())
"""Codecs of adaptive jobs, the widest first."""

DECODERS: dict[str, Codec] = {codec.name: codec for codec in (*WIDTHS, Float16(), TopK(1.0))}


def make_codec(name: str, *, top_k: float) -> Codec:
    """Return the encoder of this name; ``top_k`` is the fraction that ``top-k`` sends."""
    return TopK(top_k) if name == TopK.name else DECODERS[name]


def make_encoders(top_k: float) -> dict[str, Codec]:
    """Return the encoder of every codec by name."""
    return {**{name: make_codec(name, top_k=top_k) for name in DECODERS}, ROWS.name: ROWS}


def find_decoder(name: str) -> Codec:
    """Return the codec of a name in a frame's header; the empty name is the identity.

    Raises:
        ProtocolError: No codec has this name.
    """
    if name == ROWS.name:
        return ROWS
    if name and name not in DECODERS:
        raise ProtocolError(f"Codec: expected one of {', '.join(DECODERS)}. Received: {name[:40]!r}.")
    return DECODERS[name or IDENTITY.name]
