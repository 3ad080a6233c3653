"""Known reasons for which tests of Keras differ when their fits are distributed."""

from __future__ import annotations

import re

_LORA = r"lora\w*: AssertionError: np\.float32\(0\.0\) not greater than 0\.0"
_NUMBERS = r"test_(fit_flow|fit_lr_correctness|loss_weights|steps_per_e)\w*: AssertionError"
_STEPS = (
    r"test_(backup_corrupted|best_case_\w+|model_checkpoint_options|checkpoint_saving_basic0|training_resumption_2|"
    r"max_epochs_and_steps|callbacks_can_update_state_at_batch_boundary|validation_data_infinite_generator)"
    r": (AssertionError|\S*StepAlreadyExistsError)"
)
_HALF = (
    "With `bsp` an update takes a batch of each worker: with two workers there are half as many updates, steps and "
    "batch hooks as with one, and other numbers."
)
_LATE = (
    "A gradient is of weights that lack the newest update of the other worker, so the numbers are others than those of "
    "one process."
)
_APPROXIMATE = (
    "The hook belongs to an installed package, Keras itself, so `auto` does not choose exact hooks for it: it runs "
    "with the newest logs and the weights of the epoch's beginning. It passes with exact hooks."
)
DIFFERENCES: dict[str, str] = {
    r"test_stop_training_csv: AssertionError: 'nan' not found": (
        "A gradient that is not finite is dropped: the weights stay finite, and the losses that diverge are infinite "
        "instead of NaN."
    ),
    r"test_custom_summary: AssertionError: Items in the second set": (
        "The `call` of a layer writes with `tf.summary`. Workers have no writer of summaries, so it is lost."
    ),
    r", auto: .*test_(model_state_is_current_on|callbacks_can_update_state_at)_\w+: AssertionError": _APPROXIMATE,
    r", 1, auto: .*test_steps_per_e\w+: (AssertionError|KeyError: 'mse')": _APPROXIMATE,
    rf"bsp, 2, \w+: .*({_LORA}|{_NUMBERS}|{_STEPS})": _HALF,
    rf"ddc-asgd, 2, \w+: .*({_LORA}|{_NUMBERS})": _LATE,
    r"ddc-asgd, 2, auto: .*test_jax_layer_training_state_dtype_policy: AssertionError": (
        "The layer's state comes back as the mean of two workers' states, which half precision cannot hold exactly."
    ),
    r"ddc-asgd, 2, auto: .*backup_and_restore_test\S+: AssertionError: 3 != 6": (
        "The layer counts its batches. Each worker has a count of its own, and the job's count is not their sum."
    ),
}
"""Patterns of the configuration, the test and its error, one after the other, and the reason."""


def reason_to_differ(configuration: str, test: str, line: str) -> str:
    """Return the reason for which a test fails with an error in a configuration, named by title; "": none is known."""
    text = f"{configuration}: {test}: {line}"
    return next((reason for pattern, reason in DIFFERENCES.items() if re.search(pattern, text)), "")
