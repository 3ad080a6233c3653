// What each worker did in each second of the last minute: computation, exchange and waiting, as parts of a strip.

import { $, element } from "./format.js";

const [WIDTH, HEIGHT] = [600, 14];
const STRIP_S = 60;
const PARTS = { compute: "compute_s", exchange: "exchange_s", wait: "wait_s" };

// Draw one strip per worker; `rates(view, name, field)` are its rates between consecutive points.
export function drawStrips(view, names, rates) {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.keys(PARTS).map(part => style.getPropertyValue(`--${part}`));
  const strip = $("strip"), shown = view.points.length > 1 ? names : [];
  while (strip.children.length > shown.length) strip.lastChild.remove();
  shown.forEach((name, index) => {
    const box = strip.children[index] ?? strip.appendChild(makeStrip());
    box.firstChild.textContent = name + (view.lost.has(name) ? " (lost)" : "");
    drawStrip(box.lastChild, view.points, Object.values(PARTS).map(field => rates(view, name, field)), colours, name);
  });
}

function makeStrip() {
  return element("div", { class: "row" }, element("span"), element("canvas", { class: "strip", width: WIDTH, height: HEIGHT, role: "img" }));
}

function drawStrip(canvas, points, rate, colours, name) {
  const pen = canvas.getContext("2d"), end = points.at(-1).at, sums = rate.map(() => 0);
  pen.clearRect(0, 0, WIDTH, HEIGHT);
  points.slice(1).forEach((point, i) => {
    const from = points[i].at;
    if (point.at < end - STRIP_S) return;
    const x = WIDTH * (1 - (end - from) / STRIP_S), width = WIDTH * (point.at - from) / STRIP_S;
    const total = Math.max(1, rate.reduce((sum, values) => sum + (values[i] ?? 0), 0));
    let top = HEIGHT;
    rate.forEach((values, part) => {
      const height = HEIGHT * (values[i] ?? 0) / total;
      sums[part] += (values[i] ?? 0) * (point.at - from);
      top -= height;
      pen.fillStyle = colours[part];
      pen.fillRect(x, top, width, height);
    });
  });
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  const shares = Object.keys(PARTS).map((part, index) => `${part} ${Math.round(100 * sums[index] / all)} %`);
  canvas.setAttribute("aria-label", `${name} in the last minute: ${shares.join(", ")}`);
}
