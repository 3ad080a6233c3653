// The table of a job's workers and shards, and where the threads of one of them are.

import { MOST_LINES } from "./charts.js";
import { $, bytes, clock, element, fill, isNumber, request } from "./format.js";

const FRONT = ["process", "host", "device", "state", "codec"];
const NUMBERS = ["samples", "steps", "samples/s", "batch", "staleness", "refused", "sent", "received", "CPU", "memory", "peak memory"];
const ON_GPUS = ["GPU", "GPU memory"];
const COUNTS = ["samples", "steps", "samples_per_s", "dropped", "bytes_sent", "bytes_received"];
const rows = {}; // by process
const states = {};
const buttons = {};
const percent = share => isNumber(share) ? `${Math.round(100 * share)} %` : "-";
const size = count => count ? bytes(count) : "-";
const sum = values => values.reduce((a, b) => a + b, 0);

// Draw the table. `of` has functions of a worker's name: numbers, lost, about, codec, cpu.
export function drawTable(view, names, of, running) {
  const table = $("workers"), f = view.fields, rest = names.slice(MOST_LINES).map(of.numbers).filter(Boolean);
  const columns = [...NUMBERS, ...(names.some(name => of.numbers(name)?.[f.gpu_memory_bytes]) ? ON_GPUS : [])];
  const button = (name, about) => running && view.job.may_act && about.pid ? buttonOf(view.id, name, about) : null;
  const drawn = names.slice(0, MOST_LINES).map(name => {
    const w = of.numbers(name), lost = of.lost(name), about = of.about(name);
    const numbers = w ? [w[f.samples], w[f.steps], Math.round(w[f.samples_per_s]), Math.round(w[f.batch_size]) || "-",
      w[f.pushes] ? (w[f.staleness] / w[f.pushes]).toFixed(2) : "-", w[f.dropped], bytes(w[f.bytes_sent]), bytes(w[f.bytes_received]),
      lost ? "-" : percent(of.cpu(name)), lost ? "-" : size(w[f.memory_bytes]), size(w[f.peak_memory_bytes]),
      percent(w[f.gpu_use]), size(w[f.gpu_memory_bytes])] : [];
    const state = lost ? stateOf(name, `lost ${clock(lost.at)}`) : stateOf(name, "here", button(name, about)); // why is among the alerts
    const tr = rowOf(columns, [name, about.host ?? "-", about.device ?? "-", state, of.codec(name)], numbers);
    tr.className = lost ? "lost" : "";
    return tr;
  });
  if (names.length > MOST_LINES) {
    const [samples, steps, speed, dropped, sent, received] = COUNTS.map(field => sum(rest.map(w => w[f[field]])));
    drawn.push(rowOf(columns, [`${names.length - MOST_LINES} others`, "", "", "", ""],
      [samples, steps, Math.round(speed), "", "", dropped, bytes(sent), bytes(received), "", "", "", "", ""]));
  }
  for (const [name, shard] of Object.entries(view.points.at(-1)?.shards ?? {})) {
    const used = [percent(shard.cores), size(shard.memory_bytes), size(shard.peak_memory_bytes), "", ""];
    const state = stateOf(name, "here", button(name, shard));
    const tr = rowOf(columns, [name, shard.host, "cpu", state, ""], [...Array(NUMBERS.length - 3).fill(""), ...used]);
    tr.className = "shard";
    drawn.push(tr);
  }
  if (table.tHead.rows[0]?.cells.length !== FRONT.length + columns.length) table.tHead.replaceChildren(element("tr", {},
    ...[...FRONT, ...columns].map((text, index) => element("th", { scope: "col", class: index < FRONT.length ? "" : "n" }, text))));
  const body = table.tBodies[0];
  drawn.forEach((tr, index) => { if (body.rows[index] !== tr) body.insertBefore(tr, body.rows[index] ?? null); });
  while (body.rows.length > drawn.length) body.lastChild.remove();
}

function rowOf(columns, front, numbers) {
  const tr = rows[front[0]] ??= element("tr");
  while (tr.cells.length > front.length + columns.length) tr.lastChild.remove();
  return fill(tr, [...front, ...columns.map((_, index) => numbers[index] ?? "-")], front.length);
}

// A state, with the button as long as the process can be asked; both stay the same elements, and keep the focus.
function stateOf(name, text, button) {
  const state = states[name] ??= element("span", {}, element("span"), " ");
  state.firstChild.textContent = text;
  if (!button) state.querySelector("button")?.remove();
  else if (button.parentNode !== state) state.append(button);
  return state;
}

function buttonOf(job, name, about) {
  const button = buttons[name] ??= element("button", { "aria-label": `stack traces of ${name}` }, "stacks");
  button.onclick = () => showStacks(job, name, about);
  return button;
}

async function showStacks(job, name, { host, pid }) {
  const dialog = $("stacks");
  dialog.querySelector("h2").textContent = `Stack traces of ${name}, process ${pid} on ${host}`;
  dialog.querySelector("pre").textContent = "…";
  if (!dialog.open) dialog.showModal();
  const path = `/api/jobs/${job}/stacks?${new URLSearchParams({ host, pid })}`;
  const text = await request(path, { method: "POST", headers: { "X-NFDT": "1" } }).then(answer => answer.text(), error => error.message);
  dialog.querySelector("pre").textContent = text;
}
