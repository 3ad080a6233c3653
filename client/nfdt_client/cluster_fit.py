"""A ``fit`` on the cluster: capture, job, mirror. Here and in what this imports, Keras is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from nfdt.core.errors import CaptureError, NfdtError, ServerUnreachable, UnreadableData, UsageError
from nfdt.core.specs.job import JobSpec
from nfdt.model.backends.embedding import zero_rows
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.program.attributes import CodeValues, runs_eagerly
from nfdt.model.program.local_optimizers import merged_in_rounds
from nfdt.model.program.pack import PackedProgram, pack
from nfdt_client import batch_hooks, callbacks, placement, tables
from nfdt_client.board import Board
from nfdt_client.capture import Capture, capture
from nfdt_client.detached_callbacks import begin_callbacks, check_callbacks
from nfdt_client.failures import trained_before
from nfdt_client.fit_record import FitRecord
from nfdt_client.handle import JobHandle
from nfdt_client.job import InteractiveJob, Submission
from nfdt_client.job_session import JobSession
from nfdt_client.kept_state import describe_kept, keep_failure
from nfdt_client.local_fit import Fallback
from nfdt_client.mirror import Fit, Mirror, Validation, begin_epoch, finalize
from nfdt_client.model_state import ModelState
from nfdt_client.options import Options
from nfdt_client.outside import OF_CODE, OF_DATASET, OF_SCHEDULE, ChangedData, Outside
from nfdt_client.program_checks import (
    check_batch,
    check_local_optimizers,
    check_made_tables,
    check_rows,
    check_shards,
    cluster_for,
    move_validation,
    with_devices,
)
from nfdt_client.specify import specify
from nfdt_client.training_data import Stream

logger = logging.getLogger(__name__)


def run_fit(session: JobSession, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
    """Train a model on the cluster and return its History.

    Args:
        session: Submits the job.
        model: The user's model.
        arguments: Arguments of ``fit`` by name.
        fallback: Takes over if the cluster refuses; it has to know which hooks the callbacks have seen.
    """
    options, given = session.options, callbacks.each(arguments["callbacks"])
    hooks = batch_hooks.choose_mode(options.batch_hooks, options.algorithm, options.data, given, session.logged)
    captured = capture(model, arguments, replace(options, batch_hooks=hooks), session.allows_code)
    batch = captured.train.first()
    check_batch(model, batch)
    name = next(session.names)
    listeners = callbacks.callback_list(
        model, captured.arguments, epochs=captured.epochs, steps=captured.steps(options)
    )
    model.stop_training = False
    captured.hash_arrays()
    # The first hooks come before the model is packed, so that what they change in it is a part of the program.
    listeners.on_train_begin()
    initial_epoch = int(keras_models.restored_epoch(model) or captured.arguments["initial_epoch"])
    if initial_epoch >= captured.epochs:
        return _finish_without_epochs(captured, listeners)
    begin_epoch(model, listeners, initial_epoch)
    fallback.mark_begun(listeners, captured.local_steps)
    fit = ClusterFit(session, captured, batch, listeners, hooks, name)
    # One board for both tries: the second one goes on with the files of the first.
    with _board(session) as board:
        record = _with_readable_data(captured, options.data, partial(fit.train, initial_epoch, board))
    record.data = {"where": captured.choice.where, "reason": captured.choice.reason}
    model.history.nfdt = record
    session.fits.append(record)
    return model.history


class ClusterFit:
    """A captured fit, whose callbacks have begun, and its jobs: one, or with local steps over slow links a second one.

    Args:
        session: Submits the jobs.
        captured: The fit.
        batch: First batch of the data.
        listeners: Keras' CallbackList.
        hooks: Timing of the callbacks' batch hooks.
        name: Name of the job; "" for none.
    """

    def __init__(
        self, session: JobSession, captured: Capture, batch: Any, listeners: Any, hooks: str, name: str
    ) -> None:
        self._session, self._captured, self._batch = session, captured, batch
        self._listeners, self._hooks, self._name = listeners, hooks, name
        self._model, self._options = captured.model, session.options
        self._each = callbacks.each(listeners)
        self._size = int(captured.model.steps_per_execution or 1)
        self._pauses = batch_hooks.plan_pauses(hooks, self._options.algorithm, self._each, self._size, session.logged)

    def train(self, first: int, board: Board | None) -> FitRecord:
        """Train from an epoch on, and write the epochs to ``board``; the model then holds the result."""
        record, following = self._train_from(first, board, self._options)
        if following is None:
            return record
        begin_epoch(self._model, self._listeners, following)
        algorithm = self._options.algorithm
        local = replace(self._options, algorithm=algorithm.with_local_steps() or algorithm)
        try:
            more, _ = self._train_from(following, board, local, before=record)
        except (UsageError, CaptureError) as error:  # before anything is sent
            if trained_before(error):
                raise
            logger.warning("The workers go on to exchange after every step: %s", error)
            more, _ = self._train_from(following, board, self._options, before=record)
        return record.followed_by(more)

    def _train_from(
        self, first: int, board: Board | None, options: Options, before: FitRecord | None = None
    ) -> tuple[FitRecord, int | None]:
        """Train a job from an epoch on; return its record and the epoch with which another one goes on."""
        session, captured = self._session, self._captured
        captured.renew()
        submission, packed = prepare(session, captured, self._batch, first, options, interactive=True)
        tables.check_fit(packed.manifest, self._listeners, validates_here=captured.local_validation is not None)
        job = session.start(replace(submission, name=self._name), packed.manifest)
        may_change = before is None and not self._name and self._pauses is None and _may_change(submission.spec)
        # They hold the values that the variables have now, and so would keep them beside the trained ones.
        submission, packed = replace(submission, blobs={}), replace(packed, state_parts=())
        data = captured.train
        feed = partial(session.make_feeder, job, data.epoch, data.rewind) if isinstance(data, Stream) else None
        mirror = Mirror(self._mirrored(first, packed, board, may_change=may_change), job, feed)
        try:
            return mirror.run(), mirror.following
        except Exception as error:
            _keep_failure(session, job, error)
            raise

    def _mirrored(self, first: int, packed: PackedProgram, board: Board | None, *, may_change: bool) -> Fit:
        """Return what the mirror of a job needs to know."""
        captured, listeners, hooks = self._captured, self._listeners, self._hooks
        validate, rates_are_state = _local_validation(captured, listeners), packed.manifest.steps_on_workers
        contents = partial(callbacks.contents_for, listeners, rates_are_state=rates_are_state)
        return Fit(
            self._model,
            listeners,
            ModelState.of(self._model, packed.manifest, _outside(captured, packed)),
            first,
            captured.epochs,
            steps_per_execution=self._size,
            steps_per_epoch=captured.steps_per_epoch,
            contents=contents() or ("weights" if validate is not None else None),
            batch_contents=contents(between_batches=True),
            watches_batches=hooks != "exact" and batch_hooks.any_watches_batches(self._each),
            pauses=self._pauses,
            validate=validate,
            validation_steps=captured.validation.batches if captured.validation is not None else 0,
            board=board,
            may_change=may_change,
            log_groups=packed.log_groups,
        )


def submit_fit(session: JobSession, model: Any, arguments: dict[str, Any]) -> JobHandle:
    """Submit a ``fit`` as a detached job, which no longer needs this script.

    Raises:
        UsageError: it needs this script: for its callbacks, or its data.
    """
    checked = check_callbacks(arguments["callbacks"])
    captured = capture(model, arguments, session.options, session.allows_code)
    if isinstance(captured.train, Stream) or captured.local_validation is not None:
        raise UsageError(
            "submit: the data must go with the job. Expected: arrays, tensors or a PyDataset that the workers can "
            f"read. Received: data that only this script can read ({captured.choice.reason}). "
            "Use nfdt.distribute."
        )
    batch = captured.train.first()
    check_batch(model, batch)
    initial_epoch = int(arguments["initial_epoch"])
    if initial_epoch >= captured.epochs:
        raise UsageError(f"submit: expected epochs above {initial_epoch}. Received: {captured.epochs}.")
    captured.callbacks = begin_callbacks(checked, model, initial_epoch)
    submission, _ = prepare(session, captured, batch, initial_epoch, session.options, interactive=False)
    job_id = session.send(replace(submission, name=next(session.names))).job_id
    return JobHandle(job_id, session.release_connection())


def _may_change(spec: JobSpec) -> bool:
    """Whether a job may end with an epoch, so that one with local steps trains those that are left."""
    whole = spec.train.kind == "arrays" and spec.fit.steps_per_epoch is None
    return whole and spec.algorithm.plan == "topology" and spec.algorithm.with_local_steps() is not None


def prepare(
    session: JobSession, captured: Capture, batch: Any, initial_epoch: int, options: Options, *, interactive: bool
) -> tuple[Submission, PackedProgram]:
    """Pack the model and check that the server accepts the job, before anything is uploaded.

    ``options`` are the session's, or have another algorithm.

    Returns:
        The job with its artifacts, and its program.
    """
    algorithm = options.algorithm
    sources = list(captured.changeable) if interactive else ()
    packed = pack(captured.model, batch, sources=sources, sparse=algorithm.rows, outer=algorithm.outer_optimizer)
    check_rows(packed.manifest, algorithm)
    if algorithm.consistency_facts.synchronous and not algorithm.exchange_facts.local:
        packed = replace(packed, manifest=merged_in_rounds(captured.model, packed.manifest))
    with zero_rows():
        move_validation(captured, batch, interactive=interactive)
    cluster = session.place(packed.code or captured.ships_code)
    cluster = with_devices(captured.model, packed.manifest, cluster_for(captured.model, algorithm, cluster))
    check_shards(captured.model, packed.manifest, cluster)
    check_made_tables(packed.manifest, algorithm, cluster)
    schedulers = callbacks.schedulers(captured.arguments["callbacks"])
    if callbacks.EVERY_EPOCH in schedulers:
        cluster = cluster.model_copy(update={"epoch_overlap": False})
    check_local_optimizers(captured.model, packed.manifest, algorithm, [] if interactive else schedulers)
    submission = specify(
        captured, packed, options, cluster=cluster, initial_epoch=initial_epoch, interactive=interactive
    )
    return submission, packed


def _outside(captured: Capture, packed: PackedProgram) -> Outside:
    """Return what the program has besides the model and the script may change."""
    data = [ChangedData(captured.changeable.get(name), name) for name in packed.manifest.sources_by_value]
    fixed = [(v, OF_DATASET) for v in captured.fixed] + [(v, OF_SCHEDULE) for v in packed.fixed]
    if runs_eagerly(captured.model):
        fixed.append((CodeValues(packed.functions), OF_CODE))
    return Outside([*packed.outside, *data], fixed)


@contextlib.contextmanager
def _board(session: JobSession) -> Iterator[Board | None]:
    """Yield the writer for TensorBoard, if one is asked for; further fits of a session have folders of their own."""
    folder = session.options.tensorboard
    if folder is None:
        yield None
        return
    with contextlib.closing(Board(folder / f"fit-{len(session.fits) + 1}" if session.fits else folder)) as board:
        yield board


def _keep_failure(session: JobSession, job: InteractiveJob, error: Exception) -> None:
    """Keep what a failed job leaves on a server that ends with its session, and note where in the error."""
    if isinstance(error, UnreadableData | ServerUnreachable):
        return
    with contextlib.suppress(NfdtError):
        state_dir = session.own_state_dir()
        if state_dir is not None and (folder := keep_failure(job, state_dir)) is not None:
            error.add_note(describe_kept(folder))


def _with_readable_data(captured: Capture, mode: str, train: Callable[[], FitRecord]) -> FitRecord:
    """Train; if the workers cannot read data before anything is trained, train with data read in this process.

    Raises:
        UnreadableData: the workers cannot read the data, and ``data="workers"``, or training has begun.
    """
    try:
        return train()
    except UnreadableData as error:
        if mode == "workers":
            raise placement.refused(str(error)) from error
        if not captured.ships_code or trained_before(error):
            raise
        logger.warning("The data are read in this process, not on the workers: %s", error)
        captured.read_here(str(error))
    return train()


def _finish_without_epochs(captured: Capture, listeners: Any) -> Any:
    """Finish a fit without epochs as Keras does: no training, no logs."""
    if captured.epochs > 0 and captured.model.optimizer is not None and captured.model.optimizer.built:
        finalize(captured.model)
    listeners.on_train_end(None)
    captured.model.history.nfdt = FitRecord({}, where="nowhere", reason="no epoch is left to train")
    return captured.model.history


def _local_validation(captured: Capture, listeners: Any) -> Validation | None:
    """Return Keras' own evaluation in this process, for data that only this process can read; else None."""
    if captured.local_validation is None:
        return None
    model, arguments = captured.model, captured.arguments
    x, y, sample_weight = captured.local_validation
    batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
    data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
    iterators: list[Any] = []  # one for all epochs, as in Keras: a generator continues where it stopped

    def validate(epoch: int) -> dict[str, Any] | None:
        if not keras_data.is_due(model, epoch, arguments["validation_freq"]):
            return None
        if not iterators:
            iterator = keras_data.evaluation_iterator(
                **data,
                distribute_strategy=model.distribute_strategy,
                steps_per_execution=model.steps_per_execution,
                steps_per_epoch=arguments["validation_steps"],
                shuffle=False,
            )
            iterators.append(iterator)
        steps = arguments["validation_steps"]
        return dict(keras_data.evaluate_with(model, iterators[0], **data, steps=steps, callbacks=listeners))

    return validate
