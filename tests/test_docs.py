"""Tables, commands, links and options of the documentation are correct."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from nfdt.core.errors import NfdtError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.specs.presets import DEFAULT_PRESET, PRESETS
from tests.support.command_lines import unknown_options

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
README_AXES = ("consistency", "update_rule", "batch", "tasks")
NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FENCE = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def links(path: Path) -> list[str]:
    return [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]


def commands(path: Path) -> list[str]:
    """Return the lines of bash blocks, without comments and variable prefixes."""
    blocks = FENCE.findall(path.read_text(encoding="utf-8"))
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.split("#")[0].strip()]


def nfdt_commands() -> list[tuple[str, list[str]]]:
    found = []
    for path in DOCS:
        for line in commands(path):
            words = shlex.split(line)
            if "nfdt" in words:
                found.append((f"{path.relative_to(ROOT)}: {line}", words[words.index("nfdt") + 1 :]))
    return found


def test_links_lead_somewhere():
    targets = [(path, link) for path in DOCS for link in links(path)]
    missing = [(str(path), link) for path, link in targets if not (path.parent / link.split("#")[0]).exists()]
    assert missing == []


def test_the_readme_s_preset_table_is_the_product_s():
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(([^)]+)\)( \(default\))? \| (.*) \|$", README.read_text(), re.MULTILINE)
    table = {name: tuple(cell.strip() for cell in cells.split("|")) for name, _, _, cells in rows}
    assert table == {name: tuple(row[axis] for axis in README_AXES) for name, row in PRESETS.items()}
    assert [name for name, _, default, _ in rows if default] == [DEFAULT_PRESET]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_card_that_states_its_parts(preset):
    card = (ROOT / "docs" / "algorithms" / f"{preset}.md").read_text(encoding="utf-8")
    row = PRESETS[preset]
    assert card.startswith(f"# {preset}: ") or card.startswith(f"# {preset}\n")
    assert f"update rule: {row['update_rule']} " in card
    assert f"tasks: {row['tasks']} " in card
    for part in ("Limits", "Use it"):
        assert part in card


def test_every_number_of_an_algorithm_is_in_the_option_table():
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    numbers = {"staleness_bound", "softsync_n", "dc_lambda", "dc_clip", "gap", "dc_decay", "workers", "shards"}
    numbers |= {"codec", "reply_codec", "top_k", "error_budget"}
    numbers |= {"batch_min", "batch_max", "batch_multiple"}
    assert numbers <= {*AlgorithmSpec.model_fields, *ClusterSpec.model_fields}
    assert {name for name in numbers if f"| `{name}` |" not in text} == set()


def test_commands_in_the_documentation_parse():
    unknown = {where: unknown_options(words) for where, words in nfdt_commands()}
    assert {where: options for where, options in unknown.items() if options} == {}


def test_python_in_the_documentation_parses():
    for path in DOCS:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)):
            ast.parse(block, filename=f"{path}, block {number}")


def test_scripts_in_the_documentation_exist():
    lines = [(path, line) for path in DOCS for line in commands(path) if line.startswith("./scripts/")]
    named = {(str(path), shlex.split(line)[0]) for path, line in lines}
    assert [(page, name) for page, name in named if not (ROOT / name).stat().st_mode & 0o100] == []


def test_exit_codes_are_documented():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

    def kinds(kind: type[NfdtError]) -> set[int]:
        return {kind.exit_code}.union(*(kinds(child) for child in kind.__subclasses__()))

    assert {code for code in kinds(NfdtError) if f"| {code} |" not in text} == set()


def named_tests() -> list[tuple[str, str]]:
    return sorted({found for path in DOCS for found in NAMED_TEST.findall(path.read_text(encoding="utf-8"))})


def test_tests_that_a_page_names_exist():
    assert [
        (path, name)
        for path, name in named_tests()
        if f"\ndef {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ] == []
