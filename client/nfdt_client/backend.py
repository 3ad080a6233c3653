"""Backends of Keras on which the algorithm of a session trains."""

from __future__ import annotations

from nfdt.core.host.keras_backend import TRAINING, require_backend, require_tensorflow
from nfdt_client.options import Options


def require_backend_of(options: Options) -> None:
    """Check that the session's algorithm trains on the backend that Keras has loaded, or will load.

    Raises:
        CaptureError: it does not.
    """
    if options.algorithm.topology_facts.flat:
        require_backend(TRAINING)
    else:
        require_tensorflow(f"the ranks of algorithm={options.algorithm.name!r} compute, with Horovod,")
