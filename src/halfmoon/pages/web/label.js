import { announce, answer, ask, askCaptions, askName, byId, choices, count, fullName, html, keys, keysOf, notice, percent, shortName, takeOver, withLast } from "./common.js";
import { ARROWS, Look, tools } from "./look.js";
import { Wall } from "./wall.js";

const AGAIN = 20; // labels after which the order is requested again
const EVERY = 3000; // ms between two requests for labels that others have written

const data = { labels: [], unreadable: new Set(), unsure: new Set(), order: [], paths: [], facts: null };
const skipped = new Set(JSON.parse(sessionStorage.getItem("skipped") ?? "[]")); // also after the page is loaded again
const done = []; // what can be undone: {row, before, after, kind}
let row = -1;
let since = 0;
let busy = 0; // actions that are running or waiting
let doing = Promise.resolve();

const look = new Look(byId("stage"), byId("image"), tools());
look.unreadable = (at) => putLast(at);
const wall = new Wall(byId("wall"), { fill, open: (place) => goTo(wall.rows[place]), source: (at) => `image/${at}?small=1`, changed: drawBulk, unreadable: (at) => data.unreadable.add(at) });

const labelName = (at) => (data.labels[at] >= 0 ? data.facts.classes[data.labels[at]] : "");
const waits = (at) => data.labels[at] < 0 && !data.unsure.has(at);

// The images without a label, in their order; then those skipped, the one skipped first before the others; then those
// that cannot be read.
const queue = () => withLast([...data.order.filter((at) => waits(at) && !skipped.has(at)), ...[...skipped].filter(waits)], data.unreadable);

// Remember that an image cannot be read, and go on if it was shown in its turn.
function putLast(at) {
  const known = data.unreadable.has(at);
  data.unreadable.add(at);
  if (known || at !== row || !data.inTurn) return;
  announce("An image cannot be read; it is shown after all others.");
  next();
}

const upcoming = (most) => queue().filter((at) => at !== row).slice(0, most);

function takeOrder(found) {
  data.order = found.order;
  data.why = new Map(found.order.map((at, n) => [at, { uncertainty: found.uncertainty[n], rank: found.rank[n], far: found.far[n] }]));
}

// The numbers of the order: the uncertainty, and the rank of the distance to labeled images.
function whyOf(at) {
  const { uncertainty, rank, far } = data.why.get(at) ?? {};
  if (!rank) return "";
  const unlike = far ? `; distance to labeled images: rank ${count(far)}` : "";
  return `uncertainty ${uncertainty.toFixed(2)}, rank ${count(rank)} of ${count(data.why.size)}${unlike}`;
}

const orderAgain = async () => takeOrder(await ask(`queue?way=${byId("way").value}`));
const skips = () => sessionStorage.setItem("skipped", JSON.stringify([...skipped]));

function next() {
  const [first] = upcoming(1);
  goTo(first ?? (row >= 0 && waits(row) ? row : -1), true);
}

function goTo(at, inTurn = false) {
  row = at;
  data.inTurn = inTurn;
  view("one");
  byId("none").hidden = at >= 0;
  byId("image").hidden = at < 0;
  if (at < 0) {
    const unsure = data.facts.unsure;
    byId("none").textContent = unsure ? `Every other image has a label. ${count(unsure)} marked “not sure” are under All images.` : "Every image has a label.";
    byId("path").textContent = byId("rank").textContent = "";
  } else {
    byId("path").textContent = fullName(data, at);
    byId("rank").textContent = whyOf(at);
    byId("note").value = data.notes[at] ?? "";
    look.show(at, data.paths[at]);
    look.ahead(upcoming(3));
  }
  draw();
  suggest();
}

function draw() {
  const { facts } = data;
  byId("progress").textContent = `${count(facts.labeled)} of ${count(facts.total)} labeled`;
  const host = byId("choices");
  host.classList.toggle("many", facts.classes.length > 12);
  choices(host, facts, { now: row >= 0 ? data.labels[row] : -1, suggested: data.suggested, press: give });
  byId("find").hidden = facts.classes.length <= 12;
  find();
  byId("undo").disabled = byId("take-back").disabled = !done.length;
  byId("note").hidden = row < 0;
  for (const id of ["skip", "doubt"]) byId(id).disabled = row < 0;
  for (const button of host.children) button.disabled = row < 0;
  const { model, training } = facts;
  byId("model").textContent = facts.guesses ? "" : !model ? "order: random" : model.error ? "" : `the model predicts the images: ${count(model.done)} of ${count(model.of)}`;
  for (const id of ["ordering", "alike", "alike-here"]) byId(id).hidden = !facts.guesses;
  byId("suggesting").hidden = !facts.guesses && (!model || Boolean(model.error));
  byId("train").disabled = Boolean(training.progress);
  byId("trained").textContent = training.words;
  byId("trained").classList.toggle("bad", Boolean(training.error));
  drawCurve(training.points);
  if (model?.error && !facts.guesses) notice(`The model cannot be used, so the order is random: ${model.error}`);
}

function drawCurve(points) {
  const host = byId("curve");
  if (!points.length || (host.dataset.drawn === String(points.length) && host.firstChild)) return;
  const of = (name) => points.map((point) => point[name]);
  const line = { look: { title: "correct in cross-validation", color: "var(--link)" }, x: of("labels"), mean: of("accuracy"), low: of("low"), high: of("high"), bars: true, dense: true };
  const spec = { lines: [line], title: "Percent correct in cross-validation", xLabel: "labels", percent: true, exact: true, height: 150 };
  host.replaceChildren(lineChart(Math.max(240, host.clientWidth), spec));
  host.dataset.drawn = points.length;
}

// Go to the previous or next image of its folder, as in a series.
function beside(by) {
  const folder = (at) => data.paths[at]?.split("/").slice(0, -1).join("/");
  if (row >= 0 && folder(row + by) === folder(row)) goTo(row + by);
}

const train = () => act(async () => {
  takeOver(data, await ask("train", {}));
  draw();
}, true);

// Show all images, the most similar to one first.
const similar = (at) => act(async () => {
  if (at === undefined || at < 0) return;
  data.similar = { at, rows: (await ask(`similar/${at}`)).rows };
  view("all");
  showAll(false, "similar");
}, true);
const similarHere = () => similar([...wall.chosen][0] ?? wall.rows[wall.focused]);

// Run one action at a time, and show its error. Actions on the shown image are dropped while another one runs.
function act(what, waiting = false) {
  if (busy && !waiting) return;
  busy += 1;
  doing = doing.then(what).then(() => notice(""), (error) => notice(error.message)).finally(() => (busy -= 1));
  return doing;
}

const give = (n) => act(async () => {
  if (row < 0) return;
  const at = row;
  const [before, after] = [labelName(at), data.facts.classes[n]];
  const doubted = data.unsure.has(at);
  if (!(await answer(data, at, after, before))) {
    takeOver(data, await ask(`state?since=${data.facts.version}`));
    return next();
  }
  done.push({ kind: "label", row: at, before, after, doubted });
  skipped.delete(at);
  announce(`${after}.`);
  skips();
  if (++since % AGAIN === 0) await orderAgain();
  next();
});

// Give one label to all images that are selected on the wall, or null: not sure.
const giveAll = (n) => act(async () => {
  const rows = [...wall.chosen];
  if (!rows.length) return;
  if (n === null) {
    for (const at of rows.filter(waits)) {
      takeOver(data, await doubted(at, true));
      done.push({ kind: "doubt", row: at });
    }
  } else {
    const said = rows.map((at) => [at, data.facts.classes[n], labelName(at)]);
    await send(said);
    done.push({ kind: "many", said, doubted: rows.filter((at) => data.unsure.has(at)) });
    since += rows.length;
    announce(`${rows.length} images: ${data.facts.classes[n]}.`);
  }
  wall.choose([]);
  draw();
  showAll(true);
});

const send = async (said) => takeOver(data, await ask("answers", { said, by: data.name ?? "", since: data.facts.version }));

function drawBulk() {
  const some = wall.chosen.size;
  byId("bulk").hidden = byId("none-of-them").hidden = !some;
  byId("chosen").textContent = `${count(some)} selected`;
  byId("select").setAttribute("aria-pressed", String(wall.selecting));
  if (some) choices(byId("choices-of-all"), data.facts, { press: giveAll });
}

const skip = () => act(async () => {
  if (row < 0) return;
  skipped.delete(row); // to the end of those skipped
  skipped.add(row);
  skips();
  done.push({ kind: "skip", row });
  const [first] = upcoming(1);
  goTo(first ?? row);
});

const doubt = () => act(async () => {
  if (row < 0) return;
  const at = row;
  takeOver(data, await doubted(at, true));
  done.push({ kind: "doubt", row: at });
  announce("Not sure.");
  next();
});

const doubted = (at, on) => ask("undecided", { row: at, on, by: data.name ?? "", since: data.facts.version });

const undo = () => act(async () => {
  const last = done.at(-1);
  if (!last) return;
  if (last.kind === "label") {
    if (await answer(data, last.row, last.before, last.after)) {
      if (last.doubted) takeOver(data, await doubted(last.row, true));
    }
  } else if (last.kind === "many") {
    await send(last.said.map(([at, label, seen]) => [at, seen, label]));
    for (const at of last.doubted) takeOver(data, await doubted(at, true));
  } else if (last.kind === "doubt") {
    takeOver(data, await doubted(last.row, false));
  } else {
    skipped.delete(last.row);
  }
  done.pop();
  announce("Undone.");
  if (last.kind === "skip") skips();
  if (byId("all").hidden) goTo(last.row ?? last.said[0][0]);
  else {
    draw();
    showAll(true);
  }
}, true);

async function suggest() {
  data.suggested = "";
  const place = byId("suggestion");
  place.hidden = !byId("suggest").checked || row < 0;
  if (place.hidden) return draw();
  const at = row;
  const { label, probability } = await ask(`prediction/${at}`).catch(() => ({ label: "" }));
  if (at !== row || !byId("suggest").checked) return;
  data.suggested = label;
  place.textContent = label ? `The model predicts ${label}, ${percent(probability)}.` : "The model has no prediction for this image.";
  draw();
}

function find() {
  const words = byId("find").value.trim().toLowerCase();
  for (const button of byId("choices").children) button.hidden = words !== "" && !data.facts.classes[button.dataset.class].toLowerCase().includes(words);
}

// All images

const FILTERS = [
  ["waiting", "without a label, in this order", queue],
  ["all", "all", () => [...data.paths.keys()]],
  ["unsure", "not sure", () => [...data.unsure].filter((at) => data.labels[at] < 0).sort((a, b) => a - b)],
  ["differ", "readers disagree", () => data.differing],
  ["labeled", "with a label", () => [...data.paths.keys()].filter((at) => data.labels[at] >= 0)],
];

function fill(at) {
  const label = labelName(at);
  const mark = label ? html("b", null, label) : html("span", { class: "less" }, data.unsure.has(at) ? "not sure" : "no label");
  return { title: `${fullName(data, at)}: ${label || (data.unsure.has(at) ? "not sure" : "no label")}`, lines: [mark, shortName(data, at)] };
}

function showAll(keep = false, chosen = byId("which").value || "waiting") {
  const select = byId("which");
  const classes = data.facts.classes.map((name, n) => [`class-${n}`, name, () => [...data.paths.keys()].filter((at) => data.labels[at] === n)]);
  const near = data.similar ? [["similar", `like ${shortName(data, data.similar.at)}`, () => data.similar.rows]] : [];
  const filters = [...FILTERS, ...near, ...classes];
  select.replaceChildren(...filters.map(([value, words]) => html("option", { value }, words)));
  select.value = filters.some(([value]) => value === chosen) ? chosen : "waiting";
  const rows = withLast(filters.find(([value]) => value === select.value)[2](), data.unreadable);
  byId("amount").textContent = `${count(rows.length)} images`;
  wall.show(rows, keep);
}

function view(name) {
  const all = name === "all";
  if (byId("all").hidden === !all) return;
  byId("all").hidden = !all;
  byId("one").hidden = all;
  byId("tab-one").setAttribute("aria-pressed", String(!all));
  byId("tab-all").setAttribute("aria-pressed", String(all));
  if (all) {
    byId("wall").style.setProperty("--used", `${Math.ceil(byId("wall").getBoundingClientRect().top + scrollY)}px`);
    showAll();
    wall.focus(0);
  }
}

async function watch() {
  try {
    const before = data.facts;
    const facts = await ask(`state?since=${before.version}`);
    const ready = facts.guesses !== before.guesses;
    takeOver(data, facts);
    if (ready) {
      await orderAgain();
      if (row >= 0) byId("rank").textContent = whyOf(row);
      suggest();
    }
    if (facts.changes.length) for (const [at] of facts.changes) wall.refresh(at);
    if (ready || facts.changes.length || facts.model?.done !== before.model?.done || facts.training.words !== before.training.words) draw();
    if (row >= 0 && !busy && facts.changes.some(([at, label]) => at === row && label >= 0) && byId("all").hidden) {
      announce("Another person labeled this image.");
      next();
    }
    if (document.querySelector("#notice.fault")?.textContent.startsWith("halfmoon no longer")) notice("");
    setTimeout(watch, facts.training.progress || (facts.model && !facts.model.ready && !facts.model.error) ? 700 : EVERY);
  } catch (error) {
    notice(error.message);
    setTimeout(watch, EVERY);
  }
}

keys((key) => {
  if (!data.facts) return false;
  const n = keysOf(data.facts.classes).indexOf(key);
  if (!byId("all").hidden) {
    const acts = { w: () => view("one"), u: undo, undo, "=": similarHere, x: () => byId("select").click(), a: () => wall.choose(wall.inSight()), Escape: () => wall.choose([]), n: () => giveAll(null) };
    if (n >= 0 && wall.chosen.size) giveAll(n);
    else if (acts[key]) acts[key]();
    else return false;
    return true;
  }
  if (n >= 0) return give(n), true;
  const acts = {
    u: undo, undo, Backspace: undo, s: skip, n: doubt, z: () => look.toggle(), "+": () => look.by(1), "-": () => look.by(-1),
    c: () => announce(look.cycle()), w: () => view("all"), "?": () => byId("keys").showModal(), "/": () => byId("find").focus(),
    PageUp: () => beside(-1), PageDown: () => beside(1), "=": () => data.facts.guesses && similar(row), m: () => !byId("suggesting").hidden && byId("suggest").click(),
  };
  if (ARROWS[key] && row >= 0) return look.turn(...ARROWS[key]), true;
  if (!acts[key]) return false;
  acts[key]();
  return true;
});

byId("find").addEventListener("input", find);
byId("find").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" && event.key !== "Escape") return;
  const first = [...byId("choices").children].find((button) => !button.hidden);
  const typed = byId("find").value.trim();
  byId("find").value = "";
  find();
  byId("find").blur();
  if (event.key === "Enter" && first && typed) give(Number(first.dataset.class));
});
byId("suggest").addEventListener("change", suggest);
byId("undo").addEventListener("click", undo);
byId("skip").addEventListener("click", skip);
byId("doubt").addEventListener("click", doubt);
byId("zoom").addEventListener("click", () => look.toggle());
byId("earlier").addEventListener("click", () => beside(-1));
byId("later").addEventListener("click", () => beside(1));
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("tab-one").addEventListener("click", () => view("one"));
byId("tab-all").addEventListener("click", () => view("all"));
byId("which").addEventListener("change", () => showAll());
byId("take-back").addEventListener("click", undo);
byId("train").addEventListener("click", train);
byId("alike").addEventListener("click", () => similar(row));
byId("alike-here").addEventListener("click", similarHere);
byId("screen").addEventListener("click", () => wall.choose(wall.inSight()));
byId("none-of-them").addEventListener("click", () => wall.choose([]));
byId("select").addEventListener("click", () => {
  wall.selecting = !wall.selecting;
  drawBulk();
});
byId("way").addEventListener("change", () => act(async () => {
  await orderAgain();
  next();
}));
byId("note").addEventListener("change", () => {
  const [at, note] = [row, byId("note").value.trim()];
  act(async () => {
    takeOver(data, await ask("note", { row: at, note, by: data.name ?? "", since: data.facts.version }));
    data.notes[at] = note;
  }, true);
});

try {
  const found = await ask("start");
  Object.assign(data, { paths: found.paths, labels: found.labels, unsure: new Set(found.unsure_rows), by: found.by, notes: found.notes, differing: found.differing, facts: found });
  takeOrder(found);
  askName(data);
  if (found.foldered) notice("Some labels are names of class folders. Your first label writes all of them to a labels.csv, which is used from then on.", false);
  next();
  askCaptions(data, () => {
    wall.extra += 16; // a second line
    if (row >= 0) byId("path").textContent = fullName(data, row);
    if (!byId("all").hidden) showAll(true);
  });
  setTimeout(watch, 700);
} catch (error) {
  notice(error.message);
}
document.body.dataset.ready = "yes";
