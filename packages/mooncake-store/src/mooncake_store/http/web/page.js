// Shows a store: asks /v1/report again and again and draws what it says. Nothing is loaded from elsewhere.
"use strict";

const PERIOD_MS = 2000;
const SHOWN_HOT = 12;
const KEPT = 120; // points of a curve: four minutes
const USES = ["evictable", "pinned", "leased", "reserved", "retiring"];
const USE_NAMES = { evictable: "objects", leased: "being read", reserved: "being written", pinned: "pinned", retiring: "leaving", free: "free" };
const history = { hitRate: [], reads: [], puts: [], evictions: [] };
let before = null;

const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n).toLocaleString("en")} ${units[unit]}`;
}

function count(n) {
  if (n >= 1e9) return `${(n / 1e9).toFixed(2)} G`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(2)} M`;
  return n >= 100 || Number.isInteger(n) ? Math.round(n).toLocaleString("en") : n.toFixed(1);
}

function seconds(s, bound = true) {
  if (s === null) return "";
  const sign = bound ? "≤ " : "";
  if (s < 1e-3) return `${sign}${(s * 1e6).toFixed(bound || s >= 1e-5 ? 0 : 1)} µs`;
  return s < 1 ? `${sign}${(s * 1e3).toFixed(1)} ms` : `${sign}${s.toFixed(1)} s`;
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

function fill(table, rows, columns, nothing) {
  const body = byId(table).tBodies[0];
  if (!rows.length) rows = [element("tr", {}, element("td", { class: "empty", colspan: columns }, nothing))];
  body.replaceChildren(...rows);
}

function row(...cells) {
  return element("tr", {}, ...cells.map((cell) => (cell.tagName === "TD" ? cell : element("td", {}, cell))));
}

// One bar over the whole width: pieces of [class, value, what it is].
function bar(pieces, whole) {
  const drawn = drawing("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img" });
  let at = 0;
  for (const [kind, value, said] of pieces) {
    const width = whole ? (100 * value) / whole : 0;
    drawn.append(drawing("rect", { class: kind, x: at, y: 0, width, height: 10 }, drawing("title", {}, said)));
    at += width;
  }
  drawn.setAttribute("aria-label", pieces.map(([, , said]) => said).join(", "));
  return element("td", { class: "wide" }, drawn);
}

function spark(name, points, most, shown, kind = "") {
  const top = Math.max(most, ...points.filter((point) => point !== null)) || 1;
  const span = Math.max(points.length, 30); // the first minute needs no more room
  const x = (i) => ((span - points.length + i) * 100) / (span - 1);
  let line = "", area = "", open = null;
  points.forEach((point, i) => {
    if (point === null) {
      if (open !== null) area += `L${x(i - 1)} 40Z`;
      open = null;
      return;
    }
    const y = 38 - (36 * point) / top;
    line += `${open === null ? "M" : "L"}${x(i)} ${y}`;
    area += open === null ? `M${x(i)} 40L${x(i)} ${y}` : `L${x(i)} ${y}`;
    open = i;
  });
  if (open !== null) area += `L${x(open)} 40Z`;
  const picture = drawing(
    "svg",
    { class: `spark ${kind}`, viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${shown}` },
    drawing("path", { class: "area", d: area }),
    drawing("path", { class: "line", d: line }),
  );
  return element("div", { class: "chart" }, element("p", {}, name, element("b", {}, shown)), picture);
}

function remember(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}

function rates(report) {
  const old = before && before.epoch === report.epoch ? before : null;
  before = report;
  if (!old) return null;
  const passed_s = report.now_s - old.now_s;
  const per_s = (name) => (report.stats[name] - old.stats[name]) / passed_s;
  const hits = report.stats.hits - old.stats.hits;
  const asked = hits + report.stats.misses - old.stats.misses;
  const requests = {};
  for (const [name, one] of Object.entries(report.requests)) {
    requests[name] = (one.count - (old.requests[name]?.count ?? 0)) / passed_s;
  }
  return { hitRate: asked ? hits / asked : null, reads: asked / passed_s, puts: per_s("stored"), evictions: per_s("evicted"), requests };
}

function showTiles(stats) {
  const asked = stats.hits + stats.misses;
  const tiles = [
    [count(stats.objects), "objects"],
    [bytes(stats.used_bytes), `used of ${bytes(stats.capacity_bytes)}`],
    [percent(stats.capacity_bytes ? stats.used_bytes / stats.capacity_bytes : null), "full"],
    [percent(asked ? stats.hits / asked : null), `hits of ${count(asked)} reads`],
    [count(stats.evicted), "evicted"],
    [count(stats.corrupt), "corrupt"],
    [count(stats.clients), "clients"],
    [count(stats.leases), "reads in progress"],
    [count(stats.reservations), "puts in progress"],
  ];
  byId("tiles").replaceChildren(
    ...tiles.map(([value, name]) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name))),
  );
}

function showCharts(now) {
  for (const name of Object.keys(history)) remember(history[name], now ? now[name] : null);
  const last = (name) => history[name].at(-1);
  const rate = (name) => (last(name) === null ? "–" : `${count(last(name))} /s`);
  byId("charts").replaceChildren(
    spark("hit rate", history.hitRate, 1, percent(last("hitRate")), "hits"),
    spark("keys read", history.reads, 0, rate("reads")),
    spark("values put", history.puts, 0, rate("puts")),
    spark("evictions", history.evictions, 0, rate("evictions")),
  );
}

function showSegments(segments) {
  const rows = segments.map((one) => {
    const pieces = USES.map((use) => [use, one[`${use}_bytes`], `${bytes(one[`${use}_bytes`])} ${USE_NAMES[use]}`]);
    pieces.push(["free", one.free_bytes, `${bytes(one.free_bytes)} free`]);
    return row(
      element("td", { class: "text" }, element("code", {}, one.segment)),
      element("td", { class: "text" }, (one.address || "in the master's process") + (one.draining ? " (draining)" : "")),
      bar(pieces, one.capacity_bytes),
      bytes(one.capacity_bytes), bytes(one.free_bytes), bytes(one.largest_hole_bytes), percent(one.fragmentation), percent(one.useful),
    );
  });
  fill("segments", rows, 8, "Nobody lends memory: open a Store with lend_bytes.");
}

function showHot(hot) {
  hot = hot.slice(0, SHOWN_HOT);
  const most = Math.max(0, ...hot.map((one) => one.reads));
  const rows = hot.map((one) =>
    row(
      element("td", { class: "text" }, element("code", {}, one.key ?? (one.key_hex ? `hex ${one.key_hex}` : `digest ${one.digest}`))),
      bar([["evictable", one.reads, `${one.reads} reads`]], most),
      count(one.reads),
      one.nbytes === null ? "not there" : bytes(one.nbytes),
    ),
  );
  fill("hot", rows, 4, "Nothing has been read lately.");
}

function showRequests(requests, now) {
  const rows = Object.entries(requests).map(([name, one]) =>
    row(
      name, now ? count(now.requests[name]) : "–", count(one.count), count(one.failures),
      seconds(one.count ? one.total_s / one.count : null, false), seconds(one.p50_s), seconds(one.p99_s),
    ),
  );
  fill("requests", rows, 7, "None yet.");
}

// A table of whatever the master tells: a column for each field.
function showTable(name, rows) {
  byId(`${name}-section`).hidden = !rows?.length;
  if (!rows?.length) return;
  const fields = Object.keys(rows[0]);
  const head = element("tr", {}, ...fields.map((field) => element("th", {}, field.replace(/_bytes$/, "").replaceAll("_", " "))));
  const shown = (field, value) => {
    if (value === null || value === "") return "–";
    if (typeof value !== "number") return String(value);
    return field.endsWith("_bytes") ? bytes(value) : count(value);
  };
  byId(name).replaceChildren(
    element("thead", {}, head),
    element("tbody", {}, ...rows.map((one) => row(...fields.map((field) => shown(field, one[field]))))),
  );
}

function show(report) {
  const now = rates(report);
  showTiles(report.stats);
  showCharts(now);
  showSegments(report.segments);
  showTable("tiers", report.tiers);
  showTable("tenants", report.tenants);
  showHot(report.hot);
  showRequests(report.requests, now);
}

function say(kind, text) {
  byId("state").className = kind;
  byId("state").textContent = text;
}

async function look() {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    const answer = await fetch("v1/report", { headers, cache: "no-store" });
    byId("login").hidden = answer.status !== 401;
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.detail ?? answer.statusText);
    show(body);
    say("good", `epoch ${body.epoch}`);
    document.body.dataset.looks = Number(document.body.dataset.looks ?? 0) + 1;
  } catch (error) {
    say("bad", `${error.message}`);
    showCharts(null);
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", byId("token").value);
  look();
});

byId("legend").append(
  ...[...USES, "free"].flatMap((use) => [
    drawing("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, drawing("rect", { class: use, width: 10, height: 10, rx: 2 })),
    USE_NAMES[use],
  ]),
);

// Not setInterval: a slow answer must not pile up questions behind it.
async function follow() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}
follow();
