"""The workers of a simulated job by its topology: flat workers, the ranks of an allreduce ring, or groups.

Between two epochs they may change to groups, or to other groups, as on the job server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nfdt.coordinator.group_plan import GroupPlan
from nfdt.coordinator.online_planner import WORLDS_S
from nfdt.coordinator.topology_view import grouped, view_of
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import JobSpec, check_groups
from nfdt.schedulers.group_shares import FixedSizes, GroupShare
from nfdt.schedulers.grouping import Groups
from nfdt.simulate.machines import Machine, Post, VirtualNetwork
from nfdt.simulate.worker import SimulatedWorker

MEASURED_STEPS = 20  # of each machine before groups are formed, half of them with a quarter of the rows


class PostPlan:
    """Assignment of machines to the workers of a job, regrouped by decisions of the servers' :class:`GroupPlan`.

    Args:
        spec: The job; ``workers`` is the number of machines.
        machines: All machines.
        network: Network between them.
        weights: Elements of the model.

    Attributes:
        spec: Current specification of the job.
        weights: Elements of the model.
        posts: One post per worker, in order.
        sizes: Batch sizes of the groups; None without groups.
        shares: Share of each group, in the order of ``posts``; empty without groups.

    Raises:
        UsageError: the job uses a feature that only real clusters have.
    """

    def __init__(self, spec: JobSpec, machines: Sequence[Machine], network: VirtualNetwork, weights: int) -> None:
        _check(spec)
        self.spec, self._machines, self._network = spec, list(machines), network
        self.weights, self._bytes = weights, 4 * weights
        self.sizes: FixedSizes | None = None
        self.shares: tuple[GroupShare, ...] = ()
        every_machine = tuple(m.number for m in machines)
        self._plan: GroupPlan | None = None
        if view_of(spec).forms_groups or view_of(spec).may_form_groups(spec):
            self._plan = GroupPlan(spec, network.rings(self._bytes))
        if self._plan is not None and view_of(spec).forms_groups:
            self._measure(self._plan)
            self._form(self._plan.explicit or tuple(sorted(self._plan.choose((every_machine,)))))
        else:
            flat = spec.algorithm.topology_facts.flat
            self.posts = self._posts(tuple((n,) for n in every_machine) if flat else (every_machine,))

    @property
    def seen(self) -> JobSpec:
        """The job's specification as passed to its coordinator."""
        seen = view_of(self.spec).effective_spec(self.spec, groups=len(self.posts))
        cluster = seen.cluster.model_copy(update={"workers": len(self.posts)})
        return seen.model_copy(update={"attended": True, "cluster": cluster})

    def machines_of(self, workers: Sequence[SimulatedWorker]) -> dict[str, str]:
        """Return the name of each worker's machine; empty where it has its own and none is described."""
        network = self._network.rings(self._bytes)
        return {worker.name: network.machine(worker.post.members[0]) for worker in workers}

    def member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        """Record that a machine has done its part of a step."""
        if self._plan is not None:
            self._plan.measured(str(machine), samples, seconds)

    def seated(self) -> None:
        """Set the groups' batch sizes by worker name, once every post has a worker."""
        if self.sizes is not None:
            batches = [share.batch for share in self.shares]
            self.sizes.state({post.worker: batch for post, batch in zip(self.posts, batches, strict=True)})

    def review(self, workers: Sequence[SimulatedWorker], remaining_s: float) -> bool:
        """Form new posts between two epochs of groups if that saves time; else update the shares from the speeds.

        Args:
            workers: Live workers.
            remaining_s: Remaining seconds of training.

        Returns:
            Whether the posts are new.
        """
        if self._plan is None or not view_of(self.spec).forms_groups or not workers:
            return False
        self.posts = sorted((worker.post for worker in workers), key=lambda post: post.members)
        if steps := sum(worker.statistics.steps for worker in workers):
            self._plan.exchange_s = sum(worker.statistics.exchange_s for worker in workers) / steps
        living = tuple(post.members for post in self.posts)
        found = self._plan.review(living, remaining_s, WORLDS_S)
        if found:
            self._form(tuple(sorted(found)))
            return True
        self._share_out(self._plan, living)
        self.seated()
        return False

    def grown(self, workers: Sequence[SimulatedWorker], away: Collection[int], remaining_s: float) -> dict[str, Post]:
        """Return posts of the groups that machines without one join between two epochs if that pays, by their worker.

        Args:
            workers: Live workers.
            away: Numbers of the machines that have failed and not returned.
            remaining_s: Remaining seconds of training.
        """
        if self._plan is None or not view_of(self.spec).forms_groups:
            return {}
        of_members = {worker.post.members: worker.name for worker in workers}
        placed = {number for members in of_members for number in members}
        returned = [m.number for m in self._machines if m.number not in placed and m.number not in away]
        found = self._plan.growing(tuple(sorted(of_members)), returned, remaining_s, WORLDS_S) if returned else {}
        return {of_members[old]: self._posts((new,))[0] for old, new in found.items()}

    def rest(self, post: Post, away: Collection[int]) -> Post | None:
        """Return the post of a lost group's machines that are not away; None if all of them are."""
        members = tuple(number for number in post.members if number not in away)
        return self._posts((members,))[0] if members else None

    def settle(self, workers: Sequence[SimulatedWorker]) -> None:
        """Share the work out to the groups of these workers, one of which was formed again."""
        assert self._plan is not None, "only such jobs come here"
        self.posts = sorted((worker.post for worker in workers), key=lambda post: post.members)
        groups = tuple(post.members for post in self.posts)
        self._plan.settle(groups)
        self._share_out(self._plan, groups)
        self.seated()

    def turn(self, groups: Groups) -> None:
        """Change flat workers to these groups."""
        self.spec = grouped(self.spec)
        self._form(groups)

    def _measure(self, plan: GroupPlan) -> None:
        """Derive step times from the machines' descriptions; real groups measure them in their first world."""
        batch = self.spec.fit.batch_size
        for machine in self._machines:
            # Steps of two sizes tell the cost of a step from that of its rows.
            for rows in (batch, max(1, batch // 4)) * (MEASURED_STEPS // 2):
                plan.measured(str(machine.number), rows, machine.step.seconds(rows))

    def _form(self, groups: Groups) -> None:
        assert self._plan is not None, "only such jobs come here"
        # Only rows of arrays can be cut into batches of any size.
        self.sizes = FixedSizes(self.spec.fit.batch_size) if self.spec.train.kind == "arrays" else None
        self.posts = self._posts(groups)
        self._plan.settle(groups)
        self._share_out(self._plan, groups)

    def _share_out(self, plan: GroupPlan, groups: Groups) -> None:
        self.shares = plan.shares(groups)
        for post, share in zip(self.posts, self.shares, strict=True):
            post.rows, post.rate = share.rows, share.rate

    def _posts(self, groups: Groups) -> list[Post]:
        posts = []
        for members in groups:
            machines = tuple(self._machines[number] for number in members)
            inside_s = self._network.allreduce_s([machine.described for machine in machines], self._bytes)
            posts.append(Post(machines, inside_s, (self.spec.fit.batch_size,) * len(members)))
        return posts


def _check(spec: JobSpec) -> None:
    algorithm = spec.algorithm
    check_groups(algorithm, spec.cluster)
    if spec.cluster.elastic and not spec.algorithm.topology_facts.flat:
        raise UsageError(
            "min_workers, max_workers, host_discovery_script: expected none in the simulator. Received: an elastic "
            "ring. Leave them out, or run the script on real workers."
        )
    if algorithm.scale_lr and not spec.train.sized:  # a round of whole batches has one rate on the shards
        raise UsageError(
            f"scale_lr: expected arrays as training data in the simulator. Received: data of kind {spec.train.kind!r}. "
            "Pass arrays to fit, or write the learning rate into the script."
        )


def simulated(spec: JobSpec, workers: int, shards: int) -> JobSpec:
    """Return the job for a described cluster, with dense embedding gradients, which change no result."""
    cluster = spec.cluster.model_copy(update={"workers": workers, "shards": shards})
    algorithm = spec.algorithm.model_copy(update={"sparse": False})
    return spec.model_copy(update={"cluster": cluster, "algorithm": algorithm})
