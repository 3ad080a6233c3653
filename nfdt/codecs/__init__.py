"""Codecs: encodings of gradients and weights on the wire; pure, one file each."""

from nfdt.codecs.base import Codec
from nfdt.codecs.error_feedback import ErrorFeedback
from nfdt.codecs.registry import DECODERS, IDENTITY, WIDTHS, find_decoder, make_codec, make_encoders

__all__ = ["DECODERS", "IDENTITY", "WIDTHS", "Codec", "ErrorFeedback", "find_decoder", "make_codec", "make_encoders"]
