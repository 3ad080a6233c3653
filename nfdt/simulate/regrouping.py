"""Change of a simulated job's workers to groups, or to other groups, between two epochs, as the job server does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.group_plan import groups_event
from nfdt.coordinator.online_planner import WORLDS_S, plan_event
from nfdt.simulate.events import Agenda
from nfdt.simulate.machines import VirtualNetwork
from nfdt.simulate.post_plan import PostPlan
from nfdt.simulate.roster import WorkerRoster


class Regrouping:
    """Regrouping by the servers' own planner after every epoch; creates the workers of its plan.

    Args:
        agenda: The virtual clock and its events.
        coordinator: Coordinator; decides when flat workers become groups.
        plan: Plan of the posts; decides which machines work together.
        roster: Workers of the job.
        network: Network with the load of the shards.
        emit: Appends an event.
    """

    def __init__(
        self,
        agenda: Agenda,
        coordinator: Coordinator,
        plan: PostPlan,
        roster: WorkerRoster,
        network: VirtualNetwork,
        emit: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._agenda, self._coordinator, self._plan = agenda, coordinator, plan
        self._roster, self._network, self._emit = roster, network, emit

    def start_workers(self, reason: str, since: float | None = None) -> None:
        """Create a worker for every post; its machines may have failed from virtual second ``since`` on."""
        for post in self._plan.posts:
            self._roster.start_worker(post, since)
        self._plan.seated()
        if shares := self._plan.shares:
            self._emit("groups", groups_event(shares, reason))

    def review(self) -> None:
        """Form other workers after an epoch, if that saves time."""
        coordinator, plan, living = self._coordinator, self._plan, self._roster.living
        remaining_s = coordinator.epoch_s * (plan.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase != "hold" or remaining_s <= 0:
            return
        if plan.review(living, remaining_s):
            self._replace_all("speeds have changed")
            coordinator.expect(len(plan.posts))
        elif plan.may_turn and len(living) == len(self._roster.workers):
            load = replace(self._network.load, weights=plan.weights)
            choice = coordinator.plan_groups(load, remaining_s, plan.machines_of(living))
            if choice is not None:
                plan.turn(choice.preset.groups)
                self._emit("plan", plan_event(choice))
                self._replace_all("planned")
                coordinator.renew(plan.seen, plan.sizes)

    def _replace_all(self, reason: str) -> None:
        """Replace all workers; no worker trains while the worlds of the groups start."""
        since = self._agenda.clock.now()
        self._coordinator.retire_all()
        self._roster.retire_all()
        self._agenda.after(WORLDS_S, lambda: self._come_up(reason, since))

    def _come_up(self, reason: str, since: float) -> None:
        self.start_workers(reason, since)
        self._roster.changed()
