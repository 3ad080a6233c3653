"""Names of policies: only the registry of an axis may use them; all other code uses properties."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from nfdt.core.specs.presets import AXES

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("nfdt", "hfdt", "client/nfdt_client")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
MEMBERS = {name: axis for axis, names in AXES.items() for name in names}

# Files in which members are declared or built by name.
REGISTRIES = (
    "nfdt/consistency/__init__.py",
    "nfdt/coordinator/topology_view.py",
    "nfdt/jobserver/topologies/__init__.py",
    "nfdt/codecs/__init__.py",
    "nfdt/core/specs/presets.py",
    "nfdt/core/specs/presets.py",
    "nfdt/schedulers/batch_policies.py",
    "nfdt/schedulers/task_policies.py",
    "nfdt/update_rules/__init__.py",
)

# Comparisons that do not choose between members, by (file, words of the line).
ALLOWED = {
    ("hfdt/runtime/tensorflow_ranks.py", 'codec == "identity"'): "the compression of an allreduce, which is no codec",
    ("hfdt/runtime/jax_step.py", "FORMATS[codec]"): "the compression of an allreduce, which is no codec",
    ("hfdt/runtime/torch_step.py", "FORMATS[codec]"): "the compression of an allreduce, which is no codec",
    ("hfdt/keras/compression.py", "wanted in named"): "the compression of an allreduce, which is no codec",
    ("hfdt/keras/compression.py", "named[wanted]"): "the compression of an allreduce, which is no codec",
    ("nfdt/planning/forecast.py", "ERRORS[name]"): "figures of the codecs among which the adaptive one chooses",
    ("nfdt/planning/forecast.py", "ERRORS[codec.name]"): "figures of the codecs among which the adaptive one chooses",
    ("nfdt/simulate/record.py", 'kind == "groups"'): "the kind of an event",
}


def constants(node: ast.AST, named: dict[str, ast.AST]) -> Iterator[str]:
    """Return the strings of an operand, literal or ``named``: single, in a collection or as keys of a mapping."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in named:
        yield from constants(named[node.id], {})
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from constants(element, named)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from constants(key, named)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"):
        for argument in node.args:
            yield from constants(argument, named)


def operands(node: ast.AST) -> list[ast.AST]:
    """Return the operands of a node: sides of a comparison, pattern of a match, mapping in which a key is looked up."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict | ast.Name):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return [node.func.value]
    return []


def comparisons(source: str) -> list[tuple[int, str]]:
    """Return (line, name) of each comparison with a member of an axis."""
    tree = ast.parse(source)
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = [
        (node.lineno, name)
        for node in ast.walk(tree)
        for operand in operands(node)
        for name in constants(operand, named)
        if name in MEMBERS
    ]
    return sorted(found)


def offences(path: Path) -> list[str]:
    """Return the lines of a file that compare with a member's name, though the file is no registry."""
    file, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    lines = source.splitlines()
    return [
        f"{file}:{number}: {lines[number - 1].strip()} ({MEMBERS[name]} {name!r})"
        for number, name in comparisons(source)
        if file not in REGISTRIES and not any(file == where and words in lines[number - 1] for where, words in ALLOWED)
    ]


def test_no_comparison_with_the_name_of_a_member():
    assert [line for path in SOURCES for line in offences(path)] == []


def test_what_is_allowed_is_still_there():
    gone = [(file, words) for file, words in ALLOWED if words not in (ROOT / file).read_text(encoding="utf-8")]
    assert gone == [], "delete the lines from ALLOWED"


def test_registries_exist():
    assert [file for file in REGISTRIES if not (ROOT / file).exists()] == []


OFFENCES = {
    'if policy.name == "bsp": pass': ["bsp"],
    'if "free" != algorithm.consistency: pass': ["free"],
    'if algorithm.consistency in ("ssp", "softsync"): pass': ["softsync", "ssp"],
    'if topology not in ["ring"]: pass': ["ring"],
    'if batch in {"dbs"}: pass': ["dbs"],
    'if rule in frozenset({"ddc"}): pass': ["ddc"],
    'if (topology, consistency) == ("flat", "free"): pass': ["flat", "free"],
    'match tasks:\n    case "static" | "proportional": pass': ["proportional", "static"],
    'match axes:\n    case ("flat", "dbs"): pass': ["dbs", "flat"],
    'match axes:\n    case {"codec": "top-k"}: pass': ["top-k"],
    '{"static": 1, "dynamic": 2}[tasks]': ["dynamic", "static"],
    '{"ring": 1}.get(topology)': ["ring"],
    'RULE = "ddc"\nif algorithm.update_rule == RULE: pass': ["ddc"],
    'ALIKE = {"bsp": True}\nALIKE.get(policy.name)': ["bsp"],
    'ALIKE = ("ssp",)\nif policy.name in ALIKE: pass': ["ssp"],
    'f(codec == "adaptive" for codec in codecs)': ["adaptive"],
}


@pytest.mark.parametrize("source", OFFENCES)
def test_every_kind_of_comparison_is_found(source):
    assert sorted(name for _, name in comparisons(source)) == OFFENCES[source]


@pytest.mark.parametrize(
    "source",
    [
        'if policy.facts.synchronous: pass\nmake("bsp")\n',
        'PRESETS = {"asgd": {"consistency": "free"}}',
        'if spec.train.kind == "stream": pass',
        'option: str = Option(consistency=("ssp",))',
    ],
)
def test_properties_values_and_declarations_are_no_comparisons(source):
    assert comparisons(source) == []
