"""Word list of the project: which words prose and identifiers avoid. ``scripts/words`` prints where they are found."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def main(paths: list[str]) -> None:
    """Print the offences of files; no paths: of all files of the project."""
    texts = {path: Path(path).read_text(encoding="utf-8") for path in paths} or project_files()
    for path, text in texts.items():
        for offence in sorted(offences_in(path, text), key=lambda offence: offence.line):
            print(f"{path}:{offence.line}: {offence.rule}: {offence.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
