"""``evaluate`` and ``predict`` on the cluster: a job whose workers share the rows of one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras import tree

from nfdt.core.errors import JobFailed, NfdtError, UsageError
from nfdt.model.backends.embedding import zero_rows
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.evaluation_check import NotRepeatable, check_evaluate, check_predict
from nfdt.model.program.pack import pack
from nfdt.model.training.metrics import ModelMetrics
from nfdt.model.training.predict import MAX_OUTPUT_BYTES, join_outputs, load_outputs
from nfdt_client import callbacks, tables, training_data
from nfdt_client.capture import replaces
from nfdt_client.failures import failure_of, stop_reason
from nfdt_client.job import InteractiveJob
from nfdt_client.job_session import JobSession
from nfdt_client.local_fit import may_train_here, skip_once
from nfdt_client.patch import bind
from nfdt_client.program_checks import check_made_tables, check_shards, with_devices
from nfdt_client.specify import specify_evaluation
from nfdt_client.training_data import Arrays
from nfdt_client.upload import download

logger = logging.getLogger(__name__)

_FUNCTIONS = {"evaluate": "make_test_function", "predict": "make_predict_function"}
_BATCH_HOOKS = {
    "evaluate": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
_FIRST_HOOKS = {"evaluate": "on_test_begin", "predict": "on_predict_begin"}
# Seconds and shares of the estimate of what a call saves.
BATCH_S = 0.3e-3  # work of Keras for a batch besides the model's own
START_S = 1.0  # job of warm slots
FORWARD_SHARE = 1 / 3  # time of a forward pass, of that of a training step
LINK_BYTES_S = 100e6  # rate at which data reach a server on another machine
LEAST_S = 2.0  # a call that saves less is not distributed by default


class RunsHere(Exception):
    """A call that Keras carries out in this process; the message is the reason."""


@dataclass(frozen=True)
class Call:
    """One call, which the cluster can carry out.

    Attributes:
        method: ``evaluate`` or ``predict``.
        model: The user's model.
        arguments: Arguments by name, defaults filled in.
        data: The data.
        structure: Outputs of ``predict`` for one batch; None for ``evaluate``.
    """

    method: str
    model: Any
    arguments: Mapping[str, Any]
    data: Arrays
    structure: Any


def run_call(
    session: JobSession, method: str, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Any
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
        call = _distributable(session, method, model, bind(original, model, args, kwargs))
    except RunsHere as why:
        if tables.has_tables(model):
            raise UsageError(
                f"model.{method}: expected a call that the cluster carries out, as rows of nfdt.Embedding are on the "
                f"shards alone. Received: one that runs in this process: {why}. Pass arrays, in a session with "
                "evaluate='auto' or True."
            ) from None
        logger.info("model.%s runs in this process: %s.", method, why)
        return original(model, *args, **kwargs)
    listeners = callbacks.callback_list(model, call.arguments, epochs=1, steps=call.data.batches, history=False)
    try:
        return _evaluate(session, call, listeners) if method == "evaluate" else _predict(session, call, listeners)
    except Exception as error:
        options, reason = session.options, session.explained(error)
        may_run_here = (options.evaluate == "auto" or options.fallback == "local") and not tables.has_tables(model)
        if not may_run_here or not may_train_here(reason):
            if reason is not error:
                raise reason from None
            raise
        logger.warning("model.%s runs in this process: the cluster cannot carry it out: %s", method, reason)
        skip_once(listeners, _FIRST_HOOKS[method])  # the callbacks have seen it
        return original(model, **{**call.arguments, "callbacks": listeners})


def _distributable(session: JobSession, method: str, model: Any, arguments: dict[str, Any]) -> Call:
    """Return the call, checked; see :mod:`nfdt.model.program.evaluation_check`.

    Raises:
        RunsHere: the cluster cannot carry it out, or not faster, or Keras refuses it.
    """
    options = session.options
    if options.evaluate == "false":
        raise RunsHere("evaluate=False")
    if not options.algorithm.topology_facts.flat:
        raise RunsHere(f"algorithm={options.algorithm.name!r} trains on ranks")
    _check_model(method, model)
    if arguments.pop("kwargs", None):
        raise RunsHere("it has arguments that Keras does not know")
    if any(
        callbacks.has_own_hook(callback, _BATCH_HOOKS[method]) for callback in callbacks.each(arguments["callbacks"])
    ):
        raise RunsHere("a callback has hooks between batches")
    given = arguments["x"], arguments.get("y"), arguments.get("sample_weight")
    if given[0] is None or not training_data.is_arrays(given):
        raise RunsHere("its data are not arrays")
    if options.evaluate == "auto" and not tables.has_tables(model):
        _check_worth(session, model, arguments)
    try:
        read = training_data.read(*given, batch_size=arguments["batch_size"], shuffle=False)
    except (UsageError, ValueError) as error:
        raise RunsHere(f"Keras refuses its data: {error}") from error
    assert isinstance(read, Arrays)
    data = _limited(read, arguments["steps"], int(model.steps_per_execution or 1))
    try:
        with zero_rows():
            if method == "predict":
                return Call(method, model, arguments, data, check_predict(model, data.first(), MAX_OUTPUT_BYTES))
            check_evaluate(model, data.first())
            return Call(method, model, arguments, data, None)
    except NotRepeatable as error:
        raise RunsHere(str(error)) from error
    except Exception as error:  # Keras will raise it as well
        raise RunsHere(f"its first batch fails with {type(error).__name__}: {error}") from error


def _check_model(method: str, model: Any) -> None:

    if not (model.compiled and model.built and model.optimizer):
        raise RunsHere("the model is not compiled with an optimizer, or not built")
    if keras_models.distribution_strategy(model) is not None:
        raise RunsHere("the model was made under a strategy of tf.distribute")
    if replaces(model, name := _FUNCTIONS[method]):
        raise RunsHere(f"the model has its own {name}()")


def _limited(data: Arrays, steps: int | None, steps_per_execution: int) -> Arrays:
    """Return the rows that ``steps`` leave; Keras ends with whole executions."""
    batches = keras_models.limited_batches(steps, steps_per_execution)
    if batches is None:
        return data
    if batches > data.batches:
        raise RunsHere("it has more steps than the data have batches")
    return data.head(batches * data.batch_size)


def _check_worth(session: JobSession, model: Any, arguments: Mapping[str, Any]) -> None:
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
    # The call works in this process as well: distributing it must not slow it down.
    if gain_s < LEAST_S:
        raise RunsHere(f"the cluster would save {gain_s:.1f} s, and is used from {LEAST_S:.0f} s on")
    try:
        free = session.has_free_workers()
    except NfdtError as error:
        raise RunsHere(str(error)) from error
    if not free:
        raise RunsHere("other jobs have the server's slots")


def estimate_gain(record: Mapping[str, Any], arguments: Mapping[str, Any], *, remote: bool) -> float:
    """Return the seconds that the cluster saves; negative if it is slower.

    ::

        saved = batches * BATCH_S + compute * (1 - 1 / devices) - START_S - bytes / LINK_BYTES_S

    ``compute`` is the time of all forward passes on one device, by the speeds of the last fit, and ``devices`` is the
    number of machines and GPUs of the workers. Workers on one machine share its cores, which Keras alone uses as well:
    they only save what Keras does besides.

    Args:
        record: ``history.nfdt`` of the last fit of the model.
        arguments: Arguments of the call by name; its data are arrays.
        remote: Whether the server is another machine.
    """
    arrays = training_data.leaves([arguments.get(name) for name in ("x", "y", "sample_weight")])
    samples, size = len(arrays[0]), int(arguments["batch_size"] or 32)
    if arguments["steps"]:
        samples = min(samples, int(arguments["steps"]) * size)
    measured = [worker for worker in record.values() if worker.get("step_s") and worker.get("batch_size")]
    if not measured:
        return -START_S
    sample_s = min((one["step_s"] - one.get("step_exchange_s", 0.0)) / one["batch_size"] for one in measured)
    devices = {(worker.get("host"), worker.get("device")) for worker in record.values()}
    compute_s = FORWARD_SHARE * samples * max(0.0, sample_s)
    sent = sum(int(getattr(array, "nbytes", 0)) for array in arrays) if remote else 0
    return -(-samples // size) * BATCH_S + compute_s * (1 - 1 / len(devices)) - START_S - sent / LINK_BYTES_S


def _evaluate(session: JobSession, call: Call, listeners: Any) -> Any:
    model = call.model
    model.stop_evaluating = False
    listeners.on_test_begin()
    job, artifact = _run_job(session, call)
    ModelMetrics(model).load(download(job.connection, artifact))
    logs = keras_data.evaluation_logs(model)
    listeners.on_test_end(logs)
    return logs if call.arguments["return_dict"] else keras_data.flattened_logs(model, logs)


def _predict(session: JobSession, call: Call, listeners: Any) -> Any:

    call.model.stop_predicting = False
    listeners.on_predict_begin()
    job, artifact = _run_job(session, call)
    names = download(job.connection, artifact).decode().split()
    pieces = (load_outputs(download(job.connection, name)) for name in names)
    leaves = join_outputs(pieces, range(0, call.data.samples, call.data.batch_size))
    listeners.on_predict_end()
    return tree.pack_sequence_as(call.structure, leaves)


def _run_job(session: JobSession, call: Call) -> tuple[InteractiveJob, str]:
    """Run the job of a call to its end; return it with the name of the artifact of its result.

    Raises:
        Exception: the job failed (see :func:`~nfdt_client.failures.failure_of`).
    """
    session.mark_used()
    with keras_training.seeded(0):  # evaluate and predict draw no random numbers
        outer = session.options.algorithm.outer_optimizer
        packed = pack(call.model, call.data.first(), predicts=call.method == "predict", outer=outer)
    place = with_devices(call.model, packed.manifest, session.place(packed.code))
    check_shards(call.model, packed.manifest, place)
    check_made_tables(packed.manifest, session.options.algorithm, place)
    submission = specify_evaluation(call.model, call.data, call.method, packed, session.options, place)
    job = session.start(submission, packed.manifest)
    logger.info("model.%s runs on the cluster: %s, %d workers", call.method, job.job_id, place.workers)
    try:
        return job, _follow(job)
    except BaseException as error:
        job.cancel(stop_reason(error))
        raise


def _follow(job: InteractiveJob) -> str:
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
