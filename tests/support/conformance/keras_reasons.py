"""Known reasons for which tests of Keras differ when their fits are distributed."""

from __future__ import annotations

import re

DIFFERENCES: dict[str, str] = {
    r"test_stop_training_csv: AssertionError: 'nan' not found": (
        "A gradient that is not finite is dropped: the weights stay finite, and the losses that diverge are infinite "
        "instead of NaN."
    ),
    r"test_custom_summary: AssertionError: Items in the second set": (
        "The `call` of a layer writes with `tf.summary`. Workers have no writer of summaries, so it is lost."
    ),
}
"""Patterns of the configuration, the test and its error, one after the other, and the reason."""


def reason_to_differ(configuration: str, test: str, line: str) -> str:
    """Return the reason for which a test fails with an error in a configuration, named by title; "": none is known."""
    text = f"{configuration}: {test}: {line}"
    return next((reason for pattern, reason in DIFFERENCES.items() if re.search(pattern, text)), "")
