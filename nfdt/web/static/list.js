// The list of jobs, and the metrics of those that are compared.

import { keepCharts, lines, smoothed, sparkline, styleOf } from "./charts.js";
import { drawAlerts } from "./events.js";
import { $, ENDED, at, element, fill, get, isNumber, logsText, matches, short, tell, wordsOf } from "./format.js";

const EVERY_MS = 2000;
const MOST_CURVES = 50; // jobs, the latest, that have a small line
const MOST_METRICS = 2; // of a job in the table
const MOST_ALERTS = 20; // of all these jobs
const rows = {}; // by job
const alerts = {}; // by job
const curves = {}; // of each job, its epochs and what they were read for
const compared = new Set((new URLSearchParams(location.search).get("compare") ?? "").split(",").filter(Boolean));
let jobs = [];

export function showList() {
  $("list").hidden = false;
  $("title").textContent = "jobs";
  $("compare-tools").append($("scales"));
  $("search").addEventListener("input", drawTable);
  for (const name of ["over", "smoothing", "logarithmic"]) $(name).addEventListener("input", drawComparison);
  const again = () => update().then(() => tell(), tell).then(() => setTimeout(again, EVERY_MS));
  again();
}

async function update() {
  jobs = (await get("/api/jobs")).reverse();
  drawTable();
  const wanted = jobs.filter((job, index) => index < MOST_CURVES || compared.has(job.job_id));
  const changed = wanted.filter(job => curves[job.job_id]?.stamp !== stampOf(job));
  await Promise.all(changed.map(async job => {
    curves[job.job_id] = { stamp: stampOf(job), epochs: await get(`/api/jobs/${job.job_id}/epochs`) };
  }));
  const alarming = wanted.filter(job => changed.includes(job) || !ENDED.includes(job.state)); // a job that stalls changes nothing else
  await Promise.all(alarming.map(async job => { alerts[job.job_id] = await get(`/api/jobs/${job.job_id}/alerts`); }));
  const all = wanted.flatMap(job => alerts[job.job_id].map(event => ({ ...event, job }))).sort((a, b) => a.at - b.at);
  drawAlerts($("all-alerts"), all.slice(-MOST_ALERTS), ({ job }) => [element("a", { href: `/jobs/${job.job_id}` }, job.name || job.job_id), " "]);
  if (changed.length) drawTable();
  drawComparison();
}

const textOfJob = job => [job.job_id, job.name, job.state, job.algorithm, job.user, job.script, job.model].join(" ");
const stampOf = job => JSON.stringify([job.state, job.epoch, job.logs]);

function drawTable() {
  const body = $("jobs").tBodies[0], words = wordsOf("search"), shown = jobs.filter(job => matches(textOfJob(job), words));
  $("none").hidden = jobs.length > 0;
  $("listed").textContent = words.length ? `${shown.length} of ${jobs.length} jobs` : "";
  shown.forEach((job, index) => {
    const tr = rows[job.job_id] ??= makeRow(job);
    const losses = (curves[job.job_id]?.epochs ?? []).map(epoch => epoch.logs.loss).filter(isNumber);
    const text = `loss of ${losses.length} epochs, from ${short(losses[0] ?? "-")} to ${short(losses.at(-1) ?? "-")}`;
    const state = job.state + (job.place ? ` (${job.place} in queue)` : "");
    const logs = Object.fromEntries(Object.entries(job.logs).filter(([, value]) => isNumber(value)).slice(0, MOST_METRICS));
    fill(tr, [tr.cells[0].firstChild, tr.cells[1].firstChild, job.name || "-", state, `${Math.min(job.epoch + 1, job.epochs)}/${job.epochs}`,
      losses.length ? sparkline(losses, text) : "-", logsText(logs) || "-", job.algorithm, job.workers, job.script || "-", at(job.submitted_at)]);
    if (body.rows[index] !== tr) body.insertBefore(tr, body.rows[index] ?? null);
  });
  while (body.rows.length > shown.length) body.lastChild.remove();
}

function makeRow(job) {
  const box = element("input", { type: "checkbox", "aria-label": `compare ${job.name || job.job_id}` });
  box.checked = compared.has(job.job_id);
  box.addEventListener("change", () => {
    box.checked ? compared.add(job.job_id) : compared.delete(job.job_id);
    history.replaceState(null, "", compared.size ? `/?compare=${[...compared].join()}` : "/");
    drawComparison();
  });
  return fill(document.createElement("tr"), [box, element("a", { href: `/jobs/${job.job_id}` }, job.job_id)]);
}

// One chart for each metric, with a line for each job.
function drawComparison() {
  const over = $("over").value, weight = Number($("smoothing").value);
  $("smoothing").nextElementSibling.textContent = weight;
  const chosen = jobs.filter(job => compared.has(job.job_id) && curves[job.job_id]?.epochs.length);
  const names = [...new Set(chosen.flatMap(job => curves[job.job_id].epochs.flatMap(epoch => Object.keys(epoch.logs))))];
  for (const name of names) {
    const tables = chosen.map(job => {
      const epochs = curves[job.job_id].epochs.filter(epoch => isNumber(epoch.logs[name]));
      return [epochs.map(epoch => epoch[over]), epochs.map(epoch => epoch.logs[name])];
    });
    const [x, ...columns] = uPlot.join(tables), series = {}, styles = {};
    chosen.forEach((job, index) => {
      const label = job.name ? `${job.name} (${job.job_id})` : job.job_id;
      series[label] = columns[index].map(value => value ?? null);
      styles[label] = styleOf(jobs.length - 1 - jobs.indexOf(job)); // as long as the page is open, and for all its viewers
    });
    const drawn = smoothed(series, weight, styles);
    lines($("compared"), name, x, drawn.series, { x: over, styles: drawn.styles, log: $("logarithmic").checked, gaps: true });
  }
  keepCharts($("compared"), names);
}
