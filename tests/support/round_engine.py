"""The engine of compiled loops for synchronous rounds as well, where Keras is not on TensorFlow."""

from __future__ import annotations

import numpy as np

from nfdt.shard.engine import GradientAccumulator
from nfdt.shard.loop_engine import LoopEngine


class RoundEngine(LoopEngine):
    """A ``LoopEngine`` that applies the union of a round as one gradient without delay."""

    @classmethod
    def of_program(cls, manifest, plan, algorithm, blocks, state, custom_objects, workers):
        """Return the engine of a shard, as ``nfdt.shard.building`` makes the one with a Keras optimizer."""
        from nfdt.shard.optimizer_state import plain_traits
        from nfdt.update_rules import make_rule

        traits = plain_traits(manifest)
        engine = cls(
            plan,
            traits,
            make_rule(algorithm, traits, blocks, workers=workers),
            blocks,
            state.weights,
            manifest.optimizer_options,
        )
        engine.write(state.weights, state.optimizer)
        return engine

    def new_accumulator(self):
        return GradientAccumulator(np.zeros(self.size, np.float32), 0.0)

    @staticmethod
    def accumulate_part(accumulator, gradient, weight, length, *, added=False):
        accumulator.total = accumulator.total + np.float32(weight) * gradient
        accumulator.count_gradient(weight, length, added)

    def apply_round(self, accumulator, worker):
        union = accumulator.total / np.float32(accumulator.denominator / accumulator.union)
        result = self.step(union, self.weights(), 0, worker, length=accumulator.longest)
        result.finish()
        return result.worker
