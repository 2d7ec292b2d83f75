/* global Plot */
// What all charts share: numbers, markers, readouts, and saving. Observable Plot (plot.js) draws; texts are never parsed as HTML.

function html(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

function shown(number, digits) {
  if (digits === undefined) {
    if (Math.abs(number) >= 10000) return compact.format(number);
    digits = Number.isInteger(number) ? 0 : Math.abs(number) >= 100 ? 1 : Math.abs(number) >= 1 ? 2 : 3;
  }
  return number.toFixed(digits).replace("-", "\u2212");
}

const clipped = (name, most = 12) => (name.length > most ? `${name.slice(0, most - 1)}\u2026` : name);

// The range of an axis: that of the numbers, at least `span` wide, with a little air, not beyond what is possible.
function range(numbers, span, least, most) {
  let low = Math.min(...numbers);
  let high = Math.max(...numbers);
  const lack = Math.max(0, span - (high - low)) / 2;
  const air = 0.04 * Math.max(high - low, span);
  low = Math.max(least, low - lack - air);
  high = Math.min(most, high + lack + air);
  if (high - low < span) [low, high] = low <= least ? [low, Math.min(most, low + span)] : [Math.max(least, high - span), high];
  return [low, high];
}

// The markers of halfmoon.report.styles, which have the names of matplotlib, as symbols of Plot.
const pentagon = {
  draw(path, size) {
    const radius = Math.sqrt(size / 2.378);
    const corner = (n) => [radius * Math.sin((2 * n * Math.PI) / 5), -radius * Math.cos((2 * n * Math.PI) / 5)];
    path.moveTo(...corner(0));
    for (const n of [1, 2, 3, 4]) path.lineTo(...corner(n));
    path.closePath();
  },
};
const MARKERS = {
  s: { symbol: "square" }, D: { symbol: "square", rotate: 45 }, P: { symbol: "cross" }, X: { symbol: "cross", rotate: 45 },
  "^": { symbol: "triangle" }, v: { symbol: "triangle", rotate: 180 }, "<": { symbol: "triangle", rotate: -90 }, ">": { symbol: "triangle", rotate: 90 },
  "*": { symbol: "star" }, H: { symbol: "hexagon" }, p: { symbol: pentagon },
};
const filled = (look, r) => ({ ...MARKERS[look.marker], r, fill: look.color, stroke: "none" });
const hollow = (look, r) => ({ ...MARKERS[look.marker], r, fill: "var(--back)", stroke: look.color, strokeWidth: 1.6 });

// A legend's sample of a line. A page has the same one many times, so it is drawn once and copied.
const samples = new Map();
function sample(look) {
  const key = JSON.stringify([look.color, look.dashes, look.marker]);
  if (!samples.has(key)) {
    const drawn = Plot.plot({
      className: "sample", width: 34, height: 14, margin: 0, x: { domain: [0, 34], axis: null }, y: { domain: [0, 14], axis: null },
      marks: [
        look.dashes === null ? null : Plot.line([[1, 7], [33, 7]], { stroke: look.color, strokeWidth: 2, strokeLinecap: "butt", strokeDasharray: look.dashes || undefined }),
        Plot.dot([[17, 7]], filled(look, 4)),
      ],
    });
    drawn.setAttribute("aria-hidden", "true");
    drawn.querySelector("style").remove();
    samples.set(key, drawn);
  }
  return samples.get(key).cloneNode(true);
}

const tip = {
  box: null,
  scrolled: 0,
  show(x, y, title, rows) {
    this.box ??= document.body.appendChild(html("div", { id: "tip", role: "status" }));
    const lines = rows.map(([color, name, value]) =>
      html("div", null, color ? html("i", { style: `background:${color}` }) : null, html("span", null, name), html("span", null, value)));
    this.box.replaceChildren(html("b", null, title), ...lines);
    this.box.hidden = false;
    this.scrolled = window.scrollY;
    const { width, height } = this.box.getBoundingClientRect();
    const right = document.documentElement.clientWidth;
    this.box.style.left = `${Math.max(4, x + 14 + width > right - 4 ? Math.min(x - width - 14, right - width - 4) : x + 14)}px`;
    this.box.style.top = `${Math.max(4, y + height + 20 > window.innerHeight ? y - height - 12 : y + 16)}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};
window.addEventListener("scroll", () => window.scrollY !== tip.scrolled && tip.hide(), { passive: true });
// After a tap the tooltip remains until the next tap beside the chart.
window.addEventListener("pointerdown", (event) => event.target.closest?.("svg.chart") || tip.hide());

// A plot with its text for screen readers. Its mark with the class "guide" follows the pointer, by a pointer transform of
// Plot; `read` returns the title and the rows [color, name, value] of the tooltip at its datum. The arrow keys move the
// pointer along its stops, which `findStops` returns as positions [x, y] in the SVG, given the scales of the plot.
function chart(options, alt, read, findStops) {
  const root = Plot.plot({ className: "chart", ariaLabel: alt, ...options, style: { fontSize: "12px", color: "var(--soft)", ...options.style } });
  root.setAttribute("role", "img");
  // An image has one text; Plot's texts of its parts, which have no role, become data-part.
  for (const part of root.querySelectorAll("[aria-label]")) {
    part.dataset.part = part.getAttribute("aria-label");
    part.removeAttribute("aria-label");
  }
  root.setAttribute("tabindex", "0");
  root.style.maxWidth = `${options.width}px`;
  let at = [0, 0];
  const show = () => (root.value ? tip.show(...at, ...read(root.value)) : tip.hide());
  root.addEventListener("pointermove", (event) => {
    at = [event.clientX, event.clientY];
    show();
  });
  root.addEventListener("input", show);
  // A click would fix Plot's pointer, and so the tooltip.
  root.addEventListener("pointerdown", (event) => event.stopImmediatePropagation(), { capture: true });
  const leave = () => {
    root.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
    tip.hide();
  };
  root.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && tip.hide());
  root.addEventListener("blur", leave);
  let stop = -1;
  const stops = findStops((name) => root.scale(name));
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by || !stops.length) return;
    event.preventDefault();
    stop = Math.min(stops.length - 1, Math.max(0, stop + by));
    const [x, y] = stops[stop];
    const { x: clientX, y: clientY } = new DOMPoint(x, y).matrixTransform(root.getScreenCTM());
    root.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, pointerType: "mouse" }));
  });
  return root;
}

// The values of the colors that pages define, in the light page: programs other than browsers know no variables.
const PRINTED = {
  "var(--back)": "#fff", "var(--ink)": "#1d1f23", "var(--soft)": "#595f69", "var(--grid)": "#e6e8ec", "var(--line)": "#8b919b",
  "var(--cell)": "#00568a", "var(--cell-ink)": "#000", "var(--link)": "#0072b2", currentColor: "#595f69",
};

const svg = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

// A standalone SVG of a chart in the colors of the light page, with the names of its lines below.
function standalone(picture, looks, title) {
  const copy = picture.cloneNode(true);
  copy.querySelectorAll(".guide").forEach((each) => each.remove());
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  let [x, y] = [0, height + 4];
  for (const look of looks) {
    const room = 50 + 7 * look.title.length;
    if (x && x + room > width) [x, y] = [0, y + 20];
    const line = sample(look);
    for (const [name, value] of [["x", x], ["y", y]]) line.setAttribute(name, value);
    const name = svg("text", { x: x + 38, y: y + 7, dy: "0.32em", "text-anchor": "start" });
    name.textContent = look.title;
    copy.append(line, name);
    x += room;
  }
  const tall = looks.length ? y + 22 : height;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${tall}`, width, height: tall })) copy.setAttribute(name, value);
  for (const name of ["tabindex", "role"]) copy.removeAttribute(name);
  const heading = svg("title", {});
  heading.textContent = title;
  copy.prepend(heading, svg("rect", { width, height: tall, fill: "#fff" }));
  return Object.entries(PRINTED).reduce((text, [from, to]) => text.replaceAll(from, to), new XMLSerializer().serializeToString(copy));
}

// Rows as CSV; a spreadsheet would compute texts that begin like a formula, so these get an apostrophe.
function toCsv(rows) {
  const field = (value) => {
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value ?? "") ? `'${value}` : String(value ?? "");
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(field).join(",") + "\n").join("");
}

function save(name, type, text) {
  const link = html("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Buttons that save a figure: `find` returns {title, picture, looks, rows} of the figure as it is drawn.
function saveButtons(find) {
  const kinds = {
    SVG: ({ picture, looks, title }) => ["image/svg+xml", standalone(picture, looks, title)],
    CSV: ({ rows }) => ["text/csv", toCsv(rows)],
  };
  return html("span", { class: "saves" }, Object.entries(kinds).map(([kind, write]) => {
    const button = html("button", { type: "button", "aria-label": `Save as ${kind}: ${find().title}`, "data-save": kind }, kind);
    button.addEventListener("click", () => {
      const found = find();
      const file = found.title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
      save(`${file}.${kind.toLowerCase()}`, ...write(found));
    });
    return button;
  }));
}

// The numbers of lines, a row a point.
const lineRows = (lines, x) => [["line", x, "mean", "low", "high"], ...lines.flatMap((line) => line.x.map((at, n) => [line.look.title, at, line.mean[n], line.low[n], line.high[n]]))];
