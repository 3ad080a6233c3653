"""The page in a browser: what its script draws of real jobs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest
from nfdt_client.connection import JobsClient
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
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
JUST_SEEN = 0.05  # distance of colours in OKLab that are told apart side by side: several times the least one
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


def oklab(colour: str) -> tuple[float, float, float]:
    """Return the coordinates of ``#rrggbb`` in OKLab, in which distances are those that are seen."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in (red, green, blue)]
    to_cones = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    to_lab = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    found = np.array(to_lab) @ np.cbrt(np.array(to_cones) @ linear)
    return tuple(found.tolist())


def picture(chromium, name: str) -> None:
    if SCREENSHOTS:
        chromium.save_screenshot(str(Path(SCREENSHOTS) / name))


def test_curves_have_as_many_points_as_epochs(cluster, chromium, page, tmp_path):
    plan = tmp_path / "plan.json"
    planned = {"algorithm": "ddc-asgd", "samples_per_s": 12345.0, "staleness": 1.5, "speed_up": 123.45}
    plan.write_text(json.dumps({"workers": 2, "forecasts": [planned]}))

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.job_id = running(cluster, page)
                chromium.get(f"{page}jobs/{self.job_id}")
                until(chromium, "return document.querySelectorAll('#workers tbody tr:not(.shard)').length === 2")

    look = Look()
    history = fit(cluster, [look], forecast=str(plan)).history
    until(chromium, "return document.getElementById('state').textContent === 'succeeded'")
    until(chromium, f"return document.querySelector('#epochs [data-chart]').plot.data[0].length === {EPOCHS}")
    charts = chromium.execute_script(CHARTS)
    epochs, rates = charts.pop("learning rate")
    assert (epochs, rates) == ([1, 2, 3, 4], pytest.approx([0.01] * EPOCHS))
    assert set(charts) == {"loss", "mae"}
    for name, (epochs, training, validation) in charts.items():
        assert epochs == [1, 2, 3, 4]
        assert training == pytest.approx(history[name])
        assert validation == pytest.approx(history[f"val_{name}"])
    assert until(chromium, "return document.querySelectorAll('#speed canvas').length") == 1
    assert "ddc-asgd on 2 workers" in chromium.find_element("id", "what").text
    tiles = [tile.text.split("\n") for tile in chromium.find_elements("css selector", "#tiles div")]
    assert [name for name, *_ in tiles] == ["samples/s", "progress", "loss", "workers", "mean staleness"]
    times = float(re.fullmatch(r"(.+) times one machine, \d+ % of the plan", tiles[0][2])[1])
    assert times == pytest.approx(float(tiles[0][1]) / 100, abs=0.06)  # planned are 12,345 / 123.45 on one machine
    assert tiles[1][1] == "epoch 4 of 4"
    assert tiles[1][2].startswith("100 %, took ")
    assert float(tiles[2][1]) == pytest.approx(history["loss"][-1], rel=1e-3)
    assert tiles[3][1:] == ["2 / 2", "0 lost"]
    assert 0 <= float(tiles[4][1]) < 8
    planned_and_measured = r"planned 12,345 samples/s at a staleness of 1.5, measured [\d,]+ at [\d.]+ \(-\d+ %\)"
    assert re.fullmatch(planned_and_measured, chromium.find_element("id", "forecast").text)
    picture(chromium, "page.png")
    errors = [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []


def test_what_processes_use_and_do_is_shown_with_their_machine(cluster, chromium, page):
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch:
                return
            chromium.get(f"{page}jobs/{running(cluster, page)}")
            for process, code in (("worker-1", "nfdt/worker/"), ("shard-0", "nfdt/shard/")):
                button = f"document.querySelector('[aria-label=\"stack traces of {process}\"]')"
                until(chromium, f"return {button} && ({button}.click(), true)")
                until(chromium, "return document.querySelector('#stacks pre').textContent.includes('MainThread')")
                seen[process] = code in chromium.find_element("css selector", "#stacks pre").text
                picture(chromium, f"page-stacks-{process}.png")
                chromium.find_element("css selector", "#stacks button").click()
            until(chromium, "return document.querySelector('#usage [data-chart]')?.plot.data[0].length > 2")
            names = "box => [box.dataset.chart, box.plot.series.slice(1).map(each => each.label)]"
            charts = f"Object.fromEntries([...document.querySelectorAll('#usage [data-chart]')].map({names}))"
            seen["usage"] = chromium.execute_script(f"return {charts}")
            last = "box => [box.dataset.chart, box.plot.data.slice(1).map(values => values.at(-1))]"
            values = f"Object.fromEntries([...document.querySelectorAll('#usage [data-chart]')].map({last}))"
            seen["values"] = chromium.execute_script(f"return {values}")
            chromium.get(f"{page}machines")
            until(chromium, "return document.querySelectorAll('#machines tbody tr').length === 1")
            cells = "[...document.querySelectorAll('#machines td')].map(cell => cell.innerText)"
            seen["machine"] = chromium.execute_script(f"return {cells}")
            picture(chromium, "page-machines.png")

    fit(cluster, [Look()])
    assert (seen["worker-1"], seen["shard-0"]) == (True, True)
    processes = ["worker-0", "worker-1", "shard-0", "server"]
    titles = ["CPU, % of one core", "memory now, MB", "peak memory, MB"]  # no GPU
    assert seen["usage"] == dict.fromkeys(titles, processes)
    now, peak = seen["values"]["memory now, MB"], seen["values"]["peak memory, MB"]
    assert all(30 < each <= most + 1 for each, most in zip(now, peak, strict=True))
    host, devices, jobs, workers, shards, free, away, cores, memory = seen["machine"]
    assert (host, devices, workers, away) == (socket.gethostname(), "cpu", "2", "0")
    assert jobs.startswith("job-")
    assert 0 <= float(cores.split(" of ")[0]) <= os.cpu_count() == int(cores.split(" of ")[1])
    assert re.fullmatch(r"[\d.]+ GB of [\d.]+ GB", memory)


def test_a_killed_worker_is_marked_as_lost_within_three_seconds(cluster, chromium, page):
    seen: dict[str, float] = {}
    killed = threading.Event()

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch != 0:
                return
            job_id = running(cluster, page)
            chromium.get(f"{page}jobs/{job_id}")
            until(chromium, "return document.querySelectorAll('#workers tbody tr:not(.shard)').length === 2")
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
    # An element that was found may be replaced before it is read.
    alert = chromium.execute_script("return document.querySelector('#alerts li.warning').innerText")
    assert re.search(r"worker lost: worker-\d: its process", alert)
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#all-alerts li').length > 0")
    assert "worker lost" in chromium.find_element("id", "all-alerts").text
    picture(chromium, "page-alerts.png")


class Unqueued:
    """Runner of jobs that have all begun."""

    def places(self):
        return {}

    def slots(self, role=None):
        return []


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


def report(chromium, store: JobStore) -> None:
    """Let all workers report three times, each time until the page shows it."""
    for seconds in (1, 2, 3):
        row = {"samples": 100 * seconds, "steps": seconds, "compute_s": seconds, "staleness": {"1": seconds}}
        store.update("job-1", workers_json=json.dumps({f"worker-{index}": row for index in range(MANY)}))
        least = f"Number(document.querySelector('#workers tbody tr td:nth-child(6)')?.textContent) >= {100 * seconds}"
        until(chromium, f"return {least}")


def test_200_workers_have_32_rows_and_one_for_the_others(chromium, crowd):
    link, store = crowd
    chromium.get(link)
    report(chromium, store)
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


def test_the_workers_that_are_shown_can_be_chosen_and_told_apart(chromium, crowd):
    link, store = crowd
    chromium.get(link)
    report(chromium, store)
    plot = "document.querySelector('#speed [data-chart]').plot"
    strokes = chromium.execute_script(f"return {plot}.series.slice(1).map(each => each.stroke())")
    assert min(math.dist(oklab(a), oklab(b)) for a, b in itertools.combinations(strokes[1:], 2)) > JUST_SEEN
    last = strokes[-1]  # that of worker-0: the upper of stacked lines are drawn first
    chromium.find_element("id", "chosen").send_keys("worker-17, lost, worker-0")
    until(chromium, "return document.querySelectorAll('#workers tbody tr').length === 13")
    names = [cell.text for cell in chromium.find_elements("css selector", "#workers tbody td:first-child")]
    assert names == ["worker-0", "worker-3", "worker-17", *(f"worker-{index}" for index in range(170, 180))]
    assert chromium.find_element("id", "found").text == "13 of 200 workers"
    assert chromium.execute_script(f"return {plot}.series.slice(1).map(each => each.label)") == names[::-1]
    assert chromium.execute_script(f"return {plot}.series.at(-1).stroke()") == last


def test_a_text_says_why_a_panel_is_empty_and_what_has_failed(chromium, crowd):
    link, store = crowd
    chromium.get(link)
    until(chromium, "return document.querySelectorAll('#workers tbody tr').length === 33")
    texts = [text.text for text in chromium.find_elements("css selector", ".empty") if text.is_displayed()]
    assert {"No epoch has ended yet.", "No worker has reported yet."} <= set(texts)
    tiles = [tile.text.split("\n")[1] for tile in chromium.find_elements("css selector", "#tiles div")]
    assert tiles == ["-", "epoch 1 of 2", "-", f"{MANY - 1} / {MANY}", "-"]
    chromium.get(link.partition("open?")[0] + "jobs/job-2")
    until(chromium, "return document.getElementById('error').textContent.includes(\"No job 'job-2'\")")


def test_a_loss_that_is_no_number_is_shown(chromium, crowd):
    link, store = crowd
    ended = {"epoch": 0, "logs": {"loss": math.nan}, "val_logs": None, "seconds": 1.0, "steps": 1, "samples": 8}
    store.append("job-1", "epoch_end", ended)
    store.update("job-1", last_logs_json=json.dumps({"loss": math.nan}))
    chromium.get(link)
    until(chromium, "return document.getElementById('tile-loss').textContent === 'nan'")
    chromium.get(link.partition("open?")[0])
    assert until(chromium, "return document.querySelector('#jobs tbody tr')?.textContent").startswith("job-1")


@pytest.fixture(scope="module")
def trained(cluster):
    return [fit(cluster, job=name).history for name in ("first", "second")]


def open_job(chromium, page: str, name: str) -> None:
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length > 0")
    row = next(row for row in chromium.find_elements("css selector", "#jobs tbody tr") if name in row.text.split())
    row.find_element("tag name", "a").click()
    until(chromium, f"return document.querySelector('#epochs [data-chart]')?.plot.data[0].length === {EPOCHS}")


def test_metrics_can_be_read_smoothed_and_drawn_on_a_logarithmic_scale(chromium, page, trained):
    history = trained[1]
    open_job(chromium, page, "second")
    chart = "document.querySelector('#epochs [data-chart=loss]')"
    legend = f"[...{chart}.querySelectorAll('.u-value')].map(value => Number(value.textContent))"
    values = chromium.execute_script(f"return {legend}")
    assert values == [EPOCHS, *(pytest.approx(history[name][-1], rel=1e-3) for name in ("loss", "val_loss"))]
    over = chromium.execute_script(f"return {chart}.plot.over")
    chromium.execute_script(f"{chart}.scrollIntoView({{block: 'center'}})")
    left = -(over.size["width"] // 2) + 2
    ActionChains(chromium).move_to_element_with_offset(over, left, 0).perform()
    until(chromium, f"return {legend}[0] === 1")
    assert chromium.execute_script(f"return {legend}[1]") == pytest.approx(history["loss"][0], rel=1e-3)

    slider = "document.getElementById('smoothing')"
    chromium.execute_script(f"{slider}.value = 0.5; {slider}.dispatchEvent(new Event('input'))")
    chromium.find_element("id", "logarithmic").send_keys(" ")
    until(chromium, f"return {chart}.plot.series.length === 5 && {chart}.plot.scales.y.distr === 3")
    raw, mean = chromium.execute_script(f"return {chart}.plot.data.slice(1, 3)")
    averages, weights = [0.0], [0.0]
    for value in history["loss"]:
        averages.append(0.5 * averages[-1] + 0.5 * value)
        weights.append(0.5 * weights[-1] + 0.5)
    assert raw == pytest.approx(history["loss"])
    assert mean == pytest.approx([a / w for a, w in zip(averages[1:], weights[1:], strict=True)])


def test_jobs_are_compared_in_one_chart(chromium, page, trained):
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs .sparkline').length >= 2")
    for name in ("first", "second"):
        chromium.find_element("css selector", f"[aria-label='compare {name}']").send_keys(" ")
    chart = "document.querySelector('#compared [data-chart=val_loss]')"
    until(chromium, f"return {chart}?.plot.series.length === 3")
    chromium.refresh()  # the address names the jobs
    until(chromium, f"return {chart}?.plot.series.length === 3")
    found = chromium.execute_script(f"return [{chart}.plot.series.slice(1).map(each => each.label), {chart}.plot.data]")
    labels, (epochs, *losses) = found
    assert [label.split()[0] for label in labels] == ["second", "first"]
    assert epochs == [1, 2, 3, 4]
    assert losses == [pytest.approx(history["val_loss"]) for history in reversed(trained)]
    chromium.find_element("id", "over").send_keys("seconds")
    until(chromium, f"return {chart}.plot.data[0].length === {2 * EPOCHS}")
    label = chromium.find_element("css selector", "#jobs .sparkline").get_attribute("aria-label")
    assert label.startswith(f"loss of {EPOCHS} epochs, from ")


def test_the_page_can_be_used_by_keyboard_and_is_described(chromium, page, trained):
    open_job(chromium, page, "first")
    shown = [each for each in chromium.find_elements("css selector", "canvas, input, button, a") if each.is_displayed()]
    assert len(shown) > 10
    assert [each.get_attribute("outerHTML") for each in shown if not each.accessible_name] == []
    name = chromium.find_element("css selector", "#epochs .u-series:nth-child(2) th")
    name.send_keys(Keys.ENTER)
    assert until(chromium, "return document.querySelector('#epochs [data-chart]').plot.series[1].show === false")
    assert name.get_attribute("aria-pressed") == "false"


@pytest.mark.usefixtures("trained")
def test_the_list_leads_to_the_jobs(chromium, page):
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length > 0")
    assert "succeeded" in chromium.find_element("id", "jobs").text
    chromium.find_element("id", "search").send_keys("second, no-such-script")
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length === 1")
    assert re.fullmatch(r"1 of \d+ jobs", chromium.find_element("id", "listed").text)
    chromium.find_element("css selector", "#jobs tbody a").click()
    until(chromium, "return document.getElementById('state').textContent === 'succeeded'")


@pytest.mark.usefixtures("trained")
def test_the_page_fits_a_phone(chromium, page):
    device = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}  # narrower than a window may be
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    chromium.get(page)
    until(chromium, "return document.querySelectorAll('#jobs tbody tr').length > 0")
    fits = "return document.documentElement.scrollWidth <= window.innerWidth && window.innerWidth <= 400"
    assert until(chromium, fits)
    open_job(chromium, page, "first")
    assert until(chromium, fits)
    # The job has ended: nothing but a change of its box draws a chart again.
    device["width"] = 1000
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    boxes = "[...document.querySelectorAll('[data-chart]')]"
    assert until(chromium, f"return {boxes}.every(box => box.plot.width === box.clientWidth - 4)")
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_without_a_cookie_nothing_is_shown(chromium, page):
    chromium.delete_all_cookies()
    chromium.get(page)
    assert "nfdt ui" in chromium.find_element("tag name", "body").text
    assert not chromium.find_elements("id", "jobs")
