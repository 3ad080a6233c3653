"""Files of deploy/: complete, consistent with the README, and their commands exist."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.command_lines import unknown_options
from tests.support.scripts import DEADLINE_S

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
BINARY = "/opt/nfdt/bin/nfdt"


def instructions() -> list[tuple[str, str]]:
    """Return name and value of each line of the Containerfile."""
    lines = [line for line in (DEPLOY / "Containerfile").read_text(encoding="utf-8").splitlines() if line]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if not line.startswith("#")]


def values(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def test_the_image_is_installed_by_the_command_of_the_readme():
    (build_argument,) = values("ARG")
    name, _, default = build_argument.partition("=")
    first, page, *others = [value.replace(f"${{{name}}}", default) for value in values("RUN")]
    readme = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.split("#")[0].strip() for block in readme for line in block.splitlines()]
    assert first in commands
    assert page in (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert all(other.startswith("useradd ") for other in others)


def test_what_the_image_copies_suffices_to_install_the_package(tmp_path):
    for line in values("COPY"):
        *sources, target = line.split()
        for source in sources:
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / target / ("" if (ROOT / source).is_dir() else source), **_merging(copy))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", tmp_path / "installed", "."], cwd=tmp_path, check=True, timeout=DEADLINE_S)
    probe = "import nfdt.cli, nfdt_client, hfdt; print(nfdt.cli.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout.strip() == str(tmp_path / "installed" / "nfdt" / "cli" / "__init__.py"), done.stderr


def _merging(copy) -> dict[str, bool]:
    return {"dirs_exist_ok": True} if copy is shutil.copytree else {}


def test_the_image_runs_as_the_user_of_the_manifests():
    from nfdt.engines.kubernetes import HOME, RUN, STATE, USER

    assert values("USER") == [f"{USER}:{USER}"]
    (account,) = [value for value in values("RUN") if value.startswith("useradd ")]
    assert f"--uid {USER} " in account
    assert {RUN, STATE} <= set(account.split())
    assert values("WORKDIR")[-1] == HOME


def test_services_of_the_compose_file_share_what_they_name():
    server, worker = COMPOSE["services"]["server"], COMPOSE["services"]["worker"]
    assert worker["deploy"]["replicas"] == 2
    for name, service in COMPOSE["services"].items():
        mounts = [volume.split(":") for volume in service["volumes"]]
        assert {source for source, *_ in mounts} <= set(COMPOSE["volumes"]), name
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"]), name
        files = re.findall(r"(?:=| |^)(/\S+)", " ".join(service["command"]))
        inside = [target for _, target, *_ in mounts]
        assert [file for file in files if not any(Path(file).is_relative_to(path) for path in inside)] == [], name
    port = next(word for word in server["command"] if word.startswith("--listen=")).rpartition(":")[2]
    assert f"--server=server:{port}" in worker["command"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_workers_of_the_compose_file_have_neither_the_key_nor_the_token_that_may_train():
    server, worker = COMPOSE["services"]["server"], COMPOSE["services"]["worker"]
    mounts = {target: source for source, target in (volume.split(":")[:2] for volume in server["volumes"])}
    options = dict(word.removeprefix("--").split("=", 1) for word in server["command"] if "=" in word)

    def volume_of(option):
        return mounts[max((place for place in mounts if options[option].startswith(f"{place}/")), key=len)]

    has = {volume.partition(":")[0] for volume in worker["volumes"]}
    assert {volume_of("token-file"), volume_of("tls-key")}.isdisjoint(has)
    assert has == {volume_of("worker-token-file")}


def test_commands_of_the_compose_file_exist():
    services = COMPOSE["services"]
    (_, _, certs) = services["certs"]["command"]
    lines = [
        shlex.split(certs.partition("|| ")[2].partition(";")[0]),
        services["server"]["command"],
        services["worker"]["command"],
    ]
    lines.append(services["server"]["healthcheck"]["test"][1:])
    for program, *words in lines:
        assert program == "nfdt"
        assert unknown_options(words) == set()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_run_commands_that_exist(unit, tmp_path):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(unit)
    assert parser.sections() == ["Unit", "Service", "Install"]
    program, *words = shlex.split(parser["Service"]["ExecStart"])
    assert program == BINARY
    assert unknown_options(words) == set()
    if analyze := shutil.which("systemd-analyze"):
        here = tmp_path / unit.name
        here.write_text(unit.read_text(encoding="utf-8").replace(BINARY, sys.executable))
        done = subprocess.run(
            [analyze, "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert (done.returncode, done.stderr) == (0, "")
