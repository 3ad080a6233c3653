"""Slots on the nodes of a Ray cluster, and a job server that uses them.

Slots are reserved in a placement group, started as actors, and supervised.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nfdt_client.embedded import EmbeddedServer
from nfdt_client.options import Options

from nfdt.core.errors import JobFailed, NotInstalled, ServerUnreachable, UsageError
from nfdt.core.host.packages import install
from nfdt.core.jobs.runner import Role
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire.channel import join_address
from nfdt.engines.ray_slot import STOP_S, RaySlot, RaySlotAccess
from nfdt.launch.one_time_tls import authority_file, one_time_tls

_log = logging.getLogger(__name__)

SUPERVISE_S = 1.0
NOTICE_S = 5.0  # time without room before it is logged


@dataclass(frozen=True)
class SlotResources:
    """Resources that Ray reserves for one slot.

    Attributes:
        cpus: Number of CPUs.
        gpus: Number of GPUs of a worker; Ray shows the worker those alone.
    """

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class _SlotRequest:
    """One slot on Ray: its role, the options of ``nfdt worker`` that request it, and what Ray reserves for it."""

    role: Role
    options: tuple[str, ...]
    resources: SlotResources

    @property
    def bundle(self) -> dict[str, float]:
        """Resources in the form that Ray reads."""
        return {"CPU": self.resources.cpus, **({"GPU": self.resources.gpus} if self.resources.gpus else {})}


class _SlotRun(NamedTuple):
    """Actor, role and beginning of a run that has been requested."""

    slot: Any
    role: Role
    began: float


class RayCluster:
    """Connection of this process to a Ray cluster, and the slots that it started there.

    Args:
        address: Address of the cluster's head; None: ``RAY_ADDRESS``, or the cluster that this machine belongs to.

    Raises:
        NotInstalled: Ray is not installed.
        ServerUnreachable: no Ray cluster answers.
    """

    def __init__(self, address: str | None) -> None:
        # Ray prints its own errors to the output of the script; the loss of a node is in the job's log.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "has been marked dead")
        try:
            import ray
        except ImportError as error:
            raise NotInstalled(f"--on ray: {error}. Expected Ray on every machine: {install('ray')}.") from None
        if (address or "").startswith("ray://"):
            raise UsageError(
                f"--address: expected HOST:PORT of a Ray cluster that this machine belongs to. Received: {address!r}, "
                "an address for clients outside of it. Run this command on a node, or with: ray job submit -- ..."
            )
        self._ray: Any = ray
        self._requests: list[_SlotRequest] = []
        self._group: Any = None
        self._slots: list[Any] = []
        self._failed: Callable[[], None] = lambda: None
        self._runs: dict[Any, _SlotRun] = {}  # those that have not ended
        self._closing = threading.Event()
        self._failure: str | None = None
        self._supervisor = threading.Thread(target=self._supervise, name="ray-slots", daemon=True)
        try:
            ray.init(address=address or "auto", log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ServerUnreachable(
                f"--on ray: no Ray cluster answers at {address or 'RAY_ADDRESS, nor on this machine'}: "
                f"{str(error).rstrip('.')}. Start one with: ray start --head. Or give --address HOST:PORT."
            ) from None

    @property
    def host(self) -> str:
        """Address of this machine as the cluster's nodes know it."""
        return str(self._ray.util.get_node_ip_address())

    def reserve(self, workers: int, shards: int, resources: SlotResources, timeout_s: float) -> None:
        """Reserve room for slots, spread over the nodes.

        Args:
            workers: Number of worker slots.
            shards: Number of shard slots, which need no GPU.
            resources: Resources of each slot.
            timeout_s: Limit for the wait.

        Raises:
            JobFailed: there is no room within ``timeout_s``; the message states what there is.
        """
        self._requests = [_SlotRequest("worker", ("--slots", "1"), resources)] * workers
        self._requests += [_SlotRequest("shard", ("--shards", "1"), replace(resources, gpus=0.0))] * shards
        bundles = [request.bundle for request in self._requests]
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        noticed = min(NOTICE_S, timeout_s)
        if self._group.wait(noticed):
            return
        counts = Counter(map(_amounts, bundles))
        asked = "; ".join(f"{count} slots with {amounts} each" for amounts, count in counts.items())
        _log.warning("--on ray: waits up to %.0f s for room for %s. %s", timeout_s, asked, self._describe())
        if not self._group.wait(timeout_s - noticed):
            raise JobFailed(
                f"--on ray: expected room for {asked}, within {timeout_s:.0f} s. Received: {self._describe()} "
                "Use fewer --workers or less --slot-cpus, or add a machine: ray start --address HOST:PORT."
            )

    def start(self, access: RaySlotAccess, failed: Callable[[], None]) -> None:
        """Start the slots in the reserved room, and supervise them from now on.

        Args:
            access: Connection to the server.
            failed: Called on another thread when every slot of a role has ended for good; :meth:`check` then raises.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._failed = failed
        actor = self._ray.remote(RaySlot)
        for index, request in enumerate(self._requests):
            slot = actor.options(
                num_cpus=request.resources.cpus,
                num_gpus=request.resources.gpus,
                max_restarts=-1,  # of the actor; its run is repeated here, as Ray prints its own repetitions
                max_concurrency=2,  # run and stop
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote(access, request.options)
            self._slots.append(slot)
            self._run(slot, request.role)
        self._supervisor.start()

    def check(self) -> None:
        """Raise JobFailed if no slot of a role is left."""
        if self._failure is not None:
            raise JobFailed(self._failure)

    def close(self) -> None:
        """End the slots, release their room, and disconnect. Safe to call twice."""
        self._closing.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for slot in self._slots:
            slot.stop.remote()
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=STOP_S)
        for slot in self._slots:
            self._ray.kill(slot)
        self._slots = []
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        self._ray.shutdown()

    def _supervise(self) -> None:
        lacking_since = None
        while not self._closing.wait(SUPERVISE_S):
            self._collect_ends()
            state = self._ray.util.placement_group_table(self._group)["state"]
            if state == "CREATED":
                lacking_since = None
            elif lacking_since is None:
                lacking_since = time.monotonic()
            elif 0 < lacking_since < time.monotonic() - NOTICE_S:
                lacking_since = 0.0  # logged once until the group is complete again
                _log.warning("a Ray node is lost, and there is no room for its slots elsewhere. %s", self._describe())

    def _collect_ends(self) -> None:
        """Repeat the runs of slots that Ray starts again, and log those that have ended for good.

        When none of a role is left, record the failure and report it.
        """
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        for run in ended:
            slot, role, began = self._runs.pop(run)
            error = self._error(run)
            if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                if time.monotonic() - began > NOTICE_S:  # otherwise it was repeated too early
                    _log.warning("a %s slot on Ray is lost with its node or process; Ray starts it again", role)
                self._run(slot, role)
                continue
            reason = str(getattr(error, "cause", error))
            _log.warning("a %s slot on Ray has ended and is not started again: %s", role, reason)
            if all(role != other.role for other in self._runs.values()):
                self._failure = f"--on ray: every {role} slot has ended. The last: {reason}"
                self._closing.set()
                self._failed()

    def _run(self, slot: Any, role: Role) -> None:
        self._runs[slot.run.remote()] = _SlotRun(slot, role, time.monotonic())

    def _error(self, run: Any) -> Exception | str:
        """Return the error of a run that has ended, or a text where it has none."""
        try:
            self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            return error
        return "it returned"

    def _describe(self) -> str:
        """Describe the resources of the cluster's live nodes, and those that are free."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        have = "; ".join(f"{node['NodeManagerAddress']} has {_amounts(node['Resources'])}" for node in nodes)
        return f"a cluster of {len(nodes)} nodes: {have}; free in all: {_amounts(self._ray.available_resources())}."


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


class RayServer:
    """A running job server with slots on a Ray cluster; a :class:`~nfdt_client.embedded.StartedServer`."""

    is_warm = False

    def __init__(self, server: EmbeddedServer, cluster: RayCluster, ca_file: str | None) -> None:
        self.token, self.address, self.ca_file = server.token, server.address, ca_file
        self._server, self._cluster = server, cluster

    def check(self) -> None:
        """Raise JobFailed if no slot is left, ServerUnreachable if the server has ended."""
        self._cluster.check()
        self._server.check()


def on_ray(options: Options) -> Options:
    """Return the options of a session whose workers, and ranks, are slots on Ray.

    Raises:
        UsageError: the options name a server, or another launcher of rings and its hosts.
    """
    if options.server is not None:
        raise UsageError(f"--on ray starts a server of its own. Expected: no --server. Received: {options.server!r}.")
    cluster = options.cluster
    if not options.workers_given:  # the GPUs of this machine, which may have made it one, are not those of the nodes
        cluster = cluster.model_copy(update={"workers": ClusterSpec().workers})
        options = replace(options, cluster=cluster)
    if options.algorithm.topology_facts.flat:
        return options
    named = {"hosts": cluster.hosts, "hostfile": cluster.hostfile, "script": cluster.host_discovery_script}
    if cluster.launcher not in ("auto", "slots") or any(named.values()):
        raise UsageError(
            f"--on ray: expected ranks of {options.algorithm.name!r} in the slots that Ray starts. Received: launcher, "
            "hosts, hostfile or host_discovery_script. Leave them out."
        )
    return replace(options, cluster=cluster.model_copy(update={"launcher": "slots"}))


@contextmanager
def serve_on_ray(
    options: Options, address: str | None, resources: SlotResources, *, insecure_allreduce: bool = False
) -> Iterator[RayServer]:
    """Run a job server here and its workers on a Ray cluster, for the duration of the block.

    One shard stays with the server, so that the weights survive the loss of any node. Several shards are spread over
    the cluster's nodes, so that each adds the bandwidth of its link.
    Connections use TLS with certificates of an authority that is made here and ends with the block.

    Args:
        options: The session's options, see :func:`on_ray`.
        address: Address of the Ray cluster; None: the one that Ray finds itself.
        resources: Resources of each slot.
        insecure_allreduce: Whether ranks on several nodes may exchange gradients in plain text.

    Raises:
        NotInstalled: Ray is not installed.
        ServerUnreachable: no Ray cluster answers, or the job server does not start.
        JobFailed: the cluster has no room for the workers.
    """
    with ExitStack() as undo:
        cluster = RayCluster(address)
        undo.callback(cluster.close)
        tls = undo.enter_context(one_time_tls([cluster.host]))
        ca_file = undo.enter_context(authority_file(tls.authority.decode()))
        network = ["--listen", join_address(cluster.host, 0), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
        network += ["--insecure-allreduce"] if insecure_allreduce else []
        shards = options.cluster.shards if options.cluster.shards > 1 else 0
        server = EmbeddedServer(0, 0 if shards else 1, network=[*network, *(["--no-slots"] if shards else [])])
        undo.callback(server.stop)
        server.start()
        cluster.reserve(options.cluster.workers, shards, resources, options.start_timeout_s)
        access = RaySlotAccess(server.address(), server.worker_token, tls.authority)
        cluster.start(access, server.stop)
        yield RayServer(server, cluster, str(ca_file))
