"""Access to Horovod: imported when first needed, and this process's position among the ranks."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hfdt.keras.rank_sockets import RankSockets
from nfdt.core.errors import NotInstalled

_sockets = RankSockets()  # of this process, as Horovod's communicator is


def horovod() -> Any:
    """Return the module ``horovod.tensorflow``.

    Raises:
        NotInstalled: Horovod is not installed, or was built against another TensorFlow.
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
    """Join the other ranks that ``horovodrun`` or ``mpirun`` started; a single process forms a communicator of one.

    Args:
        args: Arguments of ``horovod.tensorflow.init``: ``comm``, a list of ranks or an MPI communicator of mpi4py.
        options: ``comm``, ``process_sets``.

    Raises:
        NotInstalled: Horovod is not installed.
    """
    with _sockets.noted() if is_elastic() else contextlib.nullcontext():
        horovod().init(*args, **options)


def shutdown() -> None:
    """Leave the communicator; :func:`init` may follow."""
    horovod().shutdown()


def enter_next_world() -> None:
    """Leave the communicator permanently, and join the next one that the elastic launcher forms."""
    shutdown()
    _sockets.cut()
    init()


def is_initialized() -> bool:
    """Return whether :func:`init` has been called."""
    return bool(horovod().is_initialized())


def rank() -> int:
    """Return the number of this process, 0 to ``size() - 1``."""
    return int(horovod().rank())


def size() -> int:
    """Return the number of processes."""
    return int(horovod().size())


def local_rank() -> int:
    """Return the number of this process among those of its machine: the index of its GPU."""
    return int(horovod().local_rank())


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(horovod().local_size())


def cross_rank() -> int:
    """Return the number of this machine among those that have a process of this local rank."""
    return int(horovod().cross_rank())


def cross_size() -> int:
    """Return the number of machines that have a process of this local rank."""
    return int(horovod().cross_size())


def is_elastic() -> bool:
    """Return whether Horovod's elastic launcher started this process: ranks may join and leave."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def is_broken_world(error: BaseException) -> bool:
    """Return whether the error is caused by the end of another rank, which has the actual reason."""
    import tensorflow as tf

    return isinstance(error, tf.errors.OpError) and any(name in str(error) for name in ("Horovod", "horovod", "hfdt_"))
