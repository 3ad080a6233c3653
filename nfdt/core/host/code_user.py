"""Another user for the code of jobs, where slots are started by root.

Code runs as the user that the command names, or as one of a range: each session has one of its own there.
The range is that which systemd reserves for services with a dynamic user, so no account of a machine is in it.
"""

from __future__ import annotations

import importlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from nfdt.core.errors import UsageError
from nfdt.core.host.child_process import die_with_parent
from nfdt.core.host.private_files import make_folder, sweep

FIRST, COUNT = 61184, 4336
EACH_SESSION = "each-session"  # a user of the range
PREFIX = "nfdt-code-"
_PUBLIC = Path("/tmp")


class Account(NamedTuple):
    """User, group and supplementary groups, as the kernel numbers them."""

    user: int
    group: int
    groups: tuple[int, ...] = ()


def choose_code_user(name: str | None) -> str:
    """Return whose rights the code of jobs has: an account, ``EACH_SESSION``, or "" for those of this process.

    Args:
        name: The account that a command names; None: none.

    Raises:
        UsageError: There is no such account, or this process may not change to it.
    """
    own = os.geteuid()
    if name is None:
        name = EACH_SESSION if own == 0 and sys.platform.startswith("linux") else ""
    if not name or (account := find_account(name, 0)).user == own:
        return ""
    try:
        # It fails before the command is sought, if the kernel refuses.
        subprocess.run(["true"], user=account.user, group=account.group, extra_groups=account.groups, cwd="/")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(
            f"--code-user: expected that user {own} may run the code of jobs as user {account.user}. Received: "
            f"{error.strerror}. Start this command as an account without rights, or as root with the capabilities "
            "SETUID and SETGID. Or name its own account, as in --code-user root: code then has all rights of it."
        ) from None
    return name


def find_account(name: str, number: int) -> Account:
    """Return the account of a name, or that of ``EACH_SESSION`` with this number.

    Raises:
        UsageError: There is no such account.
    """
    if name == EACH_SESSION:
        one = FIRST + number % COUNT
        return Account(one, one)
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(
            f"--code-user: expected an account of this machine. Received: {name!r}. Name another one, or leave the "
            "option away: root then runs each session's code as a user of its own."
        ) from None
    return Account(found.pw_uid, found.pw_gid, tuple(os.getgrouplist(name, found.pw_gid)))


class CodeHomes:
    """Homes of the users under which slots run code: a folder for each slot, in one that ends with its owner.

    Those of owners that were killed are removed first.
    """

    def __init__(self) -> None:
        here = Path(tempfile.gettempdir()).resolve()
        place = here if all(one.stat().st_mode & 0o001 for one in (here, *here.parents)) else _PUBLIC
        sweep(PREFIX, place)
        self._folder, self._lock = make_folder(PREFIX, place)
        self._folder.chmod(0o711)  # others may enter, but not list

    def of(self, slot: str) -> Path:
        """Return the home of a slot, which it makes when it needs one."""
        return self._folder / slot

    def remove(self, slot: str) -> None:
        """Remove the home of a slot that has ended."""
        shutil.rmtree(self.of(slot), ignore_errors=True)

    def close(self) -> None:
        """Remove all homes."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def become_code_user(name: str, home: Path, number: int) -> None:
    """Give up root in all threads of this process for good.

    Modules are still found where only root can reach their folders, as where root's home contains Python.
    Descriptors that are open stay so.

    Args:
        name: An account, or ``EACH_SESSION``.
        home: Folder to make for it: its home, its working directory, and the place of its temporary files.
        number: Number of the user in the range.

    Raises:
        OSError: The kernel refuses.
    """
    user, group, groups = find_account(name, number)
    folders = {one: os.open(one, os.O_PATH | os.O_CLOEXEC) for one in dict.fromkeys(sys.path) if os.path.isdir(one)}
    home.mkdir(mode=0o700)
    os.chown(home, user, group)
    # glibc changes all threads of the process.
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    die_with_parent(watch_stdin=False)  # which the kernel forgets when the user changes
    os.chdir(home)
    for variable in [one for one in os.environ if one.startswith("XDG_")]:
        del os.environ[variable]
    os.environ.update(HOME=str(home), TMPDIR=str(home))
    tempfile.tempdir = None
    _search_through(folders)


def _search_through(folders: Mapping[str, int]) -> None:
    """Search modules through the descriptors of those folders that this user cannot reach by their names."""
    links = {}
    for folder, descriptor in folders.items():
        if os.access(folder, os.R_OK | os.X_OK):
            os.close(descriptor)
        else:
            links[folder] = f"/proc/self/fd/{descriptor}"
    if not links:
        return

    def reached(path: str) -> str:
        folder = next((one for one in links if path == one or path.startswith(one + os.sep)), "")
        return links[folder] + path[len(folder) :] if folder else path

    sys.path[:] = map(reached, sys.path)
    for module in list(sys.modules.values()):
        if isinstance(path := vars(module).get("__path__"), list):
            path[:] = map(reached, path)
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
