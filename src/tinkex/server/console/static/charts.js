// Charts of a page: the curves it names, and the points that its stream of events adds to them.
// Knows uPlot and no metric: the server says which lines share a chart, and what they are called.
import { follow } from "./live.js";

const host = document.getElementById("charts");
const tool = (id) => document.getElementById(id);
const style = () => getComputedStyle(document.documentElement);
const colour = (name) => style().getPropertyValue(`--${name}`).trim();
const COLOURS = 8;

let panels = [];            // [{title, lines: [[key, label]]}]
let curves = {};            // key -> {x: [], y: []}
let plots = new Map();      // title -> {figure, value, plot}
let zoom = null;            // [low, high], while a part is shown
let drawing = 0;

const shown = (v) => v == null ? "–" : Math.abs(v) >= 1e5 ? v.toExponential(2) : String(+v.toPrecision(4));
const WHOLE = Array.from({ length: 27 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));   // steps between ticks

// The labels of an axis: as many digits as tell its ticks apart.
function labels(u, ticks, axis, space, step) {
  const power = Math.floor(Math.log10(step) + 1e-9), half = Math.abs(step / 10 ** power - 2.5) < 0.01;
  const digits = Math.max(0, Math.min(9, (half ? 1 : 0) - power));
  const most = Math.max(...ticks.map((v) => Math.abs(v ?? 0)));
  const one = (v) => most >= 1e5 || most < 1e-3 ? (+v.toPrecision(3)).toExponential() : v.toFixed(digits);
  return ticks.map((v) => v == null ? "" : v === 0 ? "0" : u.scales.y.distr === 3 ? shown(v) : one(v));
}

const room = (u, values) => 20 + 7 * Math.max(4, ...(values ?? []).map((v) => v.length));
// Of values that are all 0, which uPlot would draw up to 100.
const range = (u, low, high) => low == null ? [low, high] : low === 0 && high === 0 ? [-1, 1] : uPlot.rangeNum(low, high, 0.1, true);

function smooth(y, weight) {
  if (!weight) return y;
  let mean = 0, norm = 0;
  return y.map((v) => {
    if (v == null) return v;
    mean = mean * weight + (1 - weight) * v;
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

function tables(panel) {
  const weight = +tool("smoothing").value;
  const there = panel.lines.filter(([key]) => curves[key] && curves[key].x.length);
  const data = there.map(([key]) => [curves[key].x, smooth(curves[key].y, weight)]);
  const raw = weight ? there.map(([key]) => [curves[key].x, curves[key].y]) : [];
  return { there, data: [...raw, ...data].length ? uPlot.join([...raw, ...data]) : null, raw: raw.length };
}

function options(panel, there, raw, width) {
  const logY = tool("log-y").checked, logX = tool("log-x").checked, byTime = tool("x-axis").value === "time";
  const axis = { stroke: colour("faint"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 }, font: "12px system-ui" };
  const line = ([, label], index, faint) => ({
    label, stroke: colour(`line-${index % COLOURS}`) + (faint ? "40" : ""), width: faint ? 1 : 1.6, spanGaps: true,
    points: { show: false },
  });
  const wallClock = byTime && host.dataset.events;   // else: seconds since a run began
  const few = there.some(([key]) => curves[key].x.length < 3);
  return {
    width, height: 190, legend: { show: false }, cursor: { sync: { key: "console" }, drag: { x: true, y: false } },
    scales: { x: { time: Boolean(wallClock), distr: logX && !wallClock ? 3 : 1 }, y: logY ? { distr: 3 } : { range } },
    axes: [byTime || logX ? axis : { ...axis, incrs: WHOLE }, { ...axis, size: room, values: labels }],
    series: [{}, ...(raw ? there.map((l, i) => line(l, i, true)) : []), ...there.map((l, i) => ({ ...line(l, i, false), points: { show: few } }))],
    hooks: {
      setCursor: [(u) => caption(panel, u)],
      setSelect: [(u) => { if (u.select.width > 2) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
    },
  };
}

function caption(panel, u) {
  const held = plots.get(panel.title);
  if (!held) return;
  const parts = [];
  const at = u && u.cursor.idx != null ? u.data[0][u.cursor.idx] : null;
  panel.lines.forEach(([key, label]) => {
    const curve = curves[key];
    if (!curve || !curve.x.length) return;
    let index = curve.x.length - 1;
    if (at != null) while (index > 0 && curve.x[index] > at) index--;
    parts.push(panel.lines.length > 1 ? `${label} ${shown(curve.y[index])}` : `${shown(curve.y[index])}`);
  });
  const x = at != null && tool("x-axis").value === "step" ? ` at ${shown(at)}` : "";
  held.value.textContent = (parts.length > 3 ? "" : parts.join(" · ")) + x;
  if (at == null) held.plotted.setAttribute("aria-label", `${panel.title}: last ${parts.join(", ")}`);
}

function draw() {
  drawing = 0;
  if (!panels.length) return;
  if (!plots.size) host.replaceChildren();
  for (const panel of panels) {
    let held = plots.get(panel.title);
    const { there, data, raw } = tables(panel);
    if (!data) continue;
    if (!held) {
      const figure = document.createElement("figure"), title = document.createElement("figcaption");
      const value = document.createElement("span"), plotted = document.createElement("div");
      title.append(panel.title, " ", value);
      value.className = "faint";
      plotted.className = "plot";
      plotted.setAttribute("role", "img");
      figure.append(title, plotted);
      if (panel.lines.length > 1) {
        const legend = document.createElement("p");
        legend.className = "legend";
        figure.append(legend);
        held = { figure, value, plotted, legend };
      } else held = { figure, value, plotted };
      host.append(figure);
      plots.set(panel.title, held);
    }
    if (held.legend && held.legend.childElementCount !== there.length) {
      held.legend.replaceChildren(...there.map(([, label], i) => {
        const one = document.createElement("span");
        one.className = `key-${i % COLOURS}`;
        one.textContent = label;
        return one;
      }));
    }
    const width = Math.max(160, held.plotted.clientWidth);
    const shape = JSON.stringify([there, raw, width, tool("log-y").checked, tool("log-x").checked, tool("x-axis").value, colour("ink"), there.some(([key]) => curves[key].x.length < 3)]);
    if (held.shape !== shape) {
      held.plot?.destroy();
      held.plot = new uPlot(options(panel, there, raw, width), data, held.plotted);
      held.shape = shape;
    } else held.plot.setData(data, !zoom);
    if (zoom) held.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    caption(panel, null);
  }
}

const redraw = () => { drawing ||= requestAnimationFrame(draw); };

function take(given) {
  if (given.anew) { curves = {}; panels = []; }
  for (const panel of given.panels) {
    const known = panels.find((one) => one.title === panel.title);
    if (!known) panels.push(panel);
    else for (const line of panel.lines) if (!known.lines.some(([key]) => key === line[0])) known.lines.push(line);
  }
  for (const [key, { x, y }] of Object.entries(given.curves)) {
    const curve = (curves[key] ??= { x: [], y: [] });
    const last = curve.x.length ? curve.x[curve.x.length - 1] : -Infinity;
    if (x.length && x[0] < last) { fetchCurves(); return; }   // set back to an earlier step
    curve.x.push(...x);
    curve.y.push(...y);
  }
  if (Object.values(curves).some((curve) => curve.x.length > 8000)) fetchCurves();
  redraw();
}

async function fetchCurves() {
  const url = new URL(host.dataset.curves, location.href);
  url.searchParams.set("x", tool("x-axis").value);
  if (zoom) { url.searchParams.set("low", zoom[0]); url.searchParams.set("high", zoom[1]); }
  const response = await fetch(url, { headers: { accept: "application/json" } });
  if (response.ok) take(await response.json());
}

function zoomTo(range) {
  zoom = range;
  fetchCurves();              // the part that is shown, as finely as it can be
}

for (const id of ["smoothing", "log-y", "log-x"]) tool(id).addEventListener("input", redraw);
tool("x-axis").addEventListener("change", () => { zoom = null; curves = {}; fetchCurves().then(reopen); });
tool("reset-zoom").addEventListener("click", () => { zoom = null; fetchCurves(); });
host.addEventListener("dblclick", () => { zoom = null; fetchCurves(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(host);
const address = () => {
  const url = new URL(host.dataset.events, location.href);
  url.searchParams.set("x", tool("x-axis").value);
  return url;
};
const reopen = host.dataset.events ? follow(address, { points: (given) => { if (!zoom) take(given); } }) : () => {};
if (!host.dataset.events) fetchCurves();
