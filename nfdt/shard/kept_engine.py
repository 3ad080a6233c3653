"""Engine of a shard with its compiled functions, which the next job of the same program may use again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.model.program.manifest import Manifest
from nfdt.shard.engine import Engine

OTHER = "other"


@dataclass(frozen=True)
class EngineTerms:
    """Everything that the functions of an engine are compiled for.

    Attributes:
        manifest: The program; its initial state does not matter.
        algorithm: Algorithm of the job.
        part: Index of the shard, and number of shards as given in the job's specification.
    """

    manifest: Manifest
    algorithm: AlgorithmSpec
    part: tuple[int, int]

    def equal(self, other: EngineTerms) -> bool:
        """Whether both have the same functions."""
        same = (self.algorithm, self.part) == (other.algorithm, other.part)
        return same and self.manifest.is_same_program(other.manifest)


class KeptEngine:
    """Engine of the last job of this process, if another job may use it: SGD, Adam or AdamW of a program without code.

    Their whole state is in variables, which the initial state of a job replaces.
    """

    def __init__(self) -> None:
        self._held: tuple[EngineTerms, Engine] | None = None

    def get(
        self,
        terms: EngineTerms,
        weights: npt.NDArray[np.float32],
        optimizer: Mapping[int, npt.NDArray[Any]],
        make: Callable[[], Engine],
    ) -> Engine:
        """Return an engine with this state: the kept one, or a new one, which is kept.

        Args:
            terms: What the engine is for.
            weights: Weights of the shard, flat.
            optimizer: Variables of the whole optimizer, by index.
            make: Makes an engine with this state.
        """
        held, self._held = self._held, None
        if held is not None and held[0].equal(terms) and held[1].is_complete(optimizer):
            engine = held[1]
            engine.write(weights, optimizer)
        else:
            engine = make()
        if engine.traits.kind != OTHER and not terms.manifest.carries_code:
            self._held = (terms, engine)
        return engine
