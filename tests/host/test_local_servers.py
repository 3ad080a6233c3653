"""Descriptions of the servers that scripts of this user run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from nfdt.core.errors import UsageError
from nfdt.core.host.local_servers import LocalServer, described, find_servers, servers_folder


def server(pid: int | None = None, address: str = "127.0.0.1:1") -> LocalServer:
    return LocalServer(pid or os.getpid(), address, "a-secret", "/state")


def test_a_server_is_found_as_long_as_it_is_described(tmp_path):
    folder = tmp_path / "servers"
    assert find_servers(folder) == []
    with described(server(), folder):
        assert find_servers(folder) == [server()]
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert find_servers(folder) == []


def test_several_servers_of_one_process_are_found(tmp_path):
    with described(server(address="127.0.0.1:1"), tmp_path), described(server(address="127.0.0.1:2"), tmp_path):
        assert sorted(one.address for one in find_servers(tmp_path)) == ["127.0.0.1:1", "127.0.0.1:2"]


def test_the_description_of_a_killed_server_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with described(server(process.pid), tmp_path):
        assert find_servers(tmp_path) == []
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_files_that_are_no_descriptions_are_ignored(tmp_path, text):
    with described(server(), tmp_path):
        (path,) = tmp_path.iterdir()
        path.write_text(text)
        assert find_servers(tmp_path) == []


def test_what_others_may_read_is_ignored(tmp_path):
    with described(server(), tmp_path):
        (path,) = tmp_path.iterdir()
        path.chmod(0o644)
        assert find_servers(tmp_path) == []


def test_the_secret_is_not_printed():
    assert "a-secret" not in repr(server())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="expected a directory"), described(server(), tmp_path / "file" / "servers"):
        pass


def test_the_folder_is_that_of_the_user():
    assert servers_folder({"XDG_RUNTIME_DIR": "/run/user/7"}).parts[:4] == ("/", "run", "user", "7")
    assert servers_folder({"XDG_CACHE_HOME": "/cache"}).parts[:2] == ("/", "cache")
