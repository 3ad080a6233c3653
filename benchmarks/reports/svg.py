"""Elements of pictures for the documentation: the same content gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, PALE, ACCENT, MUTED = "#1f2933", "#eef2f7", "#3f51b5", "#9aa5b1"
FONT = "font-family=\"system-ui, 'Segoe UI', 'Liberation Sans', sans-serif\""


def picture(width: int, height: int, title: str, elements: Sequence[str]) -> str:
    """Return an SVG file with a white ground, of ``width`` by ``height`` pixels; ``title`` is for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" {FONT}>'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *elements, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, *, fill: str) -> str:
    """Return a rectangle with round corners whose upper left corner is at ``x, y``."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'


def text(
    x: float, y: float, words: str, *, size: int = 14, anchor: str = "start", fill: str = INK, bold: bool = False
) -> str:
    """Return one line of text with its base line at ``y``."""
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a line with a point at its end; it goes right or down."""
    point = "l -7 -4 v 8 z" if to_y == y else "l -4 -7 h 8 z"
    line = f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{MUTED}"/>'
    return f'{line}<path d="M {to_x:g} {to_y:g} {point}" fill="{MUTED}"/>'


def line(points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
    """Return a line through points; ``dashes`` are the lengths of its strokes and gaps."""
    placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{placed}" fill="none" stroke="{colour}" stroke-width="1.6"{pattern}/>'


def dot(x: float, y: float, colour: str, *, hollow: bool = False) -> str:
    """Return a dot with its centre at ``x, y``; a hollow one is white with a border."""
    paint = f'fill="#ffffff" stroke="{colour}" stroke-width="1.6"' if hollow else f'fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {paint}/>'
