"""Tables and pictures of the documentation, and the planner's data, from the results of the convergence study.

``python -m benchmarks.reports.convergence_page`` rewrites what differs. Blocks begin with ``<!-- results: NAME -->``
and end with ``<!-- end -->``; one that no result is for stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.reports import study_pictures, study_tables
from benchmarks.reports.accuracy_table import DATA_FILE, measured
from benchmarks.reports.claims import Claim, NotMeasured, table
from benchmarks.reports.source_claims import CLAIMS, real_scaling, scaling
from benchmarks.reports.study import Study, has_optimizer, is_default
from benchmarks.reports.study_results import FOLDER, ROOT, Setting, read_results
from benchmarks.workloads.convergence_rows import LOCAL_ROWS
from benchmarks.workloads.tasks import TASKS

PAGES = tuple(ROOT / "docs" / name for name in ("convergence.md", "which_algorithm.md", "sources.md"))
PICTURE_FOLDER = ROOT / "docs" / "images"
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CNNS, RESNETS = ("cifar10", "cifar10-cnn16"), ("cifar10-resnet20", "cifar10-resnet8")
OTHERS = ("sms", "housing")


PICTURES: dict[str, tuple[str, Callable[[Study], str | None]]] = {
    "workers": ("Score over the number of workers, each row at its best rate", study_pictures.over_workers),
    "time": ("Score over virtual time, each row at its best rate", study_pictures.over_time),
    "staleness": ("Points lost over the mean staleness", study_pictures.over_staleness),
}


def _default(study: Study, tasks: Sequence[str] = tuple(TASKS)) -> list[Setting]:
    return [setting for setting in study.settings(tasks) if is_default(setting)]


def _other(study: Study, *, momentum: bool) -> list[Setting]:
    """Return the settings whose optimizer differs from their tasks' in the momentum alone, or in more than that."""
    found = []
    for setting in study.settings():
        task = TASKS[setting.task]
        alone = (setting.optimizer, setting.weight_decay) == (task.optimizer, task.weight_decay)
        if not has_optimizer(setting) and alone == momentum:
            found.append(setting)
    return found


def _smaller_batches(study: Study) -> list[Setting]:
    found = [setting for setting in study.settings() if has_optimizer(setting)]
    return [setting for setting in found if setting.batch < TASKS[setting.task].batch]


def _local_steps(study: Study) -> list[Setting]:
    """Return the settings in which rules of local steps were compared, on validation samples."""
    found = study.settings(split="validation")
    return [setting for setting in found if any(case.row in LOCAL_ROWS for case in study.cases(setting))]


def _claims(claims: Sequence[Claim], study: Study) -> str:
    return table(claims, study.all_results)


def _if_measured(made: Callable[[], str]) -> str:
    try:
        return made()
    except NotMeasured:
        return ""


TABLES: dict[str, Callable[[Study], str]] = {
    "fashion-mnist": lambda study: study_tables.at_one_machines_rate(study, _default(study, ["fashion-mnist"])),
    "cifar10": lambda study: study_tables.at_one_machines_rate(study, _default(study, CNNS)),
    "resnet": lambda study: study_tables.at_one_machines_rate(study, _default(study, RESNETS)),
    "text-and-tables": lambda study: study_tables.at_one_machines_rate(study, _default(study, OTHERS)),
    "local-steps": lambda study: study_tables.at_one_machines_rate(study, _local_steps(study)),
    "smaller-batches": lambda study: study_tables.in_smaller_batches(study, _smaller_batches(study)),
    "best-presets": lambda study: study_tables.best_presets(study, _default(study)),
    "changing-speeds": lambda study: study_tables.in_changing_clusters(study, _default(study)),
    "virtual-time": lambda study: study_tables.in_virtual_time(study, _default(study)),
    "lower-rates": lambda study: study_tables.at_other_rates(study, _default(study)),
    "momentum": lambda study: study_tables.at_one_machines_rate(study, _other(study, momentum=True)),
    "weight-decay": lambda study: study_tables.at_one_machines_rate(study, _other(study, momentum=False)),
    **{source: functools.partial(_claims, claims) for source, claims in CLAIMS.items()},
    "scaling": lambda study: _if_measured(lambda: scaling(study.all_results)),
    "real-scaling": lambda study: _if_measured(real_scaling),
}


def block(study: Study, name: str) -> str:
    """Return the content of a block; empty without results.

    Raises:
        ValueError: there is no such block.
    """
    if name in PICTURES:
        words, drawn = PICTURES[name]
        return f"![{words}](images/convergence_{name}.svg)" if drawn(study) else ""
    if name not in TABLES:
        known = ", ".join([*TABLES, *PICTURES])
        raise ValueError(f"Block {name!r}: expected one of {known}. Correct the comment in the page.")
    return TABLES[name](study)


def rebuilt(page: str, study: Study) -> str:
    """Return the page with every block that there are results for."""

    def replaced(found: re.Match[str]) -> str:
        begin, name, content, end = found.groups()
        made = block(study, name)
        return f"{begin}\n{made}\n\n{end}" if made else begin + content + end

    return BLOCK.sub(replaced, page)


def outputs(pages: Mapping[Path, str], study: Study) -> dict[Path, str]:
    """Return the content of every file that follows from the results, given the pages as they are."""
    made = {path: rebuilt(page, study) for path, page in pages.items()}
    for name, (_, drawn) in PICTURES.items():
        if picture := drawn(study):
            made[PICTURE_FOLDER / f"convergence_{name}.svg"] = picture
    if trainings := measured(study):
        made[DATA_FILE] = json.dumps([asdict(training) for training in trainings], indent=1) + "\n"
    return made


def differing(made: Mapping[Path, str]) -> list[Path]:
    """Return the files whose content differs."""
    return [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def rewrite(*, check: bool = False) -> bool:
    """Write every file that is not what the results give; return whether there was one.

    Args:
        check: Name the files only.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in PAGES}
    made = outputs(pages, Study(read_results(FOLDER)))
    found = differing(made)
    for path in found:
        if not check:
            path.write_text(made[path], encoding="utf-8")
        print(f"{'differs from the results' if check else 'written'}: {path.relative_to(ROOT)}")
    return bool(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not what results give")
    check = parser.parse_args().check
    if rewrite(check=check) and check:
        sys.exit(1)


if __name__ == "__main__":
    main()
