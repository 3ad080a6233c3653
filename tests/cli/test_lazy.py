"""Imports of commands, and their time."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from nfdt.cli import HEADINGS, HFDT_SUMMARIES, SUMMARIES, cli, hfdt
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


def test_the_help_lists_every_command_under_a_heading_with_its_whole_sentence(capsys):
    cli(["--help"], standalone_mode=False)
    text = capsys.readouterr().out
    assert sorted(name for names in HEADINGS.values() for name in names) == sorted(SUMMARIES)
    said = " ".join(text.split())
    for heading, names in HEADINGS.items():
        assert f"\n{heading}:\n  {names[0]}" in text
        assert all(f"{name} {' '.join(SUMMARIES[name].split())}" in said for name in names)


def test_the_help_of_jobs_has_whole_sentences(capsys):
    cli(["jobs", "--help"], standalone_mode=False)
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "found"),
    [("nfdt tra", "plain,trace"), ("nfdt jobs a", "plain,attach"), ("nfdt run tr", "file,tr")],
    ids=["command", "subcommand", "script"],
)
def test_a_shell_completes_commands_and_scripts(words, found):
    asked = {"_NFDT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "nfdt.cli"],
        env=environment(**asked),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert found in done.stdout.splitlines(), done.stderr
