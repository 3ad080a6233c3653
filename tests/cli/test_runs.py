"""``nfdt runs``: what is kept of each fit, and how it is shown, compared and exported."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from http.cookiejar import CookieJar
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from click.testing import CliRunner
from nfdt_client.run_history import KeptRun, find_run, keep, read_runs, runs_folder

from nfdt.cli import cli
from nfdt.cli.runs_page import page_of_runs
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm

RUN = KeptRun(
    id="20260102-030405-aaaa",
    script="/home/me/train.py",
    arguments=["--rate", "0.1"],
    directory="/home/me",
    commit="0" * 40,
    started=1_767_322_245.0,
    seconds=10.0,
    ending="finished",
    where="cluster",
    reason="",
    algorithm="bsp",
    workers=2,
    server="",
    jobs=["job-1"],
    spec=JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("bsp"),
        cluster=ClusterSpec(workers=2),
        fit=FitSpec(epochs=2, batch_size=8),
        train=DataSpec(kind="arrays", samples=100),
    ).model_dump(mode="json"),
    options={"algorithm": "bsp", "overlap": 1},
    versions={"keras": "3.12.0", "jax": ""},
    epochs=[
        {"epoch": 0, "seconds": 2.0, "samples": 100, "logs": {"loss": 2.0, "val_loss": 2.5}},
        {"epoch": 1, "seconds": 3.0, "samples": 100, "logs": {"loss": 1.0, "val_loss": 1.5}},
    ],
    per_worker={
        "worker-0": {"samples": 150, "steps": 3, "seconds": 5.0, "staleness": {"0": 1, "2": 1}},
        "worker-1": {"samples": 50, "steps": 1, "seconds": 4.0, "staleness": {"1": 2}},
    },
)
OTHER = replace(RUN, id="20260102-040405-bbbb", algorithm="asgd", options={"overlap": 2}, jobs=["job-2"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return runs_folder()


@pytest.fixture
def nfdt(folder):
    def call(*words):
        return CliRunner().invoke(cli, ["runs", *words], catch_exceptions=False)

    return call


def test_a_run_is_read_as_it_was_kept_and_only_its_owner_may_read_it(folder):
    keep(RUN, folder, 5)
    assert read_runs(folder) == [RUN]
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_runs_go_first(folder):
    for second in range(8):
        keep(replace(RUN, id=f"20260102-03040{second}-aaaa"), folder, 5)
    assert [run.id[13:15] for run in read_runs(folder)] == ["03", "04", "05", "06", "07"]


def test_a_file_that_is_no_run_is_named_and_left_out(folder, caplog):
    keep(RUN, folder, 5)
    (folder / "20260101-000000-0000.json").write_text("{}")
    (folder / "20260103-000000-0000.json").write_text("[1")
    assert read_runs(folder) == [RUN]
    assert "20260101-000000-0000.json and 1 more: expected a run" in caplog.text
    assert len(caplog.records) == 1


def test_entries_of_a_later_version_are_ignored(folder):
    keep(RUN, folder, 5)
    path = folder / f"{RUN.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "energy_kwh": 3}))
    assert read_runs(folder) == [RUN]


def test_the_numbers_of_a_run():
    assert RUN.metrics == {"loss": 1.0, "val_loss": 1.5}
    assert RUN.samples_per_s == 40.0
    assert RUN.mean_staleness == 1.0
    assert RUN.worker_s == 9.0
    empty = replace(RUN, epochs=[], per_worker={})
    assert (empty.metrics, empty.samples_per_s, empty.mean_staleness, empty.worker_s) == ({}, None, None, 0.0)


def test_a_run_is_found_by_a_beginning_or_an_end_that_no_other_has():
    assert find_run([RUN, OTHER], "aaaa") is RUN
    assert find_run([RUN, OTHER], "20260102-04") is OTHER
    with pytest.raises(UsageError, match="which 2 have, among them"):
        find_run([RUN, OTHER], "2026")
    with pytest.raises(UsageError, match="'cccc', which none has: see `nfdt runs`"):
        find_run([RUN, OTHER], "cccc")


def test_the_list(nfdt, folder):
    keep(RUN, folder, 5)
    failed = "failed: JobFailed: " + "x" * 100
    keep(replace(OTHER, ending=failed, epochs=[], script=""), folder, 5)
    lines = nfdt().output.splitlines()
    assert lines[0].split() == "run script algorithm workers epochs loss samples/s duration ending".split()
    assert lines[1].split() == [RUN.id, "train.py", "bsp", "2", "2", "1", "40", "0:00:10", "finished"]
    assert lines[2].split()[:7] == [OTHER.id, "-", "asgd", "2", "0", "-", "-"]
    assert lines[2].endswith("x…")
    assert [entry["id"] for entry in json.loads(nfdt("list", "--format", "json").output)] == [RUN.id, OTHER.id]


def test_no_run_is_said_with_the_folder(nfdt, folder):
    assert nfdt().output == f"No run is kept in {folder}.\n"
    assert json.loads(nfdt("list", "--format", "json").output) == []


def test_one_run(nfdt, folder):
    keep(RUN, folder, 5)
    text = nfdt("show", "aaaa").output
    for line in ("/home/me/train.py --rate 0.1", "bsp, 2 workers", "option overlap", "worker seconds    9.0"):
        assert line in text
    assert "version of jax" not in text
    assert ["2", "1", "1.5"] in [line.split() for line in text.splitlines()]
    assert "worker-1" in text
    assert json.loads(nfdt("show", "aaaa", "--format", "json").output)["workers"] == 2


def test_two_runs_are_compared_by_what_differs(nfdt, folder, tmp_path):
    for run in (RUN, OTHER):
        keep(run, folder, 5)
    done = nfdt("compare", "aaaa", "bbbb", "-o", str(tmp_path / "both.png"))
    assert done.output.splitlines()[0].split() == [RUN.id, OTHER.id]
    assert {line.split("  ")[0].strip() for line in done.output.splitlines()[1:] if "saved" not in line} == {
        "algorithm",
        "jobs",
        "option overlap",
    }
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_a_picture_needs_a_name_that_matplotlib_knows_and_epochs(nfdt, folder, tmp_path):
    keep(RUN, folder, 5)
    keep(replace(OTHER, epochs=[]), folder, 5)
    done = nfdt("compare", "aaaa", "bbbb", "-o", str(tmp_path / "both.doc"))
    assert done.exit_code == 2
    assert "ends in .png, .svg, .pdf" in done.output
    done = nfdt("compare", "bbbb", "bbbb", "-o", str(tmp_path / "both.png"))
    assert done.exit_code == 2
    assert "an epoch that has ended" in done.output


def test_one_run_is_not_compared(nfdt, folder):
    keep(RUN, folder, 5)
    done = nfdt("compare", "aaaa")
    assert done.exit_code == 2
    assert "two runs or more. Received: one" in done.output


def test_runs_are_exported_with_a_line_for_each_epoch(nfdt, folder, tmp_path):
    for run in (RUN, OTHER):
        keep(run, folder, 5)
    rows = list(csv.DictReader(io.StringIO(nfdt("export").output)))
    assert [(row["run"], row["epoch"], row["loss"]) for row in rows] == [
        (RUN.id, "1", "2.0"),
        (RUN.id, "2", "1.0"),
        (OTHER.id, "1", "2.0"),
        (OTHER.id, "2", "1.0"),
    ]
    nfdt("export", "bbbb", "--format", "json", "-o", str(tmp_path / "runs.json"))
    assert [entry["id"] for entry in json.loads((tmp_path / "runs.json").read_text())] == [OTHER.id]


def test_runs_are_shown_by_the_page_of_jobs_with_their_epochs_and_their_ends():
    failed = replace(OTHER, spec=RUN.spec, ending="failed: ValueError: no", epochs=RUN.epochs[:1])
    with page_of_runs([RUN, failed, replace(RUN, id="never-begun", spec={})]) as link:
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        with browser.open(link) as page:
            assert page.status == 200
        base = link.partition("open?")[0]
        jobs = json.load(browser.open(f"{base}api/jobs"))
        epochs = json.load(browser.open(f"{base}api/jobs/{RUN.id}/epochs"))
        shown = json.load(browser.open(f"{base}api/jobs/{RUN.id}"))
        with pytest.raises(HTTPError) as refused:
            browser.open(f"{base}api/jobs/{RUN.id}/weights.npz")
    assert [(job["job_id"], job["state"], job["reason"]) for job in jobs] == [
        (RUN.id, "succeeded", ""),
        (failed.id, "failed", failed.ending),
    ]
    assert jobs[0]["logs"] == RUN.epochs[-1]["logs"]
    assert [(epoch["seconds"], epoch["logs"]) for epoch in epochs] == [
        (2.0, RUN.epochs[0]["logs"]),
        (5.0, RUN.epochs[1]["logs"]),
    ]
    assert shown["statistics"] == RUN.per_worker
    assert not shown["may_act"]
    assert "weights are not kept" in refused.value.read().decode()


def test_no_page_is_made_of_runs_without_a_job():
    with pytest.raises(UsageError, match="a run whose job has begun"), page_of_runs([replace(RUN, spec={})]):
        pass


def test_a_run_is_deleted(nfdt, folder):
    keep(RUN, folder, 5)
    assert nfdt("delete", "aaaa").exit_code == 0
    assert read_runs(folder) == []
