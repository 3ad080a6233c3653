"""Commands and programs of the documentation do what the pages state: they are run, page by page.

Commands that one machine cannot run are listed here with the reason.
A test fails for an entry that no page has any more.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain

import pytest

from tests.support.documented_commands import (
    DEADLINE_S,
    ROOT,
    SERVER,
    Block,
    Reader,
    blocks,
    commands_by_page,
    write_fashion_mnist,
)
from tests.support.script_fork_server import ScriptForkServer
from tests.support.scripts import environment

pytestmark = pytest.mark.processes

# What cannot be run by a test on one machine, by reason: a page's whole command, or its beginning with " ...".
NOT_RUN = {
    "installs packages": ["pip install ...", "./scripts/quickstart", "./scripts/install-horovod"],
    "runs this test": ["./scripts/test"],
    "measures for minutes; tests/test_benchmarks.py runs the quick form": ["./scripts/bench ..."],
    "runs for minutes; tests/test_soak.py and tests/test_conformance.py run a short form": [
        "./scripts/soak ...",
        "./scripts/mutation codecs",
        "(cd build/mutation/codecs ...",
        "./scripts/conformance ...",
    ],
    "downloads": ["git clone ..."],
    "needs a container engine": ["docker ..."],
    "needs a Kubernetes cluster": ["kubectl ...", "nfdt run --server localhost:7777 ...", "nfdt ui --no-open ..."],
    "needs Slurm on several machines; tests/integration/test_slurm.py": [
        "srun ...",
        "sbatch ...",
        "nfdt submit --slurm ...",
    ],
    "needs a Ray cluster; tests/engines/test_ray.py": ["ray start ...", "nfdt run --on ray ..."],
    "needs root and namespaces; tests/machines": ["scripts/machines ..."],
    "needs a GPU": ["KERAS_BACKEND=jax scripts/bench gpu ...", "scripts/bench gpu ..."],
    "needs two devices for each worker; tests/integration/test_devices.py": ["nfdt run --server HOST:7777 --set ..."],
    "needs other hosts": ["hfdt run -np 4 -H a:2,b:2 ..."],
    "serves until it is interrupted": ["tensorboard ...", "nfdt runs open"],
    "names runs of the reader; tests/cli/test_runs.py": ["nfdt runs show 3f9c", "nfdt runs compare ..."],
    "is not complete": ["nfdt server --ui 127.0.0.1:7778 ..."],
}
# Commands that take longer, or are like others of their page: ./scripts/test --all -m long.
LONG = [
    "nfdt run --workers 8 --shards 2 train.py",
    "nfdt run --workers 3 --set emulate.fail=1@30 script.py",
    "nfdt jobs prune --older-than 7d",
    "python -m timeit ...",
    "mpirun ...",
    "horovodrun ...",
    "hfdt run ...",
    "python -m hfdt.horovodrun ...",
    "nfdt parity ...",
    "nfdt chaos ...",
    "nfdt run --workers 8 --algorithm ...",
    "nfdt run --workers 4 --set emulate...",
    "nfdt run --workers 4 -m project.train ...",
    "nfdt run --workers 4 --algorithm ssp ...",
    "NFDT_START_LOG=start.log nfdt run script.py",
    "nfdt run --workers 4 --algorithm auto --set ...",
    "nfdt run --workers 2 --set codec=adaptive --set ...",
    "nfdt simulate ...",
    "nfdt plan --cluster ...",
    "nfdt plan --workers 4 examples/digits.py",
]
# Pages whose commands are like those of other pages, and take longer.
LONG_PAGES = (
    "docs/cluster.md",
    "docs/gpus.md",
    "docs/monitoring.md",
    "docs/operations.md",
    "docs/resume.md",
    "docs/simulate.md",
    "docs/slow_links.md",
    "docs/unequal_machines.md",
)
# Programs that are not run, by reason: page and first line. Their names of nfdt and hfdt are checked all the same.
PROGRAMS_NOT_RUN = {
    "chooses the backend of the process": [("docs/backends.md", "import os")],
    "needs four devices; tests/integration/test_devices.py runs such a script": [
        ("docs/gpus.md", "devices = keras.distribution.list_devices()"),
    ],
    "the script before its change": [
        ("docs/migration.md", "import horovod.tensorflow.keras as hvd"),
        ("docs/migration.md", "import tensorflow as tf"),
    ],
    "needs ranks; tests/hfdt and tests/integration run such scripts": [
        ("docs/horovod_library.md", "import keras"),
        ("docs/horovod_library.md", 'local = [model.get_layer("table")]'),
        ("docs/horovod_library.md", "state = hvd.elastic.KerasState(model, epoch=0, batch=0)"),
    ],
}
# Pages that suppose a server, which others describe.
WITH_SERVER = ("docs/monitoring.md", "docs/resume.md", "docs/simulate.md")
PAGES = commands_by_page()


def stated(command: str, entry: str) -> bool:
    """Whether an entry of a table is about a command."""
    return command.startswith(entry.removesuffix("...")) if entry.endswith("...") else command == entry


def listed(command: str, entries: Iterable[str]) -> bool:
    return any(stated(command, entry) for entry in entries)


RUN = {page: [c for c in commands if not listed(c, chain(*NOT_RUN.values()))] for page, commands in PAGES.items()}
QUICK = {
    page: [] if page in LONG_PAGES else [c for c in commands if not listed(c, LONG)] for page, commands in RUN.items()
}


# Where an own command begins, also behind a launcher: its name, and the words before its options.
OWN = re.compile(r"(?:^|[\s/])(scripts/[\w-]+|(?:nfdt|hfdt) (?:jobs )?[a-z]+)(?=\s|$)")
NOT_QUICK = {c for page, commands in PAGES.items() for c in commands if c not in QUICK[page]}
ENTRIES = {"nfdt": "main", "hfdt": "hfdt_main"}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_fashion_mnist(folder / "keras")
    server = ScriptForkServer(folder, KERAS_HOME=str(folder / "keras"))
    yield server
    server.stop()


@pytest.fixture
def reader(tmp_path, scripts) -> Iterator[Reader]:
    found = Reader(tmp_path, scripts)
    yield found
    found.stop()


@pytest.mark.parametrize("page", [page for page, commands in QUICK.items() if commands])
def test_the_commands_of_a_page_work(page, reader):
    follow(reader, page, QUICK[page])


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page, commands in RUN.items() if commands != QUICK[page]])
def test_all_commands_of_a_page_work(page, reader):
    follow(reader, page, RUN[page])


def follow(reader: Reader, page: str, commands: Iterable[str]) -> None:
    for command in [SERVER, *commands] if page in WITH_SERVER else commands:
        reader.follow(command)


@pytest.mark.parametrize("own", sorted({name for command in NOT_QUICK for name in OWN.findall(command)}))
def test_commands_that_are_not_run_begin_to_run(own):
    name, *words = own.split()
    entry = ENTRIES.get(name)
    command = [ROOT / name] if entry is None else [sys.executable, "-c", f"from nfdt.cli import {entry}; {entry}()"]
    done = subprocess.run(
        [*command, *words, "--help"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert words[-1] in done.stdout if entry else name in done.stdout


@pytest.mark.parametrize("entry", [*chain(*NOT_RUN.values()), *LONG])
def test_what_is_not_run_is_in_a_page(entry):
    assert any(stated(command, entry) for commands in PAGES.values() for command in commands)


def programs(page: str) -> list[str]:
    """Return the programs of a page that are run; they follow each other in one process, as in a notebook."""
    left_out = set(chain(*PROGRAMS_NOT_RUN.values()))
    return [b.text for b in PROGRAMS if b.page == page and (page, first_line(b)) not in left_out]


def first_line(block: Block) -> str:
    return block.text.partition("\n")[0]


PROGRAMS = [block for block in blocks() if block.language == "python"]


@pytest.mark.parametrize("page", [page for page in dict.fromkeys(b.page for b in PROGRAMS) if programs(page)])
def test_the_programs_of_a_page_run(page, reader):
    reader.run_program("\n".join(programs(page)))


@pytest.mark.parametrize("entry", list(chain(*PROGRAMS_NOT_RUN.values())), ids=str)
def test_programs_that_are_not_run_are_in_a_page(entry):
    assert entry in [(block.page, first_line(block)) for block in PROGRAMS]


@pytest.mark.parametrize("page", list(dict.fromkeys(block.page for block in PROGRAMS)))
def test_names_in_the_programs_of_a_page_exist(page):
    trees = [ast.parse(block.text) for block in PROGRAMS if block.page == page]
    modules = dict(chain.from_iterable(map(imported, trees)))
    used = {ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for chained in (name.split(".") for name in used):
        found = modules.get(chained[0])
        for name in chained[1:] if found else ():
            found = getattr(found, name)


def imported(tree: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the modules of this project that a program imports, by their names in it.

    Raises:
        AttributeError: it imports a name that a module lacks.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] in ("nfdt", "hfdt")]
            for alias in ours:
                module = importlib.import_module(alias.name)
                yield alias.asname or alias.name, module
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("nfdt", "hfdt"):
            for alias in node.names:
                getattr(importlib.import_module(str(node.module)), alias.name)
