/* global createLineRows, createLineSample, createSaveButtons, lineChart, tooltip */
/**
 * The page of `halfmoon watch`: runs, sweeps, federations and sites, requested again and again while they run.
 *
 * @typedef {Object} Run A run as `FollowedRun.describe` and `FollowedRun.collect_plot_data` of the server send it.
 * @property {number} id
 * @property {string} name - Name of its folder.
 * @property {string} title - Title of its method.
 * @property {number} seed
 * @property {string} state - "running", "finished", "stopped" or "waiting".
 * @property {number} version - Grows with every change of its files.
 * @property {Object} style - Color, dashes and marker of its lines; equal for runs that differ only in their seed.
 * @property {Object<string, {x: number[], y: number[]}>} [lines] - Curves over the rounds, by quantity.
 * @property {Object[]} [sites] - Accuracy curves of the sites of a federation: {style, x, y}.
 * @property {Object[]} [rows] - The last rounds, for the table.
 */

import { announce, byId, createElement, formatCount, requestJson, showNotice } from "./common.js";

const POLL_MS = 2000;
const HIDDEN_POLL_MS = 10000; // while the page is in a background tab

const MISSING = "–";

/** The charts in their order: a quantity by round with its title, and whether it is a percentage. */
const CHARTS = [
  { quantity: "accuracy", title: "Test accuracy, %", percent: true },
  { quantity: "evaluation", title: "Accuracy on the sites' own test images, %", percent: true },
  { quantity: "loss", title: "Mean loss", percent: false },
  { quantity: "pseudo", title: "Correct pseudo-labels, %", percent: true },
  { quantity: "above", title: "Correct among the confident ones, %", percent: true },
  { quantity: "share_above", title: "Confident pseudo-labels, %", percent: true },
  { quantity: "share_used", title: "Pseudo-labels that were used, %", percent: true },
  { quantity: "sent", title: "Uploaded by all clients in a round, MB", percent: false },
  { quantity: "seconds", title: "Seconds per round", percent: false },
  { quantity: "epsilon", title: "Privacy spent: epsilon", percent: false },
];

/** The columns of the table of rounds: key of a row, heading, and digits after the decimal point. */
const ROUND_COLUMNS = [
  { key: "round", heading: "round", digits: 0 },
  { key: "accuracy", heading: "accuracy %", digits: 2 },
  { key: "evaluation", heading: "sites' accuracy %", digits: 2 },
  { key: "loss", heading: "loss", digits: 4 },
  { key: "pseudo", heading: "correct pseudo-labels %", digits: 2 },
  { key: "share_above", heading: "confident %", digits: 2 },
  { key: "above", heading: "correct of these %", digits: 2 },
  { key: "cohort", heading: "clients", digits: 0 },
  { key: "sent", heading: "uploaded, MB", digits: 3 },
  { key: "seconds", heading: "seconds", digits: 1 },
  { key: "epsilon", heading: "epsilon", digits: 3 },
];

/** Counts of a site that are shown only if any site has them. */
const FAULT_COLUMNS = ["late", "no reply", "refused", "left out"];

const SITE_LINE_STYLE = { color: "#0072B2", dashes: "", marker: "o" };

const runs = new Map(); // by id
const hiddenRuns = new Set(); // ids of the runs whose lines are hidden
const figures = new Map(); // {element, plot, lines, drawnVersion} by quantity
const announcedAlarms = new Set();

// A new chart makes those next to it narrower.
const chartResizeObserver = new ResizeObserver(() => renderCharts());

const isMissing = (value) => value === null || value === undefined;

function formatNumber(value, digits) {
  if (isMissing(value)) {
    return MISSING;
  }
  return digits ? value.toFixed(digits) : formatCount(value);
}

function formatDuration(seconds) {
  if (isMissing(seconds)) {
    return MISSING;
  }
  const hours = Math.floor(seconds / 3600);
  const minutes = Math.floor(seconds / 60) % 60;
  const rest = Math.floor(seconds % 60);
  if (hours) {
    return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  }
  return minutes ? `${minutes} min ${String(rest).padStart(2, "0")} s` : `${rest} s`;
}

/** Create the head of a table; columns with left alignment are listed in `leftHeadings`. */
function createTableHead(headings, leftHeadings = []) {
  const cells = headings.map((heading) => {
    const className = leftHeadings.includes(heading) ? "left" : null;
    return createElement("th", { scope: "col", class: className }, heading);
  });
  return createElement("thead", null, createElement("tr", null, cells));
}

const createCell = (content, className = null) => createElement("td", { class: className }, content);

// Runs

/** Name a run by its method, with the seed or the folder if several runs have this method. */
function nameRun(run) {
  const sameMethod = [...runs.values()].filter((other) => other.title === run.title);
  if (sameMethod.length === 1) {
    return run.title;
  }
  const hasOtherSeeds = sameMethod.some((other) => other.seed !== run.seed);
  return `${run.title}, ${hasOtherSeeds ? `seed ${run.seed}` : run.name}`;
}

/** List the runs that match the filters above their table. */
function listMatchingRuns() {
  const words = byId("run-filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const state = byId("state-filter").value;
  return [...runs.values()].filter((run) => {
    const text = `${run.title} ${run.method} ${run.data} ${run.name} seed ${run.seed}`.toLowerCase();
    return words.every((word) => text.includes(word)) && (!state || run.state === state);
  });
}

function renderRuns() {
  const table = byId("runs-table");
  const { activeElement } = document;
  const focusedRun = activeElement && table.contains(activeElement) ? activeElement.dataset.run : undefined;
  for (const control of document.querySelectorAll("#runs-section .several-runs")) {
    control.hidden = runs.size < 2;
  }
  // On a phone the first columns are visible.
  const checkboxHeading = createElement("span", { class: "visually-hidden" }, "shown in the curves");
  const head = createTableHead(
    [checkboxHeading, "method", "accuracy %", "state", "round", "best %", "time left", "data", "seed", "folder"],
    [checkboxHeading, "method", "state", "data", "folder"],
  );
  table.replaceChildren(head, createElement("tbody", null, listMatchingRuns().map(createRunRow)));
  if (focusedRun !== undefined) {
    table.querySelector(`[data-run="${focusedRun}"]`)?.focus();
  }
}

function createRunRow(run) {
  const isHidden = hiddenRuns.has(run.id);
  const checkbox = createElement("input", {
    type: "checkbox",
    checked: !isHidden,
    "aria-label": `show ${nameRun(run)}`,
    "data-run": run.id,
    onchange: () => toggleRun(run.id),
  });
  const progressPercent = run.rounds ? (100 * run.round) / run.rounds : 0;
  const progressBar = createElement(
    "span",
    { class: "bar", "aria-hidden": "true" },
    createElement("i", { style: `width:${progressPercent}%` }),
  );
  return createElement(
    "tr",
    { class: isHidden ? "hidden-run" : null },
    createCell(createElement("label", null, checkbox, " ", createLineSample(run.style)), "left"),
    createCell(run.title, "left title"),
    createCell(formatNumber(run.accuracy, 2)),
    createCell(createElement("span", { class: `state ${run.state}` }, run.state), "left"),
    createCell([progressBar, `${formatCount(run.round)} of ${formatCount(run.rounds)}`]),
    createCell(formatNumber(run.best, 2)),
    createCell(run.state === "running" ? formatDuration(run.seconds_left) : MISSING),
    createCell(run.data, "left"),
    createCell(String(run.seed)),
    createElement("td", { class: "left name", title: run.name }, run.name),
  );
}

/** Hide or show the lines of a run. */
function toggleRun(id) {
  if (!hiddenRuns.delete(id)) {
    hiddenRuns.add(id);
  }
  renderRuns();
  renderCharts();
}

// Charts

/** Smooth values exponentially; the first ones are corrected for the missing values before them. */
function smoothValues(values, weight) {
  if (!weight) {
    return values;
  }
  let weightedSum = 0;
  let weightSum = 0;
  return values.map((value) => {
    weightedSum = weight * weightedSum + (1 - weight) * value;
    weightSum = weight * weightSum + 1 - weight;
    return weightedSum / weightSum;
  });
}

/**
 * Summarize runs that differ only in their seed as one line: their mean, in a band from the smallest to the largest.
 *
 * @param {Run[]} seedRuns - The runs, at least one.
 * @param {string} quantity - Quantity of their curves.
 * @param {number} weight - Weight of the smoothing, 0 for none.
 * @returns {Object} A line for `lineChart`.
 */
function createMeanLine(seedRuns, quantity, weight) {
  const curves = seedRuns.map((run) => {
    const { x, y } = run.lines[quantity];
    return { x, y: smoothValues(y, weight) };
  });
  // The line ends where the first run ends, at the rounds of this run.
  const shortest = curves.reduce((best, curve) => (curve.x.at(-1) < best.x.at(-1) ? curve : best));
  const valuesByRound = shortest.x.map((round) =>
    curves.map(({ x, y }) => {
      const index = x.findLastIndex((otherRound) => otherRound <= round);
      return y[Math.max(0, index)];
    }),
  );
  return {
    style: { ...seedRuns[0].style, title: nameLine(seedRuns) },
    seeds: seedRuns.length,
    x: shortest.x,
    mean: valuesByRound.map((values) => values.reduce((sum, value) => sum + value) / values.length),
    low: valuesByRound.map((values) => Math.min(...values)),
    high: valuesByRound.map((values) => Math.max(...values)),
  };
}

function nameLine(seedRuns) {
  const [first] = seedRuns;
  if (seedRuns.length === 1) {
    return nameRun(first);
  }
  const isWholeMethod = [...runs.values()].every((run) => run.title !== first.title || seedRuns.includes(run));
  return isWholeMethod ? first.title : `${first.title}, as ${first.name}`;
}

/** Group runs by the style of their lines. */
function groupByStyle(someRuns) {
  const groups = new Map();
  for (const run of someRuns) {
    const key = JSON.stringify(run.style);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()];
}

/** List the lines of a quantity. A single run of a federation also has a line for each site. */
function listLines(shownRuns, quantity, weight) {
  const drawnRuns = shownRuns.filter((run) => {
    const curve = run.lines?.[quantity];
    return curve && curve.x.length > 0 && curve.y.some((value) => value !== 0);
  });
  const lines = groupByStyle(drawnRuns).map((seedRuns) => createMeanLine(seedRuns, quantity, weight));
  if (quantity === "evaluation" && drawnRuns.length === 1 && drawnRuns[0].sites?.length) {
    lines[0].style.title = "all sites";
    for (const { style, x, y } of drawnRuns[0].sites) {
      lines.push({ style, seeds: 1, x, mean: y, low: y, high: y });
    }
  }
  return lines;
}

/** Show the names of the lines above the charts; a single line needs none. */
function renderLegend(shownRuns) {
  const runsWithLines = shownRuns.filter((run) => run.lines);
  const lastRuns = groupByStyle(runsWithLines).map((seedRuns) => seedRuns.at(-1));
  const legend = byId("legend");
  legend.hidden = lastRuns.length < 2;
  const version = JSON.stringify(lastRuns.map((run) => [run.style, run.title]));
  if (legend.dataset.version === version) {
    return;
  }
  legend.dataset.version = version;
  legend.replaceChildren(
    ...lastRuns.map((run) => createElement("li", null, createLineSample(run.style), " ", run.title)),
  );
}

/** Draw the charts of the shown runs, and remove those without lines. */
function renderCharts() {
  const shownRuns = listMatchingRuns().filter((run) => !hiddenRuns.has(run.id));
  const weight = Number(byId("smoothing").value);
  renderLegend(shownRuns);
  for (const chart of CHARTS) {
    const lines = listLines(shownRuns, chart.quantity, weight);
    if (lines.length) {
      renderChart(chart, lines, weight);
    } else {
      figures.get(chart.quantity)?.element.remove();
      figures.delete(chart.quantity);
    }
  }
}

function renderChart({ quantity, title, percent }, lines, weight) {
  if (!figures.has(quantity)) {
    figures.set(quantity, createFigure(quantity, title));
  }
  const figure = figures.get(quantity);
  figure.lines = lines;
  const width = Math.floor(figure.plot.clientWidth);
  // A chart is drawn again only if it has changed, so that a tooltip remains open.
  const version = JSON.stringify([width, weight, lines.map((line) => [line.style, line.x.length, line.mean.at(-1)])]);
  if (version === figure.drawnVersion || !width) {
    return;
  }
  figure.drawnVersion = version;
  tooltip.hide();
  const chart = lineChart(width, { lines, title, xLabel: "round", percent, hasIntegerX: true, highest: Infinity });
  figure.plot.replaceChildren(chart);
}

/** Insert an empty figure at its place among the others. */
function createFigure(quantity, title) {
  const plot = createElement("div", { class: "plot" });
  const describeFigure = () => {
    const { lines } = figures.get(quantity);
    return {
      title,
      picture: plot.querySelector("svg"),
      styles: lines.map((line) => line.style),
      rows: createLineRows(lines, "round"),
    };
  };
  const caption = createElement("figcaption", null, title, createSaveButtons(title, describeFigure));
  const element = createElement("figure", { "data-chart": quantity }, caption, plot);
  chartResizeObserver.observe(plot);
  const order = CHARTS.map((chart) => chart.quantity);
  const container = byId("charts");
  const next = [...container.children].find((other) => order.indexOf(other.dataset.chart) > order.indexOf(quantity));
  container.insertBefore(element, next ?? null);
  return { element, plot, lines: [], drawnVersion: "" };
}

// The table of rounds

/** Show the last rounds of the selected run, otherwise of one that runs. */
function renderRounds() {
  const select = byId("run-select");
  const matchingRuns = listMatchingRuns();
  const selectedId = select.value;
  select.replaceChildren(...matchingRuns.map((run) => createElement("option", { value: run.id }, nameRun(run))));
  const isListed = matchingRuns.some((run) => String(run.id) === selectedId);
  const defaultRun = matchingRuns.find((run) => run.state === "running") ?? matchingRuns[0];
  select.value = isListed ? selectedId : String(defaultRun?.id ?? "");

  const run = runs.get(Number(select.value));
  const rows = run?.rows ?? [];
  const table = byId("rounds-table");
  const version = `${select.value}:${run?.version}`;
  if (table.dataset.version === version) {
    return;
  }
  table.dataset.version = version;
  const columns = ROUND_COLUMNS.filter(({ key }) => rows.some((row) => !isMissing(row[key])));
  const createRow = (row) =>
    createElement(
      "tr",
      null,
      columns.map(({ key, digits }) => createCell(formatNumber(row[key], digits))),
    );
  table.replaceChildren(
    createTableHead(columns.map(({ heading }) => heading)),
    createElement("tbody", null, rows.toReversed().map(createRow)),
  );
}

// Federations and sites

/** Format the time of a contact, without the day if that is today. */
function formatContact(time) {
  const today = new Date().toLocaleDateString("sv"); // Sweden writes dates as YYYY-MM-DD
  const text = time.startsWith(today) ? time.split(" ")[1] : time;
  return text || MISSING;
}

function formatLabeledCount({ labeled, unlabeled }) {
  if (labeled === null) {
    return MISSING;
  }
  return unlabeled === null ? formatCount(labeled) : `${formatCount(labeled)} of ${formatCount(labeled + unlabeled)}`;
}

/** Show the sites of a federation as its server sees them. */
function renderSites(federation) {
  const sites = federation?.sites ?? [];
  byId("sites-section").hidden = !sites.length;
  if (!sites.length) {
    return;
  }
  const allRuns = [...runs.values()];
  const siteCurves = allRuns[0]?.sites ?? [];
  const isFinished = allRuns.some((run) => run.state === "finished");
  const connectedCount = sites.filter((site) => site.state === "connected").length;
  byId("summary").hidden = false;
  byId("summary").textContent = isFinished
    ? `The federation is over; ${connectedCount} of ${sites.length} sites took part to the end.`
    : `${connectedCount} of ${sites.length} sites are connected.`;

  // A server with test images does not ask sites for their accuracy.
  const hasAccuracy = siteCurves.length > 0 || allRuns.some((run) => run.lines?.evaluation?.x.length);
  const faults = FAULT_COLUMNS.filter((fault) => sites.some((site) => site[fault]));
  const accuracyHeadings = hasAccuracy ? ["accuracy %"] : [];
  const headings = ["site", "state", "last contact", "labeled images", ...accuracyHeadings, ...faults, "last event"];
  const createRow = (site) => {
    const curve = siteCurves.find(({ style }) => style.title === site.name);
    // After the end no site is connected any more; the last event of a site that stayed is that it joined.
    const state = isFinished && site.state === "connected" ? "took part to the end" : site.state;
    const stateClass = `state ${site.state.replaceAll(" ", "-")}`;
    const name = curve ? [site.name, " ", createLineSample(curve.style)] : site.name;
    const accuracyCell = createCell(curve ? formatNumber(curve.y.at(-1), 2) : MISSING);
    return createElement(
      "tr",
      null,
      createElement("th", { scope: "row", class: "left" }, name),
      createCell(createElement("span", { class: stateClass }, state), "left"),
      createCell(formatContact(site.last_contact), "left"),
      createCell(formatLabeledCount(site)),
      hasAccuracy ? accuracyCell : null,
      faults.map((fault) => createCell(formatCount(site[fault]))),
      createCell(site.last_event || MISSING, "left event"),
    );
  };
  byId("sites-table").replaceChildren(
    createTableHead(headings, ["site", "state", "last contact", "last event"]),
    createElement("tbody", null, sites.map(createRow)),
  );
  byId("consent-note").hidden = !hasAccuracy || siteCurves.length === sites.length;
}

/** Show the folder of a site: its part in the federation, what it did and sent in each round, and its curves. */
function renderSite(site) {
  byId("summary").hidden = false;
  byId("summary").textContent = site.sentence;

  byId("rounds-section").hidden = !site.rows.length;
  byId("rounds-heading").textContent = "Work of this site, and the data that it sent";
  byId("run-select").parentElement.hidden = true;
  const headings = ["round", "time", "work", "received", "sent (everything that left this site)"];
  const createRow = (row) => {
    const texts = [row.time, row.work, row.received, row.sent];
    return createElement(
      "tr",
      null,
      createCell(formatCount(row.round)),
      texts.map((text) => createCell(text, "left")),
    );
  };
  byId("rounds-table").replaceChildren(
    createTableHead(headings, headings.slice(1)),
    createElement("tbody", null, site.rows.toReversed().map(createRow)),
  );

  const lines = {};
  if (site.evaluations.length) {
    lines.evaluation = {
      x: site.evaluations.map(([round]) => round),
      y: site.evaluations.map(([, accuracy]) => accuracy),
    };
  }
  const rowsWithLoss = site.rows.filter((row) => row.loss !== null);
  if (rowsWithLoss.length) {
    lines.loss = { x: rowsWithLoss.map((row) => row.round), y: rowsWithLoss.map((row) => row.loss) };
  }
  // The charts are those of runs, so this site is shown as the only run.
  const run = { id: 0, title: "this site", name: "", method: "", data: "", seed: 0, state: "" };
  runs.clear();
  runs.set(run.id, { ...run, style: SITE_LINE_STYLE, lines });
  byId("curves-section").hidden = !Object.keys(lines).length;
  renderCharts();
}

/** Show the log, and follow its end unless the reader has scrolled up. */
function renderLog(log = []) {
  byId("log-section").hidden = !log.length;
  const list = byId("log");
  const version = log.length ? log.at(-1).join() + log.length : "";
  if (list.dataset.version === version) {
    return;
  }
  list.dataset.version = version;
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 20;
  const items = log.map(([time, text]) => createElement("li", null, createElement("time", null, time), text));
  list.replaceChildren(...items);
  if (isAtEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

// Alarms

/**
 * Group the alarms of all runs by method. Equal alarms of several runs are one entry.
 *
 * @param {Object} data - Response of /data.
 * @returns {Map<string, Map<string, string[]>>} Names of runs by text of the alarm, by title of the method ("" for
 *   alarms of the whole folder, and for those of a single run). The names are "" if the method has one run.
 */
function groupAlarms(data) {
  const groups = new Map();
  const addAlarm = (title, text, runName) => {
    const namesByText = groups.get(title) ?? new Map();
    namesByText.set(text, [...(namesByText.get(text) ?? []), runName]);
    groups.set(title, namesByText);
  };
  for (const { text } of data.alarms) {
    addAlarm("", text, "");
  }
  for (const { id, alarms } of data.runs) {
    const run = runs.get(id);
    const isOnlyOne = [...runs.values()].filter((other) => other.title === run.title).length === 1;
    const runName = isOnlyOne ? "" : nameRun(run).slice(`${run.title}, `.length);
    for (const { text } of alarms) {
      addAlarm(data.runs.length > 1 ? run.title : "", text, runName);
    }
  }
  return groups;
}

/** Show the alarms, and announce the new ones. */
function renderAlarms(groups) {
  byId("alarms").hidden = !groups.size;
  const createAlarm = ([text, runNames]) => {
    const names = runNames.filter(Boolean).join(", ");
    return createElement("li", null, names ? `${names}: ${text}` : text);
  };
  const items = [...groups].map(([title, namesByText]) =>
    createElement(
      "li",
      null,
      title ? createElement("b", null, title) : null,
      createElement("ul", null, [...namesByText].map(createAlarm)),
    ),
  );
  byId("alarms").replaceChildren(...items);
  for (const [title, namesByText] of groups) {
    for (const text of namesByText.keys()) {
      // The part after the colon has numbers, which change from round to round.
      const key = `${title} ${text.split(":")[0]}`;
      if (!announcedAlarms.has(key)) {
        announcedAlarms.add(key);
        announce(`Alarm: ${title ? `${title}: ` : ""}${text}`);
      }
    }
  }
}

// The whole page

/** Describe the progress of a run, or of all runs of a sweep or comparison, in the head of the page. */
function describeProgress(data) {
  const running = data.runs.filter((run) => run.state === "running");
  const finished = data.runs.filter((run) => run.state === "finished");
  const plannedCount = Math.max(data.planned, data.runs.length);
  const secondsLeft = Math.max(...running.map((run) => run.seconds_left ?? 0));
  const timeLeft = running.length ? `, ${formatDuration(secondsLeft)} left` : "";
  const [first] = data.runs;
  let text = data.site ? "" : "no run has started yet";
  if (plannedCount > 1) {
    const runningText = running.length ? `, ${running.length} running${timeLeft}` : "";
    text = `${finished.length} of ${plannedCount} runs finished${runningText}`;
  } else if (first?.waiting) {
    text = first.waiting;
  } else if (first) {
    text = `round ${first.round} of ${first.rounds}, ${first.state}${timeLeft}`;
  }
  return data.left_out ? `${text}; ${data.left_out} more are not shown` : text;
}

function renderPage(data) {
  for (const run of data.runs) {
    // Curves are sent only if they have changed, so the earlier ones remain.
    runs.set(run.id, { ...runs.get(run.id), ...run });
  }
  const hasRuns = data.runs.length > 0;
  for (const id of ["runs-section", "curves-section", "rounds-section"]) {
    byId(id).hidden = !hasRuns;
  }
  byId("progress").textContent = describeProgress(data);
  renderAlarms(groupAlarms(data));
  if (hasRuns) {
    renderRuns();
    renderCharts();
    renderRounds();
  } else if (data.site) {
    renderSite(data.site);
  }
  renderSites(data.federation);
  renderLog((data.federation ?? data.site)?.log);
}

async function pollData() {
  try {
    const versions = [...runs.values()]
      .filter((run) => run.lines && run.version !== undefined)
      .map((run) => `${run.id}:${run.version}`);
    renderPage(await requestJson(`data?versions=${versions.join(",")}`));
    byId("read-time").textContent = `read at ${new Date().toLocaleTimeString("en-GB")}`;
    showNotice("");
  } catch (error) {
    const isStopped = error.status === 0;
    showNotice(
      isStopped
        ? "halfmoon watch was stopped in the terminal; the runs continue. The page shows the state that it read last."
        : error.message,
    );
  }
  document.body.dataset.ready = "yes";
  setTimeout(pollData, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

function renderMatchingRuns() {
  renderRuns();
  renderCharts();
  renderRounds();
}

byId("run-filter").addEventListener("input", renderMatchingRuns);
byId("state-filter").addEventListener("change", renderMatchingRuns);
byId("run-select").addEventListener("change", renderRounds);
byId("smoothing").addEventListener("input", () => {
  byId("smoothing-value").textContent = byId("smoothing").value;
  renderCharts();
});
pollData();
