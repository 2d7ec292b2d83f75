/* global bubbleChart, classChart, clientChart, confusionsChart, createElement, createLineRows, createLineSample */
/* global createSaveButtons, lineChart, matrixChart, tooltip */
/**
 * The script of the page of `halfmoon report`: it draws the charts into the elements that the templates have for them,
 * and connects them to legends and selects.
 *
 * The data are the JSON of `halfmoon.report.page`: a list of studies, each with a group of charts for each of its
 * columns. A line of a chart is a row of the study, usually a method.
 */

/** Quantities that can be the x axis of accuracy. */
const COST_AXES = {
  round: "round",
  steps: "labeled steps",
  forward: "forward passes, images",
  megabytes: "sent, MB",
  seconds: "seconds",
};

const CHART_TITLES = {
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
  class_shares: "Class shares at the end, %",
  clients: "Accuracy at the clients, %",
  confusion: "Confusion of the final model",
  accuracy_by_cost: "Test accuracy, %",
};

/** Charts of other data than a curve; the key of a line has the same name. */
const FINAL_STATE_CHARTS = ["per_class", "class_shares", "confusion", "clients"];

/** Charts to which the legend of a group does not apply, because they show one line at a time, or all. */
const CHARTS_WITHOUT_LEGEND = ["class_shares", "confusion", "clients"];

const PERCENT_CHARTS = ["accuracy", "pseudo", "above", "share_above", "share_used"];

/** Distributions of the classes, by the key of a line's class shares. */
const CLASS_SHARE_STYLES = {
  accuracy: { title: "class-wise accuracy, its share", color: "#0072B2", dashes: null, marker: "o" },
  app_u: { title: "APP-U", color: "#D55E00", dashes: null, marker: "s" },
  labeled: { title: "labeled", color: "#009E73", dashes: null, marker: "^" },
  unlabeled: { title: "unlabeled (true)", color: "currentColor", dashes: null, marker: "D" },
};

const MAX_MATRIX_WIDTH = 760;
const WIDE_DOT_COUNT = 60; // a chart of classes with more dots has the whole width of the page

const resizeFunctions = []; // redraw a figure if its width has changed

/**
 * Add a figure with buttons that save it. It is drawn when it gets a width, and again when the width changes.
 *
 * @param {HTMLElement} container
 * @param {Object} options
 * @param {string|Node} options.caption
 * @param {?string} options.scaleNote - Sentence on the scale of the study, which is printed with the figure.
 * @param {function(number): Element} options.draw - Returns the chart for a width in pixels.
 * @param {function(): {title: string, styles: LineStyle[], rows: Array[]}} options.describe - Returns title, line
 *   styles and numbers of what is drawn, for files.
 * @param {boolean} [options.isWide] - Whether the figure has the whole width of the page.
 * @returns {function()} Draws the chart again.
 */
function addFigure(container, { caption, scaleNote, draw, describe, isWide = false }) {
  const plot = createElement("div", { class: "plot" });
  const describeFigure = () => ({ picture: plot.querySelector("svg[role=img]"), ...describe() });
  const figureCaption = createElement(
    "figcaption",
    null,
    caption,
    scaleNote ? createElement("span", { class: "scale-note" }, scaleNote) : null,
    createSaveButtons(describe().title, describeFigure),
  );
  container.append(createElement("figure", isWide ? { class: "wide" } : null, figureCaption, plot));

  let drawnWidth = 0;
  const redraw = (width) => {
    if (!width) {
      return; // the figure is hidden
    }
    drawnWidth = width;
    // The height remains while the chart is replaced, so that the page does not scroll.
    plot.style.minHeight = plot.firstChild ? `${plot.clientHeight}px` : "";
    plot.replaceChildren(draw(width));
    plot.style.minHeight = "";
  };
  const measureWidth = () => Math.floor(plot.clientWidth);
  const redrawIfResized = () => {
    if (measureWidth() !== drawnWidth) {
      redraw(measureWidth());
    }
  };
  new ResizeObserver(redrawIfResized).observe(plot);
  resizeFunctions.push(redrawIfResized);
  return () => redraw(measureWidth());
}

/**
 * Create a select.
 *
 * @param {string} label - Text for screen readers.
 * @param {string[]} names - Texts of the options.
 * @param {function(number)} onSelect - Called with the index of the selected option.
 * @returns {HTMLSelectElement}
 */
function createSelect(label, names, onSelect) {
  const options = names.map((name, index) => createElement("option", { value: index }, name));
  const select = createElement("select", { "aria-label": label }, options);
  select.addEventListener("change", () => onSelect(Number(select.value)));
  return select;
}

/** Legends of one group of charts. A click in one of them hides a line, or shows it again, in all charts. */
class LegendGroup {
  /** @param {Map<number, LineStyle>} styles - Styles of the lines by their id. */
  constructor(styles) {
    this.styles = styles;
    this.hiddenLines = new Set(); // ids
    this.buttons = []; // {element, id} of all legends
    this.redrawFunctions = [];
  }

  isVisible(id) {
    return !this.hiddenLines.has(id);
  }

  /** Call a function whenever a line is hidden or shown. */
  onChange(redraw) {
    this.redrawFunctions.push(redraw);
  }

  createLegend() {
    const buttons = [...this.styles].map(([id, style]) => this.createButton(id, style));
    const attributes = { class: "legend", role: "group", "aria-label": "Lines; press to hide or show" };
    return createElement("div", attributes, buttons);
  }

  createButton(id, style) {
    const attributes = { type: "button", "aria-pressed": String(this.isVisible(id)), "data-line": id };
    const element = createElement("button", attributes, createLineSample(style), style.title);
    element.addEventListener("click", () => this.toggleLine(id));
    this.buttons.push({ element, id });
    return element;
  }

  toggleLine(id) {
    if (!this.hiddenLines.delete(id)) {
      this.hiddenLines.add(id);
    }
    for (const button of this.buttons) {
      button.element.setAttribute("aria-pressed", String(this.isVisible(button.id)));
    }
    tooltip.hide();
    for (const redraw of this.redrawFunctions) {
      redraw();
    }
  }
}

// Charts of one column of a study

/** Check whether a line has the data of a chart. */
function hasChartData(line, name) {
  if (name === "accuracy_by_cost") {
    return Boolean(line.series.accuracy);
  }
  if (FINAL_STATE_CHARTS.includes(name)) {
    return Boolean(line[name]);
  }
  // A chart of only zeros has no information.
  return name in line.series && line.series[name].high.some((value) => value !== 0);
}

/**
 * Add the charts of one column of a study.
 *
 * @param {HTMLElement} root - Element of the column.
 * @param {Object} study - Data of the study.
 * @param {Object} group - Data of the column.
 */
function addGroupCharts(root, study, group) {
  const styles = new Map(group.lines.map((line) => [line.line_id, study.styles[line.line_id]]));
  const legends = new LegendGroup(styles);
  for (const container of root.querySelectorAll("[data-charts]")) {
    const names = container.dataset.names
      .split(" ")
      .filter((name) => group.lines.some((line) => hasChartData(line, name)));
    if (names.some((name) => !CHARTS_WITHOUT_LEGEND.includes(name))) {
      container.before(legends.createLegend());
    }
    for (const name of names) {
      addChart(container, name, study, group, legends);
    }
    const section = container.closest("section");
    if (!names.length && !section.querySelector("table")) {
      section.hidden = true;
    }
  }
}

/** Add a chart by its name. */
function addChart(container, name, study, group, legends) {
  if (name === "class_shares" || name === "confusion") {
    addSingleLineChart(container, name, study, group);
  } else if (name === "clients") {
    addClientChart(container, study, group);
  } else if (name === "accuracy_by_cost") {
    addCostChart(container, study, group, legends);
  } else if (name === "per_class") {
    addClassChart(container, study, group, legends);
  } else {
    addCurveChart(container, name, study, group, legends);
  }
}

/** Add a chart of a metric by round. */
function addCurveChart(container, name, study, group, legends) {
  const title = CHART_TITLES[name];
  const listLines = () =>
    group.lines
      .filter((line) => legends.isVisible(line.line_id) && line.series[name])
      .map((line) => ({ style: study.styles[line.line_id], seeds: line.seeds, ...line.series[name] }));
  const limits = name === "reward" ? { lowest: -Infinity, highest: Infinity } : { lowest: 0, highest: 1 };
  const percent = PERCENT_CHARTS.includes(name);
  const draw = (width) =>
    lineChart(width, { lines: listLines(), title, xLabel: "round", percent, ...limits, hasIntegerX: true });
  const describe = () => describeLines(title, listLines(), "round");
  legends.onChange(addFigure(container, { caption: title, scaleNote: study.scale, draw, describe }));
}

function describeLines(title, lines, xName) {
  return { title, styles: lines.map((line) => line.style), rows: createLineRows(lines, xName) };
}

/** Add a chart of the accuracy of each class. */
function addClassChart(container, study, group, legends) {
  const title = CHART_TITLES.per_class;
  const { classes } = group;
  const listSets = () =>
    group.lines
      .filter((line) => legends.isVisible(line.line_id) && line.per_class)
      .map((line) => ({ style: study.styles[line.line_id], ...line.per_class }));
  const draw = (width) =>
    classChart(width, { sets: listSets(), classes, title, xLabel: "class", showsWholeRange: true });
  const describe = () => describeClassSets(title, listSets(), classes);
  const isWide = classes.length * group.lines.length > WIDE_DOT_COUNT;
  legends.onChange(addFigure(container, { caption: title, scaleNote: study.scale, draw, describe, isWide }));
}

function describeClassSets(title, sets, classes) {
  const rows = [["line", "class", "mean", "low", "high"]];
  for (const { style, mean, low, high } of sets) {
    mean.forEach((value, index) => rows.push([style.title, classes[index], value, low?.[index], high?.[index]]));
  }
  return { title, styles: sets.map((set) => set.style), rows };
}

/** Add a chart of the accuracy at each client. */
function addClientChart(container, study, group) {
  const title = CHART_TITLES.clients;
  const sets = group.lines
    .filter((line) => line.clients)
    .map((line) => ({ style: study.styles[line.line_id], ...line.clients }));
  const rows = [["line", "client", "accuracy"]];
  for (const { style, accuracies, mean, deviation, worst_tenth: worstTenth } of sets) {
    const summary = [
      ["mean", mean],
      ["standard deviation", deviation],
      ["worst tenth", worstTenth],
    ];
    for (const [name, value] of [...accuracies, ...summary]) {
      rows.push([style.title, name, value]);
    }
  }
  addFigure(container, {
    caption: title,
    scaleNote: study.scale,
    draw: (width) => clientChart(width, { sets, title }),
    describe: () => ({ title, styles: [], rows }),
    isWide: true,
  });
}

/** Add a chart of the accuracy against what was spent; a select above the chart has the axes. */
function addCostChart(container, study, group, legends) {
  const title = CHART_TITLES.accuracy_by_cost;
  const axes = Object.keys(COST_AXES).filter(
    (name) => name === "round" || group.lines.some((line) => line.costs[name]),
  );
  let axis = axes.includes("steps") ? "steps" : "round";
  const xOf = (line) => (axis === "round" ? line.series.accuracy.x : line.costs[axis]);
  const listLines = () =>
    group.lines
      .filter((line) => legends.isVisible(line.line_id) && line.series.accuracy && xOf(line))
      .map((line) => ({
        style: study.styles[line.line_id],
        seeds: line.seeds,
        ...line.series.accuracy,
        x: xOf(line),
      }));
  const draw = (width) => {
    const hasIntegerX = axis !== "seconds" && axis !== "megabytes";
    return lineChart(width, { lines: listLines(), title, xLabel: COST_AXES[axis], percent: true, hasIntegerX });
  };
  const describe = () => describeLines(`${title}, against ${COST_AXES[axis]}`, listLines(), COST_AXES[axis]);
  const axisNames = axes.map((name) => COST_AXES[name]);
  const select = createSelect("what accuracy is drawn against", axisNames, (index) => {
    axis = axes[index];
    caption.dataset.selected = COST_AXES[axis];
    redraw();
  });
  select.value = String(axes.indexOf(axis));
  select.dataset.choose = "axis";
  // A print has the name of the axis instead of the select.
  const captionAttributes = { class: "selected-option", "data-selected": COST_AXES[axis] };
  const caption = createElement("span", captionAttributes, `${title}, against `, select);
  const redraw = addFigure(container, { caption, scaleNote: study.scale, draw, describe, isWide: true });
  legends.onChange(redraw);
}

/** Add a chart that shows the confusion or the class shares of one line; a select above it has the lines. */
function addSingleLineChart(container, name, study, group) {
  const lines = group.lines.filter((line) => hasChartData(line, name));
  const lineTitles = lines.map((line) => study.styles[line.line_id].title);
  const { classes } = group;
  let selected = Math.max(
    0,
    lines.findIndex((line) => line.line_id === group.winner),
  );
  const currentTitle = () => `${CHART_TITLES[name]}, ${lineTitles[selected]}`;
  const draw = (width) => {
    const line = lines[selected];
    const options = { classes, title: currentTitle() };
    if (name === "class_shares") {
      return createClassShareChart(width, line.class_shares, options);
    }
    const { matrix, largest } = line.confusion;
    return matrix
      ? matrixChart(Math.min(width, MAX_MATRIX_WIDTH), { matrix, ...options })
      : confusionsChart(width, { confusions: largest, ...options });
  };
  const describe = () => {
    const line = lines[selected];
    if (name === "class_shares") {
      return describeClassSets(currentTitle(), listClassShareSets(line.class_shares), classes);
    }
    return { title: currentTitle(), styles: [], rows: createConfusionRows(line.confusion, classes) };
  };
  const select = createSelect(study.rows_title, lineTitles, (index) => {
    selected = index;
    caption.dataset.selected = lineTitles[index];
    redraw();
  });
  select.value = String(selected);
  select.dataset.choose = name;
  // A print has the title of the selected line instead of the select.
  const captionAttributes = { class: "selected-option", "data-selected": lineTitles[selected] };
  const caption = createElement("span", captionAttributes, `${CHART_TITLES[name]}: `, select);
  const isWide = name === "confusion";
  const redraw = addFigure(container, { caption, scaleNote: study.scale, draw, describe, isWide });
}

/** List the distributions of the classes that a line has, as sets of `classChart`. */
function listClassShareSets(classShares) {
  return Object.entries(CLASS_SHARE_STYLES)
    .filter(([key]) => classShares[key])
    .map(([key, style]) => ({ style, mean: classShares[key] }));
}

/** Create a chart of the distributions of the classes, with its legend. */
function createClassShareChart(width, classShares, { classes, title }) {
  const sets = listClassShareSets(classShares);
  const keys = sets.map(({ style }) => createElement("span", { class: "key" }, createLineSample(style), style.title));
  const chart = classChart(width, { sets, classes, title, xLabel: "class" });
  return createElement("div", null, createElement("div", { class: "keys" }, keys), chart);
}

/** List the counts of a confusion matrix, or the largest ones, as rows of a table with a heading. */
function createConfusionRows({ matrix, largest }, classes) {
  const entries =
    largest ?? matrix.flatMap((counts, trueClass) => counts.map((count, predicted) => [trueClass, predicted, count]));
  const rows = entries.map(([trueClass, predicted, count]) => [classes[trueClass], classes[predicted], count]);
  return [["true class", "predicted class", "images"], ...rows];
}

// Charts of a whole study

/** Add the charts of accuracy over an option, such as the number of labels: a panel for each combination of others. */
function addOptionCharts(container, study) {
  for (const panel of study.option_panels) {
    const legends = new LegendGroup(new Map(panel.lines.map((line) => [line.line_id, line])));
    const listLines = () =>
      panel.lines.filter((line) => legends.isVisible(line.line_id)).map((line) => createOptionLine(line));
    const title = `${study.measure}, %${panel.title ? `: ${panel.title}` : ""}`;
    const hasPublished = panel.lines.some((line) => line.published.length);
    const cell = createElement(
      "div",
      study.option_panels.length === 1 ? { class: "wide" } : null,
      legends.createLegend(),
    );
    container.append(cell);
    const redraw = addFigure(cell, {
      caption: hasPublished ? `${title} (hollow: published)` : title,
      scaleNote: study.scale,
      draw: (width) =>
        lineChart(width, {
          lines: listLines(),
          title,
          xLabel: panel.option,
          percent: true,
          hasTicksAtPoints: true,
        }),
      describe: () => describeLines(title, listLines(), panel.option),
    });
    legends.onChange(redraw);
  }
}

/** Convert a line of a panel to a line of `lineChart`. */
function createOptionLine(line) {
  const { points, published } = line;
  const valuesOf = (key) => points.map((point) => point[key]);
  const hasBand = points.some((point) => point.low < point.high);
  return {
    style: line,
    seeds: hasBand ? 2 : 1, // several seeds have a band
    marksAllPoints: true,
    x: valuesOf("x"),
    mean: valuesOf("mean"),
    low: valuesOf("low"),
    high: valuesOf("high"),
    published,
  };
}

/** Add a chart of the images of each client and class for each different split. */
function addSplitCharts(section, study) {
  section.hidden = !study.splits.length;
  for (const split of study.splits) {
    const title = split.title || "Clients and classes";
    const runCount = `(${split.runs} ${split.runs === 1 ? "run" : "runs"})`;
    const caption = createElement("span", null, title, " ", createElement("span", { class: "muted" }, runCount));
    addFigure(section.querySelector("[data-split-charts]"), {
      caption,
      scaleNote: study.scale,
      draw: (width) => bubbleChart(width, split),
      describe: () => ({ title, styles: [], rows: createSplitRows(split) }),
      isWide: study.splits.length === 1,
    });
  }
}

/** List the numbers of images of a split as rows of a table with a heading. */
function createSplitRows(split) {
  const rows = [["kind", "client", "class", "images"]];
  const addCounts = (kind, client, counts) => {
    counts.forEach((count, index) => rows.push([kind, client, split.classes[kind][index], count]));
  };
  addCounts("labeled", "server", split.server ?? []);
  for (const kind of ["labeled", "unlabeled"]) {
    split[kind].forEach((counts, index) => addCounts(kind, split.shown_clients[index], counts));
  }
  return rows;
}

/**
 * Add all charts of a study.
 *
 * @param {HTMLElement} root - Element of the study.
 * @param {Object} study - Its data.
 */
function setUpStudy(root, study) {
  addSplitCharts(root.querySelector("[data-splits]"), study);
  const optionCharts = root.querySelector("[data-option-charts]");
  if (optionCharts) {
    addOptionCharts(optionCharts, study);
  }
  const groupElements = [...root.querySelectorAll(".group")];
  setUpColumnSelect(root, groupElements);
  groupElements.forEach((element, index) => addGroupCharts(element, study, study.groups[index]));
}

/** Show one column at a time, which a select chooses; a print has all columns. */
function setUpColumnSelect(root, groupElements) {
  const chooser = root.querySelector(".chooser");
  const select = chooser?.querySelector("select");
  const showSelected = () => {
    groupElements.forEach((element, index) => {
      element.hidden = Boolean(select) && index !== Number(select.value);
    });
  };
  if (select) {
    chooser.hidden = false;
    select.addEventListener("change", showSelected);
  }
  showSelected();
  window.addEventListener("beforeprint", () => {
    for (const element of groupElements) {
      element.hidden = false;
    }
    for (const redrawIfResized of resizeFunctions) {
      redrawIfResized();
    }
  });
  window.addEventListener("afterprint", showSelected);
}

const { studies } = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll(".study").forEach((root, index) => setUpStudy(root, studies[index]));
