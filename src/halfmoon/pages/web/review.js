/* global calibrationChart */
import { announce, answer, ask, askCaptions, byId, choices, count, fullName, html, keys, keysOf, notice, percent, shortName, takeOver } from "./common.js";
import { Look, tools } from "./look.js";
import { Wall } from "./wall.js";

const EVERY = 3000;
const data = { labels: [], unsure: new Set(), paths: [], facts: null, seen: null };
const done = [];
let place = -1; // of the open image, in the wall's rows

const wall = new Wall(byId("wall"), { fill, open, source: (at) => `image/${at}?small=1`, changed: drawBulk, extra: 58 });
const look = new Look(byId("stage"), byId("image"), tools());

const name = (n) => (n >= 0 ? data.facts.classes[n] : "");
const labelName = (at) => name(data.labels[at]);
const wrong = (at) => data.seen.predicted[at] >= 0 && data.labels[at] >= 0 && data.labels[at] !== data.seen.predicted[at];
const sure = (at) => (data.seen.predicted[at] >= 0 ? data.seen.probability[at] : -1);

function fill(at) {
  const said = data.seen.predicted[at] < 0 ? "cannot be read" : `${name(data.seen.predicted[at])} · ${percent(data.seen.probability[at])}`;
  const label = labelName(at);
  const mark = !label ? "no label" : wrong(at) ? html("span", { class: "no" }, `≠ label ${label}`) : `= label ${label}`;
  return {
    title: `${fullName(data, at)}: ${said}, ${label ? `label ${label}` : "no label"}`,
    lines: [html("span", { class: "said" }, said), mark, shortName(data, at)],
    odd: wrong(at),
  };
}

const SORTS = {
  wrong: (a, b) => wrong(b) - wrong(a) || (wrong(a) ? sure(b) - sure(a) : sure(a) - sure(b)),
  unsure: (a, b) => sure(a) - sure(b),
  sure: (a, b) => sure(b) - sure(a),
  class: (a, b) => data.seen.predicted[a] - data.seen.predicted[b] || sure(b) - sure(a),
  path: (a, b) => a - b,
};

function show(keep = false) {
  const [predicted, labeled] = [Number(byId("predicted").value), Number(byId("labeled").value)];
  const rows = [...data.paths.keys()].filter((at) =>
    (predicted === -2 || data.seen.predicted[at] === predicted) && (labeled === -2 || data.labels[at] === labeled));
  // Images that cannot be read have no prediction; whatever the order, they are last.
  const unreadable = (at) => data.seen.predicted[at] < 0;
  rows.sort((a, b) => unreadable(a) - unreadable(b) || SORTS[byId("sort").value](a, b) || a - b);
  const off = rows.filter(wrong).length;
  const some = rows.filter((at) => data.labels[at] >= 0).length;
  const part = rows.length < data.paths.length ? `${count(rows.length)} images, ` : "";
  byId("amount").textContent = `${part}${count(off)} of ${count(some)} labels disagree`;
  wall.show(rows, keep);
}

function selects() {
  for (const [id, none] of [["predicted", "cannot be read"], ["labeled", "none"]]) {
    const select = byId(id);
    const chosen = select.value || "-2";
    select.replaceChildren(html("option", { value: -2 }, "any"), ...data.facts.classes.map((word, n) => html("option", { value: n }, word)), html("option", { value: -1 }, none));
    select.value = chosen;
  }
}

function open(at) {
  place = at;
  const row = wall.rows[at];
  if (!byId("one").open) byId("one").showModal();
  byId("path").textContent = fullName(data, row);
  look.show(row, data.paths[row]);
  look.ahead([at + 1, at + 2].filter((n) => n < wall.rows.length).map((n) => wall.rows[n]));
  draw();
}

function draw() {
  const row = wall.rows[place];
  const seen = data.seen.predicted[row];
  byId("said").replaceChildren(
    html("b", null, seen < 0 ? "This image cannot be read." : `The model predicts ${name(seen)}, ${percent(data.seen.probability[row], 1)}.`), html("br"),
    labelName(row) ? `Its label is ${labelName(row)}.` : "It has no label.", ` ${count(place + 1)} of ${count(wall.rows.length)}.`);
  choices(byId("choices"), data.facts, { now: data.labels[row], suggested: name(seen), press: correct });
  byId("before").disabled = place === 0;
  byId("after").disabled = place === wall.rows.length - 1;
}

async function act(what) {
  try {
    await what();
    notice("");
  } catch (error) {
    notice(error.message);
    announce(error.message);
  }
}

const correct = (n) => act(async () => {
  const row = wall.rows[place];
  const [before, after] = [labelName(row), data.facts.classes[n]];
  if (before === after || !(await answer(data, row, after, before))) return;
  byId("foldered").hidden = true;
  done.push({ row, before, after });
  drawBulk();
  announce(`${data.paths[row]}: ${after}.`);
  wall.refresh(row);
  draw();
});

// Give one label to all images that are selected on the wall.
const correctAll = (n) => act(async () => {
  const rows = [...wall.chosen];
  const said = rows.map((row) => [row, data.facts.classes[n], labelName(row)]);
  if (!said.length) return;
  await send(said);
  byId("foldered").hidden = true;
  done.push({ said });
  announce(`${rows.length} images: ${data.facts.classes[n]}.`);
  wall.choose([]);
  show(true);
});

const send = async (said) => takeOver(data, await ask("answers", { said, since: data.facts.version }));

function drawBulk() {
  const some = wall.chosen.size;
  byId("bulk").hidden = byId("none-of-them").hidden = !some;
  byId("chosen").textContent = `${count(some)} selected`;
  byId("select").setAttribute("aria-pressed", String(wall.selecting));
  byId("take-back").disabled = !done.length;
  if (some) choices(byId("choices-of-all"), data.facts, { press: correctAll });
}

const undo = () => act(async () => {
  const last = done.pop();
  if (!last) return;
  if (last.said) {
    await send(last.said.map(([row, label, seen]) => [row, seen, label]));
    show(true);
  } else await answer(data, last.row, last.before, last.after);
  announce("Undone.");
  if (!last.said) wall.refresh(last.row);
  drawBulk();
  if (byId("one").open) draw();
});

const step = (by) => {
  const to = place + by;
  if (to >= 0 && to < wall.rows.length) open(to);
};

// Quality

const NAMES = 40;

async function quality() {
  byId("summary").textContent = "…";
  const found = await ask("scores");
  if (!found.images) {
    byId("summary").textContent = "No image has a label that the model knows, so nothing can be compared. Press an image to label it.";
    for (const part of document.querySelectorAll("#quality section")) part.hidden = true;
    return;
  }
  for (const part of document.querySelectorAll("#quality section")) part.hidden = false;
  byId("summary").textContent = `The model agrees with ${percent(found.accuracy, 1)} of ${count(found.images)} labels (balanced over classes: ${percent(found.balanced_accuracy, 1)}). ` +
    `Its probabilities are off by ${percent(found.calibration_error, 1)} on average. For ${percent(found.sure.share)} of these images its confidence is at least ${percent(found.sure.at_least)}` +
    (found.sure.accuracy === null ? "." : `; it is right on ${percent(found.sure.accuracy, 1)} of those.`);
  byId("confusion").replaceChildren(confusion(found));
  byId("calibration").replaceChildren(calibration(found));
  const cells = (each) => [each.precision, each.recall, each.f1].map((share) => html("td", null, percent(share, 1)));
  byId("classes").replaceChildren(html("table", null,
    html("thead", null, html("tr", null, html("th", { class: "left" }, "class"), ["precision", "recall", "F1", "labels"].map((word) => html("th", null, word)))),
    html("tbody", null, found.per_class.map((each) => html("tr", null, html("th", { scope: "row" }, each.class), cells(each), html("td", null, count(each.support)))))));
}

function confusion({ classes, confusion: matrix }) {
  if (classes.length > NAMES) return html("p", { class: "less" }, `${classes.length} classes are too many for a table; halfmoon evaluate --out writes it.`);
  const head = html("tr", null, html("td"), classes.map((word) => html("th", { scope: "col" }, word)));
  const rows = matrix.map((row, t) => {
    const all = row.reduce((sum, n) => sum + n, 0) || 1;
    return html("tr", null, html("th", { scope: "row" }, classes[t]), row.map((n, p) => html("td", null,
      n ? html("button", { type: "button", class: n / all > 0.77 ? "dark" : null, style: `--share:${(100 * n) / all}`, "aria-label": `label ${classes[t]}, predicted ${classes[p]}: ${n}`, onclick: () => only(t, p, classes) }, count(n)) : null)));
  });
  return html("table", { class: "confusion" }, html("thead", null, head), html("tbody", null, rows));
}

function only(t, p, classes) {
  byId("labeled").value = String(data.facts.classes.indexOf(classes[t]));
  byId("predicted").value = String(data.facts.classes.indexOf(classes[p]));
  view("wall");
  show();
  wall.focus(0);
}

function calibration({ reliability }) {
  const width = Math.min(400, Math.max(280, byId("calibration").clientWidth));
  return calibrationChart(width, { bins: reliability, title: "Share of correct predictions, by probability" });
}

function view(to) {
  const scores = to === "scores";
  byId("images").hidden = scores;
  byId("quality").hidden = !scores;
  byId("tab-wall").setAttribute("aria-pressed", String(!scores));
  byId("tab-scores").setAttribute("aria-pressed", String(scores));
  if (scores) act(quality);
  else fit();
}

const fit = () => byId("wall").style.setProperty("--used", `${Math.ceil(byId("wall").getBoundingClientRect().top + scrollY)}px`);

async function watch() {
  try {
    const facts = await ask(`state?since=${data.facts.version}`);
    takeOver(data, facts);
    for (const [at] of facts.changes) wall.refresh(at);
    if (byId("notice").textContent.startsWith("halfmoon no longer")) notice("");
  } catch (error) {
    notice(error.message);
  }
  setTimeout(watch, EVERY);
}

async function predicted() {
  for (;;) {
    const { model: progress } = await ask("state");
    if (progress.error) throw new Error(`The model cannot be used: ${progress.error}`);
    byId("progress").textContent = progress.ready ? `${count(data.paths.length)} images, model ${data.model}` : `the model predicts the images: ${count(progress.done)} of ${count(progress.of)}`;
    if (progress.ready) return ask("predictions");
    await new Promise((go) => setTimeout(go, 500));
  }
}

keys((key) => {
  if (!data.seen) return false;
  const acts = { q: () => view(byId("quality").hidden ? "scores" : "wall"), "?": () => byId("keys").showModal(), u: undo, undo };
  if (!byId("images").hidden) Object.assign(acts, { x: () => byId("select").click(), a: () => wall.choose(wall.inSight()), Escape: () => wall.choose([]) });
  const n = keysOf(data.facts.classes).indexOf(key);
  if (n >= 0 && wall.chosen.size && !byId("images").hidden) return correctAll(n), true;
  return acts[key] ? (acts[key](), true) : false;
});
byId("one").addEventListener("keydown", (event) => {
  if (event.altKey || event.metaKey || (event.ctrlKey && event.key !== "z") || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const n = event.ctrlKey ? -1 : keysOf(data.facts.classes).indexOf(key);
  const acts = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), z: event.ctrlKey ? undo : () => look.toggle(), "+": () => look.by(1), "-": () => look.by(-1), c: () => announce(look.cycle()), u: undo };
  if (n >= 0) correct(n);
  else if (acts[key]) acts[key]();
  else return;
  event.preventDefault();
  event.stopPropagation();
});
byId("one").addEventListener("close", () => wall.focus(place));
for (const id of ["sort", "predicted", "labeled"]) byId(id).addEventListener("change", () => show());
byId("screen").addEventListener("click", () => wall.choose(wall.inSight()));
byId("none-of-them").addEventListener("click", () => wall.choose([]));
byId("take-back").addEventListener("click", undo);
byId("select").addEventListener("click", () => {
  wall.selecting = !wall.selecting;
  drawBulk();
});
byId("before").addEventListener("click", () => step(-1));
byId("after").addEventListener("click", () => step(1));
byId("close").addEventListener("click", () => byId("one").close());
byId("zoom").addEventListener("click", () => look.toggle());
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("tab-wall").addEventListener("click", () => view("wall"));
byId("tab-scores").addEventListener("click", () => view("scores"));

try {
  const found = await ask("start");
  Object.assign(data, { paths: found.paths, labels: found.labels, unsure: new Set(found.unsure_rows), by: null, facts: found, model: found.model_name });
  byId("foldered").hidden = !found.foldered;
  data.seen = await predicted();
  takeOver(data, await ask(`state?since=${data.facts.version}`));
  selects();
  if (!data.labels.some((label) => label >= 0)) byId("sort").value = "unsure";
  fit();
  drawBulk();
  show();
  askCaptions(data, () => {
    wall.extra += 16; // a second line
    show(true);
  });
  setTimeout(watch, EVERY);
} catch (error) {
  notice(error.message);
}
document.body.dataset.ready = "yes";
