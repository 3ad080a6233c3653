"""Parts of the replay of epochs that a job had trained before its script attached to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keras.callbacks import ModelCheckpoint

REPLAYED = ("state", "epoch_begin", "progress", "epoch_end", "result")


class _UnsavedModel:
    """A model whose files are not written."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    save_weights = save


@contextmanager
def without_saving(callbacks: Any, model: Any) -> Iterator[None]:
    """Keep the files of each ModelCheckpoint inside the block: they hold the weights of their epochs, unlike ``model``.

    Args:
        callbacks: Keras' CallbackList.
        model: The model of the fit.
    """
    savers = [callback for callback in callbacks.callbacks if isinstance(callback, ModelCheckpoint)]
    for saver in savers:
        saver.set_model(_UnsavedModel(model))
    try:
        yield
    finally:
        for saver in savers:
            saver.set_model(model)
