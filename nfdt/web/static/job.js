// One job: what its events say, kept as they come.

import { isAlert, levelOf, textOf } from "./events.js";
import { $, ENDED, clock, get, request, tell } from "./format.js";
import { draw } from "./panels.js";

const REDRAW_MS = 500;
const LOG_LINES = 2000;
const ALERTS = 50;

const view = {
  id: "", job: null, fields: {}, epochs: new Map(), rates: new Map(), steps: [], points: [], log: [], alerts: [], lost: new Map(), joined: new Map(),
  marks: [], batches: [], plans: [], codecs: new Map(), epoch: null, trained: { samples: 0, seconds: 0 }, dirty: true,
};

const HANDLERS = {
  state: (data, event) => {
    view.job.state = data.state;
    view.job.reason = data.reason || "";
    if (data.state === "starting") view.job.started_at = event.at;
    if (ENDED.includes(data.state)) view.job.ended_at = event.at;
  },
  epoch_begin: (data, event) => {
    view.epoch = { ...data, at: event.at, done: 0 };
    view.job.epoch = data.epoch;
    view.marks.push({ at: event.at, colour: "#8885", text: `epoch ${data.epoch + 1}` });
  },
  progress: (data, event) => {
    view.steps.push({ at: event.at, logs: data.logs });
    if (view.epoch) view.epoch.done = data.steps;
    view.job.logs = data.logs;
  },
  epoch_end: data => {
    view.epochs.set(data.epoch + 1, { ...data.logs, ...ofValidation(data.val_logs) });
    if (data.learning_rate != null) view.rates.set(data.epoch + 1, data.learning_rate);
    view.job.logs = { ...data.logs, ...ofValidation(data.val_logs) };
    view.trained.samples += data.samples;
    view.trained.seconds += data.seconds;
    if (view.epoch) view.epoch.done = data.steps;
  },
  validated: data => view.epochs.set(data.epoch + 1, { ...view.epochs.get(data.epoch + 1), ...ofValidation(data.val_logs) }),
  worker_joined: (data, event) => {
    view.joined.set(data.worker, data);
    view.lost.delete(data.worker);
    view.marks.push({ at: event.at, colour: "#009e73" });
  },
  worker_lost: (data, event) => {
    view.lost.set(data.worker, { ...data, at: event.at });
    view.marks.push({ at: event.at, colour: "#d55e00" });
  },
  speed: (data, event) => view.batches.push({ at: event.at, workers: data.workers }),
  plan: (data, event) => view.plans.push(`${clock(event.at)} ${data.reason}`),
  groups: (data, event) => view.plans.push(`${clock(event.at)} groups ${data.groups.map(g => g.members.join("+")).join(" | ")}: ${data.reason}`),
  forecast: data => { view.forecast = data; },
  codec: data => view.codecs.set(data.worker, { short: `${data.push}, ${data.reply}`, text: `${data.worker}: gradients in ${data.push}, weights in ${data.reply}` }),
};

const ofValidation = logs => Object.fromEntries(Object.entries(logs || {}).map(([name, value]) => [`val_${name}`, value]));

function logLine(event) {
  if (["progress", "speed"].includes(event.kind)) return;
  add(view.log, `${clock(event.at)} ${levelOf(event).padEnd(7)} ${event.kind.padEnd(13)} ${textOf(event)}`, LOG_LINES);
  if (isAlert(event)) add(view.alerts, event, ALERTS);
}

function add(values, value, most) {
  values.push(value);
  if (values.length > most) values.splice(0, values.length - most);
}

export async function showJob(id) {
  view.id = id;
  $("title").textContent = id;
  try {
    view.job = await get(`/api/jobs/${id}`);
  } catch (error) {
    tell(error);
    return;
  }
  $("job").hidden = false;
  view.job.fields.forEach((name, index) => { view.fields[name] = index; });
  document.title = `${view.job.name || id} · NFDT`;
  $("title").textContent = view.job.name ? `${view.job.name} (${id})` : id;
  $("weights").href = `/api/jobs/${id}/weights.npz`;
  const size = view.job.variables.reduce((sum, [, shape]) => sum + shape.reduce((a, b) => a * b, 1), 0);
  $("options").textContent = `${view.job.model}: ${view.job.variables.length} trainable variables, ${size.toLocaleString()} weights\n`
    + view.job.variables.map(([name, shape]) => `  ${name} (${shape.join(", ")})`).join("\n")
    + `\n\n${JSON.stringify(view.job.options, null, 1)}`;
  for (const action of ["stop", "cancel"]) $(action).onclick = () => act(action);
  for (const name of ["filter", "chosen", "smoothing", "logarithmic"]) $(name).addEventListener("input", () => { view.dirty = true; });
  listen();
  setInterval(() => { if (view.dirty) { view.dirty = false; draw(view); } }, REDRAW_MS);
}

async function act(action) {
  if (action === "cancel" && !confirm("Cancel this job? Its result is lost.")) return;
  try {
    await request(`/api/jobs/${view.id}/${action}`, { method: "POST", headers: { "X-NFDT": "1" } });
    tell();
  } catch (error) {
    tell(error);
  }
}

function listen() {
  const stream = new EventSource(`/api/jobs/${view.id}/stream`); // connects again by itself, after the last event
  stream.addEventListener("events", message => {
    for (const event of JSON.parse(message.data)) {
      HANDLERS[event.kind]?.(event.data, event);
      logLine(event);
    }
    view.dirty = true;
  });
  stream.addEventListener("points", message => {
    const last = view.points.at(-1)?.at ?? 0;
    view.points.push(...JSON.parse(message.data).filter(point => point.at > last));
    const known = name => name in view.job.statistics || view.joined.has(name);
    if (!Object.keys(view.points.at(-1)?.workers ?? {}).every(known)) refresh(); // ranks, which join as one worker
    view.dirty = true;
  });
  stream.addEventListener("end", () => {
    stream.close();
    $("link").textContent = "";
    for (const text of document.querySelectorAll(".empty.recent")) text.textContent = "Not kept: the server holds the last quarter of an hour of a job, until it restarts.";
    for (const text of document.querySelectorAll(".empty:not(.recent)")) text.textContent = "The job has no such data.";
  });
  stream.onopen = () => { $("link").textContent = ""; };
  stream.onerror = () => {
    $("link").textContent = stream.readyState === EventSource.CLOSED ? "The page is no longer open: nfdt ui makes a new link."
      : "The server does not answer, trying again.";
  };
}

async function refresh() {
  try {
    view.job.statistics = (await get(`/api/jobs/${view.id}`)).statistics;
  } catch (error) {
    tell(error);
  }
}
