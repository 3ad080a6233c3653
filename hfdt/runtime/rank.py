"""One rank of an allreduce ring, started by mpirun or horovodrun as ``python -m hfdt.runtime.rank``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nfdt.core.errors import NfdtError
from nfdt.core.host.child_process import die_with_parent
from nfdt.core.host.logs import log_to_stderr
from nfdt.core.host.startup import quiet_start, worker_imports

logger = logging.getLogger(__name__)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m hfdt.runtime.rank``."""
    parser = argparse.ArgumentParser(prog="hfdt.runtime.rank", description=__doc__)
    parser.add_argument("--server", default="", help="HOST:PORT of the job server; rank 0 needs it")
    parser.add_argument("--ring", type=Path, help="directory with the token, where failures are left; rank 0 needs it")
    parser.add_argument("--members", type=_numbers, default=(), help="by rank, who of the job's workers they are: 0,1")
    parser.add_argument("--neighbours", type=int, default=0, help="ranks of other groups on this machine")
    parser.add_argument("--watch-stdin", action="store_true", help="exit when standard input closes")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(argv)
    log_to_stderr(options.log_level)
    die_with_parent(watch_stdin=options.watch_stdin)
    code = 1
    try:
        with quiet_start(), worker_imports():
            from hfdt.keras.horovod_api import is_elastic
            from hfdt.runtime.leader import run_launched_rank
            from hfdt.runtime.tensorflow_ranks import HorovodRanks

        communicator = HorovodRanks()
        communicator.share_machine(options.neighbours)
        if is_elastic():
            from hfdt.runtime.elastic.rank import ElasticRank

            ElasticRank(communicator, options.server, options.ring).run()
        else:
            run_launched_rank(communicator, options)
        communicator.close()
        code = 0
    except NfdtError as error:
        code = error.exit_code
    except Exception:
        logger.exception("the rank ends")
    finally:
        logging.shutdown()
        if code:
            os._exit(code)  # an orderly exit would wait for ranks that wait for this one
    return code


if __name__ == "__main__":
    sys.exit(main())
