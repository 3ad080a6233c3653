"""Horovod itself: found when it is first needed, and who this process is among the ranks."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hfdt.keras.rank_sockets import RankSockets
from nfdt.core.errors import NotInstalled

_sockets = RankSockets()  # of this process, as Horovod's world is


def horovod() -> Any:
    """The module ``horovod.tensorflow``.

    Raises:
        NotInstalled: Horovod is not there, or was built against another TensorFlow.
    """
    try:
        import horovod.tensorflow as found
    except (ImportError, OSError) as error:
        raise NotInstalled(
            "Horovod is needed for synchronous training (hfdt, algorithm='allreduce') and could not be imported. "
            f"Expected: Horovod, built against the installed TensorFlow. Received: {type(error).__name__}: {error}. "
            "Run: ./scripts/install-horovod"
        ) from error
    return found


def init(*args: Any, **options: Any) -> None:
    """Join the other ranks that ``horovodrun`` or ``mpirun`` started; alone, a world of one.

    Args:
        args: Arguments of ``horovod.tensorflow.init``: ``comm``, a list of ranks or an MPI communicator of mpi4py.
        options: ``comm``, ``process_sets``.

    Raises:
        NotInstalled: without Horovod.
    """
    with _sockets.noted() if is_elastic() else contextlib.nullcontext():
        horovod().init(*args, **options)


def shutdown() -> None:
    """Leave the world; :func:`init` may follow."""
    horovod().shutdown()


def enter_next_world() -> None:
    """Leave the world for good, and enter the one that the elastic launcher forms next."""
    shutdown()
    _sockets.cut()
    init()


def is_initialized() -> bool:
    """Whether :func:`init` has been called."""
    return bool(horovod().is_initialized())


def rank() -> int:
    """Number of this process, 0 to ``size() - 1``."""
    return int(horovod().rank())


def size() -> int:
    """Number of processes."""
    return int(horovod().size())


def local_rank() -> int:
    """Number of this process among those of its machine: the GPU to take."""
    return int(horovod().local_rank())


def local_size() -> int:
    """Number of processes on this machine."""
    return int(horovod().local_size())


def cross_rank() -> int:
    """Number of this machine among those that have a process of this local rank."""
    return int(horovod().cross_rank())


def cross_size() -> int:
    """Number of machines that have a process of this local rank."""
    return int(horovod().cross_size())


def is_elastic() -> bool:
    """Whether Horovod's elastic launcher started this process: ranks may come and go."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def is_broken_world(error: BaseException) -> bool:
    """Whether this is the end of another rank, as seen from here: that one knows the reason."""
    import tensorflow as tf

    return isinstance(error, tf.errors.OpError) and any(name in str(error) for name in ("Horovod", "horovod", "hfdt_"))
