"""Ranks on TensorFlow: the operations of Horovod, and the division of a machine between its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hfdt.keras.compression import find_compressor
from hfdt.keras.horovod_api import init, is_broken_world, is_elastic
from hfdt.keras.reduction import Reduction
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.network_interface import interface_of
from hfdt.runtime.rendezvous_relay import Exchange, serve_rendezvous
from hfdt.runtime.step import AllreduceStep, DenominatorInGraph
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import NfdtError, ServerUnreachable
from nfdt.core.host.launcher_rank import slot_of
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK
from nfdt.model.backends.contract import as_tensors
from nfdt.model.backends.tensorflow_step import in_graph, step_logs
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

RANK_AND_SIZE = "/rank_and_size/"


class HorovodRanks(Communicator):
    """The ranks of Horovod's world, which this process joins if it has not.

    Attributes:
        local_rank: Rank among those of this machine.
        local_size: Number of ranks of this machine.
    """

    def __init__(self) -> None:
        init()
        self.read_position()
        number, vector = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
        self._summed: Any = tf.function(lambda v, w: self.sum(v * w, "hfdt_vector"), input_signature=[vector, number])
        # On one machine an elastic launcher gives every rank a separate host name.
        own = slot_of(os.environ.get("HOROVOD_HOSTNAME", "")) if is_elastic() else None
        self.local_rank = int(hvd.local_rank()) if own is None else own
        self.local_size = int(hvd.local_size()) if own is None else max(self.size, own + 1)

    @classmethod
    def join(cls, assignment: pb.RankAssignment, exchange: Exchange) -> HorovodRanks:
        """Join the world of an assignment."""
        with meeting(assignment, exchange):
            return cls()

    @staticmethod
    def is_broken(error: BaseException) -> bool:
        """Return whether an error is one of Horovod's operations."""
        return is_broken_world(error)

    def read_position(self) -> None:
        """Read rank and size, which change when ranks join or leave."""
        self.rank, self.size = int(hvd.rank()), int(hvd.size())

    @property
    def _alone(self) -> bool:
        return self.size == 1 and not is_elastic()  # graphs outlive an elastic communicator

    def close(self) -> None:
        """Shut Horovod down; collective."""
        hvd.shutdown()

    def _from_leader(self, values: Array, name: str) -> Array:
        return _numpy(mpi_ops.broadcast(tf.constant(values), self.leader, name=name))

    def _joined(self, data: bytes) -> bytes:
        own = tf.constant(np.frombuffer(data, np.uint8))
        return bytes(_numpy(mpi_ops.allgather(own, name="hfdt_report")).tobytes())

    def reducer(self, codec: str) -> Callable[[Any, str], Any]:
        """Return a function like :meth:`sum` that sends tensors in the format ``identity``, ``fp16`` or ``bf16``.

        Raises:
            UsageError: another codec.
        """
        if codec == "identity" or self._alone:
            return self.sum
        reduction = Reduction("hfdt", hvd.Sum, hvd.global_process_set, find_compressor(codec))
        return lambda tensor, name: reduction.reduce_group([tensor], name)[0]

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over all ranks; also usable inside a graph."""
        if self._alone:
            return tensor
        # Horovod matches operations of ranks by their names, which the scopes of a rank's own graph would change.
        return mpi_ops._allreduce(tensor, name=name, op=hvd.Sum, ignore_name_scope=True)

    def sum_vector(self, vector: Any, weight: float = 1.0) -> Array:
        """Return the weighted sum of the vectors of all ranks."""
        return _numpy(self._summed(vector, weight))

    def training_step(self, model: Any, manifest: Manifest, state: State, codec: str, *, scales: bool) -> AllreduceStep:
        """Return a step whose graph has the operations of Horovod."""
        return AllreduceStep(model, manifest, state, self.reducer(codec), DenominatorInGraph(self), scales=scales)

    def test_step(self, model: Any, manifest: Manifest) -> Callable[[Any], Mapping[str, Any]]:
        """Return ``test_step`` as a graph."""
        run: Any = in_graph(lambda batch: step_logs(model.test_step(batch), "test_step"), model)
        return lambda batch: run(as_tensors(batch))

    def share_machine(self, neighbours: int = 0) -> None:
        """Limit this rank to its share of the cores, and to one GPU."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // (self.local_size + neighbours))
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # Operations of Horovod wait for other ranks: with a single thread nothing else would run meanwhile.
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            tf.config.set_visible_devices(gpus[self.local_rank % len(gpus)], "GPU")

    def device_name(self) -> str:
        """Return the one visible GPU, or ``cpu``."""
        gpus = tf.config.get_visible_devices("GPU")
        return gpus[0].name.rpartition("physical_device:")[2].lower() if gpus else "cpu"


def _numpy(tensor: Any) -> Any:
    return np.asarray(tensor)


@contextmanager
def meeting(assignment: pb.RankAssignment, exchange: Exchange) -> Iterator[None]:
    """Provide the environment and the rendezvous with which Horovod joins the world of an assignment.

    Raises:
        ServerUnreachable: The ranks did not find each other.
    """

    def answer(key: str, value: bytes | None) -> bytes | None:
        if key.startswith(RANK_AND_SIZE):  # of an elastic Horovod, which asks again in each world
            return place_of(assignment.environment)
        return exchange(key, value)

    os.environ["HOROVOD_GLOO_IFACE"] = interface_of(assignment.host or LOOPBACK)
    with serve_rendezvous(answer) as port:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = LOOPBACK
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        try:
            yield
        except NfdtError:  # Horovod is not installed
            raise
        except Exception as error:
            raise ServerUnreachable(f"Rank {assignment.rank} could not join the other ranks: {error}") from error


def place_of(environment: Mapping[str, str]) -> bytes:
    """Return the place of a rank as Horovod's elastic launcher would send it."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return ",".join(environment[f"HOROVOD_{name}"] for name in names).encode()


RANKS = HorovodRanks
