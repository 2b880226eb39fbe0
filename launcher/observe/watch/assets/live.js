// Shows the report again as it is drawn: fetches the page, replaces the sections that have changed, says how old it is.
"use strict";

const INTERVAL_MS = 2000;
const LATE_S = 90;          // a page that old says so
let state = { age: 0, error: null, failing: null, reading: null };
let received = performance.now(), answered = true, fetching = false;

const bar = document.createElement("p");
bar.id = "live";
document.querySelector("main").prepend(bar);
const shown = new Map();    // id of a section -> HTML as it was received; a reader may open what it holds
for (const section of document.querySelectorAll("main > section")) shown.set(section.id, section.innerHTML);

async function refresh() {
  if (fetching || document.hidden) return;
  fetching = true;
  try {
    const reply = await fetch("/", { cache: "no-store" });
    if (!reply.ok) throw new Error(String(reply.status));
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    state = JSON.parse(reply.headers.get("Maskfleet-State"));
    received = performance.now();
    show(page);
    answered = true;
  } catch (error) {
    answered = false;
  }
  fetching = false;
  tellAge();
}

function show(page) {
  document.title = page.title;
  const main = document.querySelector("main"), sections = [...page.querySelectorAll("main > section")];
  const ids = new Set(sections.map((section) => section.id));
  for (const old of main.querySelectorAll(":scope > section")) if (!ids.has(old.id)) old.remove();
  let before = bar;
  for (const section of sections) {
    const old = document.getElementById(section.id), html = section.innerHTML;
    if (!old) before.after(section);
    else if (shown.get(section.id) !== html) {
      const open = old.querySelector("details")?.open, scrolled = old.querySelector(".scrolled")?.scrollTop;
      old.replaceWith(section);
      if (open) section.querySelector("details")?.setAttribute("open", "");
      if (scrolled) section.querySelector(".scrolled")?.scrollTo(0, scrolled);
    }
    shown.set(section.id, html);
    before = document.getElementById(section.id);
  }
}

function spell(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
}

function tellAge() {
  const since = (performance.now() - received) / 1000, age = spell(state.age + since);
  if (!answered) {
    bar.textContent = `the watcher does not answer any more; this page is ${age} old`;
    bar.className = "lost";
  } else if (state.error !== null) {
    bar.textContent = `cannot be read since ${spell(state.failing + since)}: ${state.error}; this page is ${age} old`;
    bar.className = "late";
  } else {
    const reading = state.reading > 10 ? `, being read since ${spell(state.reading + since)}` : "";
    bar.textContent = `live, read ${age} ago${reading}`;
    bar.className = state.age + since > LATE_S ? "late" : "";
  }
}

document.addEventListener("visibilitychange", refresh);
setInterval(tellAge, 1000);
setInterval(refresh, INTERVAL_MS);
refresh();
