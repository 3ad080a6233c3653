"""Decisions of the callbacks of a detached job, carried out between two epochs."""

from __future__ import annotations

from nfdt.core.program.state import dump_state, load_state
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.work.instructions import CallbackDecision
from nfdt.jobserver.job_context import ActiveTraining, JobContext


class DecisionHandler:
    """Handler of what the callbacks of a job decide on a worker. Used only by the job's own thread.

    Args:
        context: Parts of the job.
        training: Parts that exist during training.

    Attributes:
        spec: The callbacks after the last epoch that has ended; None: the job has none.
    """

    def __init__(self, context: JobContext, training: ActiveTraining) -> None:
        self._context, self._training = context, training
        self.spec: CallbacksSpec | None = context.spec.callbacks

    def carry_out(self, epoch: int, decision: CallbackDecision) -> None:
        """Set the learning rate, keep the state of the epoch or restore that of another one, as decided.

        Args:
            epoch: The epoch that has ended.
            decision: The decision.

        Raises:
            UsageError: the learning rate is negative or no number.
        """
        if self.spec is None:
            return
        context, training, before = self._context, self._training, self.spec
        rate = decision.learning_rate
        if rate is not None and rate != before.learning_rate:
            with context.changed:
                context.control.set_learning_rate(rate)
            context.set_learning_rate(training, rate)
        kept = {known: state for known, state in before.kept.items() if known in decision.kept}
        if epoch in decision.kept:
            kept[epoch] = context.store_state(training, training.coordinator.epochs_ended)
        if decision.restored in kept:
            self._restore(kept[decision.restored])
        if decision.stop or epoch + 1 >= context.spec.fit.epochs:
            kept = {}
        self.spec = before.model_copy(update={"state": decision.state, "learning_rate": rate, "kept": kept})

    def _restore(self, artifact: str) -> None:
        """Continue with the weights and the untrained state of another epoch; the optimizer keeps its own."""
        artifacts = self._context.server.artifacts
        state = load_state(artifacts.path(artifact))
        weights = artifacts.put(dump_state(state.weights, {}, state.untrained))
        try:
            self._training.composer.replace(weights)
        finally:
            artifacts.delete(weights)
