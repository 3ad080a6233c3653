"""DLRM-like model with 26 embedding tables, on generated data like Criteo's: one training by one peer.

Runs with Keras 3 and with tf_keras. The embeddings of a sample and its numbers meet in their dot products.

References:
    Naumov et al., "Deep Learning Recommendation Model", arXiv:1906.00091: the model, without its bags of rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads.epochs import now, watch_epochs

COLUMNS, NUMBERS, WIDTH = 26, 13, 16
SHRINK = 0.7  # rows of a table per row of the one before
SKEW = 4.0  # few rows are frequent, as in clicks
SEED = 1
ON_SHARDS, ON_WORKERS = "nfdt, tables on shards", "nfdt, tables on workers"
PLAIN, PARAMETER_SERVER = "plain fit", "tf_keras, ParameterServerStrategy"


@dataclass(frozen=True)
class Recommendation:
    """One training.

    Attributes:
        table_mb: Size of all tables together.
        samples: Number of samples per epoch.
        batch: Samples per step of a worker.
        epochs: Number of epochs, of which the last one is measured.
        optimizer: ``sgd`` or ``adagrad``.
        workers: Number of workers.
        shards: Number of shards, or parameter servers.
    """

    table_mb: float
    samples: int
    batch: int = 512
    epochs: int = 3
    optimizer: str = "adagrad"
    workers: int = 1
    shards: int = 2

    def dump(self) -> str:
        """Return it as JSON; see :meth:`load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Recommendation:
        """Inverse of :meth:`dump`."""
        return cls(**json.loads(text))

    def needs_mb(self, peer: str) -> float:
        """Return the memory that the tables take with a peer on one machine, at most, in MB.

        Plain Keras copies a table in each step; where workers hold tables, the script and each shard do as well.
        """
        slots = 1.0 if self.optimizer == "adagrad" else 0.0
        copies = {PLAIN: 3 + slots, ON_WORKERS: 4 + self.workers + 2 * slots, ON_SHARDS: 1 + slots}
        return self.table_mb * copies.get(peer, 2 + slots)

    def rows(self) -> list[int]:
        """Return the number of rows of each table; each has fewer than the one before."""
        shares = SHRINK ** np.arange(COLUMNS)
        rows = self.table_mb * 2**20 / (4 * WIDTH) * shares / shares.sum()
        return [max(3, int(count)) for count in rows]

    def data(self) -> tuple[tuple[Any, ...], Any]:
        """Return numbers and row numbers, each row number column of its own, and labels that follow from them."""
        rng = np.random.default_rng(SEED)
        numbers = rng.normal(size=(self.samples, NUMBERS)).astype(np.float32)
        columns = [(count * rng.random((self.samples, 1)) ** SKEW).astype(np.int32) for count in self.rows()]
        score = numbers @ rng.normal(size=NUMBERS) + sum(column[:, 0] % 7 - 3.0 for column in columns)
        return (numbers, *columns), (score > 0).astype(np.float32)


def build(keras: Any, training: Recommendation, embedding: Any = None) -> Any:
    """Return the compiled model, of Keras 3 or tf_keras; ``embedding``: class of its tables, by default Keras' own."""
    layers = keras.layers
    embedding = embedding or layers.Embedding
    numbers = keras.Input((NUMBERS,))
    columns = [keras.Input((1,), dtype="int32") for _ in range(COLUMNS)]
    dense = layers.Dense(WIDTH, activation="relu")(layers.Dense(64, activation="relu")(numbers))
    embedded = [
        embedding(rows, WIDTH, name=f"table_{place}")(column)
        for place, (rows, column) in enumerate(zip(training.rows(), columns, strict=True))
    ]
    met = layers.Concatenate(axis=1)([layers.Reshape((1, WIDTH))(dense), *embedded])
    joined = layers.Concatenate()([dense, layers.Flatten()(layers.Dot(axes=2)([met, met]))])
    top = layers.Dense(1, activation="sigmoid")(layers.Dense(64, activation="relu")(joined))
    model = keras.Model([numbers, *columns], top)
    optimizers = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}
    model.compile(optimizers[training.optimizer](0.01), "binary_crossentropy")
    return model


def peak_mb(pid: int | str = "self") -> float:
    """Return the greatest resident memory of a process so far, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


@dataclass(frozen=True)
class Trained:
    """Result of one training: seconds of its last epoch, and the peak memory of each worker in MB."""

    seconds: float
    worker_mb: Sequence[float]

    def samples_per_s(self, training: Recommendation) -> float:
        """Return the speed of the last epoch."""
        return training.samples / self.seconds


def fit(training: Recommendation) -> Trained:
    """Train with plain Keras in this process."""
    import keras

    inputs, labels = training.data()
    model = build(keras, training)
    watch, begins = watch_epochs(keras)
    model.fit(inputs, labels, batch_size=training.batch, epochs=training.epochs, verbose=0, callbacks=[watch])
    return Trained(now() - begins[-1], [peak_mb()])


def distribute(training: Recommendation, *, on_shards: bool) -> Trained:
    """Train on workers and shards of this machine; shards make the tables, or the script does and workers hold them.

    The state that the server stores at the end of an epoch does not count.
    """
    import keras
    import psutil
    from nfdt_client.handle import JobHandle

    import nfdt

    inputs, labels = training.data()
    model = build(keras, training, nfdt.Embedding if on_shards else None)
    peaks = list[float]()

    def look(epoch: int, learning_rate: float) -> float:
        if epoch == training.epochs - 1:  # while the workers run
            processes = psutil.Process().children(recursive=True)
            peaks.extend(peak_mb(process.pid) for process in processes if process.name().startswith("nfdt worker"))
        return learning_rate

    options: dict[str, Any] = {"workers": training.workers, "shards": training.shards}
    if not on_shards:
        options["worker_tables_mb"] = 10**6
    with nfdt.session(algorithm="ddc-asgd", **options) as session:
        callbacks = [keras.callbacks.LearningRateScheduler(look)]
        model.fit(inputs, labels, batch_size=training.batch, epochs=training.epochs, verbose=0, callbacks=callbacks)
        link = session.connection()
        events = JobHandle(link.list()[0].job_id, link).recorded()
        seconds = [event.data["seconds"] for event in events if event.kind == "epoch_end"]
    return Trained(seconds[-1], peaks)


def main() -> None:
    """Entry point of ``python -m benchmarks.workloads.recommender``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=(PLAIN, ON_SHARDS, ON_WORKERS))
    parser.add_argument("training", type=Recommendation.load)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    if options.peer == PLAIN:
        trained = fit(options.training)
    else:
        trained = distribute(options.training, on_shards=options.peer == ON_SHARDS)
    options.result.write_text(json.dumps(asdict(trained)))


if __name__ == "__main__":
    main()
