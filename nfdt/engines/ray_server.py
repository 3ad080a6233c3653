"""A job server beside the script, whose workers are on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from nfdt_client.embedded import EmbeddedServer
from nfdt_client.options import Options

from nfdt.core.errors import UsageError
from nfdt.core.wire.channel import join_address
from nfdt.engines.ray_cluster import RayCluster, SlotResources
from nfdt.engines.ray_slot import RaySlotAccess
from nfdt.launch.one_time_tls import authority_file, one_time_tls


class RayServer:
    """A running job server with slots on a Ray cluster; a :class:`~nfdt_client.embedded.StartedServer`."""

    def __init__(self, server: EmbeddedServer, cluster: RayCluster, ca_file: str) -> None:
        self.token = server.token
        self.ca_file: str | None = ca_file
        self.address = server.address
        self._server, self._cluster = server, cluster

    def check(self) -> None:
        """Raise JobFailed if no slot is left, ServerUnreachable if the server has ended."""
        self._cluster.check()
        self._server.check()


@contextmanager
def serve_on_ray(options: Options, address: str | None, resources: SlotResources) -> Iterator[RayServer]:
    """Run a job server here and its workers on a Ray cluster, for the duration of the block.

    One shard stays with the server, so that no lost node takes the weights along. Several shards are spread over the
    cluster's nodes, so that each adds its link.
    Connections use TLS with certificates of an authority that is made here and ends with the block.

    Args:
        options: The session's options; they name no server.
        address: Address of the Ray cluster; None: the one that Ray finds itself.
        resources: Resources of each slot.

    Raises:
        UsageError: the options name a server, or an algorithm whose workers Horovod launches.
        NotInstalled: Ray is not installed.
        ServerUnreachable: no Ray cluster answers, or the job server does not start.
        JobFailed: the cluster has no room for the workers.
    """
    _check_options(options)
    with ExitStack() as undo:
        cluster = RayCluster(address)
        undo.callback(cluster.close)
        tls = undo.enter_context(one_time_tls([cluster.host]))
        ca_file = undo.enter_context(authority_file(tls.authority.decode()))
        network = ["--listen", join_address(cluster.host, 0), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
        shards = options.cluster.shards if options.cluster.shards > 1 else 0
        server = EmbeddedServer(0, 0 if shards else 1, network=[*network, *(["--no-slots"] if shards else [])])
        undo.callback(server.stop)
        server.start()
        cluster.reserve(options.cluster.workers, shards, resources, options.start_timeout_s)
        access = RaySlotAccess(server.address(), server.token, tls.authority)
        cluster.start(access, server.stop)
        yield RayServer(server, cluster, str(ca_file))


def _check_options(options: Options) -> None:
    if options.server is not None:
        raise UsageError(f"--on ray starts a server of its own. Expected: no --server. Received: {options.server!r}.")
    if not options.algorithm.topology_facts.flat:
        raise UsageError(
            f"--on ray: expected an algorithm whose workers are processes of their own. "
            f"Received: {options.algorithm.name!r}, whose ranks Horovod launches."
        )
