"""Word list of the project: which words prose and identifiers avoid, and how often each file still has them.

``python -m tests.support.words`` lowers the counts in the table to those found, ``--reset`` replaces all of them, and
``python -m tests.support.words FILE ...`` lists the offences of files.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "data" / "word_counts.json"
CODE = ("nfdt", "hfdt", "client", "benchmarks", "examples", "tests", "scripts")
KEPT = "docs/decisions"  # a record of its time
LINE_LENGTH = 140

# Parts of identifiers whose term in the field is another one.
OLD_PARTS = frozenset(
    "crew crews seat seats recruit wish wishes autopilot journal outbox nursery nurseries forks captor looker lap laps "
    "told halved obey attendance attended vacant speaker afresh spoiled census succession steadiness surroundings "
    "invitation meeting nest nests".split()
)
# Whole identifiers: ordinary words that have another meaning elsewhere.
OLD_NAMES = frozenset(
    "JobDesk JobAssembly JobRun Wishes Difference Chain Pace Site Ending Abandoned Half Recorder Pending Sent Stepped "
    "Arrival _Seen World Order Turn Door LeaseTimes CutTasks StatedSizes RingView News Place Kind Parts "
    "let_go send_away dismiss_strangers step_held meet attend mend_horovod seen_by_coordinator".split()
)
PERSONS = re.compile(r"\b(nobody|somebody|anybody|everybody|whoever|whom)\b", re.IGNORECASE)
SPEECH = re.compile(r"\b(tells?|told|telling|says?|said|saying|hears?|heard)\b", re.IGNORECASE)
FRAGMENT = re.compile(r"^\s*[\w*`., ]+: Of ", re.MULTILINE)
QUESTION = re.compile(r"(Of|What|Who|Whose|Whoever|How)\b")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ABBREVIATIONS = "".join(rf"(?<!\b{short})" for short in (r"e\.g", r"i\.e", "al", "vs", "eq", "no"))
SENTENCE_END = re.compile(ABBREVIATIONS + r"(?<!^\d)[.!?][)*`\"]* +[(*\[\"]*[A-Z`]")
LINK_TARGET = re.compile(r"\]\([^)]*\)")

Table = Mapping[str, Mapping[str, int]]  # counts by file and rule


@dataclass(frozen=True)
class Offence:
    """One place that breaks a rule of the word list."""

    rule: str
    line: int
    text: str


def offences_in(path: str, text: str) -> list[Offence]:
    """Return the offences of one file, Python or Markdown by its name."""
    return list(_in_python(text) if path.endswith(".py") else _in_markdown(text))


def _in_python(source: str) -> Iterator[Offence]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and is_old(token.string):
            yield Offence("old word", token.start[0], token.string)
        elif token.type == tokenize.COMMENT:
            yield from _in_prose(token.string, token.start[0])
    for line, docstring in _docstrings(source):
        if QUESTION.match(docstring):
            yield Offence("docstring begins with", line, docstring.partition("\n")[0])
        yield from (Offence("fragment", line, match[0].strip()) for match in FRAGMENT.finditer(docstring))
        yield from _in_prose(docstring, line)


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each standalone string: docstrings, including those of attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _in_prose(text: str, line: int) -> Iterator[Offence]:
    for rule, pattern in (("person", PERSONS), ("speech", SPEECH)):
        yield from (Offence(rule, line, match[0]) for match in pattern.finditer(text))


def _in_markdown(text: str) -> Iterator[Offence]:
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if code or line.startswith(("|", "#")):
            continue
        shown = LINK_TARGET.sub("]", line)
        if len(shown) > LINE_LENGTH:
            yield Offence("long line", number, shown[:60])
        if SENTENCE_END.search(shown):
            yield Offence("several sentences", number, shown[:60])
        yield from _in_prose(shown, number)


def is_old(identifier: str) -> bool:
    """Return whether an identifier, or a word in it, has a better term."""
    return identifier in OLD_NAMES or any(word.lower() in OLD_PARTS for word in WORD.findall(identifier))


def project_files() -> dict[str, str]:
    """Return the text of all files that the word list is for."""
    code = [path for room in CODE for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]
    prose = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted([*code, *prose])}
    return {path: text for path, text in texts.items() if not path.startswith(KEPT)}


def counts(offences: Iterable[Offence]) -> dict[str, int]:
    """Return how many offences there are of each rule."""
    return dict(sorted(Counter(offence.rule for offence in offences).items()))


def lowered(
    allowed: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return the counts found where they are less than allowed; files and rules without offences are left out."""
    kept = {
        path: {rule: min(count, found.get(path, {}).get(rule, 0)) for rule, count in rules.items()}
        for path, rules in allowed.items()
    }
    without_zeros = {path: {rule: count for rule, count in rules.items() if count} for path, rules in kept.items()}
    return {path: rules for path, rules in without_zeros.items() if rules}


def read_table() -> dict[str, dict[str, int]]:
    """Return the allowed counts by file and rule."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def write_table(table: Table) -> None:
    """Write the allowed counts, one file a line."""
    lines = [f" {json.dumps(path)}: {json.dumps(rules)}" for path, rules in sorted(table.items())]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Write the table, or list the offences of files."""
    if arguments and arguments != ["--reset"]:
        for path in arguments:
            for offence in sorted(offences_in(path, Path(path).read_text(encoding="utf-8")), key=lambda o: o.line):
                print(f"{path}:{offence.line}: {offence.rule}: {offence.text}")
        return
    found = {path: counts(offences_in(path, text)) for path, text in project_files().items()}
    write_table({path: rules for path, rules in found.items() if rules} if arguments else lowered(read_table(), found))


if __name__ == "__main__":
    main(sys.argv[1:])
