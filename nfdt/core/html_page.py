"""Pages of HTML in one file, without scripts: reports that open everywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:left}"
    "svg{max-width:100%}"
)


def render_page(title: str, body: str) -> str:
    """Return a page.

    Args:
        title: Title and headline, as text.
        body: What follows the headline, as HTML.
    """
    name = html.escape(title)
    head = f"<meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}<h1>{name}</h1>{body}</html>\n"


def render_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    lines = [("th", heads), *(("td", cells) for cells in rows)]
    return f"<table>{''.join(_line(tag, cells) for tag, cells in lines)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
