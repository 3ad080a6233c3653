"""``evaluate`` and ``predict`` on the cluster: a job whose workers share the rows of one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nfdt.core.errors import JobFailed, NfdtError
from nfdt.core.specs.job import ClusterSpec
from nfdt.model.program.manifest import Manifest
from nfdt_client.capture import bind
from nfdt_client.connection import JobsClient
from nfdt_client.evaluation_call import LEAST_S, Call, RunsHere, check_call, estimate_gain, read_call
from nfdt_client.failures import failure_of
from nfdt_client.job import InteractiveJob
from nfdt_client.local_fit import may_train_here, skip_once
from nfdt_client.options import Options
from nfdt_client.program_checks import check_shards
from nfdt_client.specify import Submission, specify_evaluation
from nfdt_client.upload import download

logger = logging.getLogger(__name__)

_BEGINNING = {"evaluate": "on_test_begin", "predict": "on_predict_begin"}


class CallSession(Protocol):
    """Session that submits the jobs of calls."""

    options: Options
    fits: list[dict[str, Any]]

    def connection(self) -> JobsClient:
        """Return the connection to the server."""
        ...

    def explained(self, error: Exception) -> Exception:
        """Return the error, or a better reason for it."""
        ...

    def has_free_workers(self) -> bool:
        """Whether a job can start now."""
        ...

    def note_fit(self) -> None:
        """Record that something is distributed."""
        ...

    def place(self, code: bool) -> ClusterSpec:
        """Return the cluster of a job; ``code``: it carries code of the script."""
        ...

    def start(self, submission: Submission, manifest: Manifest) -> InteractiveJob:
        """Submit a job."""
        ...


def run_call(
    session: CallSession, method: str, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Carry out ``evaluate`` or ``predict`` on the cluster where that is possible and worthwhile, else by Keras here.

    Args:
        session: The session.
        method: ``evaluate`` or ``predict``.
        original: Keras' own method.
        model: The user's model.
        args: Arguments of the call by position.
        kwargs: Arguments of the call by name.
    """
    try:
        call, structure = _distributable(session, method, model, bind(original, model, args, kwargs))
    except RunsHere as why:
        logger.info("model.%s runs in this process: %s.", method, why)
        return original(model, *args, **kwargs)
    listeners = _callback_list(call)
    try:
        return ClusterCall(session, call, structure, listeners).run()
    except Exception as error:
        options, reason = session.options, session.explained(error)
        if not (options.evaluate == "auto" or options.fallback == "local") or not may_train_here(reason):
            if reason is not error:
                raise reason from None
            raise
        logger.warning("model.%s runs in this process: the cluster cannot carry it out: %s", method, reason)
        skip_once(listeners, _BEGINNING[method])  # the callbacks have seen it
        return original(model, **{**call.arguments, "callbacks": listeners})


def _distributable(session: CallSession, method: str, model: Any, arguments: dict[str, Any]) -> tuple[Call, Any]:
    """Return the call and what its results look like; see :mod:`nfdt.model.program.evaluation_check`.

    Raises:
        RunsHere: Keras shall carry it out here.
    """
    from nfdt.model.program.evaluation_check import NotRepeatable, check_evaluate, check_predict
    from nfdt.model.training.predict import MAX_OUTPUT_BYTES

    options = session.options
    if options.evaluate == "false":
        raise RunsHere("evaluate=False")
    if not options.algorithm.topology_facts.flat:
        raise RunsHere(f"algorithm={options.algorithm.name!r} trains on ranks")
    check_call(method, model, arguments)
    if options.evaluate == "auto":
        _check_worth(session, model, arguments)
    call = read_call(method, model, arguments)
    arguments.pop("kwargs", None)
    try:
        if method == "predict":
            return call, check_predict(model, call.data.first(), MAX_OUTPUT_BYTES)
        check_evaluate(model, call.data.first())
        return call, None
    except NotRepeatable as error:
        raise RunsHere(str(error)) from error
    except Exception as error:  # Keras will raise it as well
        raise RunsHere(f"its first batch fails with {type(error).__name__}: {error}") from error


def _check_worth(session: CallSession, model: Any, arguments: Mapping[str, Any]) -> None:
    """Check that workers which are ready carry out the call clearly faster than this process.

    Raises:
        RunsHere: they do not; or this session has not trained the model, so that nothing is ready and its speed is
            not known.
    """
    own = getattr(getattr(model, "history", None), "nfdt", None)
    record = next((record for record in session.fits if record is own), None)
    if record is None:
        raise RunsHere("the model was not trained on the cluster in this session")
    gain_s = estimate_gain(record, arguments, remote=session.options.server is not None)
    if gain_s < LEAST_S:
        raise RunsHere(f"the cluster would save {gain_s:.1f} s, and is used from {LEAST_S:.0f} s on")
    try:
        free = session.has_free_workers()
    except NfdtError as error:
        raise RunsHere(str(error)) from error
    if not free:
        raise RunsHere("other jobs have the server's slots")


def _callback_list(call: Call) -> Any:
    """Return Keras' own CallbackList, as the method makes it."""
    from keras import callbacks as keras_callbacks

    callbacks, verbose = call.arguments["callbacks"], call.arguments["verbose"]
    if isinstance(callbacks, keras_callbacks.CallbackList):
        return callbacks
    options = {"add_progbar": verbose != 0, "verbose": verbose, "epochs": 1, "steps": call.data.batches}
    return keras_callbacks.CallbackList(callbacks, model=call.model, **options)


class ClusterCall:
    """One call on the cluster.

    Args:
        session: The session.
        call: The call.
        structure: Outputs of ``predict`` for one batch; None for ``evaluate``.
        listeners: Keras' CallbackList.
    """

    def __init__(self, session: CallSession, call: Call, structure: Any, listeners: Any) -> None:
        self._session, self._call = session, call
        self._structure, self._listeners = structure, listeners

    def run(self) -> Any:
        """Return the result of the call.

        Raises:
            Exception: the job failed (see :func:`~nfdt_client.failures.failure_of`), or a callback raised.
        """
        return self._evaluate() if self._call.method == "evaluate" else self._predict()

    def _evaluate(self) -> Any:
        from nfdt.model.keras_internals import data as keras_data
        from nfdt.model.training.metrics import ModelMetrics

        model = self._call.model
        model.stop_evaluating = False
        self._listeners.on_test_begin()
        job, artifact = self._run_job()
        ModelMetrics(model).load(download(job.connection, artifact))
        logs = keras_data.evaluation_logs(model)
        self._listeners.on_test_end(logs)
        return logs if self._call.arguments["return_dict"] else keras_data.flattened_logs(model, logs)

    def _predict(self) -> Any:
        from keras import tree

        from nfdt.model.training.predict import join_outputs, load_outputs

        data, self._call.model.stop_predicting = self._call.data, False
        self._listeners.on_predict_begin()
        job, artifact = self._run_job()
        names = download(job.connection, artifact).decode().split()
        pieces = (load_outputs(download(job.connection, name)) for name in names)
        leaves = join_outputs(pieces, range(0, data.samples, data.batch_size))
        self._listeners.on_predict_end()
        return tree.pack_sequence_as(self._structure, leaves)

    def _run_job(self) -> tuple[InteractiveJob, str]:
        """Run the job to its end; return the artifact of its result."""
        job = self._submit()
        try:
            return job, self._follow(job)
        except BaseException as error:
            job.cancel(f"the script stopped: {type(error).__name__}: {error}"[:500])
            raise

    def _submit(self) -> InteractiveJob:
        from nfdt.model.keras_internals import training as keras_training
        from nfdt.model.program.pack import pack

        call, session = self._call, self._session
        session.note_fit()
        with keras_training.seeded(0):  # evaluate and predict draw no random numbers
            packed = pack(call.model, call.data.first(), predicts=call.method == "predict")
        place = session.place(packed.code)
        check_shards(call.model, packed.manifest, place)
        submission = specify_evaluation(call.model, call.data, call.method, packed, session.options, place)
        job = session.start(submission, packed.manifest)
        logger.info("model.%s runs on the cluster: %s, %d workers", call.method, job.job_id, place.workers)
        return job

    def _follow(self, job: InteractiveJob) -> str:
        result, state = "", ""
        for event in job.events():
            if event.kind == "result":
                result = str(event.data["artifact"])
            elif event.kind == "worker_lost":
                logger.warning("%s is lost: %s", event.data.get("worker"), event.data.get("reason"))
            elif event.kind == "state":
                state = _state_of(job, event.data)
                if state == "queued":  # for the first time, or by a restarted server
                    job.proceed(0)
        if state != "succeeded":
            raise JobFailed(f"Job {job.job_id} has ended, but its server did not say how.")
        return result or job.result_artifact()


def _state_of(job: InteractiveJob, data: Mapping[str, Any]) -> str:
    state = str(data.get("state"))
    if state in ("failed", "cancelled"):
        raise failure_of(job.job_id, data)
    return state
