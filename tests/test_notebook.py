"""The example notebook runs, and is stored with outputs that do not name a machine."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.support.notebook import NOTEBOOK, cleaned, outputs_of, run_notebook

BAR = re.compile(r"Epoch \d/\d")
PAGE = re.compile(r'<a href="(http://127\.0\.0\.1:\d+/open\?key=[\w-]+)"')
ACCURACY = re.compile(r"test accuracy: ([\d.]+)")
LEAST = 0.8


def check(text: str) -> None:
    assert len(BAR.findall(text)) >= 4  # the bars of both fits
    assert PAGE.search(text)
    found = [float(value) for value in ACCURACY.findall(text)]
    assert len(found) == 2
    assert min(found) >= LEAST


@pytest.mark.long
def test_the_notebook_trains_and_shows_bar_page_and_accuracy(tmp_path):
    check("\n".join(outputs_of(run_notebook(tmp_path))))


def test_the_stored_outputs_are_those_of_a_run_without_names_of_a_machine():
    text = "\n".join(outputs_of(nbformat.read(NOTEBOOK, as_version=4)))
    check(text)
    assert cleaned(text) == text
    assert re.findall(r"(?<![\w.])/(?:home|root|work|usr|opt)/\S*", text) == []
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("page http://127.0.0.1:40123/open?key=ab-C_d", "page http://127.0.0.1:7778/open?key=KEY"),
        ("serves at 127.0.0.1:40123", "serves at 127.0.0.1:7777"),
        ("logs in /var/tmp/nfdt-x1/state/logs, look", "logs in /tmp/nfdt/state/logs, look"),
        ("job job-12345abcde,", "job job-0123456789,"),
        ("1/8\r2/8\r8/8\n", "8/8\n"),
        ("\x1b[1m8/8\x1b[0m", "8/8"),
    ],
)
def test_outputs_are_cleaned(text, stored):
    assert cleaned(text) == stored
