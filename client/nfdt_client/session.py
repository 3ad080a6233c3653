"""A session: its server, its patch of ``keras.Model.fit``, and the fits it runs."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, Protocol, Self

from nfdt.core.errors import PolicyRefused, ServerUnreachable, UnreadableData, UsageError
from nfdt.core.program.manifest import Manifest
from nfdt.core.sharding import why_uncuttable
from nfdt.core.specs.job import ClusterSpec
from nfdt_client import batch_hooks, callbacks, patch, placement, ring
from nfdt_client.capture import bind, capture, check_batch
from nfdt_client.captured import Capture
from nfdt_client.connection import JobsClient
from nfdt_client.embedded import EmbeddedServer
from nfdt_client.feed import Feeder
from nfdt_client.fit_record import FitRecord
from nfdt_client.job import InteractiveJob
from nfdt_client.mirror import Fit, Mirror, begin_epoch, trained_before
from nfdt_client.model_state import ModelState
from nfdt_client.options import Options
from nfdt_client.specify import Submission, specify
from nfdt_client.training_data import Stream
from nfdt_client.upload import upload

logger = logging.getLogger(__name__)

IDLE = (
    "No model.fit was called: nothing was distributed. Only model.fit trains on workers; train_on_batch, a loop of "
    "your own, and a fit in another thread run in this process."
)


class StartedServer(Protocol):
    """A job server that this process has started, or its caller.

    Attributes:
        token: Secret that it accepts.
        ca_file: PEM certificates to trust; None: it talks in plain text.
    """

    token: str
    ca_file: str | None

    def address(self) -> str:
        """Wait until the server serves and return its ``HOST:PORT``."""
        ...

    def check(self) -> None:
        """Raise an error with the reason if the server cannot serve any more."""
        ...


class Session:
    """Context manager in which ``keras.Model.fit`` of this context trains on a cluster.

    Without ``server`` in the options a job server is started here and stopped at the end. In a script started by
    mpirun, srun or horovodrun, rank 0's allreduce job runs on the ranks of that world. On another rank, entering a
    session works for that job and then ends the script.

    Args:
        options: The options.
        server: A server that the caller started for this session and stops after it; the options name none then.

    Attributes:
        fits: ``history.nfdt`` of every fit so far.
        tells_idle: Whether to log a warning when a block ends without an error and without a fit; else its caller
            does that.
    """

    tells_idle = True

    def __init__(self, options: Options, server: StartedServer | None = None) -> None:
        self.options, self._given = options, server
        self.fits: list[dict[str, Any]] = []
        self._id = uuid.uuid4().hex
        self._idle = True
        self._outer: patch.FitHandler | None = None
        self._link: JobsClient | None = None
        self._embedded: StartedServer | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._open(undo)
            import keras

            patch.PATCH.install(keras.Model)
            undo.callback(patch.PATCH.remove, keras.Model)
            token = patch.enter(self)
            undo.callback(_leave, token)
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
            self._embedded = undo.enter_context(_embedded(self.options))
        undo.callback(self._disconnect)
        if self._embedded is None:
            self.connection().describe()  # reports a wrong address or token before the script's own work begins

    def connection(self) -> JobsClient:
        """Return the connection to the session's server; wait for the embedded one to start."""
        if self._link is None:
            if self._embedded is not None:
                server = self._embedded
                self._link = JobsClient(server.address(), server.token, ca_file=server.ca_file, check=server.check)
            else:
                self._link = JobsClient(str(self.options.server), self.options.token(), **self.options.tls)
        return self._link

    def release_connection(self) -> JobsClient:
        """Return the connection; from now on the caller closes it."""
        link, self._link = self.connection(), None
        return link

    def fit(self, original: patch.FitFunction, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Train ``model`` on the cluster as ``original`` would here; fits inside callbacks are Keras' own."""
        self.note_fit()
        arguments = bind(original, model, args, kwargs)
        token = patch.enter(None)
        try:
            return self._fit(model, arguments)
        except ServerUnreachable:
            if self._embedded is not None:
                self._embedded.check()  # raises with a more precise reason
            raise
        finally:
            patch.leave(token)

    def note_fit(self) -> None:
        """Record that this session, or one nested in it, has distributed a fit."""
        self._idle = False
        if isinstance(self._outer, Session):
            self._outer.note_fit()

    def _fit(self, model: Any, arguments: dict[str, Any]) -> Any:
        from nfdt.core import keras_internals

        captured = capture(model, arguments, self.options, self.allows_code)
        batch = captured.sample_batch()
        check_batch(model, batch)
        listeners = callbacks.callback_list(captured, self.options)
        model.stop_training = False
        listeners.on_train_begin()
        initial_epoch = int(keras_internals.restored_epoch(model) or captured.arguments["initial_epoch"])
        if initial_epoch >= captured.epochs:
            return _nothing_to_train(captured, listeners)
        begin_epoch(model, listeners, initial_epoch)
        each = callbacks.each(listeners)
        size = int(model.steps_per_execution or 1)
        pauses = batch_hooks.plan_pauses(self.options.batch_hooks, self.options.algorithm, each, size)

        def train() -> dict[str, Any]:
            submission, manifest = self.prepare(captured, batch, initial_epoch, interactive=True)
            job = self._start(submission, manifest)
            validate = callbacks.local_validation(captured, listeners)
            fit = Fit(
                model,
                listeners,
                ModelState.of(model, manifest),
                initial_epoch,
                captured.epochs,
                steps_per_execution=size,
                watches_weights=validate is not None or callbacks.watches_weights(listeners),
                watches_batches=self.options.batch_hooks != "exact" and batch_hooks.look_at_batches(each),
                pauses=pauses,
                validate=validate,
                validation_steps=captured.validation.batches if captured.validation is not None else 0,
            )
            return Mirror(fit, job, self._feed(job, captured)).run()

        workers = self._with_readable_data(captured, train)
        model.history.nfdt = FitRecord(workers, {"where": captured.choice.where, "reason": captured.choice.reason})
        self.fits.append(model.history.nfdt)
        return model.history

    def _with_readable_data(self, captured: Capture, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
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
        return self._embedded is not None or self.connection().describe().allow_code

    def prepare(
        self, captured: Capture, batch: Any, initial_epoch: int, *, interactive: bool
    ) -> tuple[Submission, Manifest]:
        """Pack the model and check that the server accepts the job, before anything is uploaded.

        Returns:
            The job with its artifacts, and the program's manifest.
        """
        from nfdt.core.program.pack import pack

        packed = pack(captured.model, batch)
        look_at_metrics(captured, batch, interactive=interactive)
        cluster = self._place(packed.code or captured.ships_code)
        check_shards(captured.model, packed.manifest, cluster)
        submission = specify(
            captured, packed, self.options, cluster=cluster, initial_epoch=initial_epoch, interactive=interactive
        )
        return submission, packed.manifest

    def _place(self, code: bool) -> ClusterSpec:
        """Return the cluster with its numbers of workers and shards; ``code``: the job carries code of the script."""
        server = self.connection().describe()
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

    def _start(self, submission: Submission, manifest: Manifest) -> InteractiveJob:
        """Submit the job; ``manifest`` is that of its program."""
        return InteractiveJob(self.connection(), self.send(submission))

    def _feed(self, job: InteractiveJob, captured: Capture) -> Feeder | None:
        """Return the feeder of a stream's batches, or None."""
        return Feeder(job, captured.train.epoch) if isinstance(captured.train, Stream) else None

    def send(self, submission: Submission) -> str:
        """Upload missing artifacts, submit the job, and return its id."""
        connection = self.connection()
        sent = upload(connection, submission.blobs)
        job_id = connection.submit(submission.spec.model_dump_json(), self._id)
        logger.info("Submitted job %s (%d bytes uploaded)", job_id, sent)
        return job_id

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


@contextlib.contextmanager
def _embedded(options: Options) -> Any:
    cluster, topology = options.cluster, options.algorithm.topology_facts
    if topology.allreduce:
        server = EmbeddedServer(0, 0, rings=[ring.describe_ring(cluster)])
    elif topology.grouped:
        server = EmbeddedServer(0, cluster.shards, rings=ring.describe_groups(options.algorithm, cluster))
    else:
        server = EmbeddedServer(cluster.workers, cluster.shards)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _leave(token: Token[Any]) -> None:
    try:
        patch.leave(token)
    except ValueError:  # exited in another context than entered; that context ends anyway
        patch.enter(None)


def _nothing_to_train(captured: Capture, listeners: Any) -> Any:
    """Finish a fit without epochs as Keras does: no training, no logs."""
    if captured.epochs > 0 and captured.model.optimizer.built:
        captured.model.optimizer.finalize_variable_values(captured.model.trainable_weights)
    listeners.on_train_end(None)
    captured.model.history.nfdt = {}
    return captured.model.history


def look_at_metrics(captured: Capture, batch: Any, *, interactive: bool) -> None:
    """Move the validation into this process if ``test_step`` returns logs that workers cannot compute.

    Raises:
        CaptureError: a metric cannot be merged.
        UsageError: a detached job has no process that validates.
    """
    from nfdt.core.program.metrics import check_metrics

    validation = captured.validation
    sample = None if validation is None else validation.first()
    own = check_metrics(captured.model, batch, sample)
    if not own:
        return
    what = f"test_step returns logs that are no results of metrics: {', '.join(own)}."
    if not interactive:
        raise UsageError(
            f"submit: {what} Workers validate with metrics alone. Expected: for instance keras.metrics.Mean, updated "
            "and returned by test_step; or nfdt.distribute, which validates such a model in this script."
        )
    logger.warning("%s The model is therefore validated in this process, not on the workers.", what)
    captured.validation = None


def check_shards(model: Any, manifest: Manifest, cluster: ClusterSpec) -> None:
    """Raise UsageError if the optimizer needs all variables in one place but there are several shards."""
    if cluster.shards == 1:
        return
    obstacle, name = why_uncuttable(manifest), type(model.optimizer).__name__
    if obstacle is None:
        return
    reason = {
        "global norm": f"global_clipnorm of {name} is a norm over all variables",
        "unattributed": f"the variables of {name} cannot be attributed to the model's variables",
    }[obstacle]
    raise UsageError(f"shards={cluster.shards}: expected 1, because {reason}. Remove the option shards.")
