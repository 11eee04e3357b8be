"use strict";
// Draws the data of the page. Text of the run only ever becomes text: no string of it is parsed as HTML.
const jobs = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("report");
const SVG = "http://www.w3.org/2000/svg";
const NAMES = { data_wait: "data wait", checkpoint: "checkpoint stall", setup: "set-up and end", redone: "redone steps", peer_lost: "peer lost", no_progress: "no progress" };
const MOODS = { done: "good", running: "good", committed: "good", preempted: "warn", regrouped: "warn", missing: "warn", slow: "warn", rotated: "", elsewhere: "", unknown: "" };
const COLOURS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
// Of a chart, in the units of its text: on a phone a chart is narrow, and its text stays readable.
const WIDTH = Math.min(Math.max(document.documentElement.clientWidth - 40, 320), 1040);
let count = 0;

function h(tag, attributes, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}
const name = (word) => NAMES[word] || word;
const mood = (word) => (word in MOODS ? MOODS[word] : "bad");
const badge = (word) => h("span", { class: `badge ${mood(word)}` }, name(word));
const number = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en"));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}
const milliseconds = (seconds) => (1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0);
const moment = (at) => (at ? new Date(1000 * at).toISOString().slice(0, 19).replace("T", " ") : "");
function bytes(size) {
  if (!size) return "";
  const power = Math.min(Math.floor(Math.log(size) / Math.log(1000)), 4);
  return `${(size / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
function ranksOf(ranks) {
  const parts = [];
  for (const rank of ranks) {
    const last = parts[parts.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return `${ranks.length === 1 ? "rank" : "ranks"} ${parts.map(([a, b]) => (a === b ? a : `${a}-${b}`)).join(", ")}`;
}

// -- tables and sections ----------------------------------------------------------------------------------------------
function section(title, ...children) {
  const id = `section-${++count}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id, tabindex: "-1" }, title), ...children);
}
// Columns: [title, cell of a row, class]. On a phone each row is a card, where the table is not wide.
function table(caption, columns, rows, isWide = false) {
  const head = h("tr", null, columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title)));
  const body = rows.map((row) => h("tr", null, columns.map(([title, cell, kind]) => h("td", { class: kind, "data-title": title }, cell(row)))));
  const inner = h("table", null, h("caption", null, caption), h("thead", null, head), h("tbody", null, body));
  return h("div", { class: isWide ? "scroll" : "scroll cards", tabindex: "0", role: "region", "aria-label": caption }, inner);
}

// -- what happened ----------------------------------------------------------------------------------------------------
function headOf(job) {
  const facts = [
    `${number(job.world_size)} ranks`, job.hosts.length === 1 ? `host ${job.hosts[0]}` : `${job.hosts.length} hosts`,
    job.strategy, `${job.attempts.length} ${job.attempts.length === 1 ? "attempt" : "attempts"}`,
    `step ${number(job.step)}`, job.began ? `${moment(job.began)} to ${moment(job.last)} UTC` : "",
  ];
  return h("header", { class: mood(job.state) },
    badge(job.state), h("h1", null, job.headline), job.todo ? h("p", { class: "todo" }, job.todo) : null,
    job.stragglers.slice(0, 4).map((one) => h("p", null, badge("slow"), ` ${one.text}`)),
    h("p", { class: "soft" }, facts.filter(Boolean).join(" · ")),
    h("p", { class: "soft" }, `run ${job.runs.join(", ") || "(without an id)"} · ${job.home} · made ${moment(job.made_at)} UTC`));
}
function goodputOf(job) {
  const { wall_s, share, parts, advice, incidents } = job.goodput;
  if (!wall_s) return null;
  const shown = parts.filter((part) => part.seconds > 0);
  const text = shown.map((part) => `${name(part.name)} ${percent(part.seconds / wall_s)}`).join(", ");
  const bar = h("div", { class: "bar", role: "img", "aria-label": `Wall time: ${text}` }, shown.map((part) =>
    h("span", { style: { flexGrow: part.seconds, background: `var(--${part.name})` }, title: `${name(part.name)}: ${duration(part.seconds)}` })));
  const legend = h("ul", { class: "legend" }, shown.map((part) => h("li", { title: part.meaning },
    h("span", { class: "swatch", style: { background: `var(--${part.name})` } }), name(part.name),
    h("span", null, `${duration(part.seconds)} · ${percent(part.seconds / wall_s)}`))));
  const what = h("details", null, h("summary", null, "What each part means"),
    h("ul", null, parts.map((part) => h("li", null, `${name(part.name)}: ${part.meaning}`))));
  const list = incidents.length ? table("What each failure cost", [
    ["attempt", (one) => one.attempt, "number"], ["kind", (one) => badge(one.kind)],
    ["by", (one) => (one.culprits.length ? ranksOf(one.culprits) : "")], ["step", (one) => number(one.global_step), "number"],
    ["known after", (one) => duration(one.detect_s), "number"],
    ["trained again after", (one) => (one.recover_s === null ? "not yet" : duration(one.recover_s)), "number"],
    ["steps lost", (one) => number(one.steps_lost), "number"], ["time of these", (one) => duration(one.seconds_lost), "number"],
  ], incidents) : null;
  return section("Goodput", h("p", null, h("span", { class: "share" }, percent(share)), ` of ${duration(wall_s)} trained the model`),
    bar, legend, what, advice ? h("p", { class: "todo" }, `Advice: ${advice}`) : null, list);
}
function attemptsOf(job) {
  return section("Attempts", table("Why each start of all ranks ended", [
    ["attempt", (one) => one.number, "number"], ["began (UTC)", (one) => moment(one.began), "when"],
    ["ranks", (one) => one.world_size, "number"],
    ["steps", (one) => `${number(one.first_step)} to ${number(one.last_step)}`, "number"],
    ["lasted", (one) => duration(one.last - one.began), "number"], ["lost", (one) => (one.steps_lost ? `${number(one.steps_lost)} steps` : ""), "number"],
    ["ended", (one) => badge(one.end)], ["why", (one) => one.why, "wide"],
  ], job.attempts));
}
function verdictsOf(job) {
  if (!job.verdicts.length && !job.unread.length) return null;
  const newest = [...job.verdicts].reverse();
  return section("Verdicts", newest.map((one, index) => h("article", null,
    h("h3", null, badge(one.kind), " ", one.headline || one.incident),
    h("p", null, one.cause), h("p", { class: "todo" }, one.remedy),
    h("p", { class: "soft" }, [moment(one.at) + " UTC", one.phase && `phase ${one.phase}`, `step ${number(one.global_step)}`,
      one.location, one.waiting.length ? `${ranksOf(one.waiting)} waited` : ""].filter(Boolean).join(" · ")),
    h("details", { open: index === 0 }, h("summary", null, "The verdict as it was printed"), h("pre", { class: "wrap", tabindex: "0" }, one.text)),
    Object.entries(one.stacks).map(([rank, stack]) => h("details", null, h("summary", null, `Stack of rank ${rank}`), h("pre", { tabindex: "0" }, stack))),
    h("p", { class: "soft" }, one.path))), job.unread.map((text) => h("p", null, text)));
}

// -- steps ------------------------------------------------------------------------------------------------------------
function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (COLOURS.length - 1);
  const low = Math.min(Math.floor(at), COLOURS.length - 2);
  const mixed = COLOURS[low].map((value, index) => Math.round(value + (at - low) * (COLOURS[low + 1][index] - value)));
  return `rgb(${mixed.join(",")})`;
}
// Lets the mouse, a finger and the arrow keys choose a place of a chart; `show` says what is there.
function explore(svg, columns, rows, locate, show) {
  let column = columns - 1, row = 0;
  const choose = (nextColumn, nextRow) => {
    column = Math.min(Math.max(nextColumn, 0), columns - 1);
    row = Math.min(Math.max(nextRow, 0), rows - 1);
    show(column, row);
  };
  svg.addEventListener("pointermove", (event) => { const found = locate(event); if (found) choose(...found); });
  svg.addEventListener("pointerdown", (event) => { const found = locate(event); if (found) choose(...found); });
  svg.addEventListener("focus", () => choose(column, row));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(column + step[0], row + step[1]);
  });
}
function heatMapOf(job) {
  const map = job.steps;
  if (!map) return null;
  // All ranks of a step take equally long, because they wait for the slowest: what it does itself shows which one it is.
  const series = job.stragglers.length ? "own_s" : "step_s";
  const all = map.rows.flatMap((row) => row[series]).filter((value) => value !== null).sort((a, b) => a - b);
  if (!all.length) return null;
  const low = all[0], high = Math.max(all[Math.floor(0.99 * (all.length - 1))], 1.5 * all[Math.floor(all.length / 2)]);
  const labels = map.rows.map((row) => ranksOf(row.ranks).replace(/ranks? /, ""));
  const columns = map.rows[0].step_s.length, left = 12 + 8 * Math.max(...labels.map((label) => label.length)), width = WIDTH, cell = (width - left) / columns;
  const tall = Math.max(Math.min(240 / map.rows.length, 28), 6), height = tall * map.rows.length;
  const atColumn = (column) => map.begin + ((column + 0.5) * (map.end - map.begin)) / columns;
  const svg = h("svg:svg", { viewBox: `0 0 ${width} ${height + 22}`, role: "img", tabindex: "0",
    "aria-label": `Time of a step, ${map.rows.length} rows of ranks by time, from ${milliseconds(low)} to ${milliseconds(all[all.length - 1])} ms. The arrow keys read single values.` });
  map.rows.forEach((row, index) => {
    row[series].forEach((value, column) => {
      if (value !== null) svg.append(h("svg:rect", { x: left + column * cell, y: index * tall, width: cell + 0.3, height: tall - (tall > 8 ? 1 : 0), fill: colour((value - low) / (high - low)) }));
    });
    if (index % Math.ceil(14 / tall) === 0) svg.append(h("svg:text", { x: left - 6, y: Math.max(index * tall + tall / 2 + 4, 10), "text-anchor": "end" }, labels[index]));
  });
  svg.append(h("svg:text", { x: left, y: height + 16 }, moment(map.begin)), h("svg:text", { x: width, y: height + 16, "text-anchor": "end" }, `${moment(map.end)} UTC`));
  const cursor = h("svg:rect", { class: "cursor", width: cell, height: tall, visibility: "hidden" });
  svg.append(cursor);
  const told = h("output", { "aria-live": "polite" }, "Point at a cell, or use the arrow keys.");
  explore(svg, columns, map.rows.length, (event) => {
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const x = (event.clientX - box.left) * scale - left, y = (event.clientY - box.top) * scale;
    return x < 0 || y > height ? null : [Math.floor(x / cell), Math.floor(y / tall)];
  }, (column, row) => {
    const { ranks, step_s, own_s } = map.rows[row];
    cursor.setAttribute("x", left + column * cell);
    cursor.setAttribute("y", row * tall);
    cursor.setAttribute("visibility", "visible");
    told.textContent = `${ranksOf(ranks)}, ${moment(atColumn(column))} UTC: ${step_s[column] === null ? "no steps" : `${milliseconds(step_s[column])} ms a step, ${milliseconds(own_s[column])} ms without backward and gate`}`;
  });
  const stops = COLOURS.map((one) => `rgb(${one.join(",")})`).join(",");
  return section("Step time, by rank and time", svg, told,
    series === "own_s" ? h("p", { class: "soft" }, "Coloured by what a rank does itself: without the backward and the gate, where it waits for others.") : null,
    h("div", { class: "scale", "aria-hidden": "true", style: { background: `linear-gradient(to right, ${stops})` } }),
    h("div", { class: "ends soft" }, h("span", null, `${milliseconds(low)} ms`), h("span", null, `${milliseconds(high)} ms and more`)));
}
function ranksTable(job) {
  const parts = ["data", "forward", "backward", "optimizer", "wait", "other", "whole"];
  const late = new Map(job.stragglers.map((one) => [one.rank, one]));
  const told = job.stragglers.map((one) => h("p", { class: "todo" }, one.text));
  if (!job.ranks.length) return null;
  const rows = [...job.ranks].sort((a, b) => late.has(b.rank) - late.has(a.rank) || a.rank - b.rank).slice(0, 64);
  return section("Ranks", told, table("Milliseconds of a step in the last windows of each rank, on the clock of its host", [
    ["rank", (one) => one.rank, "number"], ["host", (one) => one.host], ["step", (one) => number(one.step), "number"],
    ...parts.map((part) => [part, (one) => milliseconds(one[part]), "number"]),
  ], rows, true));
}
function lossOf(job) {
  const lines = job.loss;
  if (!lines.length) return null;
  const points = lines.flatMap((line) => line.points);
  const [left, right, top, bottom, width, height] = [62, 8, 10, 26, WIDTH, 280];
  const bounds = (values) => [Math.min(...values), Math.max(...values)];
  const [first, last] = bounds(points.map((point) => point[0])), [low, high] = bounds(points.map((point) => point[1]));
  const x = (step) => left + ((step - first) / (last - first || 1)) * (width - left - right);
  const y = (loss) => height - bottom - ((loss - low) / (high - low || 1)) * (height - top - bottom);
  const svg = h("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
    "aria-label": `Loss from ${points[0][1].toPrecision(4)} at step ${first} to ${points[points.length - 1][1].toPrecision(4)} at step ${last}, ${lines.length - 1} restarts. The arrow keys read single values.` });
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    svg.append(h("svg:line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      h("svg:text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value && Math.abs(value) < 0.01 ? value.toExponential(1) : value.toPrecision(3)));
  }
  for (const share of [0, 0.5, 1]) {
    const step = Math.round(first + share * (last - first));
    svg.append(h("svg:text", { x: x(step), y: height - 6, "text-anchor": ["start", "middle", "end"][2 * share] }, `step ${number(step)}`));
  }
  lines.forEach((line, index) => {
    svg.append(h("svg:polyline", { class: index < lines.length - 1 ? "loss old" : "loss", points: line.points.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ") }));
    if (line.points.length === 1) svg.append(h("svg:circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3, fill: "var(--accent)" }));
  });
  for (const one of job.attempts.slice(1)) {
    if (one.first_step < first) continue;
    svg.append(h("svg:line", { class: "restart", x1: x(one.first_step), x2: x(one.first_step), y1: top, y2: height - bottom }, h("svg:title", null, `attempt ${one.number} began at step ${one.first_step}`)));
  }
  const cursor = h("svg:circle", { class: "cursor", r: 5, visibility: "hidden" });
  svg.append(cursor);
  const told = h("output", { "aria-live": "polite" }, "Point at the line, or use the arrow keys.");
  explore(svg, points.length, 1, (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) * width) / box.width;
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(x(point[0]) - at) <= Math.abs(x(points[best][0]) - at)) best = index; });
    return [best, 0];
  }, (index) => {
    cursor.setAttribute("cx", x(points[index][0]));
    cursor.setAttribute("cy", y(points[index][1]));
    cursor.setAttribute("visibility", "visible");
    told.textContent = `step ${number(points[index][0])}: loss ${points[index][1].toPrecision(5)}`;
  });
  return section("Loss", svg, told, job.attempts.length > 1 ? h("p", { class: "soft" }, "A dashed line marks the step at which an attempt began; a pale line is an earlier attempt.") : null);
}

// -- what is kept, and the rest ---------------------------------------------------------------------------------------
function checkpointsOf(job) {
  if (!job.checkpoints.length) return null;
  return section("Checkpoints", table(`The newest ${job.checkpoints.length} saves, and what is there now`, [
    ["step", (one) => number(one.step), "number"], ["saved (UTC)", (one) => moment(one.at), "when"], ["now", (one) => badge(one.state)],
    ["size", (one) => bytes(one.size_bytes), "number"], ["stall", (one) => duration(one.stall_s), "number"], ["path", (one) => one.path, "path"],
  ], [...job.checkpoints].reverse()));
}
function dataOf(job) {
  if (!job.data) return null;
  const rows = Object.entries(job.data).map(([key, value]) => [key, typeof value === "object" ? JSON.stringify(value) : String(value)]);
  return section("Data", table("The place in the data of the newest committed checkpoint", [["field", (row) => row[0]], ["value", (row) => row[1], "wide"]], rows));
}
function deadlinesOf(job) {
  if (!job.deadlines) return null;
  return section("Deadlines", table(`Measured by timeout="auto" in attempt ${job.deadlines.attempt}`, [
    ["phase", (one) => one.phase], ["deadline", (one) => duration(one.seconds), "number"], ["why", (one) => one.reason, "wide"],
  ], job.deadlines.phases));
}
function costsOf(job) {
  if (!job.costs) return null;
  return section("What the protections cost", table(`Microseconds of a step on rank ${job.costs.rank}, measured in attempt ${job.costs.attempt} over ${number(job.costs.steps)} steps`, [
    ["protection", (one) => one.name], ["microseconds", (one) => number(Math.round(one.microseconds)), "number"], ["what", (one) => one.meaning, "wide"],
  ], job.costs.parts));
}
function noticesOf(job) {
  if (!job.notices.length) return null;
  const known = new Set(["time", "rank", "attempt", "seq", "kind"]);
  const short = (value) => (typeof value === "object" ? JSON.stringify(value) : Number.isInteger(value) || isNaN(value) ? value : Number(value).toPrecision(3));
  const rest = (one) => Object.entries(one).filter(([key]) => !known.has(key)).map(([key, value]) => `${key} ${short(value)}`).join(", ");
  return section("Notices", table(`The last ${job.notices.length} of ${number(job.num_notices)}`, [
    ["time (UTC)", (one) => moment(one.time), "when"], ["rank", (one) => one.rank, "number"], ["what", (one) => one.kind.replaceAll("_", " ")], ["more", rest, "wide"],
  ], [...job.notices].reverse()));
}
function failuresOf(job) {
  if (!job.failures.length) return null;
  return section("Errors", table("The first line of the error of each rank", [
    ["time (UTC)", (one) => moment(one.at), "when"], ["attempt", (one) => one.attempt, "number"], ["rank", (one) => one.rank, "number"], ["error", (one) => one.error, "wide"],
  ], job.failures));
}

for (const job of jobs) {
  const first = mood(job.state) === "bad" ? [verdictsOf, failuresOf, goodputOf, attemptsOf] : [goodputOf, attemptsOf, verdictsOf, failuresOf];
  const parts = [...first, heatMapOf, ranksTable, lossOf, checkpointsOf, dataOf, deadlinesOf, costsOf, noticesOf].map((draw) => draw(job)).filter(Boolean);
  const links = parts.map((part) => { const title = part.querySelector("h2"); return h("a", { href: `#${title.id}` }, title.textContent); });
  main.append(headOf(job), h("nav", { "aria-label": "Sections" }, links), ...parts);
}
document.title = `distplus report: ${jobs.length ? jobs[jobs.length - 1].headline : "nothing"}`;
