"""Keeper of a rig: the process that builds its machines, and removes them on request or when the owner ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.support.machines.members import DEADLINE_S, signal_all
from tests.support.machines.plan import NETWORK, STATE, MachinePlan, RigError, RigPlan, namespace_of

BITS = NETWORK.rpartition("/")[2]
PERIOD_US = 100_000
UNSHARED = ["--net", "--mount", "--uts", "--ipc"]
HOLD = "echo ready; exec sleep infinity"
FURNISH = """
set -e
name=$1 own=$2 hosts=$3; shift 3
echo "$name" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 nfdt-rig /dev/shm
mount -t tmpfs nfdt-rig "$own"
mkdir -m 700 "$own/home" "$own/cache" "$own/run"
mkdir -m 1777 "$own/tmp"
for folder in "$@"; do mount -t tmpfs nfdt-rig "$folder"; done
mount --bind "$hosts" /etc/hosts
ip link set lo up
"""


def main() -> None:
    """Build the rig that the argument describes, report it as one line of JSON, and wait."""
    plan = RigPlan.parse(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, plan.folder)
        try:
            built = build(plan, undo)
        except (RigError, OSError) as error:
            sys.exit(f"{error}")
        (Path(plan.folder) / STATE).write_text(built.text())
        with suppress(BrokenPipeError):
            print(built.text(), flush=True)
        wait_for_end(plan.owner)


def wait_for_end(owner: int) -> None:
    """Wait until the owner writes to standard input or closes it, or ends while a fork of it keeps that open."""
    try:
        process = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    with suppress(KeyboardInterrupt):
        select.select([sys.stdin, process], [], [])


def build(plan: RigPlan, undo: ExitStack) -> RigPlan:
    """Start one holder per machine and one of the switch, and connect them."""
    plan.own.mkdir()
    names = "".join(f"{machine.address} {machine.name}\n" for machine in plan.machines)
    plan.hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    holders = undo.enter_context(_holders(plan))
    for machine in plan.machines:
        limit_cpus(machine, undo)
    undo.callback(signal_all, [namespace_of(holder.pid) for holder in holders], signal.SIGKILL)
    switch, *rest = (holder.pid for holder in holders)
    plan = replace(
        plan,
        switch=switch,
        machines=tuple(replace(m, holder=pid) for m, pid in zip(plan.machines, rest, strict=True)),
    )
    connect(plan)
    return plan


@contextmanager
def _holders(plan: RigPlan):
    scripts = [["ip link set lo up; " + HOLD]]
    for machine in plan.machines:
        arguments = [machine.name, str(plan.own), str(plan.hosts), *plan.private]
        scripts.append([FURNISH + HOLD, "sh", *arguments])
    with ExitStack() as ending:
        processes = []
        for script in scripts:
            # If the keeper is killed, its holders end too, and with them all namespaces without other members.
            command = ["setpriv", "--pdeathsig", "KILL", "unshare", *UNSHARED, "--propagation", "private"]
            process = subprocess.Popen(
                [*command, "sh", "-c", *script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            ending.callback(_end, process)
            processes.append(process)
        for process in processes:
            if process.stdout.readline() != b"ready\n":
                raise RigError(process.stderr.read().decode().strip() or "a holder of namespaces ended")
        yield processes


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def limit_cpus(machine: MachinePlan, undo: ExitStack) -> None:
    """Make the control group of a machine that has a limit."""
    if machine.cgroup is None:
        return
    group = Path(machine.cgroup)
    group.mkdir()
    undo.callback(_remove_group, group)
    quota = int(machine.cpus * PERIOD_US)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return group.rmdir()
        except OSError:  # processes that were killed a moment ago still count
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def connect(plan: RigPlan) -> None:
    """Make the bridge, and a pair of interfaces per machine: one on the bridge, one called eth0 in the machine."""
    lines = ["link add br0 type bridge", "link set br0 up"]
    for machine in plan.machines:
        lines.append(f"link add {machine.port} type veth peer name eth0 netns {machine.holder}")
        lines.append(f"link set {machine.port} master br0 up")
    batch("ip", plan.switch, lines)
    for machine in plan.machines:
        batch("ip", machine.holder, [f"addr add {machine.address}/{BITS} dev eth0", "link set eth0 up"])
        set_rate(plan, machine, machine.rate_mbit)


def set_rate(plan: RigPlan, machine: MachinePlan, rate_mbit: float | None) -> None:
    """Limit both directions of a machine's link, or remove the limit."""
    for holder, interface in ((plan.switch, machine.port), (machine.holder, "eth0")):
        batch("tc", holder, [_discipline(interface, rate_mbit)])


def _discipline(interface: str, rate_mbit: float | None) -> str:
    if rate_mbit is None:
        return f"qdisc replace dev {interface} root noqueue"
    # Two milliseconds of the rate, but more than the largest packet that the kernel hands on unsplit.
    burst = max(128 * 1024, int(rate_mbit * 1e6 / 8 * 0.002))
    return f"qdisc replace dev {interface} root tbf rate {int(rate_mbit * 1000)}kbit burst {burst} latency 50ms"


def batch(tool: str, holder: int, lines: list[str]) -> None:
    """Run lines of ``ip`` or ``tc`` in the network namespace of a holder."""
    command = ["nsenter", f"--target={holder}", "--net", tool, "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise RigError(f"{tool} failed: {done.stderr.strip()}")
