"""A session: its server, its patch of ``keras.Model.fit``, and the fits it runs."""

from __future__ import annotations

import contextlib
import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from contextvars import Token
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nfdt.core.errors import NfdtError, PolicyRefused, ServerUnreachable, UnreadableData
from nfdt.core.host.startup import note_start
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest
from nfdt_client import batch_hooks, callbacks, evaluation, patch, placement, ring
from nfdt_client.board import Board
from nfdt_client.capture import bind, capture, check_batch
from nfdt_client.captured import Capture
from nfdt_client.connection import JobsClient
from nfdt_client.embedded import StartedServer, embedded_server
from nfdt_client.failures import trained_before
from nfdt_client.feed import Feeder
from nfdt_client.fit_record import FitRecord
from nfdt_client.job import InteractiveJob, start_line
from nfdt_client.kept_state import describe_kept, keep_failure
from nfdt_client.local_fit import IN_A_FIT, Fallback, LocalFits, may_train_here
from nfdt_client.mirror import Fit, Mirror, begin_epoch
from nfdt_client.model_state import ModelState
from nfdt_client.options import Options
from nfdt_client.outside import OF_CODE, OF_DATASET, OF_SCHEDULE, ChangedData, Outside
from nfdt_client.program_checks import (
    check_local_optimizers,
    check_shards,
    cluster_for,
    look_at_metrics,
    require_backend_of,
)
from nfdt_client.specify import Submission, job_names, specify
from nfdt_client.tracebacks import hide_frames
from nfdt_client.training_data import Stream
from nfdt_client.upload import upload

if TYPE_CHECKING:
    from nfdt.model.program.pack import PackedProgram

logger = logging.getLogger(__name__)

IDLE = (
    "No model.fit was called: nothing was distributed. Only model.fit trains on workers; train_on_batch, a loop of "
    "your own, and a fit in another thread run in this process."
)


class Session:
    """Context manager in which ``keras.Model.fit`` of this context trains on a cluster.

    Without ``server`` in the options a job server is started here and stopped at the end. In a script started by
    mpirun, srun or horovodrun, rank 0's allreduce job runs on the ranks of that world. On another rank, entering a
    session works for that job and then ends the script.

    Args:
        options: The options.
        server: A server that the caller started for this session and stops after it; the options name none then.
        names: Names of the jobs of this session and of others; by default those of the option ``job``.

    Attributes:
        fits: ``history.nfdt`` of every fit so far.
        tells_idle: Whether to log a warning when a block ends without an error and without a fit; else its caller
            does that.
    """

    tells_idle = True

    def __init__(
        self, options: Options, server: StartedServer | None = None, names: Iterator[str] | None = None
    ) -> None:
        self.options, self._given = options, server
        self._names = names or job_names(options.job)
        self.fits: list[dict[str, Any]] = []
        self._logged: set[str] = set()  # lines in the log that would repeat from fit to fit
        self._id = uuid.uuid4().hex
        self._idle = True
        self._outer: patch.CallHandler | None = None
        self._link: JobsClient | None = None
        self._embedded: StartedServer | None = None
        self._refusal: NfdtError | None = None  # why no fit of this session can be distributed
        self._undo = contextlib.ExitStack()

    @hide_frames
    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            try:
                require_backend_of(self.options)
                self._open(undo)
            except NfdtError as error:
                if self.options.fallback == "error" or not may_train_here(error):
                    raise
                self._refusal = error
            import keras

            note_start("script", "has imported Keras")
            patch.PATCH.install(keras.Model)
            undo.callback(patch.PATCH.remove, keras.Model)
            token = patch.enter(self)
            undo.callback(patch.leave, token)
            self._idle, self._outer = True, None if token.old_value is Token.MISSING else token.old_value
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        in_order = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if self.tells_idle and self._idle and in_order:
            logger.warning(IDLE)

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Start or connect to a server, until ``undo``."""
        if not self.options.algorithm.topology_facts.flat and self.options.server is None:
            ring.require_horovod(self.options.algorithm.name)
        if self.options.world is not None and self.options.world.rank:
            ring.follow(self.options.cluster)
        self._embedded = self._given
        if self._given is None and self.options.server is None:
            self._embedded = undo.enter_context(embedded_server(self.options))
        undo.callback(self._disconnect)
        if self._embedded is None:
            self._describe(waits=self.options.job is not None)  # reports a wrong address before the script's own work

    def connection(self) -> JobsClient:
        """Return the connection to the session's server; wait for the embedded one to start."""
        if self._link is None:
            if self._embedded is not None:
                server = self._embedded
                self._link = JobsClient(server.address(), server.token, ca_file=server.ca_file, check=server.check)
            else:
                self._link = JobsClient(str(self.options.server), self.options.token(), **self.options.tls)
        return self._link

    def _describe(self, *, waits: bool = True) -> pb.ServerDescription:
        """Return the description of the session's server; ``waits``: it may be restarted just now."""
        link = self.connection()
        return link.persist(link.describe) if waits else link.describe()

    def release_connection(self) -> JobsClient:
        """Return the connection; from now on the caller closes it."""
        link, self._link = self.connection(), None
        return link

    def call(
        self, method: str, original: patch.KerasMethod, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out a method of ``model`` on the cluster as ``original`` would here."""
        if method == "fit":
            return self.fit(original, model, args, kwargs)
        if self._refusal is not None:
            return original(model, *args, **kwargs)
        return evaluation.run_call(self, method, original, model, args, kwargs)

    def fit(self, original: patch.KerasMethod, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Train ``model`` on the cluster as ``original`` would here; fits inside callbacks are Keras' own."""
        note_start("script", "calls fit")
        self.note_fit()
        fallback = Fallback(bind(original, model, args, kwargs), self.options.fallback)
        token = patch.enter(LocalFits(IN_A_FIT))
        try:
            if self._refusal is not None:
                raise self._refusal
            return self._fit(model, fallback.arguments, fallback)
        except Exception as error:
            reason = self.explained(error)
            if fallback.applies(reason):
                return fallback.run(original, model, reason)
            if reason is not error:
                raise reason from None
            raise
        finally:
            patch.leave(token)

    def explained(self, error: Exception) -> Exception:
        """Return the error; for an embedded server that has ended, with the reason."""
        if isinstance(error, ServerUnreachable) and self._embedded is not None:
            try:
                self._embedded.check()
            except ServerUnreachable as precise:
                for note in getattr(error, "__notes__", ()):
                    precise.add_note(note)
                return precise
        return error

    def note_fit(self) -> None:
        """Record that this session, or one nested in it, has distributed a fit."""
        self._idle = False
        if isinstance(self._outer, Session):
            self._outer.note_fit()

    def _fit(self, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
        from nfdt.model.keras_internals import models as keras_models

        options, given = self.options, callbacks.each(arguments["callbacks"])
        hooks = batch_hooks.choose_mode(options.batch_hooks, options.algorithm, options.data, given, self._logged)
        captured = capture(model, arguments, replace(options, batch_hooks=hooks), self.allows_code)
        batch = captured.sample_batch()
        check_batch(model, batch)
        name = next(self._names)
        listeners = callbacks.callback_list(
            model, captured.arguments, epochs=captured.epochs, steps=captured.steps(self.options)
        )
        model.stop_training = False
        captured.hash_arrays()
        listeners.on_train_begin()
        initial_epoch = int(keras_models.restored_epoch(model) or captured.arguments["initial_epoch"])
        if initial_epoch >= captured.epochs:
            return callbacks.finish_without_epochs(captured, listeners)
        begin_epoch(model, listeners, initial_epoch)
        fallback.begin(listeners, captured.local_steps)
        each = callbacks.each(listeners)
        size = int(model.steps_per_execution or 1)
        pauses = batch_hooks.plan_pauses(hooks, options.algorithm, each, size, self._logged)

        board = self._make_board()

        def train() -> FitRecord:
            from nfdt.model.program.attributes import CodeValues, runs_eagerly

            captured.renew()
            submission, packed = self.prepare(captured, batch, initial_epoch, interactive=True)
            manifest = packed.manifest
            data = [ChangedData(captured.changeable.get(name), name) for name in manifest.sources_by_value]
            fixed = [(v, OF_DATASET) for v in captured.fixed] + [(v, OF_SCHEDULE) for v in packed.fixed]
            if runs_eagerly(model):
                fixed.append((CodeValues(packed.functions), OF_CODE))
            outside = Outside([*packed.outside, *data], fixed)
            job = self.start(replace(submission, name=name), manifest)
            validate = callbacks.local_validation(captured, listeners)
            fit = Fit(
                model,
                listeners,
                ModelState.of(model, manifest, outside),
                initial_epoch,
                captured.epochs,
                steps_per_execution=size,
                steps_per_epoch=captured.steps_per_epoch,
                watches_weights=validate is not None
                or callbacks.watches_weights(listeners, rates_are_state=manifest.steps_on_workers),
                watches_batches=hooks != "exact" and batch_hooks.look_at_batches(each),
                pauses=pauses,
                validate=validate,
                validation_steps=captured.validation.batches if captured.validation is not None else 0,
                board=board,
                log_groups=packed.log_groups,
            )
            try:
                return Mirror(fit, job, self._feed(job, captured)).run()
            except Exception as error:
                self._keep_failure(job, error)
                raise

        try:
            record = self._with_readable_data(captured, train)
        finally:
            if board is not None:
                board.close()
        record.data = {"where": captured.choice.where, "reason": captured.choice.reason}
        model.history.nfdt = record
        self.fits.append(record)
        return model.history

    def _make_board(self) -> Board | None:
        """Return the writer for TensorBoard; further fits of a session write into folders of their own."""
        folder = self.options.tensorboard
        if folder is None:
            return None
        return Board(folder / f"fit-{len(self.fits) + 1}" if self.fits else folder)

    def _keep_failure(self, job: InteractiveJob, error: Exception) -> None:
        """Keep what a failed job leaves on a server that ends with this session, and note where in the error."""
        if self._embedded is None or isinstance(error, UnreadableData | ServerUnreachable):
            return
        with contextlib.suppress(NfdtError):
            state_dir = self._describe(waits=False).state_dir
            if state_dir and (folder := keep_failure(job, Path(state_dir))) is not None:
                error.add_note(describe_kept(folder))

    def _with_readable_data(self, captured: Capture, train: Callable[[], FitRecord]) -> FitRecord:
        """Train; if the workers cannot read data before anything is trained, train with data read in this process.

        Raises:
            UnreadableData: the workers cannot read the data, and ``data="workers"``, or training has begun.
        """
        try:
            return train()
        except UnreadableData as error:
            if self.options.data == "workers":
                raise placement.refused(str(error)) from error
            if not captured.ships_code or trained_before(error):
                raise
            logger.warning("The data are read in this process, not on the workers: %s", error)
            captured.read_here(str(error))
        return train()

    def allows_code(self) -> bool:
        """Whether the session's server takes code."""
        return self._embedded is not None or self._describe().allow_code

    def prepare(
        self, captured: Capture, batch: Any, initial_epoch: int, *, interactive: bool
    ) -> tuple[Submission, PackedProgram]:
        """Pack the model and check that the server accepts the job, before anything is uploaded.

        Returns:
            The job with its artifacts, and its program.
        """
        from nfdt.model.program.local_optimizers import merged_in_rounds
        from nfdt.model.program.pack import pack

        packed = pack(captured.model, batch, sources=list(captured.changeable) if interactive else ())
        if self.options.algorithm.consistency_facts.synchronous:
            packed = replace(packed, manifest=merged_in_rounds(captured.model, packed.manifest))
        look_at_metrics(captured, batch, interactive=interactive)
        cluster = self.place(packed.code or captured.ships_code)
        cluster = cluster_for(captured.model, self.options.algorithm, cluster)
        check_shards(captured.model, packed.manifest, cluster)
        detached = [] if interactive else callbacks.schedulers(captured.arguments["callbacks"])
        check_local_optimizers(captured.model, packed.manifest, self.options.algorithm, detached)
        submission = specify(
            captured, packed, self.options, cluster=cluster, initial_epoch=initial_epoch, interactive=interactive
        )
        return submission, packed

    def has_free_workers(self) -> bool:
        """Whether a job can start now: its server is this session's own, or has enough free slots."""
        if self._embedded is not None:
            return True
        server, wanted = self._describe(), self.options.cluster.workers
        return server.free_slots >= (wanted if self.options.workers_given else server.slots) > 0

    def place(self, code: bool) -> ClusterSpec:
        """Return the cluster with its numbers of workers and shards; ``code``: the job carries code of the script."""
        server = self._describe()
        if code and not server.allow_code:
            raise PolicyRefused(
                "The job carries code of the script (custom layers, losses, functions). Expected: a server started "
                f"with --allow-code, or Keras' own parts only. Received: {self.connection().address}, which takes none."
            )
        cluster = self.options.cluster
        flat = self.options.algorithm.topology_facts.flat
        if flat and not self.options.workers_given and self.options.server is not None and server.slots:
            cluster = cluster.model_copy(update={"workers": server.slots})
        return cluster

    def start(self, submission: Submission, manifest: Manifest) -> InteractiveJob:
        """Submit the job, or attach to the one of its name; ``manifest`` is that of its program."""
        note_start("script", "has packed the model")
        reply, name = self.send(submission), submission.name
        note_start("script", "has submitted the job")
        server = self._describe()
        link = self.connection().open_page(reply.job_id) if server.page else ""
        print(start_line(reply.job_id, submission.spec, server, link), file=sys.stderr)
        if reply.cursor:
            print(f"Attached to {reply.job_id} ({name}): its epochs so far are replayed.", file=sys.stderr)
        return InteractiveJob(self.connection(), reply.job_id, self._id, name=name, replayed=reply.cursor)

    def _feed(self, job: InteractiveJob, captured: Capture) -> Callable[[], Feeder] | None:
        """Return the maker of feeders of a stream's batches, or None."""
        train = captured.train
        return partial(Feeder, job, train.epoch, train.rewind) if isinstance(train, Stream) else None

    def send(self, submission: Submission) -> pb.SubmitReply:
        """Upload missing artifacts and submit the job.

        With a name, find the job that has it; as a second call finds the job of the first, it is made again while the
        server is away or its disk is full.
        """
        connection, spec, name = self.connection(), submission.spec.model_dump_json(), submission.name
        sent = upload(connection, submission.blobs, waits=bool(name))
        submit = partial(connection.submit, spec, self._id, name)
        reply = connection.persist(submit, stores=True) if name else submit()
        logger.info("Submitted job %s (%d bytes uploaded)", reply.job_id, sent)
        return reply

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
