"""Formulas of the documentation as MathML, which browsers show without a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from latex2mathml.converter import convert


def format_math(source: str, language: str, css_class: str, options: Mapping[str, Any], md: Any, **_: Any) -> str:
    r"""Return a block of LaTeX as MathML, a formula per line; GitHub shows the same block by itself.

    Args:
        source: Lines of LaTeX; a trailing ``\\`` ends a formula.
        language: Name of the fence, ``math``.
        css_class: Class of the element.
        options: Options of the fence; none are read.
        md: The Markdown converter.
    """
    return f'<div class="{css_class}">{"".join(convert(line, display="block") for line in formulas(source))}</div>'


def formulas(source: str) -> Sequence[str]:
    """Return the formulas of a block, without the environment that aligns them on GitHub."""
    lines = (line.strip().removesuffix("\\\\").replace("&", "").strip() for line in source.splitlines())
    return [line for line in lines if line and not line.startswith(("\\begin{", "\\end{"))]
