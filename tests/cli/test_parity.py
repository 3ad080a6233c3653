"""``nfdt parity`` with real trainings."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.scripts import DEADLINE_S, NFDT, environment

SCRIPT = """
import keras, numpy as np
keras.utils.set_random_seed(3)
x = np.random.rand(600, 8).astype("float32")
y = (x.sum(1) > 4).astype("int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")])
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=20, epochs=3, validation_split=0.2, verbose=0)
print("the script's own words")
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    (folder / "script.py").write_text(SCRIPT)
    options = ["--workers", "1", "--algorithm", "bsp", "--seeds", "2", "--tolerance", "0.5"]
    files = ["--html", "report.html", "--json", "report.json"]
    done = subprocess.run(
        [*NFDT, "parity", *options, *files, "script.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stdout, json.loads((folder / "report.json").read_text())


@pytest.mark.long
def test_repetitions_have_seeds_of_their_own_and_bsp_on_one_worker_equals_plain(report):
    _, _, found = report
    plain, bsp = found["curves"]["plain"], found["curves"]["bsp"]
    assert [len(curve) for curve in plain] == [len(curve) for curve in bsp] == [3, 3]
    assert plain[0][0]["value"] != plain[1][0]["value"]
    for one, other in zip(plain, bsp, strict=True):
        assert [e["value"] for e in one] == pytest.approx([e["value"] for e in other], abs=0.02)
    assert found["metric"] == {"name": "val_accuracy", "lower_is_better": False}
    assert found["results"]["bsp"]["verdict"] == "within noise of plain"


@pytest.mark.long
def test_the_verdict_is_printed_and_the_script_s_output_is_not_mixed_with_it(report):
    folder, printed, _ = report
    assert "within noise of plain" in printed
    assert "own words" not in printed
    assert "<polyline" in (folder / "report.html").read_text()


def test_a_script_without_a_fit_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("import keras\n")
    done = subprocess.run(
        [*NFDT, "parity", "--seeds", "1", "empty.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "calls model.fit" in done.stderr


@pytest.mark.parametrize("wrong", [["--algorithm", "asgd,nope"], ["--workers", "none"], ["--set", "overlap=9"]])
def test_a_wrong_option_is_reported_before_anything_is_trained(tmp_path, wrong):
    (tmp_path / "empty.py").write_text("raise SystemExit('it ran')\n")
    done = subprocess.run(
        [*NFDT, "parity", *wrong, "empty.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "it ran" not in done.stderr
