"""Who works for a simulated job: flat workers, the ranks of a ring, or groups, as the algorithm's topology says."""

from __future__ import annotations

from collections.abc import Sequence

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.ring_view import policy_of, seen_by_coordinator
from nfdt.core.errors import UsageError
from nfdt.core.groups import check_groups, explicit_groups, wanted_groups
from nfdt.core.spec import JobSpec
from nfdt.schedulers import Speeds, StepTime
from nfdt.schedulers.group_shares import StatedSizes, share_out
from nfdt.schedulers.grouping import Groups, choose, divide
from nfdt.simulate.machines import Machine, Network
from nfdt.simulate.worker import Crew, Post, Share


class Crews:
    """Forms the workers of a job from machines.

    Args:
        spec: The job; ``workers`` is the number of machines.
        machines: All of them.
        network: Between them.
        weights: Elements of the model.

    Attributes:
        posts: One per worker, in order.
        sizes: The groups' batches; None without groups.

    Raises:
        UsageError: what only real clusters can do.
    """

    def __init__(self, spec: JobSpec, machines: Sequence[Machine], network: Network, weights: int) -> None:
        _check(spec)
        self._spec, self._machines, self._network, self._bytes = spec, list(machines), network, 4 * weights
        self._speeds = Speeds()
        self.sizes: StatedSizes | None = None
        batch = spec.fit.batch_size
        match spec.algorithm.topology:
            case "flat":
                self._groups: Groups = tuple((m.number,) for m in machines)
            case "ring":
                self._groups = (tuple(m.number for m in machines),)
            case _:
                self.sizes = StatedSizes(batch) if spec.train.kind == "arrays" else None
                self._groups = self._formed()
        self.posts = [Post(self._crew(members), Share((batch,) * len(members))) for members in self._groups]
        self.review()

    @property
    def seen(self) -> JobSpec:
        """The job as its coordinator sees it."""
        seen = seen_by_coordinator(self._spec, len(self.posts))
        cluster = seen.cluster.model_copy(update={"workers": len(self.posts)})
        return seen.model_copy(update={"attended": True, "cluster": cluster})

    @property
    def policy(self) -> ConsistencyPolicy:
        """Who may proceed."""
        return policy_of(self._spec)

    def member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        """A member of a group has done its part of a step."""
        if self.sizes is not None:
            self._speeds.measured(str(machine), samples, seconds)

    def review(self) -> None:
        """Between two epochs: share out among the members of groups what their last steps suggest."""
        if self._spec.algorithm.topology != "groups":
            return
        algorithm = self._spec.algorithm
        shares = share_out(
            self._groups,
            self._times(),
            self._spec.fit.batch_size,
            proportional=algorithm.batch == "dbs",
            least=algorithm.batch_min,
            most=algorithm.batch_max,
        )
        for post, share in zip(self.posts, shares, strict=True):
            post.share = Share(share.rows, share.rate)
        if self.sizes is not None:
            self.sizes.state({f"worker-{i}": share.batch for i, share in enumerate(shares)})

    def _formed(self) -> Groups:
        """Groups by the speeds that are described: measuring them first is not simulated."""
        algorithm = self._spec.algorithm
        if explicit := explicit_groups(algorithm.groups, len(self._machines)):
            return explicit
        batch, count = self._spec.fit.batch_size, wanted_groups(algorithm.groups)
        seconds = [machine.step.seconds(batch) for machine in self._machines]
        groups = choose(seconds) if count is None else divide(seconds, min(count, len(seconds)))
        return tuple(sorted(groups))

    def _times(self) -> dict[int, StepTime]:
        return {m.number: self._speeds.of(str(m.number)) or m.step for m in self._machines}

    def _crew(self, members: tuple[int, ...]) -> Crew:
        machines = tuple(self._machines[number] for number in members)
        inside_s = self._network.allreduce_s([machine.described for machine in machines], self._bytes)
        return Crew(machines, inside_s)


def _check(spec: JobSpec) -> None:
    algorithm = spec.algorithm
    check_groups(algorithm, spec.cluster)
    if algorithm.outer == "delta":
        raise UsageError("outer: expected 'gradient' in the simulator. Received: 'delta', which only real groups do.")
    if algorithm.scale_lr or algorithm.warmup_epochs:
        raise UsageError(
            "scale_lr, warmup_epochs: expected none in the simulator. Received: "
            f"{algorithm.scale_lr}, {algorithm.warmup_epochs:g}. Write the learning rate into the script."
        )


def simulated(spec: JobSpec, workers: int, shards: int) -> JobSpec:
    """A job on a described cluster: nothing is emulated, and embeddings travel whole, which changes no result."""
    cluster = spec.cluster.model_copy(
        update={"workers": workers, "shards": shards, "emulate": type(spec.cluster.emulate)()}
    )
    algorithm = spec.algorithm.model_copy(update={"sparse": False})
    return spec.model_copy(update={"cluster": cluster, "algorithm": algorithm})
