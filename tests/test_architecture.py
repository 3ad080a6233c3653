"""The arrows between the rooms: who may import whom. A new import that fails here needs a reason, not an exception."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"nfdt": ROOT / "nfdt", "nfdt_client": ROOT / "client" / "nfdt_client", "hfdt": ROOT / "hfdt"}

PURE = ("nfdt.update_rules", "nfdt.consistency", "nfdt.schedulers", "nfdt.codecs", "nfdt.planning")
SERVERS = (
    "nfdt.coordinator",
    "nfdt.launch",
    "nfdt.worker.task_times",
    "nfdt.jobserver.worker_statistics",
    "nfdt.worker.pipeline",
    "nfdt.jobserver.main",
    "nfdt.shard",
    "nfdt.worker.slot",
    "nfdt.worker.statistics",
    "nfdt.transport",
    "nfdt.worker.worker",
)
SIMULATED = (
    "nfdt.coordinator",
    "nfdt.worker.task_times",
    "nfdt.worker.pipeline",
    "nfdt.shard",
    "nfdt.worker.statistics",
    "nfdt.transport",
)
CORE = "nfdt.core"
CORE_ROOMS = ("nfdt.core.jobs", "nfdt.core.wire", "nfdt.core.program", "nfdt.core.training")

# Who (longest prefix wins) may import which of our own modules.
ARROWS: dict[str, tuple[str, ...]] = {
    # The packages themselves hand the public names on, lazily.
    "nfdt": ("nfdt.core", "nfdt_client"),
    "nfdt.cli": ("nfdt", "nfdt_client", "hfdt"),
    "nfdt_client": ("nfdt.core", "nfdt_client"),
    "hfdt": ("nfdt.core", "nfdt_client"),
    **{f"hfdt.{path.stem}": ("nfdt.core", "hfdt") for path in (ROOT / "hfdt").glob("[!_]*.py")},
    "hfdt.runtime.outer": ("nfdt.core", "hfdt", "nfdt.transport"),
    "nfdt.core": (),
    "nfdt.core.jobs": ("nfdt.core.jobs", "nfdt.core.wire"),
    "nfdt.core.wire": ("nfdt.core.wire",),
    "nfdt.core.program": ("nfdt.core.program",),
    "nfdt.core.training": ("nfdt.core.training",),
    **{room: (CORE, room) for room in PURE},
    "nfdt.planning": (CORE, "nfdt.codecs", "nfdt.schedulers", "nfdt.planning"),
    **{room: (CORE, *PURE, *SERVERS) for room in SERVERS},
    # The servers' own code under a virtual clock: docs/decisions/0013.
    "nfdt.simulate": (CORE, *PURE, *SIMULATED, "nfdt.simulate"),
}

KERAS_ROOMS = (
    "nfdt.core.keras_internals",
    "nfdt.core.program",
    "nfdt.core.training",
    "nfdt.shard",
    "nfdt.worker.slot",
    "nfdt_client",
    "hfdt",
)
IMPURE = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "select", "signal"),
    *("socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time"),
}


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name, generated code left out."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" in path.name:
                continue
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names a file imports (``lazy``: also in functions); ``from a import b`` gives ``a.b`` for a module b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                generated = alias.name.endswith(("_pb2", "_pb2_grpc"))
                yield name if name in MODULES or generated else str(node.module)


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def row_of(module: str) -> str:
    rows = [row for row in ARROWS if within(module, row) and row != "nfdt" or module == row]
    assert rows, f"{module}: write its room's arrows into ARROWS"
    return max(rows, key=len)


def is_core_file(name: str) -> bool:
    return within(name, CORE) and not any(within(name, room) for room in CORE_ROOMS)


def may_import(importer: str, imported: str) -> bool:
    """``nfdt`` itself and the files at the top of the core are open to all; the rest by ARROWS."""
    if imported == "nfdt" or is_core_file(imported):
        return True
    return any(within(imported, room) for room in ARROWS[row_of(importer)])


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module):
    ours = {name for name in imports_of(MODULES[module]) if name.split(".")[0] in PACKAGES}
    assert sorted(name for name in ours if not may_import(module, name)) == []


@pytest.mark.parametrize("module", [m for m in MODULES if any(within(m, room) for room in PURE)])
def test_pure_rooms_take_values_and_return_values(module):
    foreign = {name.split(".")[0] for name in imports_of(MODULES[module])} - set(PACKAGES)
    assert foreign & IMPURE == set()
    assert foreign - set(sys.stdlib_module_names) <= {"numpy"}


@pytest.mark.parametrize("module", [m for m in MODULES if is_core_file(m)])
def test_the_floor_needs_little_more_than_numpy(module):
    specifications = ("spec", "algorithm", "emulation", "ring_options")
    exceptions = {
        **dict.fromkeys((f"nfdt.core.{name}" for name in specifications), {"pydantic"}),  # docs/decisions/0001
        "nfdt.core.arrays.safetensors_io": {"safetensors"},
        "nfdt.core.keras_internals": {"keras"},
    }
    foreign = {name.split(".")[0] for name in imports_of(MODULES[module])} - set(PACKAGES)
    assert foreign - set(sys.stdlib_module_names) <= {"numpy"} | exceptions.get(module, set())


@pytest.mark.parametrize("module", [m for m in MODULES if not any(within(m, room) for room in KERAS_ROOMS)])
def test_keras_stays_in_its_rooms(module):
    foreign = {name.split(".")[0] for name in imports_of(MODULES[module])}
    assert foreign & {"keras", "tensorflow"} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, "hfdt")])
def test_horovod_is_imported_only_by_hfdt(module):
    assert "horovod" not in {name.split(".")[0] for name in imports_of(MODULES[module])}


@pytest.mark.parametrize(
    "module", ["nfdt", "nfdt_client.decorator", "nfdt.cli", "nfdt.jobserver.main", "nfdt.core.jobs.service"]
)
def test_light_modules_load_neither_tensorflow_nor_keras(module):
    probe = f"import sys, {module}; print(sorted({{'tensorflow', 'keras'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_module_has_a_name_that_says_nothing():
    empty = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [name for name in MODULES if name.rsplit(".", 1)[-1] in empty] == []


def test_no_import_cycle():
    arrows = {m: {i for i in imports_of(MODULES[m], lazy=False) if i in MODULES and i != m} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for imported in arrows[module]:
                visit(imported, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
