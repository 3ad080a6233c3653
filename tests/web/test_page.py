"""The page of a job server: real server, workers and jobs, over HTTP."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import secrets
import signal
import socket
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import keras
import numpy as np
import psutil
import pytest
from nfdt_client.connection import JobsClient
from nfdt_client.handle import format_event
from prometheus_client.parser import text_string_to_metric_families

import nfdt
from nfdt.core.events import Event
from tests.support.browser import Browser
from tests.support.scripts import NFDT, ServerProcess, descendants, environment, start_server, stop

EPOCHS = 3
READER, TRAINER = secrets.token_hex(16), secrets.token_hex(16)


def link_of(cluster: ServerProcess) -> str:
    """Return a new link with the rights of the server's token."""
    with closing(JobsClient(cluster.address, cluster.token_file.read_text())) as client:
        return client.open_page()


def page_of(cluster: ServerProcess) -> str:
    return re.findall(r"page: (\S+)", (cluster.state_dir.parent / "server.log").read_text())[-1]


def events_of(found: list[dict]) -> list[Event]:
    return [Event(event["cursor"], event["at"], event["kind"], event["data"]) for event in found]


def fit(cluster: ServerProcess, callbacks=(), epochs: int = EPOCHS, samples: int = 640, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.ones((samples, 4), "float32"), np.ones((samples, 1), "float32")
    with nfdt.session(server=cluster.address, token_file=str(cluster.token_file), workers=2, **options):
        history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, history


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    token = folder / "token"
    token.write_text(f"{secrets.token_hex(16)}\nrita read {READER}\ntina train {TRAINER}\n")
    token.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def cluster(folder):
    cluster = start_server(folder, "--ui", "127.0.0.1:0", "--workers", "2")
    admin = folder / "admin"
    admin.write_text(cluster.token_file.read_text().splitlines()[0])
    admin.chmod(0o600)
    cluster.token_file = admin
    yield cluster
    stop(cluster.process)


class DuringTraining(keras.callbacks.Callback):
    """Callback that reads the page after the first epoch, and where a worker is, as the trainer and a reader."""

    def __init__(self, browser: Browser) -> None:
        super().__init__()
        self._browser = browser

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            (job,) = [job for job in self._browser.json("api/jobs") if job["state"] == "running"]
            self.job_id = job["job_id"]
            with self._browser.request("metrics") as answer:
                self.metrics = answer.read().decode()
            worker = self._browser.json(f"api/jobs/{self.job_id}")["statistics"]["worker-0"]
            self.stacks = f"api/jobs/{self.job_id}/stacks?host={worker['host']}&pid={worker['pid']}"
            with self._browser.request(self.stacks, post=True, **{"X-NFDT": "1"}) as answer:
                self.threads = answer.read().decode()
            self.machines = self._browser.json("api/machines")
            reader = Browser(self._browser.url, READER)
            self.refused = reader.status(self.stacks, post=True, **{"X-NFDT": "1"})
            self.hidden = reader.json("api/machines")


@pytest.fixture(scope="module")
def trained(cluster, folder):
    plan = folder / "plan.json"
    planned = {"algorithm": "ddc-asgd", "samples_per_s": 1e6, "staleness": 1.0}
    plan.write_text(json.dumps({"workers": 2, "forecasts": [planned]}))
    browser = Browser(page_of(cluster), cluster.token_file.read_text())
    seen = DuringTraining(browser)
    # Without steps of an epoch ahead, the totals are those of the epochs that have ended.
    model, history = fit(cluster, [seen], forecast=str(plan), epoch_overlap=False)
    return browser, seen, model, history


def test_a_link_opens_the_page_once_and_leaves_a_cookie_that_scripts_cannot_read(cluster):
    browser, link = Browser(page_of(cluster)), link_of(cluster)
    with browser.request(link) as answer:
        assert answer.url == browser.url
        assert b"<main" in answer.read()
    (cookie,) = browser.cookies
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert browser.status("api/jobs") == 200
    assert Browser(browser.url).status(link) == 401


def test_no_log_has_a_key(cluster):
    log = (cluster.state_dir.parent / "server.log").read_text()
    assert page_of(cluster) in log
    assert "key=" not in log


def test_bytes_that_turn_out_wrong_after_an_answer_end_their_connection_and_nothing_else(cluster):
    url = urlsplit(page_of(cluster))
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 401 ")  # and waits for the rest of the request
        connection.sendall(b"no chunk\r\n")
        while connection.recv(2**16):
            continue
    assert Browser(page_of(cluster), cluster.token_file.read_text()).status("api/jobs") == 200
    assert "Traceback" not in (cluster.state_dir.parent / "server.log").read_text()


def test_a_terminal_gets_a_link(tmp_path):
    ours, theirs = pty.openpty()
    command = [*NFDT, "server", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path), "--ui", "127.0.0.1:0"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=theirs)
    try:
        os.close(theirs)
        assert process.stdout.readline()
        with os.fdopen(ours) as terminal:  # a single read may return the lines before only
            (link,) = next(found for line in terminal if (found := re.findall(r"page: (\S+)", line)))
            assert Browser(link.partition("open?")[0]).status(link) == 200
    finally:
        stop(process)


@pytest.mark.parametrize("path", ["", "jobs/job-1", "api/jobs", "api/jobs/job-1", "api/jobs/job-1/stream", "metrics"])
@pytest.mark.parametrize("token", ["", "a-wrong-token"])
def test_without_a_cookie_or_token_nothing_is_shown(trained, cluster, path, token):
    job_id = trained[1].job_id
    with Browser(page_of(cluster), token).request(path.replace("job-1", job_id)) as answer:
        assert answer.status == 401
        assert job_id not in answer.read().decode()


def test_answers_forbid_foreign_code_and_frames(cluster):
    with Browser(page_of(cluster)).request("static/page.js") as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy


def test_the_stream_has_as_many_epochs_as_were_trained(trained):
    browser, seen, _, history = trained
    events = browser.events(seen.job_id)
    ends = [event["data"] for event in events if event["kind"] == "epoch_end"]
    assert [end["logs"]["loss"] for end in ends] == history.history["loss"]
    assert events[-1]["data"]["state"] == "succeeded"
    cursor = events[2]["cursor"]
    assert [event["cursor"] for event in browser.events(seen.job_id, cursor)] == [e["cursor"] for e in events[3:]]


def test_the_speed_after_the_first_epoch_is_compared_with_the_plan(trained):
    browser, seen, *_ = trained
    events = browser.events(seen.job_id)
    found = [event["data"] for event in events if event["kind"] == "forecast"]
    assert [(data["samples_per_s"], data["staleness"]) for data in found] == [(1e6, 1.0)] * EPOCHS
    after_first = [event["data"]["seconds"] for event in events if event["kind"] == "epoch_end"][1:]
    # The whole epochs, with their ends, take longer than their steps.
    assert found[-1]["measured_samples_per_s"] > 640 * (EPOCHS - 1) / sum(after_first)
    assert 0 <= found[-1]["measured_staleness"] <= 4
    last = [line for line in map(format_event, events_of(events)) if " forecast " in line][-1]
    assert "planned 1,000,000 samples/s at a staleness of 1.0; measured" in last


def test_a_cursor_that_is_no_number_of_an_event_is_the_beginning(trained):
    browser, seen, *_ = trained
    assert len({len(browser.events(seen.job_id, after)) for after in (0, "x", "9" * 40)}) == 1


def test_a_job_shows_its_options_program_and_workers(trained):
    browser, seen, *_ = trained
    job = browser.json(f"api/jobs/{seen.job_id}")
    assert (job["state"], job["algorithm"], job["workers"], job["epochs"]) == ("succeeded", "ddc-asgd", 2, EPOCHS)
    assert [shape for _, shape in job["variables"]] == [[4, 3], [3], [3, 1], [1]]
    assert job["options"]["fit"]["batch_size"] == 8
    assert sum(worker["samples"] for worker in job["statistics"].values()) == EPOCHS * 640
    for worker in job["statistics"].values():
        assert 0 < worker["compute_s"] < 10 * worker["cpu_s"]  # which counts the start of the process too
        assert 2**25 < worker["peak_memory_bytes"] < psutil.virtual_memory().total


def test_the_epochs_of_a_job_have_its_metrics_and_their_times(trained):
    browser, seen, _, history = trained
    epochs = browser.json(f"api/jobs/{seen.job_id}/epochs")
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert {name: [epoch["logs"][name] for epoch in epochs] for name in epochs[0]["logs"]} == history.history
    seconds = [epoch["seconds"] for epoch in epochs]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_the_weights_are_those_of_the_model(trained):
    browser, seen, model, _ = trained
    with browser.request(f"api/jobs/{seen.job_id}/weights.npz") as answer:
        arrays = np.load(io.BytesIO(answer.read()))
    for variable, name in zip(model.trainable_variables, arrays.files, strict=True):
        np.testing.assert_array_equal(variable.numpy(), arrays[name])


def test_metrics_are_read_by_the_official_parser(trained):
    _, seen, *_ = trained
    families = {family.name: family for family in text_string_to_metric_families(seen.metrics)}
    samples = [s for s in families["nfdt_samples"].samples if s.labels["job"] == seen.job_id]
    assert {s.labels["worker"] for s in samples} == {"worker-0", "worker-1"}
    assert sum(s.value for s in samples) == 640
    states = {s.labels["state"]: s.value for s in families["nfdt_jobs"].samples}
    assert states["running"] == 1
    slots = {(s.labels["role"], s.labels["state"]): s.value for s in families["nfdt_slots"].samples}
    assert slots["worker", "busy"] == 2
    assert [s.value for s in families["nfdt_workers_wanted"].samples] == [2]
    staleness = {s.name: s.value for s in families["nfdt_staleness_updates"].samples}
    assert staleness["nfdt_staleness_updates_count"] == 80
    pushes = [s for s in families["nfdt_push_seconds"].samples if s.name.endswith("_count")]
    assert [s.value for s in pushes] == [80]
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6


def test_the_dashboard_shows_every_metric_of_the_server_and_no_other(trained):
    dashboard = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "nfdt.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    used = set(re.findall(r"(?:nfdt|process)_\w+", expressions))
    samples = {s.name for family in text_string_to_metric_families(trained[1].metrics) for s in family.samples}
    assert used - samples == set()
    families = {name.removesuffix("_total").removesuffix("_bucket") for name in used}
    shown = {f.name for f in text_string_to_metric_families(trained[1].metrics) if f.name.startswith("nfdt_")}
    assert shown - families == {"nfdt_steps"}


def test_a_reader_sees_no_job_of_others_and_may_not_act(trained, cluster):
    _, seen, *_ = trained
    reader = Browser(page_of(cluster), READER)
    assert reader.json("api/jobs") == []
    assert reader.status(f"api/jobs/{seen.job_id}") == 404
    assert reader.status(f"api/jobs/{seen.job_id}/cancel", post=True, **{"X-NFDT": "1"}) == 403


def test_a_worker_says_where_its_threads_are_to_those_who_may_act(trained, cluster):
    browser, seen, *_ = trained
    main, *others = seen.threads.split("\n\n")
    assert main.startswith("MainThread\n  File ")
    assert "nfdt/worker/slot.py" in main
    assert any(thread.startswith("assignments\n") and "describe_threads" in thread for thread in others)
    assert seen.refused == 403
    assert browser.status(seen.stacks, post=True) == 400
    assert browser.status(seen.stacks, post=True, **{"X-NFDT": "1"}) == 400  # it has ended
    audit = [json.loads(line) for line in (cluster.state_dir / "audit.log").read_text().splitlines()]
    assert {"action": "stacks", "job": seen.job_id}.items() <= next(
        line for line in audit if line["action"] == "stacks"
    ).items()


def test_machines_have_the_jobs_that_their_reader_may_see(trained):
    _, seen, *_ = trained
    (machine,) = seen.machines
    assert (machine["workers"], machine["jobs"], machine["gpus"]) == (2, [seen.job_id], 0)
    assert 0 < machine["used_bytes"] < machine["total_bytes"]
    assert [found["jobs"] for found in seen.hidden] == [["(another owner's)"]]


def test_an_action_needs_the_header_that_other_sites_cannot_send(trained):
    browser, seen, *_ = trained
    assert browser.status(f"api/jobs/{seen.job_id}/cancel", post=True) == 400
    assert browser.status(f"api/jobs/{seen.job_id}/dance", post=True, **{"X-NFDT": "1"}) == 400
    assert browser.status(f"api/jobs/{seen.job_id}/cancel", post=True, **{"X-NFDT": "1"}) == 200  # it has ended


def test_stopping_keeps_the_result(cluster):
    browser = Browser(page_of(cluster), cluster.token_file.read_text())

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                (job,) = [job for job in browser.json("api/jobs") if job["state"] == "running"]
                assert browser.status(f"api/jobs/{job['job_id']}/stop", post=True, **{"X-NFDT": "1"}) == 200

    _, history = fit(cluster, [Stop()], epochs=50)
    assert 1 <= len(history.history["loss"]) < 50


def test_a_link_of_the_command_has_the_rights_of_its_token(cluster, folder):
    mine = folder / "mine"
    mine.write_text(READER)
    mine.chmod(0o600)
    command = [*NFDT, "ui", "--no-open", "--server", cluster.address, "--token-file", str(mine)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    browser = Browser(page_of(cluster))
    assert browser.status(done.stdout.strip()) == 200
    assert browser.json("api/jobs") == []


def test_a_killed_worker_is_shown_as_lost(cluster):
    browser = Browser(page_of(cluster), cluster.token_file.read_text())
    lost = threading.Event()
    found: list[str] = []

    def follow() -> None:
        (job,) = [job for job in browser.json("api/jobs") if job["state"] == "running"]
        for name, value in browser.messages(job["job_id"]):
            if name == "events":
                found.extend(event["data"]["worker"] for event in value if event["kind"] == "worker_lost")
            if found:
                lost.set()

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                thread = threading.Thread(target=follow, daemon=True)
                thread.start()
                client = JobsClient(cluster.address, cluster.token_file.read_text())
                slot = next(slot for slot in client.slots() if slot.role == "worker" and slot.job_id)
                client.close()
                (process,) = [p for p in descendants(cluster.process.pid) if p.pid == slot.pid]
                process.send_signal(signal.SIGKILL)
                assert lost.wait(60)

    fit(cluster, [Kill()])
    assert found[0] in ("worker-0", "worker-1")


def test_the_page_of_a_finished_job_is_there_after_a_restart(trained, cluster, folder):
    _, seen, _, history = trained
    stop(cluster.process)
    again = start_server(folder, "--ui", "127.0.0.1:0", "--workers", "2")
    cluster.process, cluster.address = again.process, again.address
    browser = Browser(page_of(cluster), cluster.token_file.read_text())
    ends = [event["data"] for event in browser.events(seen.job_id) if event["kind"] == "epoch_end"]
    assert [end["logs"]["loss"] for end in ends] == history.history["loss"]
    assert browser.json(f"api/jobs/{seen.job_id}")["statistics"]
