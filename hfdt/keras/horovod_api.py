"""Access to Horovod, which is imported when first needed, and changes of its communicator.

Horovod leaves connections to other ranks open when it shuts down. A rank that waits for this one detects its departure
only when they end; otherwise it waits for Gloo's timeout. Therefore they are cut.

Horovod sends no probes over silent connections, and waits for Gloo's timeout, or longer, for a machine without power.
Therefore the kernel sends them (:class:`~nfdt.core.host.link_probes.LinkProbes`).
"""

from __future__ import annotations

import os
from typing import Any

from nfdt.core.errors import NotInstalled
from nfdt.core.host.link_probes import LinkProbes
from nfdt.core.wire.rank_sockets import RankSockets

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
    if os.environ.get("HOROVOD_CONTROLLER") != "gloo":  # mpirun probes the connections of its ranks
        horovod().init(*args, **options)
        return
    with _sockets.recorded():
        horovod().init(*args, **options)
    _sockets.probe(LinkProbes.read(os.environ))


def break_off() -> None:
    """Cut the connections to the other ranks: running operations fail, here and there. Any thread may call."""
    _sockets.cut()


def leave_world() -> None:
    """Leave the communicator permanently."""
    horovod().shutdown()
    _sockets.cut()


def enter_next_world() -> None:
    """Leave the communicator permanently, and join the next one that the elastic launcher forms."""
    leave_world()
    init()


def is_elastic() -> bool:
    """Return whether Horovod's elastic launcher started this process: ranks may join and leave."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def is_broken_world(error: BaseException) -> bool:
    """Return whether the error is caused by the end of another rank, whose own error has the reason."""
    import tensorflow as tf

    return isinstance(error, tf.errors.OpError) and any(name in str(error) for name in ("Horovod", "horovod", "hfdt_"))
