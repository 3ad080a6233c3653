"""A session: its server, its patch of ``keras.Model.fit``, and what it does with calls of a model's methods."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType
from typing import Any, Self

from nfdt.core.errors import NfdtError
from nfdt.core.host.startup import note_start
from nfdt_client import patch
from nfdt_client.job_session import JobSession
from nfdt_client.local_fit import IN_A_FIT, Fallback, LocalFits, may_train_here
from nfdt_client.patch import bind
from nfdt_client.run_history import kept_run
from nfdt_client.tracebacks import hide_frames

logger = logging.getLogger(__name__)

IDLE = (
    "No model.fit was called: nothing was distributed. Only model.fit trains on workers; train_on_batch, a loop of "
    "your own, and a fit in another thread run in this process."
)


class Session(JobSession):
    """Context manager in which ``keras.Model.fit`` of this context trains on a cluster.

    In a script started by mpirun, srun or horovodrun, rank 0's allreduce job runs on the ranks of that world. On
    another rank, entering a session works for that job and then ends the script.

    Args:
        options: The options.
        server: As for :class:`~nfdt_client.job_session.JobSession`.
        names: As for :class:`~nfdt_client.job_session.JobSession`.

    Attributes:
        warns_if_idle: Whether to log a warning when a block ends without an error and without a fit; else its caller
            does that.
    """

    warns_if_idle = True
    _refusal: NfdtError | None = None  # why no fit of this session can be distributed

    @hide_frames
    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            try:
                self.options.require_backend()
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
            self._idle, self._outer = True, token.old_value if isinstance(token.old_value, JobSession) else None
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        in_order = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if self.warns_if_idle and self._idle and in_order:
            logger.warning(IDLE)

    def call(
        self, method: str, original: patch.KerasMethod, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out a method of ``model`` on the cluster as ``original`` would here."""
        if method == "fit":
            with kept_run(self, model):
                return self.fit(original, model, args, kwargs)
        if self._refusal is not None:
            return original(model, *args, **kwargs)
        from nfdt_client.evaluation import run_call  # imports Keras

        return run_call(self, method, original, model, args, kwargs)

    def fit(self, original: patch.KerasMethod, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Train ``model`` on the cluster as ``original`` would here; fits inside callbacks are Keras' own."""
        note_start("script", "calls fit")
        self.mark_used()
        fallback = Fallback(bind(original, model, args, kwargs), self.options.fallback)
        # A fit inside a callback was never meant for the cluster: until the end of this one, fits are Keras' own.
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

    def _fit(self, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
        from nfdt_client.cluster_fit import run_fit  # imports Keras

        return run_fit(self, model, arguments, fallback)
