"""Commands as users type them: help, mistakes, exit codes. No cluster is started here."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

import nfdt
from nfdt.cli import cli, hfdt
from nfdt.cli.mpi import rank_options
from nfdt.cli.options import parse_settings
from nfdt.core.errors import UsageError

NO_SERVER = "127.0.0.1:1"


@pytest.fixture
def nfdt_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("NFDT_SERVER", "NFDT_TOKEN", "NFDT_TOKEN_FILE", "NFDT_WORKERS"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments, **environment):
        return CliRunner().invoke(cli, arguments, env=environment)

    return invoke


def every_command(group: click.Group = cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found, context = [path], click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found += every_command(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


@pytest.mark.parametrize("path", every_command(), ids=" ".join)
def test_every_command_explains_itself(nfdt_command, path):
    done = nfdt_command(*path, "--help")
    assert done.exit_code == 0
    assert len(done.output.splitlines()) > 4


def test_the_version_is_printed(nfdt_command):
    assert nfdt.__version__ in nfdt_command("--version").output


@pytest.mark.parametrize("path", every_command(hfdt), ids=" ".join)
def test_every_command_of_hfdt_explains_itself(path):
    done = CliRunner().invoke(hfdt, [*path, "--help"])
    assert done.exit_code == 0
    assert len(done.output.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "code", "needle"),
    [
        (("jobs", "list"), 2, "--server"),
        (("worker",), 2, "--server"),
        (("worker", "--server", "nonsense"), 2, "HOST:PORT"),
        (("config", "--set", "workers"), 2, "KEY=VALUE"),
        (("config", "--set", "workerz=3"), 2, "Did you mean 'workers'"),
        (("run", "--set", "colour=3", __file__), 2, "Unknown option 'colour'. `nfdt config` lists all options.\n"),
        (("rum", "train.py"), 2, "Did you mean 'run'"),
        (("jobs", "lst"), 2, "Did you mean 'list'"),
        (("mpi", __file__), 2, "mpirun"),
        (("run", "no_such_file.py"), 2, "no_such_file.py"),
    ],
)
def test_a_mistake_is_one_message_with_its_exit_code(nfdt_command, arguments, code, needle):
    done = nfdt_command(*arguments)
    assert done.exit_code == code
    assert needle in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("algorithm", ["allreduce", "group-sync"])
def test_rings_of_an_mpi_launch_take_its_ranks(algorithm):
    given = {"algorithm": algorithm, "server": "127.0.0.1:1"}
    assert rank_options(given, 8) == {**given, "workers": 8, "launcher": "slots"}
    assert rank_options({**given, "workers": 2}, 8)["workers"] == 2
    with pytest.raises(UsageError, match="at most 2 workers"):
        rank_options({**given, "workers": 3}, 2)
    with pytest.raises(UsageError, match="launcher: expected none"):
        rank_options({**given, "launcher": "horovodrun"}, 8)


def test_flat_algorithms_of_an_mpi_launch_need_no_rings():
    given = {"algorithm": "asgd", "server": "127.0.0.1:1"}
    assert rank_options(given, 8) == {**given, "workers": 8}


@pytest.mark.parametrize("arguments", [("jobs", "list"), ("jobs", "show", "job-1"), ("worker", "--wait", "0")])
def test_an_unreachable_server_is_exit_code_4(nfdt_command, arguments):
    done = nfdt_command(*arguments, "--server", NO_SERVER, NFDT_TOKEN="secret")
    assert done.exit_code == 4
    assert NO_SERVER in done.output
    assert "secret" not in done.output


def test_config_shows_which_layer_won(nfdt_command, tmp_path):
    (tmp_path / "nfdt.toml").write_text('workers = 5\nalgorithm = "asgd"\nshards = 2\n')
    done = nfdt_command("config", "--format", "json", "--set", "shards=3", NFDT_ALGORITHM="ssp")
    found = json.loads(done.output)
    assert found["workers"] == {"value": 5, "origin": str(tmp_path / "nfdt.toml")}
    assert found["algorithm"]["value"] == "ssp"
    assert "NFDT_ALGORITHM" in found["algorithm"]["origin"]
    assert found["shards"] == {"value": 3, "origin": "argument"}
    assert found["dc_clip"]["origin"] == "default"


def test_config_never_shows_a_token(nfdt_command):
    assert "hush-hush" not in nfdt_command("config", NFDT_TOKEN="hush-hush").output


def test_a_result_file_of_an_unknown_kind_is_refused_before_anything_is_fetched(nfdt_command):
    done = nfdt_command("jobs", "result", "job-1", "--output", "m.h5", "--server", NO_SERVER, NFDT_TOKEN="t")
    assert done.exit_code == 2
    assert ".keras" in done.output


@pytest.mark.parametrize("pair", ["workers", "=3"])
def test_a_setting_needs_a_name_and_a_value(pair):
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_settings([pair])


def test_settings_keep_what_comes_after_the_first_equals_sign():
    assert parse_settings(["emulate.slowdown=1,4", "a=b=c"]) == {"emulate.slowdown": "1,4", "a": "b=c"}


def test_the_doctor_reports_in_json(nfdt_command):
    done = nfdt_command("doctor", "--format", "json")
    findings = {finding["subject"]: finding for finding in json.loads(done.output)}
    assert findings["keras"]["verdict"] == "ok"
    assert findings["loopback"]["verdict"] == "ok"
    assert "jax" in findings, "its devices are named where it is installed"
    assert {finding["verdict"] for finding in findings.values()} <= {"ok", "optional", "missing"}
    assert done.exit_code == 0
