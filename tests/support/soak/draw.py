"""Jobs of a soak: drawn at random, the same for the same seed and number. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from nfdt.chaos.accounting import counting_options, why_not_counted
from nfdt.chaos.schedule import KINDS, TargetRole
from tests.support.soak.machine_schedule import AMOUNTS, MACHINE_PAIRS

PRESETS = ("ddc-asgd", "asgd", "ssp", "bsp", "n-softsync")
CODECS = ("identity", "bf16", "int8", "top-k")
PAIRS: tuple[tuple[str, TargetRole], ...] = tuple((kind, role) for kind, row in KINDS.items() for role in row.roles)
EPOCHS, STEPS = 8, 57  # of the script: 1797 samples in batches of 32
TRAINING_S = 14.0  # about, without faults
LATEST_S = 11.0
MOST_FAULTS = 5
STORM, STORM_S = 0.3, 2.0  # part of the jobs whose faults all come within this time
# A script on scikit-learn's digits that a user could have written.
SCRIPT = f"""
import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32")
model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(10, activation="softmax"),
])
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs={EPOCHS}, verbose=2)
print("evaluated", model.evaluate(x, y, verbose=0))
"""


@dataclass(frozen=True)
class SoakJob:
    """One job of a soak.

    Attributes:
        number: Its number in the soak.
        preset: Its algorithm.
        workers: Number of its workers.
        counts: Whether it trains the counting model instead of :data:`SCRIPT`.
        text: Its schedule as TOML, which ``nfdt chaos`` repeats if all is on one machine.
    """

    number: int
    preset: str
    workers: int
    counts: bool
    text: str


@dataclass(frozen=True)
class FaultChoice:
    """Choice of faults that a kind of cluster allows.

    Attributes:
        pairs: Kinds with roles.
        fields: Function that draws the fields of one fault, as lines of TOML, besides kind, role and time.
        tls: Part of the jobs that use TLS in any case.
    """

    pairs: Sequence[tuple[str, TargetRole]]
    fields: Callable[[str, Random], Iterator[str]]
    tls: float


def draw_job(seed: int, number: int, choice: FaultChoice) -> SoakJob:
    """Return a job of a soak."""
    random = Random(f"{seed} {number}")
    preset, workers = random.choice(PRESETS), random.randint(1, 3)
    faults = [random.choice(choice.pairs) for _ in range(random.randint(1, MOST_FAULTS))]
    options = {
        "algorithm": f'"{preset}"',
        "codec": f'"{(codec := random.choice(CODECS))}"',
        "overlap": str(0 if preset == "bsp" else random.randint(0, 1)),
        "snapshot_s": str(random.choice([0.5, 2.0])),
        '"emulate.step_ms"': str(_step_ms(workers)),
    }
    counts = not why_not_counted({"algorithm": preset, "codec": codec})
    algorithm = {"algorithm": preset}
    options |= {
        name: json.dumps(value) for name, value in (counting_options(algorithm) if counts else algorithm).items()
    }
    tls = "true" if random.random() < choice.tls or any(kind == "corrupt" for kind, _ in faults) else "false"
    cluster = f"workers = {workers}\nshards = {random.randint(1, 2)}\ntls = {tls}\noptions = {{ "
    cluster += ", ".join(f"{name} = {value}" for name, value in options.items()) + " }\n"
    first = random.uniform(0.0, LATEST_S)
    span = (first, first + STORM_S) if random.random() < STORM else (0.0, LATEST_S)
    rows = ""
    for kind, role in faults:
        fields = [f'kind = "{kind}"', f'role = "{role}"', f"at_s = {random.uniform(*span):.2f}"]
        rows += "\n".join(["\n[[fault]]", *fields, *choice.fields(kind, random), ""])
    return SoakJob(number, preset, workers, counts, f"seed = {seed * 10_000 + number}\n\n[cluster]\n{cluster}{rows}")


def undisturbed(preset: str, workers: int) -> SoakJob:
    """Return a job without faults, whose result others are compared with."""
    options = f'algorithm = "{preset}", "emulate.step_ms" = {_step_ms(workers)}'
    return SoakJob(0, preset, workers, False, f"[cluster]\nworkers = {workers}\noptions = {{ {options} }}\n")


def _step_ms(workers: int) -> int:
    return round(1000 * TRAINING_S * workers / (EPOCHS * STEPS))


def _local_fields(kind: str, random: Random) -> Iterator[str]:
    if "seconds" in KINDS[kind].needs:
        yield f"seconds = {random.uniform(0.2, 6.0):.2f}"
    if kind == "slow":
        yield random.choice([f"mbit = {random.uniform(1.0, 20.0):.1f}", f"delay_ms = {random.randint(5, 100)}"])


def _machine_fields(kind: str, random: Random) -> Iterator[str]:
    yield f"seconds = {random.uniform(0.2, 8.0):.2f}"
    if amounts := AMOUNTS.get(kind):
        name = random.choice(sorted(amounts))
        yield f"{name} = {random.uniform(*amounts[name]):.1f}"


LOCAL = FaultChoice(PAIRS, _local_fields, 0.2)
MACHINES = FaultChoice(MACHINE_PAIRS, _machine_fields, 1.0)
