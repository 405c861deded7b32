// Charts of a page: its curves, and the points that its stream adds.
// Knows no metric: the server says which lines share a chart. The address says how they are drawn, so that it can be shared.
import { element, follow } from "./live.js";

const host = document.getElementById("charts");
const compared = !host.dataset.events;  // runs overlaid: their names are above all charts
const tool = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = 8, DASHES = [[], [7, 4], [2, 3]], HEIGHT = 196, LEGEND = 24;
const MANY = COLOURS * DASHES.length;   // more lines look alike: the pointer tells which is which
const runs = [...document.querySelectorAll(".compared a")].map((one) => one.pathname.split("/").pop());

let panels = [];        // [{title, lines: [[key, label]]}]
let curves = {};        // key -> {x: [], y: []}
let plots = new Map();  // title -> {figure, value, plot}
let zoom = null;        // [low, high], while a part is shown
let extent = null;      // of x, while all is shown
let asked = 0, drawing = 0;

const shown = (v) => v == null ? "–" : Math.abs(v) >= 1e5 ? v.toExponential(2) : String(+v.toPrecision(4));
const WHOLE = Array.from({ length: 27 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));   // steps between ticks
const byTime = () => tool("x-axis").value === "time";
const wallClock = () => byTime() && !compared;     // else: steps, or seconds since a run began
const logX = () => tool("log-x").checked && !wallClock();

// As many digits as tell an axis' ticks apart.
function labels(u, ticks, axis, space, step) {
  const power = Math.floor(Math.log10(step) + 1e-9), half = Math.abs(step / 10 ** power - 2.5) < 0.01;
  const digits = Math.max(0, Math.min(9, (half ? 1 : 0) - power));
  const most = Math.max(...ticks.map((v) => Math.abs(v ?? 0)));
  const one = (v) => most >= 1e5 || most < 1e-3 ? (+v.toPrecision(3)).toExponential() : v.toFixed(digits);
  return ticks.map((v) => v == null ? "" : v === 0 ? "0" : u.scales.y.distr === 3 ? shown(v) : one(v));
}

const room = (u, values) => 20 + 7 * Math.max(4, ...(values ?? []).map((v) => v.length));
// If all are 0, uPlot would draw up to 100.
const range = (u, low, high) => low == null ? [low, high] : low === 0 && high === 0 ? [-1, 1] : uPlot.rangeNum(low, high, 0.1, true);
// A logarithmic axis begins above 0.
function logRange(u, low, high) {
  if (low == null) return [1, 10];
  const begin = low > 0 ? low : u.data[0][0];
  return high > begin ? [begin, high] : [begin / 2, begin * 2];
}

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

// The lines of a chart that have points. A logarithmic axis has no place for x ≤ 0.
function lines(panel) {
  const weight = +tool("smoothing").value, found = [];
  panel.lines.forEach(([key, label], index) => {
    const { x, y } = curves[key] ?? { x: [] };
    const first = logX() ? x.findIndex((v) => v > 0) : 0;
    if (x.length <= first || first < 0) return;
    const smoothed = smooth(y, weight), cut = (values) => first ? values.slice(first) : values;
    found.push({ look: compared ? +key.slice(key.lastIndexOf("@") + 1) : index, label, x: cut(x), y: cut(y), smoothed: weight ? cut(smoothed) : null });
  });
  return found;
}

function options(panel, held, width) {
  const grid = { stroke: colour("grid"), width: 1 }, axis = { stroke: colour("faint"), grid, ticks: grid, font: "12px system-ui" };
  const few = held.lines.some(({ x }) => x.length < 3);
  const line = ({ label, look }, faint) => ({
    label, stroke: colour(`line-${look % COLOURS}`) + (faint ? "40" : ""), width: faint || held.many ? 1 : 1.6, spanGaps: true,
    dash: held.many ? [] : DASHES[Math.floor(look / COLOURS) % DASHES.length], points: { show: few && !faint },
  });
  return {
    width, height: HEIGHT - (held.legend ? LEGEND : 0), legend: { show: false }, padding: [10, 8, 0, 0],
    cursor: { sync: { key: "console" }, drag: { x: true, y: false }, ...(held.many && { focus: { prox: 30 }, points: { show: false } }) }, focus: { alpha: 0.2 },
    scales: { x: { time: wallClock(), ...(logX() ? { distr: 3, range: logRange } : {}) }, y: tool("log-y").checked ? { distr: 3 } : { range } },
    axes: [{ ...axis, size: wallClock() ? 42 : 28, ...(byTime() || logX() ? {} : { incrs: WHOLE }) }, { ...axis, size: room, values: labels }],
    series: [{}, ...held.lines.filter((one) => one.smoothed).map((one) => line(one, true)), ...held.lines.map((one) => line(one, false))],
    hooks: {
      setCursor: [(u) => caption(panel, held, pointed(u))],
      setSeries: [(u, i) => { held.near = i && held.lines[(i - 1) % held.lines.length]; caption(panel, held, pointed(u)); }],
      setSelect: [(u) => { if (u.select.width > 2) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
    },
  };
}

const pointed = (u) => u.cursor.idx == null ? null : u.data[0][u.cursor.idx];

// The values at a place of the x axis; else the last ones. Of many lines, the one at the pointer.
function caption(panel, held, at) {
  const { lines, legend, many } = held, near = many && at != null && held.near;
  const values = (near ? [near] : many ? [] : lines).map(({ x, y, smoothed }) => {
    let index = x.length - 1;
    if (at != null) while (index > 0 && x[index] > at) index--;
    return shown(y[index]) + (smoothed ? `${legend ? " ~ " : ", smoothed "}${shown(smoothed[index])}` : "");
  });
  const place = at == null ? "" : wallClock() ? ` at ${new Date(at * 1000).toLocaleTimeString()}` : ` at ${shown(at)}${byTime() ? " s" : ""}`;
  held.value.textContent = (near ? `${near.label}: ${values[0]}` : many ? `${lines.length} runs` : legend ? "" : values[0]) + place;
  if (legend) [...legend.children].forEach((one, i) => { one.lastChild.textContent = values[i]; });
  if (at == null) held.plotted.setAttribute("aria-label", `${panel.title}: ${many ? held.value.textContent : `last ${values.map((value, i) => legend ? `${lines[i].label} ${value}` : value).join(", ")}`}`);
}

function legend({ look, label }) {
  const one = element("span", `key-${look % COLOURS} dash-${Math.floor(look / COLOURS) % DASHES.length}`);
  one.append(element("span", compared ? "unseen" : "", `${label}:`), " ", element("b"));
  one.title = label;
  return one;
}

function add(panel) {
  const figure = element("figure"), title = element("figcaption"), value = element("span", "faint"), plotted = element("div");
  title.append(panel.title, " ", value);
  plotted.setAttribute("role", "img");
  figure.append(title, plotted);
  const many = runs.length > MANY;
  const held = { figure, value, plotted, many, legend: !many && (compared || panel.lines.length > 1) ? element("p", "legend") : null };
  if (held.legend) figure.append(held.legend);
  host.append(figure);
  plots.set(panel.title, held);
  return held;
}

function draw() {
  drawing = 0;
  if (!panels.length) return;
  if (!plots.size) host.replaceChildren();
  const empty = new Set(plots.values());
  for (const panel of panels) {
    const found = lines(panel);
    if (!found.length) continue;
    const held = plots.get(panel.title) ?? add(panel);
    held.figure.hidden = false;
    held.lines = found;
    empty.delete(held);
    const raw = found.filter((one) => one.smoothed).map(({ x, y }) => [x, y]);
    const data = uPlot.join([...raw, ...found.map(({ x, y, smoothed }) => [x, smoothed ?? y])]);
    const width = Math.max(160, held.plotted.clientWidth);
    const shape = JSON.stringify([found.map(({ look, label, x }) => [look, label, x.length < 3]), raw.length, width, tool("log-y").checked, logX(), byTime(), colour("ink")]);
    if (held.shape !== shape) {
      held.legend?.replaceChildren(...found.map(legend));
      held.plot?.destroy();
      held.plot = new uPlot(options(panel, held, width), data, held.plotted);
      held.shape = shape;
    } else held.plot.setData(data, !zoom);
    if (zoom) held.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    caption(panel, held, pointed(held.plot));
  }
  for (const { figure } of empty) figure.hidden = true;
  if (!zoom) extent = Object.values(curves).reduce(([low, high], { x }) => x.length ? [Math.min(low, x[0]), Math.max(high, x[x.length - 1])] : [low, high], [Infinity, -Infinity]);
}

const redraw = () => { drawing ||= requestAnimationFrame(draw); };

function take(given, complete = true) {
  if (given.anew) { curves = {}; panels = []; }
  for (const panel of given.panels) {
    const known = panels.find((one) => one.title === panel.title);
    if (!known) panels.push(panel);
    else for (const line of panel.lines) if (!known.lines.some(([key]) => key === line[0])) known.lines.push(line);
  }
  const axes = given.x.map((steps) => { let at = 0; return steps.map((step) => at += step); });
  for (const [key, [axis, y]] of Object.entries(given.curves)) {
    const x = axes[axis];
    const curve = (curves[key] ??= { x: [], y: [] });
    const last = curve.x.length ? curve.x[curve.x.length - 1] : -Infinity;
    if (x.length && x[0] < last) { fetchCurves(); return; }   // set back to an earlier step
    curve.x.push(...x);
    curve.y.push(...y);
  }
  if (Object.values(curves).some((curve) => curve.x.length > 8000)) fetchCurves();
  tool("left-out").textContent = given.left_out ? `${given.left_out} more metrics are not shown.` : "";
  if (complete) redraw();
}

// Of runs overlaid, so many at a time; drawn about once a second until all are here.
async function fetchCurves() {
  const mine = ++asked, together = +host.dataset.together || 1;
  let anew = true, drawn = performance.now();
  for (let first = 0; first < (runs.length || 1); first += together) {
    const url = address(host.dataset.curves), add = (name, value) => url.searchParams.append(name, value);
    if (zoom) add("low", zoom[0]), add("high", zoom[1]);
    if (compared) add("first", first), add("of", runs.length);
    for (const run of runs.slice(first, first + together)) add("run", run);
    const response = await fetch(url, { headers: { accept: "application/json" } }), given = response.ok && await response.json();
    if (mine !== asked) return;
    if (given) take({ ...given, anew }, performance.now() - drawn > 1000);
    if (given) anew = false;
    if (drawing) drawn = performance.now();
    if (compared) tool("live").textContent = first + together < runs.length ? `${first + together} of ${runs.length} runs` : "";
  }
  redraw();
}

// -- what the address says --

function address(path) {
  const url = new URL(path, location.href);
  url.searchParams.set("x", tool("x-axis").value);
  return url;
}

function remember() {
  const url = new URL(location.href);
  const says = {
    x: byTime() ? "time" : null, smoothing: +tool("smoothing").value || null, "log-y": tool("log-y").checked || null, "log-x": tool("log-x").checked || null,
    low: zoom?.[0], high: zoom?.[1],
  };
  for (const [name, value] of Object.entries(says)) value == null ? url.searchParams.delete(name) : url.searchParams.set(name, value);
  history.replaceState(history.state, "", url);
}

function recall() {
  const says = new URL(location.href).searchParams, part = [says.get("low"), says.get("high")].map((v) => parseFloat(v));
  tool("x-axis").value = says.get("x") === "time" ? "time" : "step";
  tool("smoothing").value = says.get("smoothing") ?? 0;
  for (const name of ["log-y", "log-x"]) tool(name).checked = says.has(name);
  if (part[0] < part[1]) zoom = part;
}

// -- what is done to charts --

function zoomTo(range) {
  zoom = range;
  remember();
  fetchCurves();              // the part that is shown, as finely as it can be
}

// To a part that is `scale` times as wide, and moved by this share of it; within what there is.
function move(scale, by) {
  const [low, high] = zoom ?? extent ?? [0, 0], wide = (high - low) * scale;
  if (!(wide > 0)) return;
  const [first, last] = extent ?? [-Infinity, Infinity];
  const begin = Math.max(first, Math.min((low + high - wide) / 2 + by * wide, last - wide));
  zoomTo(wide >= last - first ? null : [begin, begin + wide]);
}

recall();
for (const id of ["smoothing", "log-y", "log-x"]) {
  tool(id).addEventListener("input", redraw);
  tool(id).addEventListener("change", remember);
}
tool("x-axis").addEventListener("change", () => { zoom = null; curves = {}; remember(); fetchCurves().then(reopen); });
for (const button of document.querySelectorAll("[data-move]")) button.addEventListener("click", () => move(...JSON.parse(button.dataset.move)));
tool("reset-zoom").addEventListener("click", () => zoomTo(null));
host.addEventListener("dblclick", () => zoomTo(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(host);
if (compared || zoom) fetchCurves();
const reopen = compared ? () => {} : follow(() => address(host.dataset.events), { points: (given) => { if (!zoom) take(given); } });
