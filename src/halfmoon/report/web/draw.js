/* global Plot */
/**
 * Functions that all charts share: elements, numbers, markers, tooltips, and files of figures.
 *
 * Observable Plot (plot.js) draws. Texts are inserted as text nodes and never parsed as HTML.
 *
 * @typedef {Object} LineStyle Style of the line of a method, as `halfmoon.report.styles` assigns it.
 * @property {string} title - Name of the method.
 * @property {string} color
 * @property {?string} dashes - Lengths of dashes and gaps in pixels; "" for a solid line, null for a marker only.
 * @property {string} marker - Name of the marker in matplotlib.
 *
 * @typedef {[color: string, name: string, value: string]} TooltipRow A line of a tooltip; the color "" has no dot.
 */

const COMPACT_FORMAT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const MINUS_SIGN = "\u2212";
const ELLIPSIS = "\u2026";
const URL_LIFETIME_MS = 10000; // a saved file must have been read by then

/**
 * Create an HTML element.
 *
 * @param {string} tag - Name of the element.
 * @param {?Object<string, string>} attributes
 * @param {...(Node|string|Array|null|undefined)} children - Contents; arrays are flattened, null and undefined skipped.
 * @returns {HTMLElement}
 */
function createElement(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function createSvgElement(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  return element;
}

/** Format a number with some digits after the decimal point; without `digits`, with about three significant ones. */
function formatNumber(number, digits) {
  const size = Math.abs(number);
  if (digits === undefined && size >= 10000) {
    return COMPACT_FORMAT.format(number);
  }
  let usedDigits = digits;
  if (digits === undefined) {
    if (Number.isInteger(number)) {
      usedDigits = 0;
    } else if (size >= 100) {
      usedDigits = 1;
    } else {
      usedDigits = size >= 1 ? 2 : 3;
    }
  }
  return number.toFixed(usedDigits).replace("-", MINUS_SIGN);
}

function shortenName(name, maxLength = 12) {
  return name.length > maxLength ? `${name.slice(0, maxLength - 1)}${ELLIPSIS}` : name;
}

/**
 * Compute the range of an axis: that of the numbers and a margin, within limits.
 *
 * @param {number[]} numbers - At least one.
 * @param {number} minSpan - Smallest length of the range, because a smaller one would show only noise.
 * @param {number} lowest - Lower limit.
 * @param {number} highest - Upper limit.
 * @returns {[low: number, high: number]}
 */
function computeAxisRange(numbers, minSpan, lowest, highest) {
  const smallest = Math.min(...numbers);
  const largest = Math.max(...numbers);
  const widening = Math.max(0, minSpan - (largest - smallest)) / 2;
  const margin = 0.04 * Math.max(largest - smallest, minSpan);
  const low = Math.max(lowest, smallest - widening - margin);
  const high = Math.min(highest, largest + widening + margin);
  if (high - low >= minSpan) {
    return [low, high];
  }
  // A limit has cut the range, so it grows at its other end.
  return low <= lowest ? [low, Math.min(highest, low + minSpan)] : [Math.max(lowest, high - minSpan), high];
}

// Markers and samples of lines

/** A symbol of Plot, which has no pentagon; `size` is its area in square pixels. */
const PENTAGON = {
  draw(path, size) {
    const radius = Math.sqrt(size / 2.378); // a regular pentagon has the area 2.378 * radius ** 2
    const cornerAt = (index) => {
      const angle = (2 * index * Math.PI) / 5;
      return [radius * Math.sin(angle), -radius * Math.cos(angle)];
    };
    path.moveTo(...cornerAt(0));
    for (const index of [1, 2, 3, 4]) {
      path.lineTo(...cornerAt(index));
    }
    path.closePath();
  },
};

/** Symbols of Plot by the names of markers in matplotlib; "o", a circle, is the default of Plot. */
const MARKERS = {
  s: { symbol: "square" },
  D: { symbol: "square", rotate: 45 },
  P: { symbol: "cross" },
  X: { symbol: "cross", rotate: 45 },
  "^": { symbol: "triangle" },
  v: { symbol: "triangle", rotate: 180 },
  "<": { symbol: "triangle", rotate: -90 },
  ">": { symbol: "triangle", rotate: 90 },
  "*": { symbol: "star" },
  H: { symbol: "hexagon" },
  p: { symbol: PENTAGON },
};

/** Options of Plot for a filled marker of a style with radius `r` in pixels. */
function filledMarker(style, r) {
  return { ...MARKERS[style.marker], r, fill: style.color, stroke: "none" };
}

/** Options of Plot for a hollow marker of a style with radius `r` in pixels. */
function hollowMarker(style, r) {
  return { ...MARKERS[style.marker], r, fill: "var(--back)", stroke: style.color, strokeWidth: 1.6 };
}

const SAMPLE_WIDTH = 34;
const SAMPLE_HEIGHT = 14;
const lineSamples = new Map(); // drawn once for each style and copied, because a page has the same ones many times

/** Create the sample of a line for a legend, as an SVG element. */
function createLineSample(style) {
  const key = JSON.stringify([style.color, style.dashes, style.marker]);
  if (!lineSamples.has(key)) {
    lineSamples.set(key, drawLineSample(style));
  }
  return lineSamples.get(key).cloneNode(true);
}

function drawLineSample(style) {
  const middle = SAMPLE_HEIGHT / 2;
  const ends = [
    [1, middle],
    [SAMPLE_WIDTH - 1, middle],
  ];
  const lineOptions = {
    stroke: style.color,
    strokeWidth: 2,
    strokeLinecap: "butt",
    strokeDasharray: style.dashes || undefined,
  };
  const sample = Plot.plot({
    className: "sample",
    width: SAMPLE_WIDTH,
    height: SAMPLE_HEIGHT,
    margin: 0,
    x: { domain: [0, SAMPLE_WIDTH], axis: null },
    y: { domain: [0, SAMPLE_HEIGHT], axis: null },
    marks: [
      style.dashes === null ? null : Plot.line(ends, lineOptions),
      Plot.dot([[SAMPLE_WIDTH / 2, middle]], filledMarker(style, 4)),
    ],
  });
  sample.setAttribute("aria-hidden", "true");
  sample.querySelector("style").remove();
  return sample;
}

// Tooltips

/** The tooltip of all charts. */
const tooltip = {
  element: null,
  scrollY: 0, // scroll position of the page at which it was shown

  /**
   * Show the tooltip next to a point.
   *
   * @param {number} x - Pixels from the left edge of the window.
   * @param {number} y - Pixels from the top edge of the window.
   * @param {string} title
   * @param {TooltipRow[]} rows
   */
  show(x, y, title, rows) {
    this.element ??= document.body.appendChild(createElement("div", { id: "tooltip", role: "status" }));
    const rowElements = rows.map(([color, name, value]) => {
      const dot = color ? createElement("i", { style: `background:${color}` }) : null;
      return createElement("div", null, dot, createElement("span", null, name), createElement("span", null, value));
    });
    this.element.replaceChildren(createElement("b", null, title), ...rowElements);
    this.element.hidden = false;
    this.scrollY = window.scrollY;

    const { width, height } = this.element.getBoundingClientRect();
    const windowWidth = document.documentElement.clientWidth;
    let left = x + 14;
    if (left + width > windowWidth - 4) {
      left = Math.min(x - width - 14, windowWidth - width - 4);
    }
    const fitsBelow = y + height + 20 <= window.innerHeight;
    const top = fitsBelow ? y + 16 : y - height - 12;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  },

  hide() {
    if (this.element) {
      this.element.hidden = true;
    }
  },
};

function hideTooltipAfterScroll() {
  if (window.scrollY !== tooltip.scrollY) {
    tooltip.hide();
  }
}

/** After a tap the tooltip remains until the next tap outside of the charts. */
function hideTooltipOutsideCharts(event) {
  if (!event.target.closest?.("svg.chart")) {
    tooltip.hide();
  }
}

window.addEventListener("scroll", hideTooltipAfterScroll, { passive: true });
window.addEventListener("pointerdown", hideTooltipOutsideCharts);

// Charts

/**
 * Create a chart with a text for screen readers and with a tooltip.
 *
 * @param {Object} options - Options of `Plot.plot`. A mark with the class "guide" follows the pointer, by a pointer
 *   transform of Plot.
 * @param {string} description - Text for screen readers.
 * @param {function(Object): [title: string, rows: TooltipRow[]]} describeDatum - Returns the tooltip of the datum at
 *   the guide.
 * @param {function(function(string): Object): [x: number, y: number][]} findStops - Receives a function that returns
 *   a scale of the plot by its name, and returns the positions in the SVG to which the arrow keys move the pointer.
 * @returns {SVGElement}
 */
function createChart(options, description, describeDatum, findStops) {
  const style = { fontSize: "12px", color: "var(--soft)", ...options.style };
  const chart = Plot.plot({ className: "chart", ariaLabel: description, ...options, style });
  chart.setAttribute("role", "img");
  // An image has one text; Plot's texts of its parts, which have no role, become data-part.
  for (const part of chart.querySelectorAll("[aria-label]")) {
    part.dataset.part = part.getAttribute("aria-label");
    part.removeAttribute("aria-label");
  }
  chart.setAttribute("tabindex", "0");
  chart.style.maxWidth = `${options.width}px`;
  const leave = addTooltip(chart, describeDatum);
  addArrowKeys(
    chart,
    findStops((name) => chart.scale(name)),
    leave,
  );
  return chart;
}

/**
 * Show a tooltip at the datum of the pointer.
 *
 * @returns {function()} Hides tooltip and guide, as if the pointer left the chart.
 */
function addTooltip(chart, describeDatum) {
  let pointerPosition = [0, 0];
  const update = () => {
    if (chart.value) {
      tooltip.show(...pointerPosition, ...describeDatum(chart.value));
    } else {
      tooltip.hide();
    }
  };
  const leave = () => {
    chart.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "mouse" }));
    tooltip.hide();
  };
  chart.addEventListener("pointermove", (event) => {
    pointerPosition = [event.clientX, event.clientY];
    update();
  });
  chart.addEventListener("input", update); // Plot has set chart.value
  // A click would fix Plot's pointer, and so the tooltip.
  chart.addEventListener("pointerdown", (event) => event.stopImmediatePropagation(), { capture: true });
  chart.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") {
      tooltip.hide();
    }
  });
  chart.addEventListener("blur", leave);
  return leave;
}

/** Let the arrow keys move the pointer from stop to stop, and Escape take it away. */
function addArrowKeys(chart, stops, leave) {
  const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
  let current = -1;
  chart.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      leave();
    }
    const step = steps[event.key];
    if (!step || !stops.length) {
      return;
    }
    event.preventDefault();
    current = Math.min(stops.length - 1, Math.max(0, current + step));
    const point = new DOMPoint(...stops[current]).matrixTransform(chart.getScreenCTM());
    const position = { clientX: point.x, clientY: point.y, pointerType: "mouse" };
    chart.dispatchEvent(new PointerEvent("pointermove", position));
  });
}

// Files of figures

/** Values of the colors of the light page: programs other than browsers do not know variables. */
const PRINT_COLORS = {
  "var(--back)": "#fff",
  "var(--ink)": "#1d1f23",
  "var(--soft)": "#595f69",
  "var(--grid)": "#e6e8ec",
  "var(--line)": "#8b919b",
  "var(--cell)": "#00568a",
  "var(--cell-ink)": "#000",
  "var(--link)": "#0072b2",
  currentColor: "#595f69",
};

/**
 * Format a chart as a standalone SVG file, with the names of its lines below it.
 *
 * @param {SVGElement} picture - The chart.
 * @param {LineStyle[]} styles - Styles of its lines.
 * @param {string} title
 * @returns {string}
 */
function formatSvg(picture, styles, title) {
  const copy = picture.cloneNode(true);
  for (const guide of copy.querySelectorAll(".guide")) {
    guide.remove();
  }
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  const totalHeight = height + appendLegend(copy, styles, width, height);
  const attributes = { viewBox: `0 0 ${width} ${totalHeight}`, width, height: totalHeight };
  for (const [name, value] of Object.entries(attributes)) {
    copy.setAttribute(name, value);
  }
  for (const name of ["tabindex", "role"]) {
    copy.removeAttribute(name);
  }
  const titleElement = createSvgElement("title", {});
  titleElement.textContent = title;
  copy.prepend(titleElement, createSvgElement("rect", { width, height: totalHeight, fill: "#fff" }));
  let text = new XMLSerializer().serializeToString(copy);
  for (const [name, color] of Object.entries(PRINT_COLORS)) {
    text = text.replaceAll(name, color);
  }
  return text;
}

/**
 * Append the names of lines to an SVG, in as many rows as they need.
 *
 * @returns {number} Height of the legend in pixels.
 */
function appendLegend(picture, styles, width, top) {
  if (!styles.length) {
    return 0;
  }
  const rowHeight = 20;
  let x = 0;
  let y = top + 4;
  for (const style of styles) {
    const entryWidth = 50 + 7 * style.title.length; // letters are about 7 pixels wide
    if (x && x + entryWidth > width) {
      x = 0;
      y += rowHeight;
    }
    const sample = createLineSample(style);
    sample.setAttribute("x", x);
    sample.setAttribute("y", y);
    const position = { x: x + 38, y: y + 7, dy: "0.32em", "text-anchor": "start" };
    const name = createSvgElement("text", position);
    name.textContent = style.title;
    picture.append(sample, name);
    x += entryWidth;
  }
  return y + 22 - top;
}

/** Format rows as CSV. Texts that a spreadsheet would read as a formula get an apostrophe. */
function formatCsv(rows) {
  const formatField = (value) => {
    if (typeof value === "number") {
      return String(value);
    }
    const text = String(value ?? "");
    const escaped = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(escaped) ? `"${escaped.replaceAll('"', '""')}"` : escaped;
  };
  return rows.map((row) => `${row.map(formatField).join(",")}\n`).join("");
}

function saveFile(name, mediaType, text) {
  const url = URL.createObjectURL(new Blob([text], { type: mediaType }));
  createElement("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), URL_LIFETIME_MS);
}

/**
 * Create the buttons that save a figure.
 *
 * @param {string} title - Title of the figure, for screen readers.
 * @param {function(): {title: string, picture: SVGElement, styles: LineStyle[], rows: Array[]}} describeFigure -
 *   Returns the figure as it is drawn, and its numbers as rows of a table.
 * @returns {HTMLElement}
 */
function createSaveButtons(title, describeFigure) {
  const formats = {
    SVG: { mediaType: "image/svg+xml", format: (figure) => formatSvg(figure.picture, figure.styles, figure.title) },
    CSV: { mediaType: "text/csv", format: (figure) => formatCsv(figure.rows) },
  };
  const buttons = Object.entries(formats).map(([name, { mediaType, format }]) => {
    const attributes = { type: "button", "aria-label": `Save as ${name}: ${title}`, "data-save": name };
    const button = createElement("button", attributes, name);
    button.addEventListener("click", () => {
      const figure = describeFigure();
      const fileName = figure.title
        .toLowerCase()
        .replace(/[^a-z0-9]+/g, "-")
        .replace(/^-|-$/g, "");
      saveFile(`${fileName}.${name.toLowerCase()}`, mediaType, format(figure));
    });
    return button;
  });
  return createElement("span", { class: "save-buttons" }, buttons);
}

/** List the points of lines as rows of a table with a heading. */
function createLineRows(lines, xName) {
  const rows = [["line", xName, "mean", "low", "high"]];
  for (const { style, x, mean, low, high } of lines) {
    x.forEach((value, index) => rows.push([style.title, value, mean[index], low[index], high[index]]));
  }
  return rows;
}
