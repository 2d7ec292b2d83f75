/* global lineChart, lineRows, sample, saveButtons, tip */
import { announce, ask, byId, count, html, notice } from "./common.js";

const EVERY = 2000;
const CHARTS = [
  ["accuracy", "Test accuracy, %", true],
  ["evaluation", "Accuracy on the sites' own test images, %", true],
  ["loss", "Mean loss", false],
  ["pseudo", "Correct pseudo-labels, %", true],
  ["above", "Correct among the confident ones, %", true],
  ["share_above", "Confident pseudo-labels, %", true],
  ["share_used", "Pseudo-labels that were used, %", true],
  ["sent", "Uploaded by all clients in a round, MB", false],
  ["seconds", "Seconds per round", false],
  ["epsilon", "Privacy spent: epsilon", false],
];
const COLUMNS = [
  ["round", "round", 0], ["accuracy", "accuracy %", 2], ["evaluation", "sites' accuracy %", 2], ["loss", "loss", 4], ["pseudo", "correct pseudo-labels %", 2],
  ["share_above", "confident %", 2], ["above", "correct of these %", 2], ["cohort", "clients", 0], ["sent", "uploaded, MB", 3], ["seconds", "seconds", 1], ["epsilon", "epsilon", 3],
];

const runs = new Map(); // by id: facts, lines, rows
const hidden = new Set();
const figures = new Map();
const sizes = new ResizeObserver(() => drawCharts()); // a new chart makes those next to it narrower
const told = new Set(); // alarms that were announced, by method
const clock = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds % 60)];
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : m ? `${m} min ${String(s).padStart(2, "0")} s` : `${s} s`;
};
const number = (value, digits) => (value === null || value === undefined ? "–" : digits ? value.toFixed(digits) : count(value));

function label(run) {
  const same = [...runs.values()].filter((each) => each.title === run.title);
  return same.length > 1 ? `${run.title}, ${same.some((each) => each.seed !== run.seed) ? `seed ${run.seed}` : run.name}` : run.title;
}

function matching() {
  const words = byId("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const state = byId("state").value;
  return [...runs.values()].filter((run) => {
    const text = `${run.title} ${run.method} ${run.data} ${run.name} seed ${run.seed}`.toLowerCase();
    return words.every((word) => text.includes(word)) && (!state || run.state === state);
  });
}

// Exponential smoothing, corrected for its beginning.
function smooth(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return sum / total;
  });
}

function keyed(table, id) {
  const at = document.activeElement;
  return at && table.contains(at) ? at.dataset[id] : undefined;
}

function drawRuns() {
  const shown = matching();
  const table = byId("runs");
  const focused = keyed(table, "run");
  // On a phone the first columns are visible.
  const head = ["", "method", "accuracy %", "state", "round", "best %", "time left", "data", "seed", "folder"];
  const left = new Set([0, 1, 3, 7, 9]);
  for (const tool of document.querySelectorAll("#runs-section .several")) tool.hidden = runs.size < 2;
  table.replaceChildren(
    html("thead", null, html("tr", null, head.map((word, n) => html("th", { scope: "col", class: left.has(n) ? "left" : null }, word || html("span", { class: "sr" }, "shown in the curves"))))),
    html("tbody", null, shown.map((run) => {
      const box = html("input", { type: "checkbox", checked: !hidden.has(run.id), "aria-label": `show ${label(run)}`, "data-run": run.id, onchange: () => toggle(run.id) });
      const bar = html("span", { class: "bar", "aria-hidden": "true" }, html("i", { style: `width:${run.rounds ? (100 * run.round) / run.rounds : 0}%` }));
      return html("tr", { class: hidden.has(run.id) ? "off" : null },
        html("td", { class: "left" }, html("label", null, box, " ", sample(run.look))),
        html("td", { class: "left title" }, run.title), html("td", null, number(run.accuracy, 2)),
        html("td", { class: "left" }, html("span", { class: `state ${run.state}` }, run.state)),
        html("td", null, bar, `${count(run.round)} of ${count(run.rounds)}`), html("td", null, number(run.best, 2)),
        html("td", null, run.state === "running" ? clock(run.left) : "–"),
        html("td", { class: "left" }, run.data), html("td", null, String(run.seed)),
        html("td", { class: "left name", title: run.name }, run.name));
    })));
  if (focused !== undefined) table.querySelector(`[data-run="${focused}"]`)?.focus();
}

function toggle(id) {
  hidden.has(id) ? hidden.delete(id) : hidden.add(id);
  drawRuns();
  drawCharts();
}

// Runs that differ only in their seed are one line: their mean, in a band from the smallest to the largest.
function lineOf(seeds, key, weight) {
  const curves = seeds.map((run) => ({ x: run.lines[key].x, y: smooth(run.lines[key].y, weight) }));
  const x = curves.reduce((least, { x }) => (x.at(-1) < least.at(-1) ? x : least), curves[0].x);
  const values = x.map((round) => curves.map(({ x, y }) => y[Math.max(0, x.findLastIndex((at) => at <= round))]));
  const alone = [...runs.values()].every((run) => run.title !== seeds[0].title || seeds.includes(run));
  const title = seeds.length === 1 ? label(seeds[0]) : alone ? seeds[0].title : `${seeds[0].title}, as ${seeds[0].name}`;
  return {
    look: { ...seeds[0].look, title }, seeds: seeds.length, x,
    mean: values.map((all) => all.reduce((a, b) => a + b) / all.length),
    low: values.map((all) => Math.min(...all)), high: values.map((all) => Math.max(...all)),
  };
}

// The lines of the curves by name; one line needs none.
function drawLegend(shown) {
  const named = new Map(shown.filter((run) => run.lines).map((run) => [JSON.stringify(run.look), run]));
  const place = byId("legend");
  place.hidden = named.size < 2;
  const stamp = JSON.stringify([...named.values()].map((run) => [run.look, run.title]));
  if (place.dataset.stamp === stamp) return;
  place.dataset.stamp = stamp;
  place.replaceChildren(...[...named.values()].map((run) => html("li", null, sample(run.look), " ", run.title)));
}

function drawCharts() {
  const shown = matching().filter((run) => !hidden.has(run.id));
  const weight = Number(byId("smooth").value);
  drawLegend(shown);
  for (const [key, title, percent] of CHARTS) {
    const drawn = shown.filter((run) => run.lines?.[key]?.y.some((value) => value !== 0) && run.lines[key].x.length > 0);
    const looks = new Set(drawn.map((run) => JSON.stringify(run.look)));
    const lines = [...looks].map((look) => lineOf(drawn.filter((run) => JSON.stringify(run.look) === look), key, weight));
    const sites = (key === "evaluation" && drawn.length === 1 && drawn[0].sites) || [];
    if (sites.length) lines[0].look.title = "all sites";
    lines.push(...sites.map(({ look, x, y }) => ({ look: look, seeds: 1, x, mean: y, low: y, high: y })));
    let figure = figures.get(key);
    if (!lines.length) {
      figure?.root.remove();
      figures.delete(key);
      continue;
    }
    if (!figure) {
      const plot = html("div", { class: "plot" });
      const find = () => ({ title, picture: plot.querySelector("svg"), looks: figures.get(key).lines.map((line) => line.look), rows: lineRows(figures.get(key).lines, "round") });
      figure = { plot, lines, drawn: "" };
      figures.set(key, figure);
      figure.root = html("figure", { "data-chart": key }, html("figcaption", null, title, saveButtons(find)), plot);
      sizes.observe(plot);
      const order = CHARTS.map(([name]) => name);
      const after = [...byId("charts").children].find((each) => order.indexOf(each.dataset.chart) > order.indexOf(key));
      byId("charts").insertBefore(figure.root, after ?? null);
    }
    figure.lines = lines;
    const width = Math.floor(figure.plot.clientWidth);
    // A chart is drawn again only if it has changed, so that a tooltip remains open.
    const now = JSON.stringify([width, weight, lines.map((line) => [line.look, line.x.length, line.mean.at(-1)])]);
    if (now === figure.drawn || !width) continue;
    figure.drawn = now;
    tip.hide();
    figure.plot.replaceChildren(lineChart(width, { lines, title, xLabel: "round", percent, whole: true, most: Infinity }));
  }
}

function drawTable() {
  const select = byId("which");
  const known = matching();
  const chosen = select.value;
  select.replaceChildren(...known.map((run) => html("option", { value: run.id }, label(run))));
  const running = known.find((run) => run.state === "running") ?? known[0];
  select.value = known.some((run) => String(run.id) === chosen) ? chosen : String(running?.id ?? "");
  const run = runs.get(Number(select.value));
  const rows = run?.rows ?? [];
  const columns = COLUMNS.filter(([key]) => rows.some((row) => row[key] !== null && row[key] !== undefined));
  const stamp = `${select.value}:${run?.version}`;
  if (byId("table").dataset.stamp === stamp) return;
  byId("table").dataset.stamp = stamp;
  byId("table").replaceChildren(
    html("thead", null, html("tr", null, columns.map(([, word]) => html("th", { scope: "col" }, word)))),
    html("tbody", null, rows.toReversed().map((row) => html("tr", null, columns.map(([key, , digits]) => html("td", null, number(row[key], digits)))))));
}

// The time of a contact, without the day if that is today.
const recent = (when) => (when.startsWith(new Date().toLocaleDateString("sv")) ? when.split(" ")[1] : when) || "–";

// Faults are shown only if a site had one.
const FAULTS = ["late", "no reply", "refused", "left out"];

function drawSites(federation) {
  byId("sites-section").hidden = !federation?.sites.length;
  if (byId("sites-section").hidden) return;
  const { sites } = federation;
  const [shared = []] = [...runs.values()].map((run) => run.sites);
  const known = sites.filter((site) => site.state === "connected").length;
  const over = [...runs.values()].some((run) => run.state === "finished");
  byId("sentence").hidden = false;
  byId("sentence").textContent = over ? `The federation is over; ${known} of ${sites.length} sites took part to the end.` : `${known} of ${sites.length} sites are connected.`;
  // After the end nobody is connected any more: the last event of such a site is that it had joined.
  const stateOf = (site) => (over && site.state === "connected" ? "took part to the end" : site.state);
  // A server with test images asks no site for its accuracy.
  const measured = shared.length > 0 || [...runs.values()].some((run) => run.lines?.evaluation?.x.length);
  const faults = FAULTS.filter((fault) => sites.some((site) => site[fault]));
  const head = ["site", "state", "last contact", "labeled images", ...(measured ? ["accuracy %"] : []), ...faults, "last event"];
  const left = new Set(["site", "state", "last contact", "last event"]);
  const labeled = ({ labeled, unlabeled }) => (labeled === null ? "–" : unlabeled === null ? count(labeled) : `${count(labeled)} of ${count(labeled + unlabeled)}`);
  byId("sites").replaceChildren(
    html("thead", null, html("tr", null, head.map((word) => html("th", { scope: "col", class: left.has(word) ? "left" : null }, word)))),
    html("tbody", null, sites.map((site) => {
      const curve = shared.find(({ look }) => look.title === site.name);
      return html("tr", null,
        html("th", { scope: "row", class: "left" }, site.name, curve ? [" ", sample(curve.look)] : null),
        html("td", { class: "left" }, html("span", { class: `state ${site.state.replaceAll(" ", "-")}` }, stateOf(site))),
        html("td", { class: "left" }, recent(site.contact)), html("td", null, labeled(site)),
        measured ? html("td", null, curve ? number(curve.y.at(-1), 2) : "–") : null, faults.map((fault) => html("td", null, count(site[fault]))),
        html("td", { class: "left event" }, site.words || "–"));
    })));
  byId("consent").hidden = !measured || shared.length === sites.length;
}

function drawSite(site) {
  byId("sentence").hidden = !site;
  if (!site) return;
  byId("sentence").textContent = site.sentence;
  byId("table-section").hidden = !site.rows.length;
  byId("h-table").textContent = "Work of this site, and the data that it sent";
  byId("which").parentElement.hidden = true;
  const head = ["round", "time", "work", "received", "sent (everything that left this site)"];
  byId("table").replaceChildren(
    html("thead", null, html("tr", null, head.map((word, n) => html("th", { scope: "col", class: n ? "left" : null }, word)))),
    html("tbody", null, site.rows.toReversed().map((row) => html("tr", null, html("td", null, count(row.round)),
      [row.when, row.did, row.received, row.sends].map((word) => html("td", { class: "left" }, word))))));
  const look = { color: "#0072B2", dashes: "", marker: "o" };
  const lines = {};
  if (site.tests.length) lines.evaluation = { x: site.tests.map(([round]) => round), y: site.tests.map(([, right]) => right) };
  const losses = site.rows.filter((row) => row.loss !== null);
  if (losses.length) lines.loss = { x: losses.map((row) => row.round), y: losses.map((row) => row.loss) };
  runs.clear();
  runs.set(0, { id: 0, title: "this site", name: "", method: "", data: "", seed: 0, state: "", look, lines });
  byId("curves-section").hidden = !Object.keys(lines).length;
  drawCharts();
}

function drawLog(log) {
  byId("log-section").hidden = !log?.length;
  const place = byId("log");
  const stamp = log?.length ? log.at(-1).join() + log.length : "";
  if (place.dataset.stamp === stamp) return;
  place.dataset.stamp = stamp;
  const low = place.scrollHeight - place.scrollTop - place.clientHeight < 20;
  place.replaceChildren(...(log ?? []).map(([when, words]) => html("li", null, html("time", null, when), words)));
  if (low) place.scrollTop = place.scrollHeight;
}

// The alarms of all runs, by method: equal alarms of several runs are one line that names the runs.
function groupAlarms(found) {
  const groups = new Map();
  const add = (title, words, run) => {
    if (!groups.has(title)) groups.set(title, new Map());
    const lines = groups.get(title);
    lines.set(words, [...(lines.get(words) ?? []), ...(run ? [run] : [])]);
  };
  for (const { words } of found.alarms) add("", words);
  for (const run of found.runs) {
    const known = runs.get(run.id);
    const alone = [...runs.values()].filter((each) => each.title === known.title).length === 1;
    for (const { words } of run.alarms) add(found.runs.length > 1 ? known.title : "", words, alone ? "" : label(known).slice(known.title.length + 2));
  }
  return groups;
}

function drawAlarms(groups) {
  byId("alarms").hidden = !groups.size;
  const line = (words, names) => `${names.filter(Boolean).length ? `${names.filter(Boolean).join(", ")}: ` : ""}${words}`;
  byId("alarms").replaceChildren(...[...groups].map(([title, lines]) => html("li", null, title ? html("b", null, title) : null,
    html("ul", null, [...lines].map(([words, names]) => html("li", null, line(words, names)))))));
  for (const [title, lines] of groups) for (const [words] of lines) {
    const name = `${title} ${words.split(":")[0]}`;
    if (told.has(name)) continue;
    told.add(name);
    announce(`Alarm: ${title ? `${title}: ` : ""}${words}`);
  }
}

function draw(found) {
  for (const fact of found.runs) runs.set(fact.id, { ...runs.get(fact.id), ...fact });
  const any = found.runs.length > 0;
  for (const id of ["runs-section", "curves-section", "table-section"]) byId(id).hidden = !any;
  const going = found.runs.filter((run) => run.state === "running");
  const finished = found.runs.filter((run) => run.state === "finished").length;
  const planned = Math.max(found.planned, found.runs.length);
  const left = going.length ? `, ${clock(Math.max(...going.map((run) => run.left ?? 0)))} left` : "";
  if (planned > 1) byId("progress").textContent = `${finished} of ${planned} runs finished${going.length ? `, ${going.length} running${left}` : ""}`;
  else if (found.runs[0]?.waiting) byId("progress").textContent = found.runs[0].waiting;
  else if (any) byId("progress").textContent = `round ${found.runs[0].round} of ${found.runs[0].rounds}, ${found.runs[0].state}${left}`;
  else byId("progress").textContent = found.site ? "" : "no run has started yet";
  if (found.left_out) byId("progress").textContent += `; ${found.left_out} more are not shown`;
  drawAlarms(groupAlarms(found));
  if (any) {
    drawRuns();
    drawCharts();
    drawTable();
  } else if (found.site) drawSite(found.site);
  drawSites(found.federation);
  drawLog((found.federation ?? found.site)?.log);
}

async function watch() {
  try {
    const have = [...runs.values()].filter((run) => run.lines && run.version !== undefined).map((run) => `${run.id}:${run.version}`).join(",");
    draw(await ask(`data?have=${have}`));
    byId("fresh").textContent = `read at ${new Date().toLocaleTimeString("en-GB")}`;
    notice("");
  } catch (error) {
    notice(error.status === 0 ? "halfmoon watch was stopped in the terminal; the runs continue. The page shows the state that it read last." : error.message);
  }
  document.body.dataset.ready = "yes";
  setTimeout(watch, document.hidden ? 5 * EVERY : EVERY);
}

byId("filter").addEventListener("input", () => (drawRuns(), drawCharts(), drawTable()));
byId("state").addEventListener("change", () => (drawRuns(), drawCharts(), drawTable()));
byId("which").addEventListener("change", drawTable);
byId("smooth").addEventListener("input", () => {
  byId("smoothed").textContent = byId("smooth").value;
  drawCharts();
});
watch();
