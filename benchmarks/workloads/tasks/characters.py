"""The next character of the messages of the SMS Spam Collection, by a transformer of 1.0 M weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from keras import layers

from benchmarks.workloads.tasks.sms import AddPositions, read_messages
from benchmarks.workloads.tasks.task import StudyTask, TaskData

CHARACTERS, LENGTH, WIDTH, BLOCKS = 96, 32, 144, 4
TRAIN_SHARE = 0.8
RARE, END = 0, 1


def read(data_dir: Path | None) -> TaskData:
    """Read the texts of the messages."""
    return prepare([text for _, text in read_messages(data_dir)])


def prepare(texts: Sequence[str]) -> TaskData:
    """Return characters (n, 32), int32, and those that follow each (n, 32); 80 % of the texts are for training."""
    order = np.random.default_rng(0).permutation(len(texts))
    cut = round(TRAIN_SHARE * len(order))
    counted = Counter("".join(texts[i] for i in order[:cut]))
    numbers = {character: i for i, (character, _) in enumerate(counted.most_common(CHARACTERS - 2), start=2)}

    def sequences(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stream = [number for i in rows for number in (*(numbers.get(c, RARE) for c in texts[i]), END)]
        count = (len(stream) - 1) // LENGTH
        inputs, targets = (np.array(stream[start : start + count * LENGTH], np.int32) for start in (0, 1))
        return inputs.reshape(count, LENGTH), targets.reshape(count, LENGTH)

    return TaskData("characters", sequences(order[:cut]), sequences(order[cut:]))


def transformer() -> keras.Model:
    """Return a causal transformer of four blocks, layers normalised first."""
    characters = keras.Input((LENGTH,), dtype="int32")
    x = AddPositions()(layers.Embedding(CHARACTERS, WIDTH)(characters))
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    return keras.Model(characters, layers.Dense(CHARACTERS, activation="softmax")(layers.LayerNormalization()(x)))


NEXT_CHARACTER = StudyTask(
    "characters",
    "characters of SMS, a transformer",
    read,
    transformer,
    chance=0.18,
    optimizer="adamw",
    rate=0.002,
    weight_decay=0.01,
    epochs=8,
    batch=16,
)
