"""One rank of a Horovod world that times allreduces of several sizes: ``python -m benchmarks.workloads.ring_rank``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

WARM_UP = 3
PORT, RESULT = "store ", "seconds "  # beginnings of the lines that rank 0 prints


def timed(hvd: Any, tf: Any, size: int, repeats: int) -> list[float]:
    """Return the seconds of repeated allreduces of ``size`` bytes on this rank."""
    gradient, seconds = tf.zeros(size // 4), []
    for number in range(WARM_UP + repeats):
        began = time.perf_counter()
        hvd.allreduce(gradient, op=hvd.Sum, name=f"bytes-{size}").numpy()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return seconds


def serve_store(hosts: str) -> Any:
    """Start Horovod's rendezvous store for a world on these hosts (``a:2,b:2``) and print its port."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    store = RendezvousServer()
    port = store.start()
    plan = parse_hosts(hosts)
    store.init(get_host_assignments(plan, sum(host.slots for host in plan)))
    print(f"{PORT}{port}", flush=True)
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    return store


def main(argv: Sequence[str] | None = None) -> int:
    """Join the world of this environment and, as rank 0, print the seconds by size as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--store", metavar="HOSTS", help="run the rendezvous store of a world on these hosts")
    options = parser.parse_args(argv)
    store = serve_store(options.store) if options.store else None
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    found = {str(size): timed(hvd, tf, size, options.repeats) for size in options.bytes}
    if hvd.rank() == 0:
        print(f"{RESULT}{json.dumps(found)}", flush=True)
    hvd.shutdown()
    if store is not None:
        store.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
