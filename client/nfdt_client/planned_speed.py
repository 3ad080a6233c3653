"""Speed that ``nfdt plan`` predicted for the algorithm of a session, from the plan's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import SpeedForecast


def read_forecast(file: Any, algorithm: str, workers: int) -> SpeedForecast:
    """Return the forecast of an algorithm from the output of ``nfdt plan --format json``.

    Raises:
        UsageError: the file cannot be read, or has no forecast of this algorithm on so many workers.
    """
    try:
        plan = json.loads(Path(file).read_text(encoding="utf-8"))
        planned, found = plan["workers"], {each["algorithm"]: each for each in plan["forecasts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"forecast: expected a file that `nfdt plan --format json` has written. Received: {file} "
            f"({type(error).__name__}: {error})."
        ) from None
    if planned != workers or algorithm not in found:
        raise UsageError(
            f"forecast: expected a plan of {algorithm} on {workers} workers. Received: one of "
            f"{', '.join(found)} on {planned} workers, in {file}."
        )
    try:
        return SpeedForecast(**{name: found[algorithm].get(name) for name in SpeedForecast.model_fields})
    except ValidationError as error:
        raise UsageError(f"forecast: expected numbers for {algorithm} in {file}. Received: {error}.") from None
