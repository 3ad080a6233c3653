"""Callbacks for ``fit`` on every rank: equal initial states, averaged metrics, learning rates for large batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hfdt.keras.collectives import allreduce, broadcast_variables, gather_json, shared_state
from hfdt.keras.horovod_api import horovod
from hfdt.keras.optimizer import prepare_model
from hfdt.keras.partial_reduction import LocalVariables
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import UsageError
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.keras_internals import training as keras_training


class _RankCallback(keras.callbacks.Callback):
    """Base class of the callbacks of this module: prepares the model for its distributed optimizer."""

    def set_model(self, model: Any) -> None:
        """Store the model; Keras calls this before it compiles the training step."""
        super().set_model(model)
        prepare_model(model)


class BroadcastGlobalVariablesCallback(_RankCallback):
    """Start all ranks from the weights and the optimizer state of one rank; average untrained weights.

    The state is sent once, when the first ``fit`` begins; if a rank's model is built by its first batch, after that
    batch. Random seeds are not sent: ranks drop out different units.

    At the end of each epoch the non-trainable weights, such as the moving statistics of BatchNormalization, become the
    mean over the ranks: each rank normalises with its own batches, and all end with equal weights.

    Args:
        root_rank: Rank whose values are sent.
        device: Accepted for Horovod scripts; not used.
        local_variables: One or several variables that are not synchronized between ranks.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = LocalVariables()
        self._local.add_variables(local_variables)

    def register_local_var(self, variable: Any) -> None:
        """Exclude this variable from synchronization."""
        self._local.add_variables(variable)

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the state of the root rank if the models of all ranks are built."""
        if not self.broadcast_done and all(gather_json(_build_optimizer(self.model))):
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Send the state after the first batch, if that batch has built the models."""
        if not self.broadcast_done:
            self._send()

    def _send(self) -> None:
        broadcast_variables(self._shared(shared_state(self.model)), self.root_rank)
        self.broadcast_done = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the weights that the optimizer does not keep equal."""
        if horovod().size() > 1:
            average_differing(self._shared(self.model.non_trainable_weights))

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        return [variable for variable in variables if variable not in self._local]


class MetricAverageCallback(_RankCallback):
    """Replace the logs of an epoch by their mean over the ranks.

    Put it before callbacks that read the logs: ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, TensorBoard. A metric
    that only some ranks have, such as a validation metric of rank 0, becomes the mean over those, on all ranks.

    Args:
        device: Accepted for Horovod scripts; not used.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the logs in place."""
        if logs is not None and horovod().size() > 1:
            logs.update(average_logs(logs))


class LearningRateScheduleCallback(_RankCallback):
    """Set the learning rate to ``initial_lr * multiplier`` between two epochs.

    Args:
        initial_lr: Base learning rate.
        multiplier: A function of the epoch, or a number, which is raised to the power ``epoch - start_epoch``.
        start_epoch: First epoch in which the schedule is active.
        end_epoch: First epoch in which it is no longer active; None: active to the end.
        staircase: True: once per epoch, with the integer epoch; False: in each batch, with ``epoch + batch / steps``.
        momentum_correction: Scale the momentum's velocity by the change of the rate (Goyal et al. 2017, section 3).
        steps_per_epoch: Number of batches per epoch, if Keras does not provide it.

    Raises:
        UsageError: ``initial_lr`` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError(
                "Expected initial_lr to be a number: the learning rate that is multiplied. Received: None."
            )
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the optimizer, and determine the number of batches per epoch.

        Raises:
            UsageError: the optimizer has a schedule, or the number of batches is unknown.
        """
        optimizer = _inner(self.model.optimizer)
        if not keras_training.has_fixed_learning_rate(optimizer):
            raise UsageError(
                f"{type(self).__name__} sets the learning rate, and {optimizer.name!r} has a schedule. "
                "Give the optimizer a number as learning_rate, or leave this callback out."
            )
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise UsageError(
                f"{type(self).__name__} must know how many batches an epoch has, and this data does not tell. "
                "Pass steps_per_epoch to the callback or to fit()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._adjust(self._epoch + batch / float(self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate as ``lr``."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = _inner(self.model.optimizer)
        before, rate = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        if self.momentum_correction and before and rate != before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (rate / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr``, batch by batch.

    ``lr(epoch) = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)``, reached at the end of each batch.

    Args:
        initial_lr: Rate after the warm-up; usually that of one rank times ``size()``.
        warmup_epochs: Number of epochs of the warm-up.
        momentum_correction: See :class:`LearningRateScheduleCallback`.
        steps_per_epoch: Number of batches per epoch, if Keras does not provide it.
        verbose: 1: rank 0 prints a line at the end of the warm-up.

    References:
        Goyal et al. 2017, arXiv:1706.02677, section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            size = horovod().size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate, and print a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch + 1 == self.end_epoch and horovod().rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


def _build_optimizer(model: Any) -> bool:
    """Return whether the model is built; build its optimizer in that case."""
    if not model.built or not all(layer.built for layer in keras_models.flatten_layers(model)):
        return False
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return True


def average_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean of each number or array in the logs over the ranks that have it; all ranks get the same names.

    If arrays differ in shape, only those with the first rank's shape are averaged.
    """
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    numbers = {name: array.tolist() for name, array in arrays.items() if array.dtype.kind in "biuf"}
    per_rank: list[dict[str, Any]] = gather_json(numbers)
    names = sorted(set().union(*per_rank))
    return {name: _mean([np.asarray(found[name], np.float64) for found in per_rank if name in found]) for name in names}


def _mean(values: Sequence[Array]) -> Any:
    mean = np.mean([value for value in values if value.shape == values[0].shape], axis=0)
    return float(mean) if mean.ndim == 0 else mean.astype(np.float32)


def average_differing(variables: Sequence[Any]) -> None:
    """Replace float variables that differ between ranks by their mean; the others stay bit-identical."""
    floats = [v for v in variables if "float" in keras.backend.standardize_dtype(v.dtype)]
    values = [np.asarray(keras.ops.convert_to_numpy(v), np.float32) for v in floats]
    checksums = gather_json([zlib.crc32(value.tobytes()) for value in values])
    differing = [i for i, seen in enumerate(zip(*checksums, strict=True)) if len(set(seen)) > 1]
    if not differing:
        return
    mean = np.asarray(allreduce(np.concatenate([values[i].ravel() for i in differing]), op=horovod().Average))
    ends = np.cumsum([values[i].size for i in differing])
    for i, part in zip(differing, np.split(mean, ends[:-1]), strict=True):
        floats[i].assign(part.reshape(values[i].shape))


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _velocities(optimizer: Any) -> list[Any]:
    """Return the momentum buffers that hold ``momentum * velocity + rate * gradient``: SGD's and RMSprop's."""
    if not getattr(optimizer, "momentum", 0):
        return []
    return keras_training.momentums(optimizer)
