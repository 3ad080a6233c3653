"""Drop-in for ``horovod.tensorflow.keras.elastic`` on Keras 3: ``hvd.elastic`` after ``import hfdt.keras as hvd``.

::

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
        ])
    train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hfdt.keras.collectives import broadcast_variables
from hfdt.keras.horovod_api import enter_next_world, horovod, is_broken_world
from nfdt.core.errors import UsageError

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function whose first argument is a state: it is called again whenever ranks join or leave.

    Before each call the state is synchronized with that of rank 0; after the loss of a rank it is first restored to the
    last commit. Outside ``horovodrun --min-np`` the function is called once. Call collective operations inside it.

    Args:
        func: The function.
    """
    return run_in_worlds(func, enter_next_world)


def run_in_worlds(func: Callable[..., Any], enter_next: Callable[[], None]) -> Callable[..., Any]:
    """Decorate a function as :func:`run` does; ``enter_next`` joins the next communicator."""

    def attempt(state: Any, *args: Any, **options: Any) -> Any:
        try:
            return func(state, *args, **options)
        except Exception as error:
            if is_broken_world(error):
                raise HorovodInternalError(str(error)) from error  # after which Horovod forms another communicator
            raise

    wrapped: Callable[..., Any] = run_fn(attempt, enter_next)
    return wrapped


class KerasState(ObjectState):
    """State that all ranks share: a model with its optimizer, and any other values.

    Args:
        model: A built model.
        optimizer: Optimizer of the model, if the model is not compiled with it.
        **values: Values to keep as attributes, also committed and restored: ``epoch=0, batch=0``.

    Raises:
        UsageError: the model is not built, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if not model.built or optimizer is None:
            raise UsageError(
                "KerasState: expected a built model with an optimizer, because what it keeps are their variables. "
                f"Received: {model!r}, {optimizer!r}. Give the model an Input layer and call compile() first."
            )
        self.model, self.optimizer = model, optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._saved = self._copies()
        super().__init__(bcast_object=horovod().broadcast_object, get_rank=horovod().rank, **values)

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *self.optimizer.variables]

    def _copies(self) -> list[Any]:
        return [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._variables()]

    def save(self) -> None:
        """Copy weights, optimizer state and values; :meth:`commit` also checks for new hosts."""
        self._saved = self._copies()
        super().save()

    def restore(self) -> None:
        """Restore the last copy."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Synchronize with rank 0."""
        broadcast_variables(self._variables(), root_rank=0)
        self._saved = self._copies()
        super().sync()


class CommitStateCallback(keras.callbacks.Callback):
    """Commit every ``batches_per_commit`` batches, and at the end of each epoch.

    Args:
        state: The state.
        batches_per_commit: Largest number of batches that the loss of a rank discards; a commit copies the model.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restart the count: ranks commit together."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep ``state.batch`` at the number of the last batch, 0 at an epoch's end.

    ``fit`` does not shorten an epoch that resumes in its middle: pass ``steps_per_epoch=steps - state.batch``.

    Args:
        state: The state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the epoch length."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Make the progress bar count the rest of the first epoch."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the batch: the next epoch begins with its first one."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep ``state.epoch`` at the number of finished epochs, over all calls of ``fit``.

    Args:
        state: The state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Store the first epoch, as Keras counts from 0 in every call of ``fit``."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Store the next epoch to train."""
        self.state.epoch = self.initial_epoch + epoch + 1
