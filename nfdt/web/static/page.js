// The page of a job server. It reads jobs as JSON, the events of one job as a stream, and draws them.

const $ = id => document.getElementById(id);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888", "#b2182b"];
const MOST_ROWS = 32; // workers with a row or a line of their own; the others are drawn together
const STRIP_S = 60;
const REDRAW_MS = 500;
const LOG_LINES = 2000;

const jobId = location.pathname.startsWith("/jobs/") ? location.pathname.slice("/jobs/".length) : "";
const at = seconds => seconds ? new Date(seconds * 1000).toLocaleString() : "-";
const clock = seconds => new Date(seconds * 1000).toLocaleTimeString();
const short = value => typeof value === "number" ? Number(value.toPrecision(4)).toString() : JSON.stringify(value);
const ringOf = name => name.split("/")[0]; // worker-0/rank-1 is a rank of worker-0
const byName = (a, b) => a.length - b.length || (a < b ? -1 : 1);

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h} h ${m % 60} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

function row(cells, numbers = cells.length) {
  const tr = document.createElement("tr");
  cells.forEach((cell, index) => {
    const td = document.createElement("td");
    if (index >= numbers) td.className = "n";
    cell instanceof Node ? td.append(cell) : td.textContent = cell;
    tr.append(td);
  });
  return tr;
}

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// ---- the list of jobs

async function showList() {
  $("list").hidden = false;
  $("title").textContent = "jobs";
  const jobs = await get("/api/jobs");
  $("none").hidden = jobs.length > 0;
  $("jobs").tBodies[0].replaceChildren(...jobs.reverse().map(job => {
    const link = document.createElement("a");
    link.href = `/jobs/${job.job_id}`;
    link.textContent = job.job_id;
    const epoch = `${Math.min(job.epoch + 1, job.epochs)}/${job.epochs}`;
    const state = job.state + (job.place ? ` (${job.place} in queue)` : "");
    return row([link, job.name || "-", state, job.script || "-", job.algorithm, job.workers, epoch, at(job.submitted_at)]);
  }));
}

// ---- charts

const charts = {};

// Draw lines: one per name, over shared x. The chart is made again when its names change.
function lines(parent, title, x, series, options = {}) {
  const names = Object.keys(series), key = `${parent.id}/${title}`;
  const data = [x, ...names.map(name => series[name])];
  const width = Math.max(280, Math.floor(parent.clientWidth / (parent.classList.contains("charts") ? columns(parent) : 1)) - 8);
  let chart = charts[key];
  if (chart && chart.names.join() === names.join()) {
    chart.marks = options.marks ?? [];
    if (chart.plot.width !== width) chart.plot.setSize({ width, height: chart.plot.height });
    chart.plot.setData(data);
    return;
  }
  if (chart) chart.box.remove();
  const box = document.createElement("div");
  box.dataset.chart = title;
  parent.append(box);
  chart = charts[key] = { names, box, marks: options.marks ?? [] };
  const axis = { stroke: "#888", grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const plot = new uPlot({
    title, width, height: 220, legend: { live: false },
    scales: { x: { time: options.time ?? true }, y: { range: options.fill ? (_, low, high) => [0, 1.05 * high || 1] : null } },
    axes: [options.time === false ? { ...axis, incrs: WHOLE } : axis, { ...axis, size: 64, values: (_, values) => values.map(v => short(v)) }],
    series: [{}, ...names.map((label, index) => ({
      label, stroke: COLOURS[index % COLOURS.length], width: 1.5, points: { show: x.length < 40, size: 5 },
      fill: options.fill ? COLOURS[index % COLOURS.length] + "55" : undefined,
      paths: options.steps ? uPlot.paths.stepped({ align: 1 }) : options.bars ? uPlot.paths.bars({ size: [0.8, 60] }) : undefined,
    }))],
    hooks: { draw: [drawing => drawMarks(drawing, charts[key].marks)] },
  }, data, box);
  box.plot = plot; // for tests and the console
  chart.plot = plot;
}

// Draw vertical lines at moments: workers that joined or were lost.
function drawMarks(plot, marks) {
  const { ctx: pen, bbox } = plot, { min, max } = plot.scales.x;
  for (const { at, colour } of marks.filter(mark => mark.at >= min && mark.at <= max)) {
    const x = Math.round(plot.valToPos(at, "x", true));
    pen.fillStyle = colour;
    pen.fillRect(x - 1, bbox.top, 2, bbox.height);
  }
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]; // distances of ticks
const columns = parent => getComputedStyle(parent).gridTemplateColumns.split(" ").filter(width => parseFloat(width) > 0).length || 1;

// ---- one job

const view = {
  job: null, fields: {}, epochs: new Map(), steps: [], points: [], log: [], lost: new Map(), joined: new Map(), marks: [],
  batches: [], plans: [], codecs: new Map(), epoch: null, dirty: true, began: null,
};

const HANDLERS = {
  state: (data, event) => {
    view.job.state = data.state;
    view.job.reason = data.reason || "";
    if (data.state === "starting") view.job.started_at = event.at;
    if (["succeeded", "failed", "cancelled"].includes(data.state)) view.job.ended_at = event.at;
  },
  epoch_begin: (data, event) => { view.epoch = { ...data, at: event.at, done: 0 }; view.job.epoch = data.epoch; },
  progress: (data, event) => {
    view.steps.push({ at: event.at, logs: data.logs });
    if (view.epoch) view.epoch.done = data.steps;
    view.job.logs = data.logs;
  },
  epoch_end: data => {
    const validation = Object.fromEntries(Object.entries(data.val_logs || {}).map(([name, value]) => [`val_${name}`, value]));
    view.epochs.set(data.epoch + 1, { ...data.logs, ...validation });
    view.job.logs = { ...data.logs, ...validation };
    view.epoch_s = data.seconds;
    if (view.epoch) view.epoch.done = data.steps;
  },
  validated: data => {
    const logs = view.epochs.get(data.epoch + 1) || {};
    for (const [name, value] of Object.entries(data.val_logs)) logs[`val_${name}`] = value;
    view.epochs.set(data.epoch + 1, logs);
  },
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

const WARNINGS = ["worker_lost", "shard_lost", "stalled"];

function logLine(event) {
  const { kind, data } = event;
  if (["progress", "speed"].includes(kind)) return;
  const level = kind === "log" ? data.level : WARNINGS.includes(kind) ? "warning" : data.state === "failed" ? "error" : "info";
  const text = kind === "log" ? `${data.worker || "server"}: ${data.text}`
    : kind === "epoch_end" ? `epoch ${data.epoch + 1} ends ${Object.entries(data.logs).map(([k, v]) => `${k}=${short(v)}`).join(" ")}`
      : kind === "epoch_begin" ? `epoch ${data.epoch + 1} begins`
        : Object.entries(data).filter(([, v]) => v !== null && typeof v !== "object").map(([k, v]) => `${k}=${v}`).join(" ");
  view.log.push(`${clock(event.at)} ${level.padEnd(7)} ${kind.padEnd(13)} ${text}`);
  if (view.log.length > LOG_LINES) view.log.splice(0, view.log.length - LOG_LINES);
}

async function showJob() {
  $("job").hidden = false;
  view.job = await get(`/api/jobs/${jobId}`);
  view.job.fields.forEach((name, index) => { view.fields[name] = index; });
  document.title = `${view.job.name || jobId} · NFDT`;
  $("title").textContent = view.job.name ? `${view.job.name} (${jobId})` : jobId;
  $("weights").href = `/api/jobs/${jobId}/weights.npz`;
  const size = view.job.variables.reduce((sum, [, shape]) => sum + shape.reduce((a, b) => a * b, 1), 0);
  $("options").textContent = `${view.job.model}: ${view.job.variables.length} trainable variables, ${size.toLocaleString()} weights\n`
    + view.job.variables.map(([name, shape]) => `  ${name} (${shape.join(", ")})`).join("\n")
    + `\n\n${JSON.stringify(view.job.options, null, 1)}`;
  for (const action of ["stop", "cancel"]) $(action).onclick = () => act(action);
  $("filter").oninput = () => { view.dirty = true; };
  addEventListener("resize", () => { view.dirty = true; });
  listen();
  setInterval(() => { if (view.dirty) { view.dirty = false; draw(); } }, REDRAW_MS);
}

async function refresh() {
  view.job.statistics = (await get(`/api/jobs/${jobId}`)).statistics;
}

async function act(action) {
  if (action === "cancel" && !confirm("Cancel this job? Its result is lost.")) return;
  const answer = await fetch(`/api/jobs/${jobId}/${action}`, { method: "POST", headers: { "X-NFDT": "1" } });
  if (!answer.ok) alert(await answer.text());
}

function listen() {
  const stream = new EventSource(`/api/jobs/${jobId}/stream`); // connects again by itself, after the last event
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
  stream.addEventListener("end", () => { stream.close(); $("link").textContent = ""; });
  stream.onopen = () => { $("link").textContent = ""; };
  stream.onerror = () => { $("link").textContent = "the server does not answer, trying again"; };
}

// Rates of a worker between consecutive points: (name, field) -> one value per point after the first.
function rates(name, field) {
  const index = view.fields[field];
  return view.points.slice(1).map((point, i) => {
    const now = point.workers[name], before = view.points[i].workers[name], seconds = point.at - view.points[i].at;
    return now && before && seconds > 0 ? Math.max(0, now[index] - before[index]) / seconds : null;
  });
}

function workerNames() {
  const named = [...new Set([...view.joined.keys(), ...Object.keys(view.points.at(-1)?.workers ?? view.job.statistics)])];
  const rings = new Set(named.filter(name => name.includes("/")).map(ringOf)); // of these the ranks are shown
  return named.filter(name => !rings.has(name)).sort(byName);
}

// At most MOST_ROWS lines; the others are merged into one by `merge`.
function perWorker(field, merge = values => values.reduce((a, b) => a + b, 0)) {
  const names = workerNames(), series = {};
  for (const name of names.slice(0, MOST_ROWS)) series[name] = rates(name, field);
  const rest = names.slice(MOST_ROWS).map(name => rates(name, field));
  if (rest.length) series[`${rest.length} others`] = rest[0].map((_, i) => merge(rest.map(values => values[i] ?? 0)));
  return series;
}

function draw() {
  drawFacts();
  drawMetrics();
  drawWorkers();
  const filter = $("filter").value.toLowerCase();
  const log = $("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = view.log.filter(line => line.toLowerCase().includes(filter)).join("\n");
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function drawFacts() {
  const { job, epoch } = view;
  const running = !["succeeded", "failed", "cancelled"].includes(job.state);
  $("state").textContent = job.state;
  $("state").className = job.state;
  $("what").textContent = `${job.algorithm} on ${job.workers} worker${job.workers === 1 ? "" : "s"}`
    + `, epoch ${Math.min(job.epoch + 1, job.epochs)} of ${job.epochs}${job.reason ? `: ${job.reason}` : ""}`;
  const within = epoch?.steps ? Math.min(1, epoch.done / epoch.steps) : 0;
  const done = job.state === "succeeded" ? 1 : job.epochs ? Math.min(1, (job.epoch + within) / job.epochs) : 0;
  $("done").value = done;
  const from = job.started_at ?? job.submitted_at, spent = (job.ended_at ?? Date.now() / 1000) - from;
  $("eta").textContent = running ? (done > 0.01 ? `about ${duration(spent * (1 - done) / done)} left` : "")
    : `took ${duration(spent)}`;
  $("numbers").textContent = Object.entries(job.logs).map(([name, value]) => `${name} ${short(value)}`).join("   ");
  $("forecast").textContent = view.forecast ? forecastText(view.forecast) : "";
  $("stop").hidden = $("cancel").hidden = !(running && job.may_act);
}

function forecastText(f) {
  const off = 100 * (f.measured_samples_per_s / f.samples_per_s - 1);
  return `planned ${Math.round(f.samples_per_s).toLocaleString()} samples/s at a staleness of ${f.staleness.toFixed(1)}, `
    + `measured ${Math.round(f.measured_samples_per_s).toLocaleString()} at ${f.measured_staleness.toFixed(1)} `
    + `(${off < 0 ? "" : "+"}${off.toFixed(0)} %)`;
}

function drawMetrics() {
  const epochs = [...view.epochs.keys()].sort((a, b) => a - b);
  const names = [...new Set([...view.epochs.values()].flatMap(Object.keys))].filter(name => !name.startsWith("val_"));
  for (const name of names) {
    const series = {};
    for (const label of [name, `val_${name}`]) {
      const values = epochs.map(epoch => view.epochs.get(epoch)[label]);
      if (values.some(value => typeof value === "number")) series[label] = values.map(v => typeof v === "number" ? v : null);
    }
    lines($("epochs"), name, epochs, series, { time: false });
  }
  const thinned = thin(view.steps, 600);
  for (const name of new Set(thinned.flatMap(step => Object.keys(step.logs)))) {
    lines($("steps"), name, thinned.map(step => step.at), { [name]: thinned.map(step => step.logs[name] ?? null) });
  }
}

function thin(values, most) {
  const every = Math.ceil(values.length / most);
  return values.filter((_, index) => index % every === 0 || index === values.length - 1);
}

function drawWorkers() {
  const names = workerNames(), x = view.points.slice(1).map(point => point.at);
  if (x.length) {
    const speeds = perWorker("samples"), stacked = {}, sum = x.map(() => 0);
    for (const name of Object.keys(speeds)) {
      speeds[name].forEach((value, index) => { sum[index] += value ?? 0; });
      stacked[name] = [...sum];
    }
    const reversed = Object.fromEntries(Object.entries(stacked).reverse());
    lines($("speed"), "samples/s", x, reversed, { fill: true, marks: view.marks });
    const pushes = perWorker("pushes"), missed = perWorker("staleness"), mean = {};
    for (const name of Object.keys(pushes)) mean[name] = missed[name].map((m, i) => pushes[name][i] ? m / pushes[name][i] : null);
    lines($("staleness"), "mean staleness of each second's gradients", x, mean);
    const traffic = perWorker("bytes_sent"), received = perWorker("bytes_received"), megabytes = {};
    for (const name of Object.keys(traffic)) megabytes[name] = traffic[name].map((v, i) => v === null ? null : (v + received[name][i]) / 1e6);
    lines($("traffic"), "MB/s, sent and received", x, megabytes);
  }
  const histogram = view.points.at(-1)?.staleness ?? {}, taus = Object.keys(histogram).map(Number).sort((a, b) => a - b);
  if (taus.length) lines($("histogram"), "gradients by staleness", taus, { gradients: taus.map(tau => histogram[tau]) }, { time: false, bars: true, fill: true });
  if (view.batches.length) {
    const series = {};
    const batches = [...view.batches, { ...view.batches.at(-1), at: Math.max(view.batches.at(-1).at, x.at(-1) ?? 0) + 1 }];
    for (const name of [...new Set(names.map(ringOf))].slice(0, MOST_ROWS)) series[name] = batches.map(b => b.workers[name]?.batch_size ?? null);
    lines($("batches"), "batch size", batches.map(b => b.at), series, { steps: true });
  }
  list($("plans"), view.plans);
  list($("codecs"), [...view.codecs.values()].map(codec => codec.text));
  drawStrips(names);
  drawTable(names);
}

function list(parent, texts) {
  parent.replaceChildren(...texts.map(text => { const li = document.createElement("li"); li.textContent = text; return li; }));
}

// One strip per worker: each second of the last minute divided into computation, exchange and waiting.
function drawStrips(names) {
  const end = view.points.at(-1)?.at ?? 0, parts = ["compute_s", "exchange_s", "wait_s"];
  const style = getComputedStyle(document.documentElement);
  const colours = ["--compute", "--exchange", "--wait"].map(name => style.getPropertyValue(name));
  const strip = $("strip"), shown = names.slice(0, MOST_ROWS);
  while (strip.children.length > shown.length) strip.lastChild.remove();
  shown.forEach((name, index) => {
    let box = strip.children[index];
    if (!box) {
      box = document.createElement("div");
      box.className = "row";
      const label = document.createElement("span"), canvas = document.createElement("canvas");
      canvas.className = "strip"; canvas.width = 600; canvas.height = 14;
      box.append(label, canvas);
      strip.append(box);
    }
    box.firstChild.textContent = name + (view.lost.has(name) ? " (lost)" : "");
    const pen = box.lastChild.getContext("2d");
    pen.clearRect(0, 0, 600, 14);
    const rate = parts.map(part => rates(name, part));
    view.points.slice(1).forEach((point, i) => {
      const from = view.points[i].at;
      if (point.at < end - STRIP_S) return;
      const x = 600 * (1 - (end - from) / STRIP_S), width = 600 * (point.at - from) / STRIP_S;
      const total = Math.max(1, rate.reduce((sum, values) => sum + (values[i] ?? 0), 0));
      let top = 14;
      rate.forEach((values, part) => {
        const height = 14 * (values[i] ?? 0) / total;
        top -= height;
        pen.fillStyle = colours[part];
        pen.fillRect(x, top, width, height);
      });
    });
  });
}

function drawTable(names) {
  const table = $("workers"), f = view.fields, last = view.points.at(-1)?.workers ?? {};
  const head = ["worker", "host", "device", "state", "codec", "samples", "steps", "samples/s", "batch", "staleness", "refused", "sent", "received"];
  table.tHead.replaceChildren(row(head, 5));
  const statistics = name => last[name] ?? fromTotals(view.job.statistics[name]);
  table.tBodies[0].replaceChildren(...names.slice(0, MOST_ROWS).map(name => {
    const w = statistics(name), ring = ringOf(name), lost = view.lost.get(ring);
    const about = { ...view.joined.get(ring), ...view.job.statistics[name] };
    const codec = view.codecs.get(ring)?.short ?? view.job.options.algorithm.codec ?? "";
    const numbers = w ? [w[f.samples], w[f.steps], Math.round(w[f.samples_per_s]), Math.round(w[f.batch_size]) || "-",
      w[f.pushes] ? (w[f.staleness] / w[f.pushes]).toFixed(2) : "-", w[f.dropped], bytes(w[f.bytes_sent]), bytes(w[f.bytes_received])]
      : Array(8).fill("-");
    const tr = row([name, about.host ?? "-", about.device ?? "-", lost ? `lost ${clock(lost.at)}: ${lost.reason}` : "here", codec, ...numbers], 5);
    if (lost) tr.className = "lost";
    tr.dataset.worker = name;
    return tr;
  }));
  if (names.length > MOST_ROWS) {
    const rest = names.slice(MOST_ROWS).map(statistics).filter(Boolean);
    const sum = field => rest.reduce((total, w) => total + w[f[field]], 0);
    table.tBodies[0].append(row([`${rest.length} others`, "", "", "", "", sum("samples"), sum("steps"), Math.round(sum("samples_per_s")),
      "", "", sum("dropped"), bytes(sum("bytes_sent")), bytes(sum("bytes_received"))], 5));
  }
}

// The numbers of a worker of a job that has ended before this server began, in the order of the fields.
function fromTotals(found) {
  if (!found) return null;
  const bins = Object.entries(found.staleness ?? {});
  const sums = {
    pushes: bins.reduce((sum, [, count]) => sum + count, 0),
    staleness: bins.reduce((sum, [tau, count]) => sum + tau * count, 0),
  };
  return view.job.fields.map(name => sums[name] ?? found[name] ?? 0);
}

if (jobId) showJob().catch(error => { $("title").textContent = error.message; });
else {
  const again = () => showList().catch(error => { $("title").textContent = error.message; });
  again();
  setInterval(again, 2000);
}
