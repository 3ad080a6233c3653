"""docs/convergence.md and the planner's data: what the result files of the convergence study give."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict

import pytest

from benchmarks.reports import convergence_page
from benchmarks.reports.accuracy_table import JUDGED, measured, planner_name
from benchmarks.reports.chart import Axis
from benchmarks.reports.convergence_page import PAGES, PICTURES, TABLES, block, differing, outputs, rebuilt
from benchmarks.reports.study import Study
from benchmarks.reports.study_results import FOLDER, ResultFile, read_results
from nfdt.core.specs.job import resolve_algorithm
from nfdt.planning.accuracy import measured_as
from tests.support.study import result, some_results

STUDY = Study(some_results())


def test_the_pages_are_what_the_results_give():
    made = outputs({path: path.read_text(encoding="utf-8") for path in PAGES}, Study(read_results(FOLDER)))
    assert differing(made) == [], "run python -m benchmarks.reports.convergence_page"


def test_the_pages_have_every_block():
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {name for _, name, _, _ in convergence_page.BLOCK.findall(text)} == {*TABLES, *PICTURES}


def test_the_best_preset_of_a_cluster_is_named_with_what_it_loses():
    first, *others = block(STUDY, "best-presets").splitlines()[2:]
    start = "| Fashion-MNIST, an MLP, 3 epochs | 4 equal | `ddc-asgd`, 87.7 % | 4.3 |"
    assert first.startswith(start)
    assert [line.split(" | ")[1] for line in others] == ["8 equal"]


def test_a_table_has_rows_and_clusters_that_were_trained():
    assert block(STUDY, "fashion-mnist").splitlines() == [
        "**Fashion-MNIST, an MLP**, 3 epochs (1,407 updates), SGD with momentum 0.9, lr 0.05.",
        "Accuracy in %, 2 seeds; one machine: 92.0 ± 0.0.",
        "",
        "| row | 4 equal | 8 equal |",
        "|---|---|---|",
        "| `ddc-asgd` | **87.7 ± 0.1** | **87.3 ± 0.1** |",
        "| `asgd` | 10.0 ± 0.0 | 10.0 ± 0.0 |",
    ]


def test_what_was_not_trained_is_an_empty_cell():
    study = Study([*some_results(), result("bsp", 8, 0.05, 0.85, speeds="unequal")])
    table = block(study, "fashion-mnist")
    assert "Accuracy in %, 1 to 2 seeds; " in table
    assert table.splitlines()[-1] == "| `bsp` |  |  | **85.0** |"


def test_smaller_batches_are_beside_one_machine_and_the_usual_batch():
    smaller = [result("ddc-asgd", 8, rate, score, batch=32) for rate, score in ((0.02, 0.9), (0.01, 0.91))]
    study = Study([*some_results(), *smaller])
    assert block(STUDY, "smaller-batches") == ""
    assert block(study, "smaller-batches").splitlines()[2:] == [
        "| Fashion-MNIST, an MLP, 3 epochs | `ddc-asgd` | 8 equal "
        "| 92.0 ± 0.0 (128, 0.05) | 87.3 ± 0.1 (128, 0.05) | 91.0 (32, 0.01) |"
    ]
    assert block(study, "fashion-mnist") == block(STUDY, "fashion-mnist")


def test_other_rates_are_those_at_which_one_machine_is_not_at_its_best():
    text = block(STUDY, "lower-rates")
    assert text.count("| row |") == 2
    assert "lr 0.01.\nAccuracy in %, 2 seeds; one machine: 90.0 ± 0.0." in text
    assert "| `asgd` | 80.0 ± 0.0 (0.01) | 80.0 ± 0.0 (0.01) |" in text


def test_the_best_rate_is_that_of_the_validation_samples():
    judged = [
        result("sequential", 1, rate, score, split="validation", samples=54_000)
        for rate, score in ((0.05, 0.7), (0.01, 0.8))
    ]
    assert "lr 0.01." in block(Study([*some_results(), *judged]), "fashion-mnist")
    assert "lr 0.05." in block(STUDY, "fashion-mnist")


def test_changing_speeds_are_shown_beside_equal_ones():
    slowed = result("ddc-asgd", 8, 0.05, 0.86, speeds="slowed")
    assert "| row | 8 equal | 8 slowed |" in block(Study([*some_results(), slowed]), "changing-speeds")
    assert block(STUDY, "changing-speeds") == ""


def test_virtual_time_is_that_until_a_share_of_one_machine_s_score():
    study = Study([*some_results(), result("bsp", 4, 0.05, 0.98)])
    text = block(study, "virtual-time")
    assert "virtual seconds to 87 %.\nOne machine: 120.0 s, 0.90, 120.0 s." in text
    assert "| `bsp` | 30.0 s, 0.90, 15.0 s |" in text
    assert "| `asgd` | 30.0 s, 0.90, not reached |" in text


def test_settings_of_another_optimizer_have_tables_of_their_own():
    changes = [{"momentum": 0.0}, {"weight_decay": 0.02}]
    study = Study([result(row, w, 0.1, 0.8, **c) for c in changes for row, w in (("sequential", 1), ("asgd", 8))])
    assert "3 epochs (1,407 updates), SGD, lr 0.1." in block(study, "momentum")
    assert "SGD with momentum 0.9 and weight decay 0.02, lr 0.1." in block(study, "weight-decay")
    assert block(study, "fashion-mnist") == ""


def test_blocks_without_results_stay_as_they_are():
    page = "a\n<!-- results: fashion-mnist -->\nold\n<!-- end -->\nb\n<!-- results: sms-like -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match="expected one of fashion-mnist"):
        rebuilt(page, STUDY)
    page = page.replace("sms-like", "resnet")
    assert rebuilt(page, Study([])) == page
    made = rebuilt(page, STUDY)
    assert "old" not in made
    assert "\nb\n<!-- results: resnet -->\n<!-- end -->\n" in made
    assert rebuilt(made, STUDY) == made


def test_the_command_writes_what_differs_and_checks_it(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "page.md", ResultFile(tmp_path / "results.jsonl")
    for each in some_results():
        results.append({**each.training.to_json(), **{k: v for k, v in asdict(each).items() if k != "training"}})
    results.append({**results.lines[0], "seed": 9, "error": "JobFailed: it failed"})
    page.write_text("<!-- results: fashion-mnist -->\n<!-- end -->\n<!-- results: workers -->\n<!-- end -->\n")
    for name, path in {"PAGES": (page,), "FOLDER": tmp_path, "ROOT": tmp_path, "PICTURE_FOLDER": tmp_path}.items():
        monkeypatch.setattr(convergence_page, name, path)
    monkeypatch.setattr("sys.argv", ["convergence_page", "--check"])
    with pytest.raises(SystemExit, match="1"):
        convergence_page.main()
    assert "page.md" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["convergence_page"])
    convergence_page.main()
    assert "| `ddc-asgd` | **87.7 ± 0.1** |" in page.read_text()
    assert "](images/convergence_workers.svg)" in page.read_text()
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["convergence_page", "--check"])
    convergence_page.main()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_svg_with_the_rows_of_the_results(name):
    drawn = PICTURES[name][1](STUDY)
    assert drawn is not None
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert ">ddc-asgd<" in drawn
    assert "nan" not in drawn
    assert PICTURES[name][1](Study([])) is None


def test_ticks_are_round():
    assert Axis.around([4, 32], doubles=True).ticks() == [4, 8, 16, 32]
    assert Axis.around([71.3, 88.8]).ticks() == [75, 80, 85]
    assert Axis(0, 8, doubles=False).share(2) == 0.25


def judged_results():
    rest = [row for row in JUDGED if row not in ("ddc-asgd", "asgd", "n-softsync")]
    found = [result(row, 8, 0.05, 0.85) for row in rest]
    return [*some_results(), *found, result("n-softsync", 8, 0.05, 0.75, speeds="unequal")]


def test_the_planner_gets_the_accuracies_at_one_machine_s_rate():
    (training,) = measured(Study(judged_results()))
    assert training.task == "Fashion-MNIST, an MLP, 1,407 updates"
    assert training.one_machine == 92.0
    assert training.rows["ddc"] == {4: 87.7, 8: 87.3}
    assert training.rows["plain"] == {4: None, 8: None}, "it diverged"
    assert training.lower["plain"] == {4: (5, 80.0), 8: (5, 80.0)}
    assert training.rows["softsync"] == {8: 75.0}, "that of unequal workers, as there is no other"
    assert json.loads(json.dumps(asdict(training)))["rows"]["barrier"] == {"8": 85.0}


def test_the_planner_keeps_its_data_until_every_preset_can_be_judged():
    assert measured(STUDY) == []


def test_every_row_of_the_planner_has_a_name_of_its_own():
    names = [planner_name(row) for row in JUDGED]
    assert len(set(names)) == len(names)
    assert measured_as(resolve_algorithm("ddc-asgd")) == names[0]
