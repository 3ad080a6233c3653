from __future__ import annotations

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import resolve_cluster
from nfdt.launch.horovod_command import HostInfo, RingShape, ring_command, ring_environment

TUNED = {"fusion_threshold_mb": 64, "cycle_time_ms": 2.5, "autotune": True, "autotune_log": "/l", "timeline": "/t"}
STALLS = {"stall_warning_s": 5, "stall_shutdown_s": 9}
VARIABLES = {
    "HOROVOD_FUSION_THRESHOLD": str(64 * 2**20),
    "HOROVOD_CYCLE_TIME": "2.5",
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_LOG": "/l",
    "HOROVOD_TIMELINE": "/t",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
}
HERE = HostInfo("/usr/bin/mpirun", cores=2, root=False)


def shape(launcher: str = "auto") -> RingShape:
    return RingShape.of(resolve_cluster(workers=2, launcher=launcher, **TUNED, **STALLS))


def test_horovod_gets_no_option_that_was_not_set():
    assert resolve_cluster().variables() == {}
    assert resolve_cluster().tuning_flags() == []


def test_horovodrun_gets_what_is_asked_for_as_flags_that_horovod_knows():
    launch = pytest.importorskip("horovod.runner.launch")
    from horovod.runner.common.util import config_parser

    flags = shape().tuning.tuning_flags()
    command = ring_command(shape("horovodrun"), ["program"], HERE)
    assert command[-len(flags) - 1 :] == [*flags, "program"]
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["horovodrun", "-np", "2", *flags, "program"])
        config_parser.set_env_from_args(found, launch.parse_args())
    assert {name: found[name] for name in VARIABLES} == VARIABLES


def test_mpirun_and_a_world_get_it_as_environment():
    command = ring_command(shape("mpirun"), ["program"], HERE)
    given = [value for flag, value in zip(command, command[1:], strict=False) if flag == "-x"]
    assert dict(value.split("=", 1) for value in given) == {**VARIABLES, "HFDT_LINK_PROBES": "2,3"}
    environment = ring_environment({}, in_world=True, variables=shape().tuning.variables())
    assert VARIABLES.items() <= environment.items()


def test_a_shape_survives_the_way_to_its_server():
    cluster = resolve_cluster(workers=3, hosts="a:2,b:1", **TUNED, **STALLS)
    fields = {"size": cluster.workers, **cluster.model_dump(exclude_none=True, exclude={"emulate"})}
    assert RingShape.from_json(fields) == RingShape.of(cluster)


def test_every_file_that_a_job_names_is_known():
    cluster = resolve_cluster(**TUNED, hostfile="/h", host_discovery_script="/d")
    assert set(RingShape.of(cluster).files) == {"/l", "/t", "/h", "/d"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autotune_log": "l"}, "autotune=True"),
        ({"timeline": "-t"}, "timeline"),
        ({"cycle_time_ms": 0}, "cycle_time_ms"),
        ({"stall_shutdown_s": 30}, "at least stall_warning_s, 60"),
        ({"min_workers": 3, "workers": 2}, "workers: expected"),
        ({"max_workers": 1, "workers": 2}, "workers: expected"),
        ({"commit_steps": 0}, "commit_steps"),
        ({"host_discovery_script": "--output x"}, "host_discovery_script"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        resolve_cluster(**options)
