"""Evaluation by one worker: metrics over the rows of a lease, or outputs in a job that predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nfdt.core.arrays.layout import Array
from nfdt.core.work import instructions as ins
from nfdt.model.training.host_batches import rows_of
from nfdt.model.training.job_model import JobModel
from nfdt.model.training.predict import OUTPUT_BYTES, PredictStep, dump_outputs
from nfdt.model.training.steps import EvaluationStep


class Evaluation:
    """Evaluation of a job's model on weights that a worker has pulled.

    Args:
        job: Model and data of the job.
        evaluate: Evaluation step of the model.
        predict: Prediction step of the model.
        advanced: Called after each batch; an exception ends the evaluation.
    """

    def __init__(
        self, job: JobModel, evaluate: EvaluationStep, predict: PredictStep, advanced: Callable[[], object]
    ) -> None:
        self._job, self._advanced = job, advanced
        self._evaluate, self._predict = evaluate, predict

    def answer(self, request: ins.Evaluate, weights: Any) -> ins.Evaluated:
        """Return the answer to an instruction; in a job that predicts it may leave out the last tasks."""
        job, source = self._job, self._job.validation
        job.load_untrained(request.untrained)
        job.begin_validation(request.epoch)
        job.prefetch(source, request.tasks)
        if job.spec.method == "predict":
            return self._outputs(request, weights)
        batches = ((batch, rows_of(batch)) for batch in (job.batch(source, task) for task in request.tasks))
        metrics = job.evaluate(batches, lambda batch: self._evaluate(weights, batch), self._advanced)
        return ins.Evaluated(request.epoch, tuple(task.task for task in request.tasks), metrics)

    def _outputs(self, request: ins.Evaluate, weights: Any) -> ins.Evaluated:
        outputs: dict[int, list[Array]] = {}
        done, size = [], 0
        for task in request.tasks:
            outputs[task.start] = leaves = self._predict(weights, self._job.batch(self._job.validation, task))
            done.append(task.task)
            self._advanced()
            size += sum(leaf.nbytes for leaf in leaves)
            if size >= OUTPUT_BYTES:
                break
        return ins.Evaluated(request.epoch, tuple(done), dump_outputs(outputs))
