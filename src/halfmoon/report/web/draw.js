// What all charts share: elements, scales, axes, markers, and the one tooltip. Texts only ever enter as text.

function element(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
const html = (name, attributes, ...children) => element(null, name, attributes, children);
const svg = (name, attributes, ...children) => element("http://www.w3.org/2000/svg", name, attributes, children);

const MINUS = "\u2212";
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

function shown(number, digits) {
  if (digits === undefined) {
    if (Math.abs(number) >= 10000) return compact.format(number);
    digits = Number.isInteger(number) ? 0 : Math.abs(number) >= 100 ? 1 : Math.abs(number) >= 1 ? 2 : 3;
  }
  return number.toFixed(digits).replace("-", MINUS);
}

// Round numbers between low and high, about as many as wanted.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// Ticks with their texts, all with the digits that the finest needs.
function written(values) {
  const digits = Math.max(0, ...values.map((value) => (String(value).split(".")[1] ?? "").length));
  const large = values.some((value) => Math.abs(value) >= 10000);
  return values.map((value) => [value, large ? compact.format(value) : shown(value, digits)]);
}

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

// The range of numbers, at least `span` wide, with a little air, not beyond what is possible.
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

const SHAPES = {
  o: null,
  s: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  "^": [[0, -1.2], [1.15, 0.9], [-1.15, 0.9]],
  v: [[0, 1.2], [1.15, -0.9], [-1.15, -0.9]],
  "<": [[-1.2, 0], [0.9, 1.15], [0.9, -1.15]],
  ">": [[1.2, 0], [-0.9, 1.15], [-0.9, -1.15]],
  D: [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]],
  "*": Array.from({ length: 10 }, (_, n) => [1.5 * (n % 2 ? 0.45 : 1) * Math.sin((n * Math.PI) / 5), -1.5 * (n % 2 ? 0.45 : 1) * Math.cos((n * Math.PI) / 5)]),
  p: Array.from({ length: 5 }, (_, n) => [1.25 * Math.sin((2 * n * Math.PI) / 5), -1.25 * Math.cos((2 * n * Math.PI) / 5)]),
  H: Array.from({ length: 6 }, (_, n) => [1.2 * Math.sin((n * Math.PI) / 3), -1.2 * Math.cos((n * Math.PI) / 3)]),
  P: [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]],
  X: [[0, -0.6], [0.7, -1.3], [1.3, -0.7], [0.6, 0], [1.3, 0.7], [0.7, 1.3], [0, 0.6], [-0.7, 1.3], [-1.3, 0.7], [-0.6, 0], [-1.3, -0.7], [-0.7, -1.3]],
};

function marker(look, x, y, size, hollow) {
  const paint = hollow ? { fill: "var(--back)", stroke: look.color, "stroke-width": 1.6 } : { fill: look.color };
  const corners = SHAPES[look.marker];
  if (!corners) return svg("circle", { class: "marker", cx: x.toFixed(1), cy: y.toFixed(1), r: size, ...paint });
  const points = corners.map(([a, b]) => `${(x + a * size).toFixed(1)},${(y + b * size).toFixed(1)}`).join(" ");
  return svg("polygon", { class: "marker", points, ...paint });
}

// A legend's sample of a line.
function sample(look) {
  const line = { x1: 1, x2: 33, y1: 7, y2: 7, stroke: look.color, "stroke-width": 2, "stroke-dasharray": look.dashes };
  return svg("svg", { width: 34, height: 14, "aria-hidden": "true" }, svg("line", line), marker(look, 17, 7, 3.6));
}

const tip = {
  box: null,
  show(x, y, title, rows) {
    this.box ??= document.body.appendChild(html("div", { id: "tip", role: "status" }));
    const lines = rows.map(([color, name, value]) =>
      html("div", null, color ? html("i", { style: `background:${color}` }) : null, html("span", null, name), html("span", null, value)));
    this.box.replaceChildren(html("b", null, title), ...lines);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const right = document.documentElement.clientWidth;
    this.box.style.left = `${Math.max(4, x + 14 + width > right - 4 ? Math.min(x - width - 14, right - width - 4) : x + 14)}px`;
    this.box.style.top = `${Math.max(4, y + height + 20 > window.innerHeight ? y - height - 12 : y + 16)}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};

const canvas = (width, height, alt) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, style: `max-width:${width}px`, role: "img", "aria-label": alt });

const slanted = (text, x, y) =>
  svg("text", { class: "x", x: 0, y: 0, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(-38)`, "text-anchor": "end", "dominant-baseline": "central" }, text);

function level(text, x, y, width) {
  const last = x + 3.4 * text.length > width;
  return svg("text", { class: "x", x: last ? width : x, y, "text-anchor": last ? "end" : "middle" }, text);
}

// An empty picture with its axes: {root, x, y, box}; `axes` says ranges, ticks [value, text] and the label below.
function picture(width, height, alt, axes) {
  const widest = Math.max(...axes.y.ticks.map(([, text]) => text.length), 1);
  const steep = axes.x.steep ?? 0;
  const box = { left: 14 + 6.7 * widest, right: width - 12, top: 8, bottom: height - 24 - (axes.label ? 16 : 0) - steep };
  const x = scale(...axes.x.range, box.left, box.right);
  const y = scale(...axes.y.range, box.bottom, box.top);
  const root = canvas(width, height, alt);
  for (const [value, text] of axes.y.ticks) {
    const at = y(value).toFixed(1);
    if (axes.y.rules !== false) root.append(svg("line", { class: "rule", x1: box.left, x2: box.right, y1: at, y2: at }));
    root.append(svg("text", { x: box.left - 6, y: at, "text-anchor": "end", "dominant-baseline": "central" }, text));
  }
  root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  for (const [value, text] of axes.x.ticks) {
    const at = x(value);
    if (axes.x.marks !== false) root.append(svg("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
    root.append(steep ? slanted(text, at, box.bottom + 8) : level(text, at, box.bottom + 17, width));
  }
  if (axes.label) root.append(svg("text", { class: "label", x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle" }, axes.label));
  return { root, x, y, box };
}

// Follow the pointer over a picture in its own coordinates; `leave` when it goes.
function follow(root, move, leave) {
  const at = (event) => {
    const frame = root.getBoundingClientRect();
    const zoom = root.viewBox.baseVal.width / frame.width;
    move((event.clientX - frame.left) * zoom, (event.clientY - frame.top) * zoom, event.clientX, event.clientY);
  };
  root.addEventListener("pointermove", at);
  root.addEventListener("pointerdown", at);
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
}

// A standalone SVG of a chart in the colors of the light page, with the names of its lines below.
function standalone(picture, looks, title) {
  const copy = picture.cloneNode(true);
  copy.querySelectorAll(".guide, [visibility=hidden]").forEach((each) => each.remove());
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  const rows = [];
  for (const look of looks) {
    const room = 46 + 6.8 * look.title.length;
    const last = rows.at(-1);
    if (!last || last.used + room > width) rows.push({ used: room, entries: [[look, 0]] });
    else {
      last.entries.push([look, last.used]);
      last.used += room;
    }
  }
  rows.forEach(({ entries }, n) => entries.forEach(([look, x]) => {
    const y = height + 14 + 20 * n;
    copy.append(svg("line", { x1: x + 1, x2: x + 33, y1: y, y2: y, stroke: look.color, "stroke-width": 2, "stroke-dasharray": look.dashes }), marker(look, x + 17, y, 3.6));
    copy.append(svg("text", { x: x + 38, y, "dominant-baseline": "central" }, look.title));
  }));
  const tall = height + 20 * rows.length + (rows.length ? 6 : 0);
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${tall}`, width, height: tall, xmlns: "http://www.w3.org/2000/svg" })) copy.setAttribute(name, value);
  for (const name of ["style", "tabindex", "role"]) copy.removeAttribute(name);
  copy.prepend(svg("title", null, title), svg("style", null, "text { font: 12px sans-serif; fill: #595f69; } .line { fill: none; stroke-width: 2; stroke-linejoin: round; } .rule { stroke: #e6e8ec; } .axis { stroke: #8b919b; } .panel { font-weight: 600; }"),
    svg("rect", { width, height: tall, fill: "#fff" }));
  // Programs other than browsers know neither variables nor color-mix.
  copy.querySelectorAll("[data-share]").forEach((cell) => {
    const share = Number(cell.dataset.share);
    cell.setAttribute("fill", `rgb(${[0, 86, 138].map((part) => Math.round(255 + share * (part - 255))).join(",")})`);
  });
  const plain = { "var(--back)": "#fff", "var(--cell-ink)": "#000", "var(--ink)": "#1d1f23", currentColor: "#1d1f23" };
  return Object.entries(plain).reduce((text, [from, to]) => text.replaceAll(from, to), new XMLSerializer().serializeToString(copy));
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

const clipped = (name, most = 12) => (name.length > most ? `${name.slice(0, most - 1)}\u2026` : name);

// Names below an axis: slanted where they have no room beside each other, and then as many as there is room for.
function named(names, room) {
  const longest = Math.max(...names.map((name) => clipped(name).length), 1);
  const fits = names.length * (6.8 * longest + 6) <= room;
  const every = fits ? 1 : Math.max(1, Math.ceil((names.length * 15) / room));
  const kept = names.map((name, n) => [n, clipped(name)]).filter(([n]) => n % every === 0);
  return { ticks: kept, steep: fits ? 0 : 4.4 * longest };
}
