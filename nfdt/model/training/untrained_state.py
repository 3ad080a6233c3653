"""State of a worker other than its weights: BatchNorm statistics, seeds, counters, and what the script may change.

:mod:`nfdt.model.training.merge` merges the states of several workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ShapeMismatch
from nfdt.model.backends.variables import assign_values, preserved, values_of
from nfdt.model.program.untrained import untrained_variables
from nfdt.model.training.merge import decode_arrays, encode_arrays, is_large


class UntrainedState:
    """The untrained variables of one worker's model, in the order of the program's ``untrained``.

    Worker 0 keeps the random seeds of the user's model. Every other worker folds its index into them, so that no two
    workers drop out the same units.

    Args:
        model: A built model with the program's state.
        rules: Merge rule of each variable; see :attr:`nfdt.model.program.manifest.Manifest.untrained_rules`.
        worker: Index of this worker.
        others: Variables that follow the model's in the program: those of optimizers that step on the workers, those
            besides the model, data that the script may change.

    Attributes:
        variables: All of them, in the order of the program's ``untrained``.

    Raises:
        ShapeMismatch: the model has another number of untrained variables than the program.
    """

    def __init__(
        self, model: Any, rules: Sequence[Mapping[str, Any]], *, worker: int, others: Sequence[Any] = ()
    ) -> None:
        self.variables = [*untrained_variables(model), *others]
        self._rules = [entry["rule"] for entry in rules]
        self._worker = worker
        if len(self.variables) != len(self._rules):
            raise ShapeMismatch(
                f"Expected {len(self._rules)} untrained variables, as the program says. "
                f"Received: {len(self.variables)}."
            )
        if worker > 0:
            seeds = [v for v, rule in zip(self.variables, self._rules, strict=True) if rule == "seed"]
            assign_values(seeds, [fold_seed(seed, worker) for seed in values_of(seeds)])
        self._given = _digests(self.read())

    def read(self) -> list[Array]:
        """Return the values, in order."""
        return values_of(self.variables)

    def preserved(self) -> AbstractContextManager[None]:
        """Restore the values at the end of a block, except data of the script."""
        own = [v for v, rule in zip(self.variables, self._rules, strict=True) if rule != "given"]
        return preserved(own)

    def encode(self, left_out: Collection[int] = ()) -> bytes:
        """Return the values as safetensors, without large ones that are as they were given, and without data.

        ``left_out``: further variables, by index, that this worker keeps to itself.
        """
        arrays = self.read()
        # Only the script changes what is given: workers never report it (decision 65).
        given = {i for i, rule in enumerate(self._rules) if rule == "given"}
        now = _digests([None if i in given else array for i, array in enumerate(arrays)])
        as_given = {i for i, digest in now.items() if digest == self._given[i]}
        return encode_arrays(arrays, as_given | given | set(left_out))

    def load(self, encoded: bytes) -> None:
        """Assign merged values from safetensors, which lacks large ones that have never changed.

        Raises:
            ShapeMismatch: the number or a shape of the arrays differs.
        """
        self.write(decode_arrays(encoded, [None] * len(self.variables)))

    def write(self, arrays: Sequence[Array | None]) -> None:
        """Assign merged values, except those that are None; seeds only on worker 0, which they belong to.

        Raises:
            ShapeMismatch: the number or a shape of the arrays differs.
        """
        expected = [tuple(int(n) for n in v.shape) for v in self.variables]
        received = [np.shape(a) if a is not None else None for a in arrays]
        pairs = zip(expected, received, self._rules, strict=False)
        wrong = any(got not in (None, want) and rule != "given" for want, got, rule in pairs)
        if len(received) != len(expected) or wrong:
            raise ShapeMismatch(
                f"Expected {len(expected)} arrays of shapes {expected[:8]}. Received: {len(received)}: {received[:8]}. "
                "The sender runs another model."
            )
        for variable, array, rule in zip(self.variables, arrays, self._rules, strict=True):
            if array is not None and not (rule == "seed" and self._worker > 0):
                assign_values([variable], [array])
        self._given |= _digests(arrays)


def fold_seed(state: Array, index: int) -> Array:
    """Return a seed generator's state for worker ``index``: another seed, the same number of draws."""
    seed = int(state[0])
    folded = np.random.SeedSequence([seed % 2**64, index]).generate_state(1)[0] & 0x7FFFFFFF
    return np.asarray([folded, state[1]], state.dtype)


def _digests(arrays: Sequence[Array | None]) -> dict[int, bytes]:
    """Return a digest of the bytes of each large array, by index."""
    large = {i: np.ascontiguousarray(array) for i, array in enumerate(arrays) if array is not None and is_large(array)}
    return {i: hashlib.blake2b(array.view(np.uint8).data, digest_size=16).digest() for i, array in large.items()}
