"""Start of one job: its shards, its topology, its coordinator, its workers."""

from __future__ import annotations

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.job_context import ActiveTraining, JobContext
from nfdt.jobserver.job_slot import ShardState
from nfdt.jobserver.outcome import JobOutcome
from nfdt.jobserver.shard_clients import ShardClients, connect_shards
from nfdt.jobserver.snapshots import StateComposer, merger_of


def start_training(context: JobContext) -> ActiveTraining:
    """Start a job whose slots are available.

    Raises:
        JobFailed: A part does not start in time.
    """
    context.job_log.begin(JobOutcome("starting"))
    context.job_log.record("data", {"where": context.spec.train.where, "reason": context.spec.train.reason})
    begun = context.spec.fit.begun
    with context.changed:
        context.slots.shard_state = ShardState(records=begun.records if begun is not None else "")
        for job_slot in context.slots.shards:
            context.slots.start_shard(job_slot)
        context.wait_for(lambda: [job_slot.name for job_slot in context.slots.shards if not job_slot.address])
        context.topology.form()
    training = _assemble(context)
    with context.changed:
        context.training = training
        rate, weights = context.control.learning_rate, context.control.weights
        if context.spec.callbacks is not None:  # no client sets the rate of such a job
            rate = context.spec.callbacks.learning_rate
        context.control.weights = None
    if weights is not None:
        context.replace_state(training, weights)
    if rate is not None:
        context.set_learning_rate(training, rate)
    with context.changed:
        context.slots.admit(context.slots.living(), training.coordinator)
    context.job_log.begin(JobOutcome("running"))
    return training


def _assemble(context: JobContext) -> ActiveTraining:
    server, topology = context.server, context.topology
    merger = merger_of(context.manifest, server.artifacts)
    policy = topology.view.policy(topology.spec)
    coordinator = Coordinator(
        _coordinator_spec(context), policy, context.clock, merger, topology.sizes, restorable=topology.restores
    )
    shards = topology.connect(lambda: _connect(context), coordinator)
    composer = StateComposer(shards, merger, server.artifacts)
    return ActiveTraining(shards, composer, coordinator, topology.recovery)


def _connect(context: JobContext) -> ShardClients:
    addresses = [job_slot.address for job_slot in context.slots.shards]
    return connect_shards(addresses, context.manifest, context.slots.shard_key, authority=context.slots.shard_ca)


def _coordinator_spec(context: JobContext) -> JobSpec:
    """Return the specification for the coordinator, which permits no epoch itself: the job permits each one."""
    return context.topology.coordinator_spec().model_copy(update={"attended": True})
