// Keeps the page up to date, shows values where somebody points, hides curves whose legend was pressed.
"use strict";

const EVERY_MS = 2000;      // between two looks
const LATE_S = 90;          // a page that old says so
const SVG = "http://www.w3.org/2000/svg";

const known = JSON.parse(document.body.dataset.known);
const shown = new Map();    // section -> HTML as it was received
const hidden = new Set();   // "chart|series" whose curve is hidden
const pointed = { name: null, x: null };
let received = performance.now(), answered = true, looking = false, asked = 0;

// ---- Looking for news

async function look() {
  if (looking || document.hidden) return;
  looking = true;
  const mine = ++asked;
  try {
    const address = new URL(location.href);
    address.searchParams.set("live", known.version);
    const reply = await fetch(address, { cache: "no-store" });
    if (!reply.ok) throw new Error(String(reply.status));
    const news = await reply.json();
    if (mine !== asked) return;  // something else was asked for meanwhile
    take(news);
    answered = true;
  } catch (error) {
    if (mine !== asked) return;
    answered = false;
  }
  looking = false;
  tell();
}

function take(news) {
  received = performance.now();
  for (const name of ["version", "age", "error", "failing", "reading"]) known[name] = news[name];
  if (!news.sections) return;
  document.title = `${news.title} - Maskfleet`;
  const place = document.getElementById("sections");
  for (const section of [...place.children]) {
    if (!(section.id.slice(2) in news.sections)) { section.remove(); shown.delete(section.id.slice(2)); }
  }
  let before = null;
  for (const [name, html] of Object.entries(news.sections)) {
    let section = document.getElementById(`s-${name}`);
    if (!section) {
      section = document.createElement("section");
      section.id = `s-${name}`;
      place.insertBefore(section, before ? before.nextSibling : place.firstChild);
    }
    if (shown.get(name) !== html) replace(section, name, html);
    before = section;
  }
}

function replace(section, name, html) {
  const rows = new Set([...section.querySelectorAll("#s-events tr")].map((row) => row.textContent));
  const scrolled = section.querySelector(".scrolled")?.scrollTop ?? 0;
  const focused = section.contains(document.activeElement) ? path(document.activeElement) : null;
  const opened = [...section.querySelectorAll("details")].map((one) => one.open);
  section.innerHTML = html;
  shown.set(name, html);
  section.querySelectorAll("details").forEach((one, index) => { if (index in opened) one.open = opened[index]; });
  if (rows.size) {
    for (const row of section.querySelectorAll("tr")) row.classList.toggle("new", !rows.has(row.textContent));
  }
  const list = section.querySelector(".scrolled");
  if (list) list.scrollTop = scrolled;
  enliven(section);
  if (focused) section.querySelector(focused)?.focus({ preventScroll: true });
}

function path(element) {
  if (element.name) return `[name="${CSS.escape(element.name)}"][value="${CSS.escape(element.value)}"]`;
  if (element.dataset.axis) return `[data-axis="${element.dataset.axis}"]`;
  const figure = element.closest("figure");
  if (!figure) return element.classList.contains("scrolled") ? ".scrolled" : "a";
  const within = element.dataset.series ? `[data-series="${CSS.escape(element.dataset.series)}"]` : "svg";
  return `figure[data-name="${CSS.escape(figure.dataset.name)}"] ${within}`;
}

// ---- How old it is

function spell(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600) % 24} h`;
}

function tell() {
  const since = (performance.now() - received) / 1000, live = document.getElementById("live");
  const age = known.age === null ? null : known.age + since;
  let text, mood = "";
  if (!answered) {
    text = `the watcher does not answer any more; this is as of ${spell((age ?? 0))} ago`;
    mood = "lost";
  } else if (known.error !== null) {
    const old = age === null ? "" : `; shown is how it was ${spell(age)} ago`;
    text = `cannot be read since ${spell(known.failing + since)}: ${known.error}${old}`;
    mood = "late";
  } else if (age === null) {
    text = "reading for the first time";
  } else if (known.reading !== null && known.reading > 10) {
    text = `reading since ${spell(known.reading + since)}; shown is how it was ${spell(age)} ago`;
    mood = age > LATE_S ? "late" : "";
  } else if (age > LATE_S) {
    text = `shown is how it was ${spell(age)} ago`;
    mood = "late";
  } else {
    text = `live, read ${spell(age)} ago`;
  }
  live.className = mood;
  live.setAttribute("role", mood ? "status" : "none");
  const place = document.getElementById("age");
  if (place.textContent !== text) place.textContent = text;
  for (const time of document.querySelectorAll("time[data-at]")) {
    const ago = `${spell(Date.now() / 1000 - Number(time.dataset.at))} ago`;
    if (time.textContent !== ago) {
      time.title ||= time.textContent;
      time.textContent = ago;
    }
  }
}

// ---- Charts

function enliven(root) {
  for (const figure of root.querySelectorAll("figure[data-readings]")) {
    const readings = JSON.parse(figure.dataset.readings), name = figure.dataset.name;
    figure.readings = readings;
    for (const key of figure.querySelectorAll(".key")) press(figure, key);
    const svg = figure.querySelector("svg");
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => point(figure, place(svg, event)));
    svg.addEventListener("pointerdown", (event) => point(figure, place(svg, event)));
    svg.addEventListener("pointerleave", () => leave(figure));
    svg.addEventListener("blur", () => leave(figure));
    svg.addEventListener("keydown", (event) => step(figure, event));
    hide(figure);
    if (pointed.name === name) point(figure, pointed.x);
  }
  for (const box of root.querySelectorAll(".choose input")) box.addEventListener("change", choose);
}

function press(figure, span) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = span.className;
  button.textContent = button.dataset.series = span.textContent;
  button.title = "show or hide";
  button.addEventListener("click", () => {
    const id = `${figure.dataset.name}|${button.dataset.series}`;
    if (!hidden.delete(id)) hidden.add(id);
    hide(figure);
  });
  span.replaceWith(button);
}

function hide(figure) {
  for (const series of figure.readings.series) {
    const away = hidden.has(`${figure.dataset.name}|${series.name}`);
    figure.querySelectorAll(`svg .s${series.tone}`).forEach((shape) => shape.classList.toggle("hidden", away));
    for (const button of figure.querySelectorAll("button.key")) {
      if (button.dataset.series === series.name) button.setAttribute("aria-pressed", String(!away));
    }
  }
}

function place(svg, event) {
  const box = svg.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
}

function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
}

function visibleSeries(figure) {
  return figure.readings.series.filter((one) => !hidden.has(`${figure.dataset.name}|${one.name}`));
}

function point(figure, x) {
  pointed.name = figure.dataset.name;
  pointed.x = x;
  const found = visibleSeries(figure).map((series) => {
    const index = nearest(series.x, x);
    return { series, index, away: Math.abs(series.x[index] - x) };
  });
  wipe(figure);
  if (!found.length) return;
  const best = found.reduce((one, other) => (other.away < one.away ? other : one));
  const at = best.series.x[best.index];
  const close = found.filter((one) => Math.abs(one.series.x[one.index] - at) < 14);
  const marks = figure.readings.marks.filter((mark) => Math.abs(mark.x - x) < 5).slice(0, 3);
  draw(figure, at, close);
  tip(figure, at, best.series.at[best.index], close, marks);
}

function draw(figure, at, close) {
  const svg = figure.querySelector("svg"), group = document.createElementNS(SVG, "g");
  group.setAttribute("class", "pointer");
  const line = document.createElementNS(SVG, "line");
  const height = svg.viewBox.baseVal.height;
  for (const [name, value] of Object.entries({ class: "cursor", x1: at, x2: at, y1: 16, y2: height - 30 })) {
    line.setAttribute(name, value);
  }
  group.append(line);
  for (const { series, index } of close) {
    const dot = document.createElementNS(SVG, "circle");
    const place = { class: `dot at s${series.tone}`, cx: series.x[index], cy: series.y[index], r: 4 };
    for (const [name, value] of Object.entries(place)) dot.setAttribute(name, value);
    group.append(dot);
  }
  svg.append(group);
}

function tip(figure, at, where, close, marks) {
  const box = document.createElement("div");
  box.className = "tip";
  box.setAttribute("role", "status");
  const head = document.createElement("b");
  head.textContent = where;
  box.append(head);
  for (const { series, index } of close) {
    const row = document.createElement("div"), name = document.createElement("i"), value = document.createElement("span");
    name.className = `key-${series.tone}`;
    name.textContent = series.name;
    value.textContent = series.text[index];
    row.append(name, value);
    box.append(row);
  }
  for (const mark of marks) {
    const text = document.createElement("span");
    text.className = "mark-text";
    text.textContent = mark.text;
    box.append(text);
  }
  figure.append(box);
  const svg = figure.querySelector("svg"), scale = svg.clientWidth / svg.viewBox.baseVal.width || 1;
  const from = svg.getBoundingClientRect(), around = figure.getBoundingClientRect();
  const x = at * scale + from.left - around.left;
  const over = x + 14 + box.offsetWidth > figure.clientWidth;
  box.style.left = `${Math.max(4, over ? x - 14 - box.offsetWidth : x + 14)}px`;
  box.style.top = `${from.top - around.top + 8}px`;
}

function wipe(figure) {
  figure.querySelectorAll(".pointer,.tip").forEach((one) => one.remove());
}

function leave(figure) {
  pointed.name = null;
  wipe(figure);
}

function step(figure, event) {
  const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e6, End: 1e6 }[event.key];
  if (event.key === "Escape") leave(figure);
  const series = visibleSeries(figure)[0];
  if (!way || !series) return;
  event.preventDefault();
  const from = pointed.name === figure.dataset.name ? nearest(series.x, pointed.x) : way > 0 ? -1 : series.x.length;
  point(figure, series.x[Math.min(series.x.length - 1, Math.max(0, from + way))]);
}

// ---- What is compared, and over what

function choose(event) {
  const boxes = [...document.querySelectorAll(".choose input:checked")];
  if (boxes.length > 8) { event.target.checked = false; return; }
  const address = new URL(location.href);
  address.searchParams.delete("run");
  for (const box of boxes) address.searchParams.append("run", box.value);
  if (!boxes.length) address.searchParams.append("run", "");
  go(address);
}

function go(address) {
  history.replaceState(null, "", address);
  known.version = "";
  looking = false;
  look();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-axis]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const address = new URL(location.href);
  address.searchParams.set("axis", link.dataset.axis);
  go(address);
});

for (const section of document.querySelectorAll("#sections > section")) {
  shown.set(section.id.slice(2), null);
  enliven(section);
}
document.addEventListener("visibilitychange", look);
setInterval(tell, 1000);
setInterval(look, EVERY_MS);
tell();
look();
