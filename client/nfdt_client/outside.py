"""What a fit sends besides its model and the script may change: variables, and data that are code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import UnreadableData
from nfdt.model.program.shipped_data import dump_changed
from nfdt.model.training.merge import MOST_GIVEN_BYTES
from nfdt_client.training_data import Indexed, own_hook

logger = logging.getLogger(__name__)

OF_DATASET = "the graph of a tf.data.Dataset has it as a constant. Use data='client', which reads the data here."
OF_CODE = "it was sent with the code. Use a keras.Variable, or an attribute of a layer or the model."
OF_SCHEDULE = (
    "a schedule of the optimizer has it, which runs on the shards. Let the callback set optimizer.learning_rate, or "
    "use keras.callbacks.LearningRateScheduler."
)
_REMEDY = "Use data='client', which reads the data in this process."


class Replaceable(Protocol):
    """A variable, or something that is read and written as one."""

    def numpy(self) -> Array:
        """Return the value."""
        ...

    def assign(self, value: Array) -> Any:
        """Set the value."""
        ...


class Outside:
    """Everything besides the model, in the order of the program's ``untrained``.

    A value that the script has set is sent when training stands still; one that workers have changed is assigned here.
    Where both have changed a value, the script's counts.

    Args:
        members: The variables and data.
        fixed: Variables that were sent and cannot be sent again, each with the reason and the remedy.
    """

    def __init__(self, members: Sequence[Replaceable] = (), fixed: Sequence[tuple[Replaceable, str]] = ()) -> None:
        self._members = members
        self._known = self.read()  # by the cluster
        self._fixed = [(member, np.array(member.numpy()), why) for member, why in fixed]

    def read(self) -> list[Array]:
        """Return a copy of the values."""
        return [np.array(member.numpy()) for member in self._members]

    def changed(self) -> list[str]:
        """Return the names of those whose values the cluster does not have.

        Raises:
            UnreadableData: the workers cannot have a value; the message names it and the remedy.
        """
        for member, sent, why in self._fixed:
            if not _same(member.numpy(), sent):
                raise UnreadableData(f"{_name(member)} was changed while the workers train with its old value: {why}")
        pairs = zip(self._members, self._known, strict=True)
        return [_name(member) for member, known in pairs if not _same(member.numpy(), known)]

    def mark_sent(self) -> None:
        """Record that the cluster has the present values."""
        self._known = self.read()

    def assign_new(self, values: Sequence[Array]) -> None:
        """Assign the values of the cluster that are new, except where the script has set another one meanwhile."""
        for place, (member, value) in enumerate(zip(self._members, values, strict=True)):
            known = self._known[place]
            if not _same(value, known):
                if _same(member.numpy(), known):
                    member.assign(value)
                self._known[place] = value


class ChangedData:
    """Data that workers read by index, as the pickle of what the script has changed; no bytes: as they were sent.

    Args:
        data: The data; None: the workers do not read them after all.
        path: What they are for: ``train`` or ``validation``.
    """

    def __init__(self, data: Indexed | None, path: str) -> None:
        self.path, self._data = path, data
        self._value = np.zeros(0, np.uint8)

    def numpy(self) -> Array:
        """Return the pickle, made again if the script has changed the data.

        Raises:
            UnreadableData: workers cannot have the change.
        """
        if (data := self._data) is None:
            return self._value
        # Large arrays are compared by identity and samples, and only now and then as a whole, which takes long.
        late = data.watch.changed_in_place()
        if data.watch.changed() or late:
            dataset, name = data.source[0], type(data.source[0]).__name__
            if late:
                logger.warning(
                    "%s: elements of a large array were changed in place, which is not looked at in each epoch: the "
                    "workers see it from now on. Assign a new array to change it at once.",
                    name,
                )
            _check(dataset, data.whole)
            code = dump_changed(data.source, data.shipped, data.watch.unchanged)
            if len(code) > MOST_GIVEN_BYTES:
                raise UnreadableData(
                    f"{name} was changed while the workers read it: expected at most {MOST_GIVEN_BYTES >> 20} MB of "
                    f"it that changes. Received: {len(code) / 2**20:.0f} MB. {_REMEDY}"
                )
            data.watch.record_checksums()
            self._value = np.frombuffer(code, np.uint8)
        return self._value

    def assign(self, value: Array) -> None:
        """Do nothing: the data here are those of the script."""


def _check(dataset: Any, batches: int) -> None:
    """Raise UnreadableData if copies of a changed dataset would differ from the one in the script."""
    name = type(dataset).__name__
    if hook := own_hook(dataset):
        raise UnreadableData(
            f"{name} was changed while the workers read it, and its {hook}() changes it there: the changes cannot be "
            f"put together. {_REMEDY}"
        )
    if int(dataset.num_batches) != batches:
        raise UnreadableData(
            f"{name} was changed while the workers read it: expected {batches} batches as before. Received: "
            f"{int(dataset.num_batches)}. {_REMEDY}"
        )


def _name(member: Any) -> str:
    return str(getattr(member, "path", None) or member.name)


def _same(one: Any, other: Any) -> bool:
    return one is other or np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
