"""Trial on several machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nfdt.chaos.trial import Trial, TrialRecord
from tests.support.machines import Rig
from tests.support.soak.machine_cluster import MachineCluster, machine_names
from tests.support.soak.machine_injector import MachineInjector
from tests.support.soak.machine_schedule import parse_machine_schedule


def run_on_machines(
    text: str, script: Path, folder: Path, server_options: Sequence[str] = (), **options: Any
) -> TrialRecord:
    """Run the trial of a schedule on machines that are made for it, and removed in any case.

    Args:
        text: The schedule.
        script: File of the script.
        folder: New folder for logs and state.
        server_options: More options of ``nfdt server``.
        options: Those of :class:`Trial`.
    """
    schedule = parse_machine_schedule(text)
    folder.mkdir(mode=0o700)
    with Rig(machine_names(schedule.cluster), logs=folder) as rig:
        cluster = MachineCluster(rig, schedule.cluster, script, folder, server_options)
        return Trial(cluster, MachineInjector(cluster), schedule.plan(), **options).run()
