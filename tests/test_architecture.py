"""Arrows between the rooms. A new import that fails here needs a reason, not an exception."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.architecture import Arrows, SourceTree, circle_of_files, circle_of_rooms, forbidden, within

ROOT = Path(__file__).parents[1]
TREE = SourceTree({"nfdt": ROOT / "nfdt", "nfdt_client": ROOT / "client" / "nfdt_client", "hfdt": ROOT / "hfdt"})

CORE = {
    "nfdt.core": (),  # errors, clock, events, order: open to all
    "nfdt.core.arrays": (),
    "nfdt.model": (),
    "nfdt.core.specs": (),
    "nfdt.core.host": (),
    "nfdt.model.keras_internals": (),
    "nfdt.core.wire": ("nfdt.core.host",),
    "nfdt.model.backends": ("nfdt.core.arrays", "nfdt.model.keras_internals"),
    "nfdt.model.program": ("nfdt.core.arrays", "nfdt.model.backends", "nfdt.model.keras_internals"),
    "nfdt.core.sharding": ("nfdt.core.arrays", "nfdt.core.specs", "nfdt.model.program"),
    "nfdt.core.work": ("nfdt.core.arrays", "nfdt.core.host", "nfdt.core.specs", "nfdt.core.wire"),
    "nfdt.model.training": (
        *("nfdt.core.arrays", "nfdt.model.backends", "nfdt.model.keras_internals", "nfdt.model.program"),
        *("nfdt.core.specs", "nfdt.core.work.instructions", "nfdt.core.work.tasks"),
    ),
    "nfdt.core.jobs": (
        *("nfdt", "nfdt.core.host", "nfdt.model.program", "nfdt.core.specs", "nfdt.core.wire"),
        "nfdt.core.work.artifacts",
    ),
}
FLOOR = tuple(CORE)
PURE = {
    "nfdt.codecs": ("nfdt.core.arrays.loops",),
    "nfdt.consistency": ("nfdt.core.specs",),
    "nfdt.schedulers": ("nfdt.core.specs", "nfdt.core.work.member_rows", "nfdt.core.work.tasks"),
    "nfdt.parity": ("nfdt.core.html_page",),
    "nfdt.update_rules": ("nfdt.core.arrays", "nfdt.core.specs"),
    "nfdt.planning": ("nfdt.codecs", "nfdt.consistency", "nfdt.schedulers", "nfdt.core.specs"),
    "nfdt.coordinator": (
        *("nfdt.consistency", "nfdt.planning", "nfdt.schedulers"),
        *("nfdt.core.specs", "nfdt.model.training.merge", "nfdt.model.training.metric_states"),
        *("nfdt.core.work.instructions", "nfdt.core.work.tasks"),
    ),
}
SERVERS = {
    "nfdt.transport": ("nfdt.codecs", *FLOOR),
    "nfdt.shard": ("nfdt.codecs", "nfdt.consistency", "nfdt.transport", "nfdt.update_rules", *FLOOR),
    "nfdt.worker": ("nfdt.transport", *FLOOR),
    # A slot becomes one of them.
    "nfdt.worker.slot": ("nfdt.worker", *FLOOR),
    "nfdt.worker.run_rank": ("hfdt.runtime.slot_rank", "nfdt.worker.assignment_context", *FLOOR),
    "nfdt.worker.run_shard": (
        "nfdt.shard.servicer",
        "nfdt.shard.building",
        "nfdt.worker.assignment_context",
        *FLOOR,
    ),
    "nfdt.launch": FLOOR,
    "nfdt.web": (
        *("nfdt.core.host", "nfdt.core.jobs", "nfdt.model.program", "nfdt.core.specs"),
        *("nfdt.core.wire", "nfdt.core.work"),
    ),
    "nfdt.jobserver": ("nfdt.coordinator", "nfdt.launch", "nfdt.planning", "nfdt.schedulers", "nfdt.web", *FLOOR),
    # The servers' own code under a virtual clock: docs/decisions/0013.
    "nfdt.simulate": ("nfdt.shard", "nfdt.transport", "nfdt.worker", *PURE, *FLOOR),
    "nfdt.engines": ("nfdt_client", "nfdt.launch", *FLOOR),
    # It starts the commands of a cluster as processes and reads what they record.
    "nfdt.chaos": FLOOR,
    "nfdt.cli": ("nfdt", "nfdt_client", "hfdt", "nfdt.chaos", "nfdt.jobserver", "nfdt.launch", "nfdt.shard")
    + ("nfdt.simulate", "nfdt.web")
    + ("nfdt.engines", *PURE, *FLOOR),
}
CLIENTS = {
    # The packages themselves hand the public names on, lazily.
    "nfdt": ("nfdt_client",),
    "hfdt": ("nfdt_client", "hfdt.horovodrun"),
    "nfdt_client": FLOOR,
    "hfdt.keras": FLOOR,
    "hfdt.horovodrun": FLOOR,
    "hfdt.runtime": ("hfdt.keras", "hfdt.horovodrun", "nfdt.transport", *FLOOR),
}
ARROWS = Arrows(
    {**CORE, **PURE, **SERVERS, **CLIENTS},
    floors=frozenset({"nfdt", "nfdt.core", "nfdt.model", "hfdt"}),
    open_to_all=("nfdt.core.errors", "nfdt.core.clock", "nfdt.core.events", "nfdt.core.order"),
)

KERAS_ROOMS = (
    *("nfdt.model.keras_internals", "nfdt.model.backends", "nfdt.model.program", "nfdt.model.training", "nfdt.shard"),
    *("nfdt.worker.slot", "nfdt_client", "hfdt.keras", "hfdt.runtime"),
)
IMPURE = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "select", "signal"),
    *("socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time"),
}


def modules(*rooms: str) -> list[str]:
    return [module for module in TREE.modules if any(within(module, room) for room in rooms)]


def test_imports_follow_the_arrows():
    assert forbidden(TREE, ARROWS) == []


def test_no_files_import_each_other_in_a_circle():
    assert " -> ".join(circle_of_files(TREE)) == ""


def test_no_rooms_import_each_other_in_a_circle():
    assert " -> ".join(circle_of_rooms(TREE, ARROWS)) == ""


@pytest.mark.parametrize("room", [*PURE, "nfdt.worker.loop", "nfdt.worker.driver", "nfdt.worker.pipeline"])
def test_pure_rooms_take_values_and_return_values(room):
    for module in modules(room):
        foreign = TREE.foreign_imports(module)
        assert foreign & IMPURE == set(), module
        assert foreign - set(sys.stdlib_module_names) <= {"numpy", "numba"}, module


@pytest.mark.parametrize("room", ["nfdt.core.arrays", "nfdt.core.specs", "nfdt.core.host"])
def test_the_lowest_rooms_need_little_more_than_numpy(room):
    exceptions = {
        "nfdt.core.specs": {"pydantic"},
        "nfdt.core.arrays.safetensors_io": {"safetensors"},
        "nfdt.core.arrays.loops": {"numba"},
        "nfdt.core.host.usage": {"psutil", "pynvml"},
    }
    for module in modules(room):
        allowed = {"numpy"}.union(*(names for name, names in exceptions.items() if within(module, name)))
        assert TREE.foreign_imports(module) - set(sys.stdlib_module_names) <= allowed, module


def test_keras_stays_in_its_rooms():
    found = {m for m in TREE.modules if TREE.foreign_imports(m) & {"keras", "tensorflow", "jax", "torch"}}
    assert found - set(modules(*KERAS_ROOMS)) == set()


def test_horovod_is_imported_only_by_hfdt():
    assert {m for m in TREE.modules if "horovod" in TREE.foreign_imports(m)} - set(modules("hfdt")) == set()


@pytest.mark.parametrize(
    "module", ["nfdt", "nfdt_client.decorator", "nfdt.cli", "nfdt.jobserver.main", "nfdt.core.jobs.service"]
)
def test_light_modules_load_neither_tensorflow_nor_keras(module):
    probe = f"import sys, {module}; print(sorted({{'tensorflow', 'keras'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_module_has_a_name_without_meaning():
    empty = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [name for name in TREE.modules if name.rsplit(".", 1)[-1] in empty] == []


def test_no_module_is_loose_beside_the_rooms():
    assert [
        m for m in TREE.modules if m.count(".") == 1 and within(m, "nfdt") and TREE.modules[m].name != "__init__.py"
    ] == []


# ---- the checks themselves, on artificial trees

MADE_UP = Arrows(
    {"made": (), "made.low": (), "made.middle": ("made.low",), "made.high": ("made.middle", "made.low")},
    floors=frozenset({"made"}),
    open_to_all=("made.errors",),
)


def made_up(folder: Path, **files: str) -> SourceTree:
    """Return a tree of one package; ``room__file="source"`` creates made/room/file.py."""
    for name, source in files.items():
        path = folder / "made" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return SourceTree({"made": folder / "made"})


def test_what_the_arrows_allow_is_no_offence(tmp_path):
    tree = made_up(
        tmp_path,
        errors="",
        low__a="import made.errors",
        middle__b="from made.low import a",
        high__c="from made.middle.b import thing\nfrom made.low.a import other\nimport made.high.d",
        high__d="",
    )
    assert forbidden(tree, MADE_UP) == []
    assert circle_of_files(tree) == []
    assert circle_of_rooms(tree, MADE_UP) == []


@pytest.mark.parametrize(
    "source",
    [
        "from made.high.c import thing",
        "from made.high import c",
        "import made.high.c",
        "def f():\n    from made.high.c import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.high.c import thing",
        "class A:\n    def f(self):\n        import made.high.c",
    ],
)
def test_an_import_against_the_arrows_is_found(tmp_path, source):
    assert forbidden(made_up(tmp_path, low__a=source, high__c=""), MADE_UP) == ["made.low.a -> made.high.c"]


def test_a_room_without_a_row_is_found(tmp_path):
    with pytest.raises(AssertionError, match="made.new.a: write the arrows"):
        forbidden(made_up(tmp_path, new__a=""), MADE_UP)


def test_a_relative_import_is_found(tmp_path):
    with pytest.raises(AssertionError, match="relative import"):
        forbidden(made_up(tmp_path, low__a="from . import b", low__b=""), MADE_UP)


@pytest.mark.parametrize(
    "back", ["import made.low.a", "def f():\n    import made.low.a", "if TYPE_CHECKING:\n    import made.low.a"]
)
def test_files_in_a_circle_are_found(tmp_path, back):
    tree = made_up(tmp_path, low__a="import made.low.b", low__b="import made.low.c", low__c=back)
    assert circle_of_files(tree) == ["made.low.a", "made.low.b", "made.low.c", "made.low.a"]


def test_rooms_in_a_circle_are_found_though_no_files_are(tmp_path):
    tree = made_up(
        tmp_path, low__a="import made.high.c", low__b="", middle__b="import made.low.b", high__c="import made.middle.b"
    )
    assert circle_of_files(tree) == []
    assert circle_of_rooms(tree, MADE_UP) == ["made.high", "made.middle", "made.low", "made.high"]
