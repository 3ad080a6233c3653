// Charts: lines over epochs or time with the values under the pointer, and small lines in tables.

import { clock, element, isNumber, short } from "./format.js";

export const MOST_LINES = 32; // workers with a row or a line of their own; the others are drawn together
export const OTHERS = { stroke: "#888888" };
// Each is as far from all before it as colours that can be seen on white and on black can be, by OKLab.
const COLOURS = [
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#87005a", "#9600ff",
  "#3c4b00", "#0000ff", "#ff0fff", "#69d200", "#4b2da5", "#c30fa5", "#ff0069", "#7878ff",
  "#963c0f", "#e1a5ff", "#96c396", "#004b69", "#007800", "#875aa5", "#877800", "#f0a5a5",
  "#c3004b", "#4b695a", "#96a500", "#8700a5", "#c369f0", "#2d5af0", "#ff69d2", "#ff6969",
];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const FAINT = "55"; // opacity of a colour
const HEIGHT = 200;
const MARK_PX = 8; // least distance of the marks of epochs
const LABEL_PX = 60; // least distance of those with a text
const READ_ALOUD = 4; // lines whose values are part of a chart's description
const STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power)); // whole distances of ticks
const charts = {};

// The style of a line; lines of the same hue differ by their dashes.
export const styleOf = index => ({ stroke: COLOURS[index % COLOURS.length], dash: DASHES[Math.floor(index / 8) % DASHES.length] });

// Draw lines: one per name, over shared x. The chart is made again when its names or scales change.
// Options: x (name of x, if that is no time), styles (by name), shown (values for the legend, by name), log, fill, bars,
// steps, gaps (whether missing values are bridged), marks.
export function lines(parent, title, x, series, options = {}) {
  const names = Object.keys(series), key = `${parent.id}/${title}`;
  if (!names.length) return remove(key);
  const data = [x, ...names.map(name => options.log ? series[name].map(v => v > 0 ? v : null) : series[name])];
  const chart = charts[key] ??= makeChart(parent, title);
  const kind = JSON.stringify([names, options.log, options.x]);
  Object.assign(chart, { names, marks: options.marks ?? [], shown: options.shown ?? series });
  if (chart.kind !== kind) {
    chart.plot?.destroy();
    chart.kind = kind;
    chart.plot = chart.box.plot = new uPlot(plan(chart, title, x.length, options), data, chart.box); // of the box: for tests
    makeOperable(chart);
  } else {
    chart.plot.setData(data);
  }
  showLast(chart.plot);
  describe(chart, title);
}

// A box whose chart is as wide as it, also after other charts have come beside it.
function makeChart(parent, title) {
  const box = parent.appendChild(element("div", { "data-chart": title }));
  new ResizeObserver(() => box.plot?.setSize({ width: widthOf(box), height: HEIGHT })).observe(box);
  return { box };
}

const widthOf = box => Math.max(240, box.clientWidth - 4);

function remove(key) {
  charts[key]?.plot.destroy();
  charts[key]?.box.remove();
  delete charts[key];
}

// Remove the charts of a parent whose titles are not among some.
export function keepCharts(parent, titles) {
  for (const box of parent.querySelectorAll("[data-chart]")) if (!titles.includes(box.dataset.chart)) remove(`${parent.id}/${box.dataset.chart}`);
}

function plan(chart, title, points, options) {
  const axis = { stroke: "#888", grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const texts = (_, values) => values.map(value => value === null ? "" : short(value));
  const time = options.x === undefined;
  const value = (name, index) => short(chart.shown[name].slice(options.gaps ? 0 : index, index + 1).findLast(isNumber) ?? "-");
  return {
    title, width: widthOf(chart.box), height: HEIGHT,
    cursor: time ? { sync: { key: "time", scales: ["x", null] } } : {},
    scales: {
      x: { time },
      y: { distr: options.log ? 3 : 1, range: options.fill ? (_, low, high) => [0, 1.05 * high || 1] : null },
    },
    axes: [time ? axis : { ...axis, incrs: STEPS }, { ...axis, size: 64, values: texts }],
    series: [
      { label: options.x ?? "time", value: (_, v) => v == null ? "-" : time ? clock(v) : short(v) },
      ...chart.names.map((label, index) => {
        const style = options.styles?.[label] ?? styleOf(index);
        return {
          label, width: 1.5, points: { show: points < 40 && !options.bars, size: 5, fill: style.stroke }, spanGaps: options.gaps ?? false, ...style,
          fill: options.fill ? style.stroke + FAINT : undefined,
          paths: options.steps ? uPlot.paths.stepped({ align: 1 }) : options.bars ? uPlot.paths.bars({ size: [0.8, 60] }) : undefined,
          value: (_, raw, seriesIndex, index) => index === null ? "-" : value(label, index),
        };
      }),
    ],
    hooks: { draw: [plot => drawMarks(plot, chart.marks)], setCursor: [showLast] },
  };
}

// Without a pointer in the chart, its legend shows the last values.
function showLast(plot) {
  if (!(plot.cursor.left >= 0)) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
}

// Names of lines hide and show these, with the keyboard too.
function makeOperable({ plot }) {
  plot.root.querySelectorAll(".u-legend .u-series:not(:first-child) th").forEach((name, index) => {
    name.tabIndex = 0;
    name.setAttribute("role", "button");
    const update = () => name.setAttribute("aria-pressed", plot.series[index + 1].show);
    name.addEventListener("click", () => queueMicrotask(update));
    name.addEventListener("keydown", event => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      name.click();
    });
    update();
  });
}

function describe({ plot, names, shown }, title) {
  const last = names.slice(0, READ_ALOUD).map(name => `${name} ${short(shown[name].findLast(isNumber) ?? "-")}`);
  const rest = names.length > READ_ALOUD ? ` and ${names.length - READ_ALOUD} more lines` : "";
  const canvas = plot.root.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Chart of ${title}, last values: ${last.join(", ")}${rest}`);
}

// Draw vertical lines at moments: workers that joined or were lost, and beginnings of epochs, which have a text.
function drawMarks(plot, marks) {
  const { ctx: pen, bbox } = plot, { min, max } = plot.scales.x, ratio = devicePixelRatio;
  let last = -Infinity, lastText = -Infinity;
  pen.save();
  pen.font = `${10 * ratio}px system-ui, sans-serif`;
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  for (const { at, colour, text } of marks.filter(mark => mark.at >= min && mark.at <= max)) {
    const x = Math.round(plot.valToPos(at, "x", true));
    if (text && x - last < MARK_PX * ratio) continue;
    pen.fillStyle = colour;
    pen.fillRect(x - 1, bbox.top, text ? ratio : 2 * ratio, bbox.height);
    if (!text) continue;
    last = x;
    if (x - lastText < LABEL_PX * ratio) continue;
    lastText = x;
    pen.fillStyle = OTHERS.stroke;
    pen.fillText(text, x + 3 * ratio, bbox.top + 9 * ratio);
  }
  pen.restore();
}

// The exponential moving average of a metric, corrected for its beginning with 0.
export function smooth(values, weight) {
  let sum = 0, weights = 0;
  return values.map(value => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + 1 - weight;
    return sum / weights;
  });
}

// Series and styles of metrics: with a weight, each line is drawn faint below its moving average.
export function smoothed(series, weight, styles = {}) {
  if (!weight) return { series, styles };
  const found = { series: {}, styles: {} };
  Object.entries(series).forEach(([name, values], index) => {
    const style = styles[name] ?? styleOf(index), mean = `${name}, smoothed`;
    found.series[name] = values;
    found.series[mean] = smooth(values, weight);
    found.styles[name] = { ...style, stroke: style.stroke + FAINT, points: { show: false } };
    found.styles[mean] = style;
  });
  return found;
}

// A line without axes, for a cell of a table.
export function sparkline(values, label) {
  const [width, height] = [90, 20], low = Math.min(...values), range = Math.max(...values) - low || 1;
  const x = index => values.length > 1 ? 1 + (width - 2) * index / (values.length - 1) : width / 2;
  const points = values.map((value, index) => `${x(index).toFixed(1)},${(height - 2 - (height - 4) * (value - low) / range).toFixed(1)}`);
  const svg = tag => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const set = (node, attributes) => { for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value); return node; };
  const image = set(svg("svg"), { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  image.append(set(svg("polyline"), { points: points.join(" ") }));
  return image;
}
