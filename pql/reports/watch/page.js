"use strict";
// Texts from runs are only ever set as textContent: run directories may be anybody's.

const POLL = 3000, SHOWN = 8, SVG = "http://www.w3.org/2000/svg";
const CHARTS = [
  {title: "Speed", unit: "env steps/s", keys: ["throughput/env_steps_per_s"], zero: true},
  {title: "Busy", unit: "share of time", match: /^busy\//, low: 0, high: 1},
  {title: "Update ratios", unit: "realised", match: /^ratio\//, zero: true},
  {title: "Replay", unit: "share filled", keys: ["fill"], low: 0, high: 1},
  {title: "Actions at their limits", unit: "share", keys: ["policy/saturated", "policy/frozen"], low: 0, high: 1},
  {title: "Policy", unit: "entropy, KL", keys: ["policy/entropy", "policy/kl"]},
  {title: "Value", unit: "scaled rewards", keys: ["value/q"]},
  {title: "Critic loss", unit: "", keys: ["loss/critic"]},
  {title: "Gradient norms", unit: "before clipping", match: /^grad_norm\//, zero: true},
  {title: "Skipped updates", unit: "share", match: /^skipped\//, low: 0, high: 1},
  {title: "Policy lag", unit: "ticks", match: /^lag\//, zero: true},
  {title: "Memory", unit: "GiB", match: /^memory\//, zero: true},
];
const state = {axis: "time/seconds", runs: [], data: new Map(), hidden: new Set(), focus: null, film: null};
const byId = (id) => document.getElementById(id);

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(2) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(2) + "M";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.round(seconds), parts = [Math.floor(whole / 60) % 60, whole % 60].map((n) => String(n).padStart(2, "0"));
  return whole >= 3600 ? `${Math.floor(whole / 3600)}:${parts.join(":")}` : parts.join(":").replace(/^0/, "");
}

function element(tag, content = "", attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = content;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function drawn(tag, attributes, content = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = content;
  return node;
}

const CLOCK = [1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400];

function ticks(low, high, count, clocked = false) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const round = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const step = (clocked && CLOCK.find((n) => n >= raw)) || round;
  const first = Math.ceil(low / step), many = Math.min(50, Math.floor(high / step + 1e-6) - first + 1);  // numbers may be huge
  return Array.from({length: Math.max(0, many || 0)}, (_, i) => (first + i) * step);
}

function short(value) {
  const size = Math.abs(value), trim = (n) => String(Number(n.toPrecision(3)));
  return size >= 1e6 ? trim(value / 1e6) + "M" : size >= 1000 ? trim(value / 1000) + "k" : trim(value);
}

// A chart of lines {label, color, x, y, thin, dots}; x and y are columns with null where a value is missing.
function chart(host, {title, unit, low, high, zero, height = 170}, lines) {
  const present = lines.map((line) => ({...line, points: points(line)})).filter((line) => line.points.length);
  host.replaceChildren();
  host.hidden = !present.length;
  if (!present.length) return 0;
  if (title) {
    const head = element("h3", title + " ");
    head.append(element("small", unit));
    host.append(head);
  }
  const width = Math.max(240, host.clientWidth - 20), left = 46, bottom = 22, right = 8, top = 8;
  const all = present.flatMap((line) => line.points);
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [low ?? Math.min(...ys, ...(zero ? [0] : [])), Math.max(high ?? -Infinity, ...ys)];
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0 && low !== undefined) y1 = low + 1;
  if (y1 === y0) [y0, y1] = [y0 - Math.abs(y0 || 1) * 0.1, y1 + Math.abs(y1 || 1) * 0.1];
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title || "return"});
  for (const y of ticks(y0, y1, 4)) {
    svg.append(drawn("line", {class: "grid-line", x1: left, x2: width - right, y1: py(y), y2: py(y)}));
    svg.append(drawn("text", {x: left - 6, y: py(y) + 4, "text-anchor": "end"}, short(y)));
  }
  for (const x of ticks(x0, x1, width / 75, state.axis === "time/seconds")) {
    const label = state.axis === "time/seconds" ? clock(x) : short(x);
    svg.append(drawn("text", {x: px(x), y: height - 6, "text-anchor": px(x) > width - 24 ? "end" : "middle"}, label));
  }
  for (const line of present) {
    const path = line.points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    svg.append(drawn("path", {d: path, stroke: line.color, ...(line.thin ? {class: "thin"} : {})}));
    if (line.dots && line.points.length < 60) {
      for (const [x, y] of line.points) svg.append(drawn("circle", {cx: px(x), cy: py(y), r: 2.6, fill: line.color}));
    }
  }
  host.append(svg);
  const named = present.filter((line) => !line.thin);
  if (named.length > 1 || !title) {
    const legend = element("div", "", {class: "legend"});
    for (const line of named.length ? named : present) {
      const item = element("span", line.label);
      item.style.setProperty("--color", line.color);
      legend.append(item);
    }
    host.append(legend);
  }
  return 1;
}

function points({x, y}) {
  if (!x || !y) return [];
  return x.map((at, i) => [at, y[i]]).filter(([a, b]) => a !== null && a !== undefined && b !== null && b !== undefined);
}

const color = (i) => `var(--c${i % 8})`;
const visible = () => state.runs.filter((run) => !state.hidden.has(run.id)).slice(0, SHOWN);

function drawRuns() {
  const body = byId("runs"), shown = visible();
  body.replaceChildren(...state.runs.map((run) => {
    const row = element("tr", "", {"aria-selected": String(run.id === state.focus)});
    const box = element("input", "", {type: "checkbox", "aria-label": `show ${run.id}`});
    const place = shown.indexOf(run);
    box.checked = place >= 0;
    box.style.accentColor = place >= 0 ? color(place) : "";
    box.addEventListener("click", (event) => { event.stopPropagation(); toggle(run.id, box.checked); });
    const latest = run.latest, label = element("button", run.id);
    const what = [run.task, run.algo, run.seed && `seed ${run.seed}`].filter(Boolean).join(", ");
    label.title = what;
    const cells = [box, label, element("span", run.state, {class: `state ${run.state}`}), clock(latest["time/seconds"]),
      number(latest["steps/env"]), number(latest["throughput/env_steps_per_s"]), number(latest["train/return_mean"]),
      number(latest["eval/return_mean"])];
    for (const cell of cells) { const td = element("td"); td.append(cell); row.append(td); }
    row.addEventListener("click", () => { state.focus = run.id; refresh(); });
    return row;
  }));
}

function toggle(id, on) {
  if (on) state.hidden.delete(id); else state.hidden.add(id);
  refresh();
}

function drawCharts() {
  const axis = state.axis;
  let count = chart(byId("returns"), {height: 300}, visible().flatMap((run, i) => {
    const data = state.data.get(run.id);
    if (!data) return [];
    const label = state.runs.length > 1 ? run.id : [run.task, run.algo].filter(Boolean).join(", ") || run.id;
    return [
      {label: `${label} (train)`, color: color(i), x: data.training[axis], y: data.training["train/return_mean"], thin: true},
      {label, color: color(i), x: data.evaluations[axis], y: data.evaluations["eval/return_mean"], dots: true},
    ];
  }));
  const data = state.data.get(state.focus), host = byId("charts");
  while (host.children.length < CHARTS.length) host.append(element("div", "", {class: "chart"}));
  byId("name").textContent = state.focus || "";
  CHARTS.forEach((spec, n) => {
    const rows = data ? {...data.training, fill: filled(data)} : {};
    const keys = spec.keys || Object.keys(rows).filter((key) => spec.match.test(key)).sort();
    const lines = keys.filter((key) => rows[key]).map((key, i) => ({label: key.replace(/^.*\//, ""), color: color(i), x: rows[axis], y: rows[key]}));
    count += chart(host.children[n], spec, lines);
  });
  drawFilm(data);
  byId("latest").replaceChildren(...Object.entries(data ? data.latest : {}).sort().map(([name, value]) => {
    const row = element("tr");
    row.append(element("td", name), element("td", number(value, 4)));
    return row;
  }));
  const log = byId("log"), follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.hidden = !(data && data.log);
  log.textContent = data ? data.log : "";
  if (follows) log.scrollTop = log.scrollHeight;
  document.documentElement.dataset.charts = count;
}

function filled(data) {
  return data.capacity ? (data.training["steps/env"] || []).map((n) => (n === null ? null : Math.min(1, n / data.capacity))) : undefined;
}

function drawFilm(data) {
  const film = byId("film"), key = data && data.video ? `${state.focus} ${data.video}` : null;
  film.hidden = !key;
  if (key === state.film) return;
  state.film = key;
  if (key) film.querySelector("video").src = `/video?id=${encodeURIComponent(state.focus)}&v=${encodeURIComponent(data.video)}`;
}

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

async function refresh() {
  try {
    const listing = await fetched("/api/runs");
    state.runs = listing.runs;
    byId("folder").textContent = listing.folder;
    if (!state.runs.some((run) => run.id === state.focus)) {
      state.focus = (state.runs.find((run) => run.state === "running") || state.runs[0] || {id: null}).id;
    }
    const wanted = new Set([...visible().map((run) => run.id), state.focus].filter((id) => id !== null));
    await Promise.all([...wanted].map(async (id) => {
      const known = state.data.get(id);
      const version = encodeURIComponent(known ? known.version : "");
      const found = await fetched(`/api/run?id=${encodeURIComponent(id)}&version=${version}`).catch(() => ({}));
      if (found.training) state.data.set(id, found);
    }));
    const running = state.runs.filter((run) => run.state === "running").length;
    byId("status").textContent = state.runs.length ? `${state.runs.length} runs, ${running} running` : "no runs yet";
    drawRuns();
    drawCharts();
  } catch (error) {
    byId("status").textContent = "no answer: has pql watch ended?";
  }
}

document.querySelectorAll("[data-axis]").forEach((button) => button.addEventListener("click", () => {
  state.axis = button.dataset.axis;
  document.querySelectorAll("[data-axis]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
  drawCharts();
}));
window.addEventListener("resize", drawCharts);
(async function poll() { await refresh(); setTimeout(poll, POLL); })();
