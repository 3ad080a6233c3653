"""The option ``forecast``."""

from __future__ import annotations

import json

import pytest
from nfdt_client.options import resolve

from nfdt.core.errors import UsageError

PLAN = {"workers": 2, "forecasts": [{"algorithm": "asgd", "samples_per_s": 800.0, "staleness": 1.0, "epoch_s": 2}]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


def forecast(file, **options):
    return resolve({"workers": 2, "algorithm": "asgd", "forecast": str(file), **options}, environ={}).forecast


def test_the_forecast_of_the_algorithm_is_read(file):
    found = forecast(file)
    assert (found.samples_per_s, found.staleness) == (800, 1)


@pytest.mark.parametrize("options", [{"workers": 3}, {"algorithm": "bsp"}])
def test_a_plan_for_something_else_is_refused(file, options):
    with pytest.raises(UsageError, match="forecast: expected a plan of .* Received: one of asgd on 2 workers"):
        forecast(file, **options)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"workers": 2, "forecasts": [3]}', '{"workers": 2, "forecasts": 4}'])
def test_a_file_that_is_no_plan_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(UsageError, match="forecast: expected a file that `nfdt plan --format json` has written"):
        forecast(file)


def test_numbers_that_are_none_are_refused(file):
    file.write_text(json.dumps({"workers": 2, "forecasts": [{"algorithm": "asgd", "samples_per_s": "fast"}]}))
    with pytest.raises(UsageError, match="forecast: expected numbers for asgd"):
        forecast(file)
