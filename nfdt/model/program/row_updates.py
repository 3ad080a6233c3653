"""Optimizers whose update may be of single rows of a table. No Keras here."""

from __future__ import annotations

from nfdt.model.program.manifest import Manifest

_BY_ROWS = ("SGD", "Adagrad")
_LAZY = ("Adam", "AdamW")
_MOVES_ALL = ("momentum", "amsgrad", "weight_decay", "use_ema", "clipvalue", "gradient_accumulation_steps")


def why_dense(manifest: Manifest, *, lazy: bool = False) -> str | None:
    """Return why the optimizer of a program needs the gradients of all rows; None if those of touched rows are enough.

    They are enough where Keras itself leaves untouched rows and their state as they are. With ``lazy`` also where it
    moves them by the decay of moments only.
    """
    options, name = manifest.optimizer_options, manifest.optimizer_class
    if name not in _BY_ROWS and not (lazy and name in _LAZY):
        return f"{name} moves rows without a gradient as well"
    if moved := [option for option in _MOVES_ALL if options.get(option)]:
        return f"{name} with {moved[0]} moves or measures whole variables"
    if not manifest.layout.divisible:
        return f"the options of {name} do not treat all elements alike"
    return f"the script has changed {name} after it was made" if manifest.optimizer_attributes else None
