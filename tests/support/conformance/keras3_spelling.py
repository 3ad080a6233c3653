"""Keras 2 in the source and the errors of tests: names that Keras 3 spells differently, and names that it lacks."""

from __future__ import annotations

import re

SPELLINGS = {
    r"\bhorovod\.(?:tensorflow\.)?keras\b": "hfdt.keras",
    r"\btf\.ConfigProto\b": "tf.compat.v1.ConfigProto",
    r"\blr=": "learning_rate=",
    r"\.optimizer\.lr\b": ".optimizer.learning_rate",
    r"\bkeras\.losses\.mean_squared_error\b": "keras.losses.MeanSquaredError()",
    r"\s*,\s*experimental_run_tf_function=False": "",
    r"\b(\w+)\.ref\(\)": r"id(\1)",
    r"\bsuper\(\).__init__\(name=name, ": "super().__init__(0.1, name=name, ",
    r"\bdef update_step\(self, gradient, variable\)": "def update_step(self, gradient, variable, learning_rate)",
}
"""Patterns and replacements: the wrapper's import, and public names that Keras 3 has under another one."""

WITHOUT_COUNTERPART = {
    r"has no attribute '(_compute_gradients|_agg_helper)'": r"Keras 2: \1",
    r"`(keras\.optimizers\.legacy)` is not supported in Keras 3": r"Keras 2: \1",
    r"^KeyError: \(\)$": "Horovod: no process set of the odd ranks of one rank",
}
"""Errors that concern no part of ``hfdt.keras``, and the reason: mostly private attributes of Keras 2 and Horovod."""


def as_keras3(source: str) -> str:
    """Return the source of a test with ``hfdt.keras`` for Horovod's wrapper, and the spellings of Keras 3."""
    for pattern, replacement in SPELLINGS.items():
        source = re.sub(pattern, replacement, source)
    return source


def reason_not_comparable(line: str) -> str:
    """Return the reason for which an error of a test concerns no part of ``hfdt.keras``; "": it does."""
    found = ((re.search(pattern, line), reason) for pattern, reason in WITHOUT_COUNTERPART.items())
    return next((match.expand(reason) for match, reason in found if match), "")
