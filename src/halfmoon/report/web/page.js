// Puts charts into the places that the page has for them, and connects legends and choices.

const AXES = {
  round: "round",
  steps: "labeled steps",
  forward: "forward passes, images",
  megabytes: "sent, MB",
  seconds: "seconds",
};
const TITLES = {
  accuracy: "Test accuracy, %",
  pseudo: "Correct pseudo-labels, %",
  above: "Correct among those above the threshold, %",
  share_above: "Pseudo-labels above the threshold, %",
  share_used: "Pseudo-labels that were used, %",
  auc_confidence: "AUC of the confidence for correct pseudo-labels",
  auc_weight: "AUC of the weights for correct pseudo-labels",
  weights_mean: "FedDure: mean of F-reg's weights m",
  weights_spread: "FedDure: standard deviation of F-reg's weights m",
  reward: "FedDure: reward d of C-reg",
  js_app_u: "Divergence of class-wise accuracy from APP-U",
  js_labeled: "Divergence of class-wise accuracy from the labeled mix",
  local_js_app_u: "Clients' own models: divergence from APP-U, mean over clients",
  local_js_labeled: "Clients' own models: divergence from their labeled mix",
  global_js_app_u: "Global model at clients: divergence from APP-U, mean over clients",
  global_js_labeled: "Global model at clients: divergence from their labeled mix",
  per_class: "Class-wise accuracy of the final model, %",
  prior: "Class shares at the end, %",
  clients: "Accuracy at the clients, %",
  confusion: "Confusion of the final model",
  against: "Test accuracy, %",
};
const SHARES = [
  ["accuracy", { title: "class-wise accuracy, its share", color: "#0072B2", dashes: "", marker: "o" }],
  ["app_u", { title: "APP-U", color: "#D55E00", dashes: "", marker: "s" }],
  ["labeled", { title: "labeled", color: "#009E73", dashes: "", marker: "^" }],
  ["unlabeled", { title: "unlabeled (true)", color: "currentColor", dashes: "", marker: "D" }],
];

const PERCENT = new Set(["accuracy", "pseudo", "above", "share_above", "share_used"]);

const charts = [];

// A chart in its place: `draw` gets the width and is called whenever width or choice change. `found` returns the title,
// the line styles and the numbers (rows of CSV) of what is drawn now.
function place(host, caption, stamp, draw, found, wide) {
  const plot = createElement("div", { class: "plot" });
  const buttons = createSaveButtons(found().title, () => ({ picture: plot.querySelector("svg[role=img]"), ...found() }));
  const said = createElement("figcaption", null, caption, stamp ? createElement("span", { class: "stamp" }, stamp) : null, buttons);
  host.append(createElement("figure", wide ? { class: "wide" } : null, said, plot));
  let drawn = 0;
  const redraw = (always) => {
    const width = Math.floor(plot.clientWidth);
    if (!width || (!always && width === drawn)) return;
    drawn = width;
    const scroll = plot.style;
    scroll.minHeight = plot.firstChild ? `${plot.clientHeight}px` : "";
    plot.replaceChildren(draw(width));
    scroll.minHeight = "";
  };
  new ResizeObserver(() => redraw(false)).observe(plot);
  charts.push(redraw);
  return () => redraw(true);
}

function choice(label, names, act) {
  const options = names.map((name, n) => createElement("option", { value: n }, name));
  const select = createElement("select", { "aria-label": label }, options);
  select.addEventListener("change", () => act(Number(select.value)));
  return select;
}

// Legends of one group act together: a click hides a line in all its charts.
function legends(styles, lines) {
  const hidden = new Set();
  const buttons = [];
  const watchers = [];
  const press = (line) => {
    hidden.has(line) ? hidden.delete(line) : hidden.add(line);
    for (const [button, of] of buttons) button.setAttribute("aria-pressed", String(!hidden.has(of)));
    tooltip.hide();
    watchers.forEach((redraw) => redraw());
  };
  const make = () => createElement("div", { class: "legend", role: "group", "aria-label": "Lines; press to hide or show" }, lines.map((line) => {
    const button = createElement("button", { type: "button", "aria-pressed": String(!hidden.has(line)), "data-line": line }, createLineSample(styles[line]), styles[line].title);
    button.addEventListener("click", () => press(line));
    buttons.push([button, line]);
    return button;
  }));
  return { hidden, make, watch: (redraw) => watchers.push(redraw) };
}

function setUpGroup(root, study, group) {
  const legend = legends(study.styles, group.lines.map((line) => line.line));
  const visible = () => group.lines.filter((line) => !legend.hidden.has(line.line));
  for (const host of root.querySelectorAll("[data-charts]")) {
    const names = host.dataset.names.split(" ").filter((name) => group.lines.some((line) => has(line, name) && lively(line, name)));
    const shared = names.some((name) => !["prior", "confusion", "clients"].includes(name));
    if (shared) host.before(legend.make());
    for (const name of names) legend.watch(setUpChart(host, name, study, group, visible));
    if (!names.length && !host.closest("section").querySelector("table")) host.closest("section").hidden = true;
  }
}

// A chart of zeros alone says nothing.
const lively = (line, name) => !(name in line.series) || line.series[name].high.some((value) => value !== 0);

function has(line, name) {
  if (name === "against") return Boolean(line.series.accuracy);
  if (name in line.series) return true;
  return ["per_class", "prior", "confusion", "clients"].includes(name) && Boolean(line[name]);
}

function setUpChart(host, name, study, group, visible) {
  const title = TITLES[name];
  const holders = group.lines.filter((line) => has(line, name));
  if (name === "prior" || name === "confusion") return chosen(host, name, study, group, holders);
  if (name === "against") return against(host, study, group, visible);
  if (name === "per_class") {
    const sets = () => visible().filter((line) => line.per_class).map((line) => ({ style: study.styles[line.line], ...line.per_class }));
    const draw = (width) => classChart(width, { sets: sets(), classes: group.classes, title, yLabel: "class", full: true });
    const found = () => ({ title, styles: sets().map((set) => set.style), rows: classRows(sets(), group.classes) });
    return place(host, title, study.scale, draw, found, group.classes.length * group.lines.length > 60);
  }
  if (name === "clients") {
    const sets = holders.map((line) => ({ style: study.styles[line.line], ...line.clients }));
    const rows = [["line", "client", "accuracy"], ...sets.flatMap(({ style, each, mean, deviation, worst }) => [...each.map(([client, share]) => [style.title, client, share]), [style.title, "mean", mean], [style.title, "standard deviation", deviation], [style.title, "worst tenth", worst]])];
    return place(host, title, study.scale, (width) => clientChart(width, { sets, title }), () => ({ title, styles: [], rows }), true);
  }
  const percent = PERCENT.has(name);
  const lines = () => visible().filter((line) => line.series[name]).map((line) => ({ style: study.styles[line.line], seeds: line.seeds, ...line.series[name] }));
  const least = name === "reward" ? -Infinity : 0;
  const draw = (width) => lineChart(width, { lines: lines(), title, xLabel: "round", percent, least, most: least ? Infinity : 1, whole: true });
  return place(host, title, study.scale, draw, () => ({ title, styles: lines().map((line) => line.style), rows: createLineRows(lines(), "round") }));
}

const classRows = (sets, classes) => [["line", "class", "mean", "low", "high"], ...sets.flatMap((set) => set.mean.map((share, n) => [set.style.title, classes[n], share, set.low?.[n], set.high?.[n]]))];

// Accuracy against what was spent; the axis is chosen above the chart.
function against(host, study, group, visible) {
  const axes = Object.keys(AXES).filter((key) => key === "round" || group.lines.some((line) => line.against[key]));
  let axis = axes.includes("steps") ? "steps" : "round";
  const select = choice("what accuracy is drawn against", axes.map((key) => AXES[key]), (n) => {
    axis = axes[n];
    redraw();
  });
  select.value = String(axes.indexOf(axis));
  select.dataset.choose = "axis";
  const at = (line) => (axis === "round" ? line.series.accuracy.x : line.against[axis]);
  const lines = () => visible().filter((line) => line.series.accuracy && at(line)).map((line) => ({ style: study.styles[line.line], seeds: line.seeds, ...line.series.accuracy, x: at(line) }));
  const draw = (width) => lineChart(width, { lines: lines(), title: TITLES.against, xLabel: AXES[axis], percent: true, whole: axis !== "seconds" && axis !== "megabytes" });
  const caption = createElement("span", null, `${TITLES.against}, against `, select);
  const found = () => ({ title: TITLES.against, styles: lines().map((line) => line.style), rows: createLineRows(lines(), AXES[axis]) });
  const redraw = place(host, caption, study.scale, draw, found, true);
  return redraw;
}

// Charts that show one line's own; a choice above says whose.
function chosen(host, name, study, group, holders) {
  let current = Math.max(0, holders.findIndex((line) => line.line === group.winner));
  const titles = holders.map((line) => study.styles[line.line].title);
  const select = choice(study.rows, titles, (n) => {
    current = n;
    label.dataset.chosen = titles[n];
    redraw();
  });
  select.value = String(current);
  select.dataset.choose = name;
  const label = createElement("span", { class: "chosen", "data-chosen": titles[current] }, `${TITLES[name]}: `, select);
  const draw = (width) => {
    const line = holders[current];
    const title = `${TITLES[name]}, ${titles[current]}`;
    if (name === "prior") return prior(width, line.prior, group.classes, title);
    if (line.confusion.matrix) return matrixChart(Math.min(width, 760), { matrix: line.confusion.matrix, classes: group.classes, title });
    return confusionsChart(width, { entries: line.confusion.largest, classes: group.classes, title });
  };
  const found = () => {
    const line = holders[current];
    const title = `${TITLES[name]}, ${titles[current]}`;
    if (name === "prior") return { title, styles: priorSets(line.prior).map(({ style }) => ({ ...style, dashes: null })), rows: classRows(priorSets(line.prior), group.classes) };
    return { title, styles: [], rows: confusionRows(line.confusion, group.classes) };
  };
  const redraw = place(host, label, study.scale, draw, found, name === "confusion");
  return () => undefined;
}

const priorSets = (shares) => SHARES.filter(([key]) => shares[key]).map(([key, style]) => ({ style, mean: shares[key] }));

function confusionRows({ matrix, largest }, classes) {
  const head = ["true class", "predicted class", "images"];
  if (largest) return [head, ...largest.map(([t, p, count]) => [classes[t], classes[p], count])];
  return [head, ...matrix.flatMap((row, t) => row.map((count, p) => [classes[t], classes[p], count]))];
}

function prior(width, shares, classes, title) {
  const sets = priorSets(shares);
  const keys = sets.map(({ style }) => createElement("span", { class: "key" }, createLineSample({ ...style, dashes: null }), style.title));
  const chart = classChart(width, { sets, classes, title, yLabel: "class" });
  return createElement("div", null, createElement("div", { class: "keys" }, keys), chart);
}

function setUpAlong(host, study) {
  for (const panel of study.x) {
    const styles = Object.fromEntries(panel.lines.map((line) => [line.line, line]));
    const legend = legends(styles, panel.lines.map((line) => line.line));
    const title = `${study.measured}, %${panel.title ? `: ${panel.title}` : ""}`;
    const lines = () => panel.lines.filter((line) => !legend.hidden.has(line.line)).map((line) => ({
      style: line,
      seeds: line.points.some((point) => point.low < point.high) ? 2 : 1,
      dense: true,
      x: line.points.map((point) => point.x),
      ...Object.fromEntries(["mean", "low", "high"].map((key) => [key, line.points.map((point) => point[key])])),
      published: line.published,
    }));
    const words = panel.lines.some((line) => line.published.length) ? " (hollow: published)" : "";
    const cell = createElement("div", study.x.length === 1 ? { class: "wide" } : null, legend.make());
    host.append(cell);
    const found = () => ({ title, styles: lines().map((line) => line.style), rows: createLineRows(lines(), panel.label) });
    legend.watch(place(cell, title + words, study.scale, (width) => lineChart(width, { lines: lines(), title, xLabel: panel.label, percent: true, exact: true }), found));
  }
}

function setUpStudy(root, study) {
  const splits = root.querySelector("[data-splits]");
  splits.hidden = !study.splits.length;
  for (const split of study.splits) {
    const runs = `${split.runs} ${split.runs === 1 ? "run" : "runs"}`;
    const words = createElement("span", null, split.title || "Clients and classes", " ", createElement("span", { class: "less" }, `(${runs})`));
    const counts = (kind) => split[kind].flatMap((row, k) => row.map((count, c) => [kind, split.shown[k], split.classes[c], count]));
    const server = (split.server ?? []).map((count, c) => ["labeled", "server", split.classes[c], count]);
    const rows = [["kind", "client", "class", "images"], ...server, ...counts("labeled"), ...counts("unlabeled")];
    const found = () => ({ title: split.title || "Clients and classes", styles: [], rows });
    place(splits.querySelector("[data-splits-here]"), words, study.scale, (width) => bubbleChart(width, split), found, study.splits.length === 1);
  }
  const along = root.querySelector("[data-along]");
  if (along) setUpAlong(along, study);
  const groups = [...root.querySelectorAll(".group")];
  const chooser = root.querySelector(".chooser");
  const select = chooser?.querySelector("select");
  const show = () => groups.forEach((group, n) => (group.hidden = select && n !== Number(select.value)));
  if (select) {
    chooser.hidden = false;
    select.addEventListener("change", show);
  }
  show();
  groups.forEach((group, n) => setUpGroup(group, study, study.groups[n]));
  // On paper nothing can be chosen, so every column is printed.
  window.addEventListener("beforeprint", () => {
    groups.forEach((group) => (group.hidden = false));
    charts.forEach((redraw) => redraw(false));
  });
  window.addEventListener("afterprint", show);
}

const data = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll(".study").forEach((root, n) => setUpStudy(root, data.studies[n]));
