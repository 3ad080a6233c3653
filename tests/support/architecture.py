"""Imports of a source tree: imports of each module, the resulting arrows between rooms, and circles.

Every import counts: at the top of a file, inside a function, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


def within(name: str, room: str) -> bool:
    """Return whether a module is the room itself or lies below it."""
    return name == room or name.startswith(room + ".")


@dataclass(frozen=True)
class SourceTree:
    """Packages of one project.

    Attributes:
        packages: Folder of each top-level package, by name.
    """

    packages: Mapping[str, Path]

    @cached_property
    def modules(self) -> dict[str, Path]:
        """File of every module by its dotted name, generated code left out."""
        found = {}
        for package, folder in self.packages.items():
            for path in sorted(folder.rglob("*.py")):
                if "_pb2" not in path.name:
                    parts = [package, *path.relative_to(folder).with_suffix("").parts]
                    found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """Dotted names that each module imports, foreign ones too."""
        return {name: frozenset(self._imports_of(path)) for name, path in self.modules.items()}

    def own_imports(self, module: str) -> set[str]:
        """Modules of this tree that a module imports."""
        return {name for name in self.imports[module] if name.split(".")[0] in self.packages}

    def foreign_imports(self, module: str) -> set[str]:
        """Top-level names of other packages that a module imports."""
        return {name.split(".")[0] for name in self.imports[module]} - set(self.packages)

    def _imports_of(self, path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    raise AssertionError(f"{path}: relative import")
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    generated = alias.name.endswith(("_pb2", "_pb2_grpc"))
                    yield name if name in self.modules or generated else str(node.module)


@dataclass(frozen=True)
class Arrows:
    """Arrows that permit imports.

    Attributes:
        rooms: Rooms that the modules of a room may import besides their own, by the room's name. A module's room is
            the longest name that contains it.
        floors: Rooms that are only the files right in their folder: a folder below needs a row of its own.
        open_to_all: Modules and rooms that every module may import.
    """

    rooms: Mapping[str, tuple[str, ...]]
    floors: frozenset[str] = frozenset()
    open_to_all: tuple[str, ...] = ()

    def room_of(self, module: str, path: Path) -> str:
        """Return the room of a module.

        Raises:
            AssertionError: No row covers it.
        """
        folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        rooms = [r for r in self.rooms if within(module, r) and (r not in self.floors or folder == r or module == r)]
        if not rooms:
            raise AssertionError(f"{module}: write the arrows of its room into the table")
        return max(rooms, key=len)

    def allow(self, room: str, imported: str) -> bool:
        """Return whether the modules of a room may import a module."""
        if any(imported == name or within(imported, name) for name in self.open_to_all):
            return True
        return any(
            imported == name or (within(imported, name) and (name not in self.floors or self._right_in(imported, name)))
            for name in (room, *self.rooms[room])
        )

    def _right_in(self, module: str, floor: str) -> bool:
        return "." not in module.removeprefix(floor + ".") and module not in self.rooms


def forbidden(tree: SourceTree, arrows: Arrows) -> list[str]:
    """Return ``importer -> imported`` for each import that no arrow allows."""
    found = []
    for module, path in tree.modules.items():
        room = arrows.room_of(module, path)
        names = sorted(tree.own_imports(module) - {module})
        found += [f"{module} -> {name}" for name in names if not arrows.allow(room, name)]
    return found


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes of one circle, with the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node not in done:
            for following in sorted(graph.get(node, ())):
                if found := visit(following, [*trail, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def circle_of_files(tree: SourceTree) -> list[str]:
    """Return modules that import each other in a circle; late imports count."""
    return circle({m: {i for i in tree.own_imports(m) if i in tree.modules and i != m} for m in tree.modules})


def circle_of_rooms(tree: SourceTree, arrows: Arrows) -> list[str]:
    """Return rooms that import each other in a circle; packages that only re-export names are left out."""
    room = {module: arrows.room_of(module, path) for module, path in tree.modules.items()}
    graph: dict[str, set[str]] = {}
    for module, home in room.items():
        if home not in tree.packages:
            others = {room[name] for name in tree.own_imports(module) if name in room} - {home, *tree.packages}
            graph.setdefault(home, set()).update(others)
    return circle(graph)
