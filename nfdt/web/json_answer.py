"""JSON for browsers, whose parsers refuse the numbers that are not finite: these are texts."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response


def dump_json(value: Any) -> str:
    """Return plain values as JSON, with ``"nan"``, ``"inf"`` and ``"-inf"`` for the numbers that JSON lacks."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


class JsonAnswer(Response):
    """Answer of plain values, as :func:`dump_json` writes them."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return dump_json(content).encode()
