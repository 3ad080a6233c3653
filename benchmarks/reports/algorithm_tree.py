"""Picture of the questions that lead to an algorithm, for docs/which_algorithm.md.

``python -m benchmarks.reports.algorithm_tree`` writes docs/images/which_algorithm.svg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reports.svg import ACCENT, PALE, arrow, box, picture, text

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "which_algorithm.svg"
QUESTION_WIDTH, LEAF_WIDTH, LINE, ROW_HEIGHT = 225, 240, 18, 96


@dataclass(frozen=True)
class Question:
    """A question with its two answers, each an algorithm or another question."""

    lines: Sequence[str]
    yes: Question | str
    no: Question | str


SYNCHRONOUS = Question(("Equally fast workers, a fast", "network, and Horovod?"), "allreduce", 'bsp, batch="dbs"')
EQUAL = Question(
    ("Is the network slow beside", "a step (1 Gbit/s and less)?"), 'ddc-asgd, codec="adaptive"', "ddc-asgd"
)
UNEQUAL = Question(("Must batches keep their size", "(BatchNorm, for instance)?"), "h-ps", "auto")
LAST = Question(("Are all workers equally fast?",), EQUAL, UNEQUAL)
RESULT = Question(("Must the result be that of one", "process with a larger batch?"), SYNCHRONOUS, LAST)
ROOT = Question(("Is there more to compute with", "than plain fit uses already?"), RESULT, "plain Keras")


def leaves(node: Question | str) -> Sequence[str]:
    """Return the algorithms that the questions lead to."""
    return [node] if isinstance(node, str) else [*leaves(node.yes), *leaves(node.no)]


def draw() -> str:
    """Return the picture: the main questions from top to bottom, further ones and algorithms to their right."""
    left, middle, right = 20, 330, 650
    elements: list[str] = []

    def question(node: Question, x: float, y: float) -> None:
        elements.append(box(x, y, QUESTION_WIDTH, 52, fill=PALE))
        first = y + 31 - (len(node.lines) - 1) * LINE / 2
        centre = x + QUESTION_WIDTH / 2
        elements.extend(text(centre, first + i * LINE, line, anchor="middle") for i, line in enumerate(node.lines))

    def leaf(name: str, x: float, y: float) -> None:
        elements.append(box(x, y, LEAF_WIDTH, 34, fill=ACCENT))
        elements.append(text(x + LEAF_WIDTH / 2, y + 22, name, anchor="middle", fill="#ffffff", bold=True))

    def answer(words: str, x: float, y: float, to_x: float, to_y: float) -> None:
        elements.append(arrow(x, y, to_x, to_y))
        elements.append(text(x + 8, y + (16 if to_x == x else -6), words, size=12))

    def second(node: Question, y: float) -> None:
        question(node, middle, y)
        for name, words, place in ((node.yes, "yes", y - 13), (node.no, "no", y + 31)):
            answer(words, middle + QUESTION_WIDTH, place + 17, right, place + 17)
            leaf(str(name), right, place)

    def right_of(words: str, y: float) -> None:
        answer(words, left + QUESTION_WIDTH, y + 26, middle, y + 26)

    def down(words: str, y: float) -> None:
        answer(words, left + QUESTION_WIDTH / 2, y + 52, left + QUESTION_WIDTH / 2, y + ROW_HEIGHT)

    y = 20
    question(ROOT, left, y)
    right_of("no", y)
    leaf(str(ROOT.no), middle, y + 9)
    for words, node, aside, label in (("yes", RESULT, RESULT.yes, "yes"), ("no", LAST, LAST.yes, "yes")):
        down(words, y)
        y += ROW_HEIGHT
        question(node, left, y)
        right_of(label, y)
        assert isinstance(aside, Question)
        second(aside, y)
    down("no, or unknown", y)
    y += ROW_HEIGHT
    question(UNEQUAL, left, y)
    answer("yes", left + QUESTION_WIDTH, y + 4, middle, y + 4)
    leaf(str(UNEQUAL.yes), middle, y - 13)
    answer("no", left + QUESTION_WIDTH, y + 48, middle, y + 48)
    leaf(str(UNEQUAL.no), middle, y + 31)
    return picture(right + LEAF_WIDTH + 20, y + 85, f"Algorithms: {', '.join(leaves(ROOT))}", elements)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
