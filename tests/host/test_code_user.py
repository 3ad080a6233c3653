"""Another user for the code of jobs: which, and what a process that becomes it can reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.host import code_user
from nfdt.core.host.code_user import COUNT, EACH_SESSION, FIRST, CodeHomes, choose_code_user, find_account
from tests.support.scripts import environment

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
BECOME = """
import json, os, sys, tempfile, threading
from pathlib import Path
from nfdt.core.host.code_user import become_code_user

asked, answered = threading.Event(), threading.Event()
ids = {}

def another_thread():
    asked.wait()
    ids["thread"] = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text().split("Uid:")[1].split()[:4]
    answered.set()

threading.Thread(target=another_thread).start()
become_code_user("each-session", Path(sys.argv[1]), 5)
asked.set()
answered.wait()
import found_late
from package_of_root import part
ids.update(process=os.getresuid() + os.getresgid(), groups=os.getgroups(), late=found_late.VALUE + part.VALUE)
ids.update(places=[os.getcwd(), tempfile.gettempdir(), str(Path.home())])
print(json.dumps(ids))
"""


def test_without_root_code_has_the_rights_of_the_process(monkeypatch):
    monkeypatch.setattr(code_user.os, "geteuid", lambda: 1000)
    assert choose_code_user(None) == ""


@as_root
def test_root_runs_code_as_another_user_unless_it_is_told_otherwise():
    assert choose_code_user(None) == EACH_SESSION
    assert choose_code_user("nobody") == "nobody"
    assert choose_code_user("root") == ""


def test_an_account_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="expected an account of this machine. Received: 'nosuchaccount'"):
        choose_code_user("nosuchaccount")


@as_root
def test_a_command_that_may_not_change_its_user_says_so_before_it_serves():
    command = "from nfdt.core.host.code_user import choose_code_user as c; print(c('nobody'))"
    done = subprocess.run(
        ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-all", sys.executable, "-c", command],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "--code-user: expected that user 0 may run the code of jobs as user" in done.stderr
    assert "Operation not permitted" in done.stderr


def test_numbers_of_users_are_within_the_range():
    accounts = [find_account(EACH_SESSION, number) for number in range(2 * COUNT)]
    assert {one.user for one in accounts} == set(range(FIRST, FIRST + COUNT))
    assert all(one.group == one.user and not one.groups for one in accounts)


@as_root
def test_a_process_gives_up_root_in_all_threads_and_still_finds_its_modules(tmp_path):
    tmp_path.chmod(0o700)  # as the home of root
    modules = tmp_path / "modules"
    (modules / "package_of_root").mkdir(parents=True)
    (modules / "found_late.py").write_text("VALUE = 1")
    (modules / "package_of_root" / "__init__.py").write_text("")
    (modules / "package_of_root" / "part.py").write_text("VALUE = 2")
    homes = CodeHomes()
    try:
        home = homes.of("slot")
        begin = f"import sys; sys.path.append({str(modules)!r}); import package_of_root\n"
        done = subprocess.run(
            [sys.executable, "-c", begin + BECOME, str(home)], env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert got["process"] == [FIRST + 5] * 6
        assert got["thread"] == [str(FIRST + 5)] * 4
        assert (got["groups"], got["late"]) == ([], 3)
        assert got["places"] == [str(home)] * 3
        homes.remove("slot")
        assert not home.exists()
    finally:
        homes.close()
    assert not home.parent.exists()


@as_root
def test_homes_are_where_every_user_can_reach_them(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(code_user.tempfile, "tempdir", str(tmp_path))
    homes = CodeHomes()
    try:
        folder = homes.of("slot").parent
        assert folder.parent == Path("/tmp")
        assert folder.stat().st_mode & 0o777 == 0o711
    finally:
        homes.close()
