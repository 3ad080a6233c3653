"""The SMS Spam Collection with a transformer of 75 k weights: is a message spam?

Almeida, Gomez Hidalgo and Yamakami, "Contributions to the Study of SMS Spam Filtering", DocEng 2011.
"""

from __future__ import annotations

import lzma
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.workloads.tasks.task import StudyTask, TaskData, read_file

FILE = "sms_spam.tsv.xz"
WORDS, LENGTH, WIDTH = 2000, 64, 32
TRAIN_SHARE = 0.8
PAD, UNKNOWN = 0, 1
TOKEN = re.compile(r"[a-z']+|\d|[^\w\s]")  # words, single digits, punctuation marks


def read_messages(data_dir: Path | None) -> list[list[str]]:
    """Read ``sms_spam.tsv.xz``: lines ``label<TAB>text``."""
    with lzma.open(read_file(data_dir, FILE), "rt", encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\n").split("\t", 1) for line in lines]


def read(data_dir: Path | None) -> TaskData:
    """Read the messages; 80 % of them, drawn once, are for training."""
    pairs = read_messages(data_dir)
    return prepare([text for _, text in pairs], [label == "spam" for label, _ in pairs])


def prepare(texts: Sequence[str], spam: Sequence[bool]) -> TaskData:
    """Return tokens (n, 64), int32, and labels (n, 1), 1 for spam; the vocabulary is that of the training part."""
    order = np.random.default_rng(0).permutation(len(texts))
    cut = round(TRAIN_SHARE * len(order))
    counted = Counter(token for i in order[:cut] for token in TOKEN.findall(texts[i].lower()))
    numbers = {token: i for i, (token, _) in enumerate(counted.most_common(WORDS - 2), start=2)}
    tokens = np.array([_encoded(text, numbers) for text in texts], np.int32)
    labels = np.array(spam, np.float32)[:, None]
    train, test = ((tokens[rows], labels[rows]) for rows in (order[:cut], order[cut:]))
    return TaskData("sms", train, test)


def _encoded(text: str, numbers: Mapping[str, int]) -> list[int]:
    found = [numbers.get(token, UNKNOWN) for token in TOKEN.findall(text.lower())[:LENGTH]]
    return found + [PAD] * (LENGTH - len(found))


@keras.saving.register_keras_serializable(package="nfdt-benchmarks")
class AddPositions(layers.Layer):
    """Add a trained vector for each position to a sequence (n, length, width)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True

    def build(self, shape: Sequence[int | None]) -> None:
        """Make the vectors."""
        self.vectors = self.add_weight(name="vectors", shape=tuple(shape[1:]), initializer="uniform")

    def call(self, sequence: Any) -> Any:
        """Return the sequence with its positions."""
        return sequence + self.vectors


def transformer() -> keras.Model:
    """Return a transformer of one block, layers normalised first, with the mean over tokens as its output."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = AddPositions()(layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens))
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, WIDTH // 2)(y, y)])
    y = layers.Dense(2 * WIDTH, activation="relu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(1, activation="sigmoid")(x))


def balanced_accuracy(logs: Mapping[str, float], targets: np.ndarray) -> dict[str, float]:
    """Return the mean of the shares of spam and of other messages that are recognised."""
    spam, recall = float(targets.mean()), float(logs["val_recall"])
    other = (float(logs["val_accuracy"]) - spam * recall) / (1.0 - spam)
    return {"balanced_accuracy": (recall + other) / 2}


SMS = StudyTask(
    "sms",
    "SMS Spam, a transformer",
    read,
    transformer,
    loss="binary_crossentropy",
    metrics=lambda: ["accuracy", keras.metrics.Recall(name="recall")],
    chance=0.866,
    more=balanced_accuracy,
    optimizer="adamw",
    rate=0.002,
    weight_decay=0.01,
    epochs=10,
    batch=32,
)
