"""One ``fit`` call: its checked arguments and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nfdt_client.options import Options
from nfdt_client.training_data import Arrays, Stream


@dataclass
class Capture:
    """One ``fit`` call: its arguments checked, its data read, nothing sent yet.

    Attributes:
        model: The user's model.
        arguments: Arguments of ``fit`` by name, defaults filled in.
        train: Training data.
        validation: Validation data that go with the job; None when there are none or Keras evaluates here.
        validation_data: Validation data passed to ``fit``, as (x, y, sample_weight).
    """

    model: Any
    arguments: dict[str, Any]
    train: Arrays | Stream
    validation: Arrays | None = None
    validation_data: tuple[Any, Any, Any] | None = None

    @property
    def local_validation(self) -> tuple[Any, Any, Any] | None:
        """Validation data that Keras evaluates in this process."""
        return self.validation_data if self.validation is None else None

    @property
    def epochs(self) -> int:
        """Index after the last epoch."""
        return int(self.arguments["epochs"])

    @property
    def batch_size(self) -> int:
        """Local batch of one worker."""
        return self.train.batch_size if isinstance(self.train, Arrays) else 32

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps per epoch of the job; None for one pass over arrays and for streams, whose epochs end by themselves."""
        steps = self.arguments["steps_per_epoch"]
        return int(steps) if steps and isinstance(self.train, Arrays) else None

    def sample_batch(self) -> Any:
        """Return a first batch, to build the model with."""
        if isinstance(self.train, Stream):
            return self.train.peek()
        return self.train.head(self.train.batch_size).pytree

    def steps(self, options: Options) -> int | None:
        """Return the steps per epoch to display until the cluster reports the actual number."""
        workers = options.cluster.workers if options.algorithm.consistency_facts.synchronous else 1
        if isinstance(self.train, Stream):
            return self.train.batches and -(-self.train.batches // workers)
        return self.steps_per_epoch or -(-self.train.samples // (self.train.batch_size * workers))
