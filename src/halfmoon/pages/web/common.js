// Common functions of all pages: elements, requests, shortcuts, dialogs. Texts are never parsed as HTML.

export function html(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);
export const count = (number) => number.toLocaleString("en");
export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

export class Refused extends Error {
  constructor(status, said) {
    super(said.error ?? "The server of this page sent an invalid response.");
    this.status = status;
    this.held = said.held;
  }
}

export async function ask(path, sent) {
  const options = sent === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(sent) };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refused(0, { error: "halfmoon no longer runs: it was stopped in the terminal. All labels so far are saved." });
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, said);
  return said;
}

export function notice(words, fault = true) {
  const place = byId("notice");
  place.hidden = !words;
  place.textContent = words;
  place.classList.toggle("fault", fault);
}

export const announce = (words) => (byId("spoken").textContent = words);

// The keys of classes: digits first, then letters that no command has.
const LETTERS = "abdefghijklopqrtvxy";
const TAKEN = "cmnsuwz+-/?=";

// Classes whose names are one sign each are their own keys.
export function keysOf(classes) {
  const own = classes.map((name) => name.toLowerCase());
  if (own.every((name) => name.length === 1 && !TAKEN.includes(name)) && new Set(own).size === own.length) return own;
  return classes.map((_, n) => (n < 9 ? String(n + 1) : n === 9 ? "0" : LETTERS[n - 10] ?? ""));
}

// Call a handler for each key, unless the focus is in a field or a dialog is open.
export function keys(handle) {
  document.addEventListener("change", (event) => event.target.blur()); // so that the next key is a command again
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey && event.key.toLowerCase() === "z") {
      if (handle("undo", event)) event.preventDefault();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (document.querySelector("dialog[open]") || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if ((event.key === " " || event.key === "Enter") && /^(BUTTON|A|SUMMARY)$/.test(event.target.tagName)) return;
    if (handle(event.key.length === 1 ? event.key.toLowerCase() : event.key, event)) event.preventDefault();
  });
}

// The rows with some last, in their order otherwise: images that cannot be read are shown after all others.
export function withLast(rows, last) {
  return last.size ? [...rows.filter((at) => !last.has(at)), ...rows.filter((at) => last.has(at))] : rows;
}

// The name of an image on a page: the caption of its header if it has one, otherwise the name of its file.
export const shortName = (data, at) => data.captions?.[at] ?? data.paths[at].split("/").at(-1);

// The path of an image, and the caption of its header.
export const fullName = (data, at) => (data.captions?.[at] ? `${data.captions[at]} (${data.paths[at]})` : data.paths[at]);

// Ask for the captions of headers, which takes long in large folders; then call `done`.
export async function askCaptions(data, done) {
  const found = await ask("captions").catch(() => ({ captions: {} }));
  data.captions = found.captions;
  if (Object.keys(found.captions).length) done();
}

// Ask a question; resolves with the value of the button that was pressed, "" for Escape.
export function question(title, words, buttons) {
  return new Promise((done) => {
    const box = html("dialog", { "aria-label": title }, html("h2", null, title), html("p", null, words));
    const row = html("div", { class: "row" }, buttons.map(([value, text], n) =>
      html("button", { type: "button", class: n ? null : "main", onclick: () => box.close(value) }, text)));
    box.append(row);
    box.addEventListener("close", () => {
      box.remove();
      done(box.returnValue);
    });
    document.body.append(box);
    box.showModal();
  });
}

// One button for each class, with its key, the number of its labels, and a note if it has few.
export function choices(host, facts, { now = -1, suggested = "", press }) {
  const most = Math.max(1, ...facts.counts);
  const assigned = keysOf(facts.classes);
  host.replaceChildren(...facts.classes.map((name, n) => {
    const starved = facts.starved.includes(n);
    const key = assigned[n];
    const side = html("span", { class: "less n" }, starved ? html("span", { class: "starved" }, "few labels") : null, ` ${count(facts.counts[n])}`);
    return html("button", {
      type: "button", class: [name === suggested ? "suggested" : "", n === now ? "now" : ""].join(" ").trim() || null, "data-class": n,
      "aria-keyshortcuts": key || null, "aria-pressed": n === now ? "true" : null, onclick: () => press(n),
    }, html("kbd", null, key || "·"), html("span", { class: "name" }, name), side, html("span", { class: "bar", style: `width:${(100 * facts.counts[n]) / most}%` }));
  }));
}

// Apply the changes since the version of the page.
export function takeOver(data, facts) {
  for (const [row, label, unsure] of facts.changes) {
    data.labels[row] = label;
    unsure ? data.unsure.add(row) : data.unsure.delete(row);
  }
  data.facts = facts;
}

// Send a label; if another person has changed it meanwhile, ask which one to keep.
export async function answer(data, row, label, seen) {
  const send = (before) => ask("answer", { row, label, seen: before, by: data.name ?? "", since: data.facts.version });
  try {
    takeOver(data, await send(seen));
    return true;
  } catch (error) {
    if (error.status !== 409) throw error;
    const theirs = error.held || "no label";
    const kept = await question("Another person labeled this image", `${data.paths[row]}: its label is now ${theirs}. Your label is ${label || "no label"}.`, [
      ["theirs", `Keep ${theirs}`], ["mine", `Change to ${label || "no label"}`],
    ]);
    if (kept !== "mine") return false;
    takeOver(data, await send(error.held));
    return true;
  }
}

// Ask for a name if labels are recorded with names and none was given.
export function askName(data) {
  if (data.by === null) return;
  data.name = data.by || sessionStorage.getItem("name") || "";
  if (data.name) return;
  const input = html("input", { type: "text", maxlength: 100, "aria-label": "your name", required: true });
  const form = html("form", { method: "dialog" }, html("h2", null, "Your name"), html("p", null, "Your name is recorded with each label in labels.csv."), input, html("div", { class: "row" }, html("button", { class: "main" }, "Start")));
  const box = html("dialog", { "aria-label": "Your name" }, form);
  box.addEventListener("close", () => {
    data.name = input.value.trim() || "somebody";
    sessionStorage.setItem("name", data.name);
    box.remove();
  });
  document.body.append(box);
  box.showModal();
}
