"""Imports of commands, and their time."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from nfdt.cli import HFDT_SUMMARIES, SUMMARIES, cli, hfdt
from tests.support.command_lines import command_of
from tests.support.scripts import DEADLINE_S, environment

HEAVY = {"pydantic", "grpc", "yaml", "numpy", "cryptography", "keras", "tensorflow", "psutil"}
PROBE = """
import sys
from nfdt.cli import {group}
try:
    {group}({arguments})
finally:
    print(sorted({heavy} & set(sys.modules)), file=sys.stderr)
"""


def loaded(group, *arguments):
    code = PROBE.format(group=group, arguments=list(arguments), heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    return done.stderr.splitlines()[-1], done.stdout


@pytest.mark.parametrize("group", ["cli", "hfdt"])
def test_the_help_of_all_commands_imports_no_libraries(group):
    assert loaded(group, "--help")[0] == "[]"


def test_the_help_of_nfdt_run_imports_no_libraries():
    modules, text = loaded("cli", "run", "--help")
    assert modules == "[]"
    assert "--workers" in text


def test_a_list_of_jobs_imports_what_it_needs_to_call_a_server():
    modules, _ = loaded("cli", "jobs", "list")
    assert modules == "['grpc', 'numpy']"


@pytest.mark.parametrize(("group", "summaries"), [(cli, SUMMARIES), (hfdt, HFDT_SUMMARIES)], ids=["nfdt", "hfdt"])
def test_the_summary_of_every_command_is_that_of_its_help(group, summaries):
    names = group.list_commands(click.Context(group))
    found = {name: command_of(group, name).get_short_help_str(1000) for name in names}
    assert found == summaries


def test_the_help_lists_every_command(capsys):
    cli(["--help"], standalone_mode=False)
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.strip().splitlines()] == sorted(SUMMARIES)
