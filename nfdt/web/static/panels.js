// The panels of one job, drawn from what its events and points have told.

import { MOST_LINES, OTHERS, lines, smoothed, styleOf } from "./charts.js";
import { drawAlerts } from "./events.js";
import { $, ENDED, duration, element, isNumber, logsText, matches, short, wordsOf } from "./format.js";
import { drawTable } from "./processes.js";
import { drawStrips } from "./strips.js";

const MOST_STEPS = 600; // points of a metric while epochs run
const RECENT = 10; // points of which the speed is the mean
const ringOf = name => name.split("/")[0]; // worker-0/rank-1 is a rank of worker-0
const byName = (a, b) => a.length - b.length || (a < b ? -1 : 1);
const sum = values => values.reduce((a, b) => a + b, 0);

export function draw(view) {
  const names = workerNames(view), chosen = names.filter(name => isChosen(view, name));
  $("found").textContent = $("chosen").value ? `${chosen.length} of ${names.length} workers` : "";
  drawFacts(view, names);
  drawMetrics(view);
  drawCharts(view, names, chosen);
  drawStrips(view, chosen.slice(0, MOST_LINES), rates);
  drawTable(view, chosen, {
    numbers: name => numbersOf(view, name), about: name => aboutWorker(view, name), lost: name => view.lost.get(ringOf(name)),
    codec: name => view.codecs.get(ringOf(name))?.short ?? view.job.options.algorithm.codec ?? "", cpu: name => cpuRates(view, name).at(-1),
  }, !ENDED.includes(view.job.state));
  drawAlerts($("alerts"), view.alerts);
  list($("plans"), view.plans);
  list($("codecs"), [...view.codecs.values()].map(codec => codec.text));
  drawLog(view);
}

function workerNames(view) {
  const named = [...new Set([...view.joined.keys(), ...Object.keys(view.points.at(-1)?.workers ?? view.job.statistics)])];
  const rings = new Set(named.filter(name => name.includes("/")).map(ringOf)); // of these the ranks are shown
  return named.filter(name => !rings.has(name)).sort(byName);
}

// Whether a worker matches one of the words that are searched for.
function isChosen(view, name) {
  const about = aboutWorker(view, name);
  return matches([name, about.host, about.device, view.lost.has(ringOf(name)) ? "lost" : "here"].join(" "), wordsOf("chosen"));
}

const aboutWorker = (view, name) => ({ ...view.joined.get(ringOf(name)), ...view.job.statistics[name] });

// The numbers of a worker, in the order of the fields; without points, its totals at the end.
function numbersOf(view, name) {
  const last = view.points.at(-1)?.workers[name], found = view.job.statistics[name];
  if (last || !found) return last;
  const bins = Object.entries(found.staleness ?? {});
  const sums = { pushes: sum(bins.map(([, count]) => count)), staleness: sum(bins.map(([tau, count]) => tau * count)) };
  return view.job.fields.map(field => sums[field] ?? found[field] ?? 0);
}

// ---- the job

function tile(name, value, note) {
  const shown = $(`tile-${name}`);
  shown.textContent = value ?? "-";
  if (note !== undefined) shown.nextElementSibling.textContent = note;
}

function drawFacts(view, names) {
  const { job, epoch } = view, running = !ENDED.includes(job.state), at = Math.min(job.epoch + 1, job.epochs);
  $("state").textContent = job.state;
  $("state").className = job.state;
  $("what").textContent = `${job.algorithm} on ${job.workers} worker${job.workers === 1 ? "" : "s"}${job.reason ? `: ${job.reason}` : ""}`;
  const within = epoch?.steps ? Math.min(1, epoch.done / epoch.steps) : 0;
  const done = job.state === "succeeded" ? 1 : job.epochs ? Math.min(1, (job.epoch + within) / job.epochs) : 0;
  const from = job.started_at ?? job.submitted_at, spent = (job.ended_at ?? Date.now() / 1000) - from;
  $("done").value = done;
  const time = !running ? `, took ${duration(spent)}` : done > 0.01 ? `, about ${duration(spent * (1 - done) / done)} left` : "";
  tile("progress", `epoch ${at} of ${job.epochs}`, `${Math.floor(100 * done)} %${time}`);
  drawSpeed(view, running);
  const { loss, val_loss: validation } = job.logs;
  tile("loss", loss === undefined ? "-" : short(loss), validation === undefined ? "" : `validation ${short(validation)}`);
  const here = names.filter(name => !view.lost.has(ringOf(name))).length;
  tile("workers", `${names.length ? here : "-"} / ${job.workers}`, names.length ? `${names.length - here} lost` : "now / asked for");
  const numbers = names.map(name => numbersOf(view, name)).filter(Boolean), { pushes, staleness } = view.fields;
  const applied = sum(numbers.map(found => found[pushes]));
  tile("staleness", applied ? (sum(numbers.map(found => found[staleness])) / applied).toFixed(2) : "-", "updates that gradients missed");
  $("numbers").textContent = logsText(job.logs);
  $("forecast").textContent = view.forecast ? forecastText(view.forecast) : "";
  $("stop").hidden = $("cancel").hidden = !(running && job.may_act);
}

// The speed of the last seconds while the job runs, then that of all its epochs.
function drawSpeed({ job, points, fields, trained }, running) {
  const recent = points.slice(-RECENT - 1), seconds = recent.length > 1 ? recent.at(-1).at - recent[0].at : 0;
  const done = Object.entries(recent.at(-1)?.workers ?? {}).map(([name, now]) => now[fields.samples] - (recent[0].workers[name]?.[fields.samples] ?? 0));
  const speed = running ? (seconds ? Math.max(0, sum(done)) / seconds : null) : trained.seconds ? trained.samples / trained.seconds : null;
  tile("speed", speed === null ? "-" : Math.round(speed).toLocaleString(),
    speed === null ? "" : besidePlan(speed, job.forecast) || (running ? "now" : "mean of all epochs"));
}

// A speed beside the forecast of `nfdt plan` for the job, and beside one machine, which is plain Keras where that was measured.
function besidePlan(speed, forecast) {
  if (!forecast) return "";
  const alone = forecast.speed_up ? `${(speed * forecast.speed_up / forecast.samples_per_s).toFixed(1)} times one machine, ` : "";
  return `${alone}${Math.round(100 * speed / forecast.samples_per_s)} % of the plan`;
}

function forecastText(f) {
  const off = 100 * (f.measured_samples_per_s / f.samples_per_s - 1);
  return `planned ${Math.round(f.samples_per_s).toLocaleString()} samples/s at a staleness of ${f.staleness.toFixed(1)}, `
    + `measured ${Math.round(f.measured_samples_per_s).toLocaleString()} at ${f.measured_staleness.toFixed(1)} `
    + `(${off < 0 ? "" : "+"}${off.toFixed(0)} %)`;
}

function drawMetrics(view) {
  const weight = Number($("smoothing").value), log = $("logarithmic").checked;
  $("smoothing").nextElementSibling.textContent = weight;
  const metric = (parent, name, x, series, options) => {
    const drawn = smoothed(series, weight);
    lines(parent, name, x, drawn.series, { ...options, log, styles: drawn.styles });
  };
  const epochs = [...view.epochs.keys()].sort((a, b) => a - b);
  const names = [...new Set([...view.epochs.values()].flatMap(Object.keys))].filter(name => !name.startsWith("val_"));
  for (const name of names) {
    const series = {};
    for (const label of [name, `val_${name}`]) {
      const values = epochs.map(epoch => view.epochs.get(epoch)[label]).map(value => isNumber(value) ? value : null);
      if (values.some(isNumber)) series[label] = values;
    }
    metric($("epochs"), name, epochs, series, { x: "epoch" });
  }
  if (view.rates.size) lines($("epochs"), "learning rate", epochs, { "learning rate": epochs.map(epoch => view.rates.get(epoch) ?? null) }, { x: "epoch", log });
  const steps = thin(view.steps, MOST_STEPS), marks = view.marks.filter(mark => mark.text);
  for (const name of new Set(steps.flatMap(step => Object.keys(step.logs)))) {
    const values = steps.map(step => step.logs[name]).map(value => isNumber(value) ? value : null);
    metric($("steps"), name, steps.map(step => step.at), { [name]: values }, { marks });
  }
}

function thin(values, most) {
  const every = Math.ceil(values.length / most);
  return values.filter((_, index) => index % every === 0 || index === values.length - 1);
}

// ---- its workers

// Rates of a worker between consecutive points: one value per point after the first.
function rates(view, name, field) {
  const index = view.fields[field];
  return view.points.slice(1).map((point, i) => {
    const now = point.workers[name], before = view.points[i].workers[name], seconds = point.at - view.points[i].at;
    return now && before && seconds > 0 ? Math.max(0, now[index] - before[index]) / seconds : null;
  });
}

const present = (view, name, field) => view.points.slice(1).map(point => point.workers[name]?.[view.fields[field]] ?? null);
const levels = (view, name, field) => view.points.slice(1).map(point => point.workers[name]?.[view.fields[field]] || null);

// A worker that has not reported yet has used no time.
const cpuRates = (view, name) => rates(view, name, "cpu_s").map((rate, i) => view.points[i].workers[name]?.[view.fields.cpu_s] ? rate : null);

// At most MOST_LINES lines; the others are added up in one.
function perWorker(view, names, field, read = rates) {
  const series = {};
  for (const name of names.slice(0, MOST_LINES)) series[name] = read(view, name, field);
  const rest = names.slice(MOST_LINES).map(name => read(view, name, field));
  if (rest.length) series[`${rest.length} others`] = rest[0].map((_, i) => sum(rest.map(values => values[i] ?? 0)));
  return series;
}

const combine = (series, more, join) => Object.fromEntries(Object.entries(series).map(([name, values]) =>
  [name, values.map((value, i) => value === null ? null : join(value, more[name][i]))]));
const scale = (series, factor) => combine(series, series, value => value * factor);

function drawCharts(view, names, chosen) {
  const x = view.points.slice(1).map(point => point.at), { marks } = view;
  const styles = Object.fromEntries(names.map((name, index) => [name, styleOf(index)]));
  if (chosen.length > MOST_LINES) styles[`${chosen.length - MOST_LINES} others`] = OTHERS;
  const options = { styles, marks };
  if (x.length) {
    const speeds = perWorker(view, chosen, "samples"), total = x.map(() => 0), stacked = [];
    for (const [name, values] of Object.entries(speeds)) {
      values.forEach((value, index) => { total[index] += value ?? 0; });
      stacked.unshift([name, [...total]]);
    }
    lines($("speed"), "samples/s", x, Object.fromEntries(stacked), { ...options, shown: speeds, fill: true });
    const missed = combine(perWorker(view, chosen, "staleness"), perWorker(view, chosen, "pushes"), (a, b) => b ? a / b : null);
    lines($("stale"), "mean staleness of each second's gradients", x, missed, options);
    const traffic = combine(perWorker(view, chosen, "bytes_sent"), perWorker(view, chosen, "bytes_received"), (a, b) => (a + b) / 1e6);
    lines($("traffic"), "MB/s, sent and received", x, traffic, options);
    drawUsage(view, x, chosen, options);
  }
  const histogram = view.points.at(-1)?.staleness ?? {}, taus = Object.keys(histogram).map(Number).sort((a, b) => a - b);
  if (taus.length) lines($("stale"), "gradients by staleness", taus, { gradients: taus.map(tau => histogram[tau]) }, { x: "staleness", bars: true, fill: true });
  if (view.batches.length) {
    const last = view.batches.at(-1), batches = [...view.batches, { ...last, at: Math.max(last.at, x.at(-1) ?? 0) + 1 }];
    const sizes = [...new Set(chosen.map(ringOf))].slice(0, MOST_LINES).map(name => [name, batches.map(b => b.workers[name]?.batch_size ?? null)]);
    lines($("batches"), "batch size", batches.map(b => b.at), Object.fromEntries(sizes), { ...options, steps: true });
  }
}

// What the processes use: workers, shards, and the server; with GPUs, these too.
function drawUsage(view, x, chosen, options) {
  const later = view.points.slice(1), server = later.map((point, i) => {
    const before = view.points[i];
    return 100 * (point.server.cpu_s - before.server.cpu_s) / (point.at - before.at);
  });
  const shards = [...new Set(later.flatMap(point => Object.keys(point.shards)))].sort(byName).slice(0, MOST_LINES);
  const ofShards = (field, factor) => Object.fromEntries(shards.map(name => [name, later.map(point => factor * point.shards[name]?.[field] || null)]));
  const styles = { ...options.styles, server: { stroke: OTHERS.stroke, dash: [1, 3] } };
  shards.forEach((name, index) => { styles[name] = { ...styleOf(index), dash: [1, 3] }; });
  const chart = (title, workers, more = {}) => lines($("usage"), title, x, { ...workers, ...more }, { ...options, styles });
  chart("CPU, % of one core", scale(perWorker(view, chosen, "cpu_s", cpuRates), 100), { ...ofShards("cores", 100), server });
  for (const [title, field] of [["memory now, MB", "memory_bytes"], ["peak memory, MB", "peak_memory_bytes"]]) {
    const workers = scale(perWorker(view, chosen, field, levels), 1e-6);
    chart(title, workers, { ...ofShards(field, 1e-6), server: later.map(point => point.server[field] / 1e6) });
  }
  if (!chosen.some(name => numbersOf(view, name)?.[view.fields.gpu_memory_bytes])) return;
  chart("GPU, % of the time", scale(perWorker(view, chosen.slice(0, MOST_LINES), "gpu_use", present), 100));
  chart("GPU memory, MB", scale(perWorker(view, chosen, "gpu_memory_bytes", levels), 1e-6));
}

function list(parent, texts) {
  parent.replaceChildren(...texts.map(text => element("li", {}, text)));
}

function drawLog(view) {
  const filter = $("filter").value.toLowerCase();
  const log = $("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = view.log.filter(line => line.toLowerCase().includes(filter)).join("\n") || (filter ? "No line matches." : "No data yet.");
  if (atEnd) log.scrollTop = log.scrollHeight;
}
