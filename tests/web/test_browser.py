"""The page in a browser: what its script draws of real jobs."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest
from nfdt_client.connection import JobsClient
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

import nfdt
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import AuditLog, Holders
from nfdt.core.jobs.store import JobStore
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.web.pages import PageSource
from nfdt.web.server import PageAddress, PageServer
from tests.support.browser import Browser
from tests.support.scripts import descendants, start_server, stop

EPOCHS = 4
WAIT_S = 120
MANY = 200  # workers
LOST_S = 3.0  # limit from the loss of a worker to its mark on the page
pytestmark = pytest.mark.browser
SCREENSHOTS = os.environ.get("NFDT_TEST_SCREENSHOTS")  # directory for pictures of the page; none are made without it
CHARTS = (
    "return Object.fromEntries([...document.querySelectorAll('#epochs [data-chart]')]"
    ".map(box => [box.dataset.chart, box.plot.data]))"
)


@pytest.fixture(scope="module")
def chromium():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,2400"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(WAIT_S)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("browser"), "--ui", "127.0.0.1:0", "--workers", "2")
    yield cluster
    stop(cluster.process)


@pytest.fixture(scope="module")
def page(cluster, chromium):
    """Return the page's address, after the link has been opened in the browser."""
    with closing(JobsClient(cluster.address, cluster.token_file.read_text())) as client:
        link = client.open_page()
    chromium.get(link)
    return link.partition("open?")[0]


def until(chromium, script: str, timeout_s: float = WAIT_S):
    """Return what a script returns as soon as that is true."""
    return WebDriverWait(chromium, timeout_s, poll_frequency=0.1).until(lambda driver: driver.execute_script(script))


def fit(cluster, callbacks=(), **more):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).random((320, 8), dtype="float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    options = {"server": cluster.address, "token_file": str(cluster.token_file), "workers": 2}
    with nfdt.session(**options, **more, emulate={"step_ms": (20, 60)}):
        return model.fit(
            x, x.sum(1), batch_size=8, epochs=EPOCHS, validation_split=0.2, verbose=0, callbacks=list(callbacks)
        )


def running(cluster, page: str) -> str:
    browser = Browser(page, cluster.token_file.read_text())
    (job,) = [job for job in browser.json("api/jobs") if job["state"] == "running"]
    return job["job_id"]


def picture(chromium, name: str) -> None:
    if SCREENSHOTS:
        chromium.save_screenshot(str(Path(SCREENSHOTS) / name))


def test_curves_have_as_many_points_as_epochs(cluster, chromium, page, tmp_path):
    plan = tmp_path / "plan.json"
    planned = {"algorithm": "ddc-asgd", "samples_per_s": 12345.0, "staleness": 1.5}
    plan.write_text(json.dumps({"workers": 2, "forecasts": [planned]}))

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.job_id = running(cluster, page)
                chromium.get(f"{page}jobs/{self.job_id}")
                until(chromium, "return document.querySelectorAll('#workers tbody tr').length === 2")

    look = Look()
    history = fit(cluster, [look], forecast=str(plan)).history
    until(chromium, "return document.getElementById('state').textContent === 'succeeded'")
    until(chromium, f"return document.querySelector('#epochs [data-chart]').plot.data[0].length === {EPOCHS}")
    charts = chromium.execute_script(CHARTS)
    assert set(charts) == {"loss", "mae"}
    for name, (epochs, training, validation) in charts.items():
        assert epochs == [1, 2, 3, 4]
        assert training == pytest.approx(history[name])
        assert validation == pytest.approx(history[f"val_{name}"])
    assert until(chromium, "return document.querySelectorAll('#speed canvas').length") == 1
    assert "ddc-asgd on 2 workers" in chromium.find_element("id", "what").text
    planned_and_measured = r"planned 12,345 samples/s at a staleness of 1.5, measured [\d,]+ at [\d.]+ \(-\d+ %\)"
    assert re.fullmatch(planned_and_measured, chromium.find_element("id", "forecast").text)
    picture(chromium, "page.png")
    errors = [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []


def test_a_killed_worker_is_marked_as_lost_within_three_seconds(cluster, chromium, page):
    seen: dict[str, float] = {}
    killed = threading.Event()

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch != 0:
                return
            job_id = running(cluster, page)
            chromium.get(f"{page}jobs/{job_id}")
            until(chromium, "return document.querySelectorAll('#workers tbody tr').length === 2")
            client = JobsClient(cluster.address, cluster.token_file.read_text())
            slot = next(slot for slot in client.slots() if slot.role == "worker" and slot.job_id == job_id)
            client.close()
            (process,) = [p for p in descendants(cluster.process.pid) if p.pid == slot.pid]
            process.send_signal(signal.SIGKILL)
            began = time.monotonic()
            until(chromium, "return document.querySelector('#workers tr.lost') !== null")
            seen["after_s"] = time.monotonic() - began
            killed.set()

    fit(cluster, [Kill()])
    assert killed.is_set()
    assert seen["after_s"] < LOST_S * max(1.0, os.getloadavg()[0])


class Unqueued:
    """Runner of jobs that have all begun."""

    def places(self):
        return {}


@pytest.fixture
def crowd(tmp_path):
    """Serve the page of a running job with 200 workers, of which one is lost; return its link and its store."""
    spec = JobSpec(
        program="0" * 64,
        algorithm=resolve_algorithm("ddc-asgd"),
        cluster=ClusterSpec(workers=MANY),
        fit=FitSpec(epochs=2, batch_size=8),
        train=DataSpec(kind="arrays", samples=800),
    )
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add("job-1", spec.model_dump_json(), session="", owner="")
    for state in ("starting", "running"):
        store.transition("job-1", state)
    for index in range(MANY):
        worker = f"worker-{index}"
        joined = {"worker": worker, "index": index, "pid": 1, "host": "h", "device": "cpu"}
        store.append("job-1", "worker_joined", joined)
    store.append("job-1", "worker_lost", {"worker": "worker-3", "reason": "SIGKILL", "requeued": 1})
    holders = Holders([token := secrets.token_hex(16)])
    source = PageSource(store, ArtifactStore(tmp_path / "artifacts"), Unqueued(), holders, AuditLog(tmp_path / "audit"))
    server = PageServer(PageAddress("127.0.0.1:0"), source)
    server.start()
    yield server.make_link(holders.find(token), "job-1"), store
    server.stop()
    store.close()


def test_200_workers_have_32_rows_and_one_for_the_others(chromium, crowd):
    link, store = crowd
    chromium.get(link)

    def report(seconds: int) -> None:
        row = {"samples": 100 * seconds, "steps": seconds, "compute_s": seconds, "staleness": {"1": seconds}}
        store.update("job-1", workers_json=json.dumps({f"worker-{index}": row for index in range(MANY)}))

    for seconds in (1, 2, 3):
        report(seconds)
        least = f"Number(document.querySelector('#workers tbody tr td:nth-child(6)')?.textContent) >= {100 * seconds}"
        until(chromium, f"return {least}")
    rows = chromium.find_elements("css selector", "#workers tbody tr")
    assert len(rows) == 33
    cells = [cell.text for cell in rows[-1].find_elements("css selector", "td")]
    assert (cells[0], cells[5]) == ("168 others", str(168 * 300))
    assert len(chromium.find_elements("css selector", "#strip .row")) == 32
    count = chromium.execute_script("return document.querySelector('#speed [data-chart]').plot.series.length")
    assert count == 1 + 33
    assert "lost" in chromium.find_element("css selector", "#workers tr.lost").text
    picture(chromium, "page-200.png")
    errors = [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []


@pytest.fixture(scope="module")
def trained(cluster):
    fit(cluster)


@pytest.mark.usefixtures("trained")
def test_the_list_leads_to_the_jobs(chromium, page):
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length > 0")
    assert "succeeded" in chromium.find_element("id", "jobs").text
    chromium.find_element("css selector", "#jobs tbody a").click()
    until(chromium, "return document.getElementById('state').textContent === 'succeeded'")


@pytest.mark.usefixtures("trained")
def test_the_page_fits_a_phone(chromium, page):
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length > 0")
    chromium.find_element("css selector", "#jobs tbody a").click()
    until(chromium, "return document.querySelector('#epochs [data-chart]') !== null")
    chromium.set_window_size(420, 900)
    assert until(chromium, "return document.getElementById('job').scrollWidth <= window.innerWidth")
    chromium.set_window_size(1200, 2400)


def test_without_a_cookie_nothing_is_shown(chromium, page):
    chromium.delete_all_cookies()
    chromium.get(page)
    assert "nfdt ui" in chromium.find_element("tag name", "body").text
    assert not chromium.find_elements("id", "jobs")
