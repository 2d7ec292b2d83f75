/* global calibrationChart */
/**
 * The page of `halfmoon review`: a model's predictions of a folder's images in a grid, to sort, check and correct, and
 * the quality of the model on the labeled images.
 *
 * A row is the index of an image in the folder, and a position is its place in the grid.
 */

import {
  addKeyHandler,
  announce,
  applyState,
  assignKeys,
  byId,
  clearStoppedNotice,
  createElement,
  fitGridToWindow,
  formatCount,
  formatPercent,
  imageName,
  imageTitle,
  loadCaptions,
  normalizeKey,
  renderBulkButtons,
  renderClassButtons,
  requestJson,
  saveLabel,
  saveLabels,
  showNotice,
} from "./common.js";
import { ImageGrid } from "./image_grid.js";
import { ImageViewer, findViewerControls } from "./viewer.js";

const POLL_MS = 3000; // time between two requests for changes, such as other people's labels
const PREDICTION_POLL_MS = 500; // the same while the model predicts the images
const MAX_TABLE_CLASSES = 40; // with more classes there is no table of confusions
const DARK_CELL_SHARE = 0.77; // cells with a larger share have light text
const CAPTION_PIXELS = 58; // three lines, of which the last may have two
const CAPTION_LINE_PIXELS = 16;

// Values of the filters that are no class.
const ANY = -2;
const NONE = -1;

/** @type {import("./common.js").FolderData & Object} */
const data = {
  paths: [],
  labels: [],
  undecided: new Set(),
  state: null,
  by: null, // corrections are recorded without a name
  modelName: "",
  predictions: null, // {predicted, probability}: class index (-1 for an unreadable image) and its probability, by row
};
const undoStack = []; // {entries, isBulk}: [row, label, previous] of the images that one correction has changed
let openPosition = -1; // position of the image in the dialog

const grid = new ImageGrid(byId("image-grid"), {
  describeCell,
  onOpen: openImage,
  imageUrl: (row) => `image/${row}?small=1`,
  onSelect: renderSelection,
  captionHeight: CAPTION_PIXELS,
});
const viewer = new ImageViewer(byId("stage"), byId("image"), findViewerControls());

const isGridShown = () => !byId("grid-view").hidden;
const className = (index) => (index >= 0 ? data.state.classes[index] : "");
const labelName = (row) => className(data.labels[row]);
const isReadable = (row) => data.predictions.predicted[row] >= 0;
const confidence = (row) => (isReadable(row) ? data.predictions.probability[row] : -1);
const disagrees = (row) =>
  isReadable(row) && data.labels[row] >= 0 && data.labels[row] !== data.predictions.predicted[row];

// The grid

/** Describe a cell of the grid, as `ImageGrid` needs it. */
function describeCell(row) {
  const prediction = isReadable(row)
    ? `${className(data.predictions.predicted[row])} · ${formatPercent(confidence(row))}`
    : "cannot be read";
  const label = labelName(row);
  let labelLine = "no label";
  if (disagrees(row)) {
    labelLine = createElement("span", { class: "disagreement" }, `≠ label ${label}`);
  } else if (label) {
    labelLine = `= label ${label}`;
  }
  return {
    title: `${imageTitle(data, row)}: ${prediction}, ${label ? `label ${label}` : "no label"}`,
    lines: [createElement("span", { class: "prediction" }, prediction), labelLine, imageName(data, row)],
    isMarked: disagrees(row),
  };
}

const byConfidence = (a, b) => confidence(b) - confidence(a);

// Functions that compare two rows, by the value of the select of the sort order.
const SORT_ORDERS = {
  disagreement(a, b) {
    if (disagrees(a) !== disagrees(b)) {
      return disagrees(a) ? -1 : 1;
    }
    // First the confident among the disagreements, which are probably wrong labels; then the least confident.
    return disagrees(a) ? byConfidence(a, b) : byConfidence(b, a);
  },
  uncertain: (a, b) => byConfidence(b, a),
  confident: byConfidence,
  class: (a, b) => data.predictions.predicted[a] - data.predictions.predicted[b] || byConfidence(a, b),
  path: (a, b) => a - b,
};

/** Show the images of the filters in the selected order. */
function renderGrid(keepsScroll = false) {
  const predictedClass = Number(byId("prediction-filter").value);
  const labelClass = Number(byId("label-filter").value);
  const rows = [...data.paths.keys()].filter(
    (row) =>
      (predictedClass === ANY || data.predictions.predicted[row] === predictedClass) &&
      (labelClass === ANY || data.labels[row] === labelClass),
  );
  const compare = SORT_ORDERS[byId("sort").value];
  // Unreadable images have no prediction, so they are last in every order.
  rows.sort((a, b) => isReadable(b) - isReadable(a) || compare(a, b) || a - b);

  const disagreementCount = rows.filter(disagrees).length;
  const labelCount = rows.filter((row) => data.labels[row] >= 0).length;
  const imageCount = rows.length < data.paths.length ? `${formatCount(rows.length)} images, ` : "";
  byId("image-count").textContent =
    `${imageCount}${formatCount(disagreementCount)} of ${formatCount(labelCount)} labels disagree`;
  grid.showRows(rows, keepsScroll);
}

/** Fill the filters with the classes; what is selected remains. */
function renderFilters() {
  for (const [id, noneText] of [
    ["prediction-filter", "cannot be read"],
    ["label-filter", "none"],
  ]) {
    const select = byId(id);
    const value = select.value || String(ANY);
    select.replaceChildren(
      createElement("option", { value: ANY }, "any"),
      ...data.state.classes.map((name, index) => createElement("option", { value: index }, name)),
      createElement("option", { value: NONE }, noneText),
    );
    select.value = value;
  }
}

function renderSelection() {
  byId("grid-undo").disabled = !undoStack.length;
  renderBulkButtons(grid, data.state, correctSelectedImages);
}

// The dialog with one image

/** Open the image at a position of the grid. */
function openImage(position) {
  openPosition = position;
  const row = grid.rows[position];
  if (!byId("image-dialog").open) {
    byId("image-dialog").showModal();
  }
  byId("path").textContent = imageTitle(data, row);
  viewer.showImage(row, data.paths[row]);
  viewer.preloadImages(grid.rows.slice(position + 1, position + 3));
  renderDialog();
}

function openNeighbor(step) {
  const position = openPosition + step;
  if (position >= 0 && position < grid.rows.length) {
    openImage(position);
  }
}

/** Show prediction and label of the open image, and the buttons of the classes. */
function renderDialog() {
  const row = grid.rows[openPosition];
  const predictedClass = data.predictions.predicted[row];
  const prediction = isReadable(row)
    ? `The model predicts ${className(predictedClass)}, ${formatPercent(confidence(row), 1)}.`
    : "This image cannot be read.";
  const label = labelName(row) ? `Its label is ${labelName(row)}.` : "It has no label.";
  byId("prediction").replaceChildren(
    createElement("b", null, prediction),
    createElement("br"),
    `${label} ${formatCount(openPosition + 1)} of ${formatCount(grid.rows.length)}.`,
  );
  renderClassButtons(byId("class-buttons"), data.state, {
    current: data.labels[row],
    suggested: className(predictedClass),
    onPress: correctOpenImage,
  });
  byId("previous").disabled = openPosition === 0;
  byId("next").disabled = openPosition === grid.rows.length - 1;
}

// Corrections

/** Run an action, and show its error. */
async function runAction(action) {
  try {
    await action();
    showNotice("");
  } catch (error) {
    showNotice(error.message);
    announce(error.message); // a dialog may cover the notice
  }
}

function correctOpenImage(classIndex) {
  runAction(async () => {
    const row = grid.rows[openPosition];
    const previous = labelName(row);
    const label = data.state.classes[classIndex];
    if (label === previous || !(await saveLabel(data, row, label, previous))) {
      return;
    }
    byId("folder-labels-notice").hidden = true;
    undoStack.push({ entries: [[row, label, previous]], isBulk: false });
    renderSelection();
    announce(`${data.paths[row]}: ${label}.`);
    grid.refreshRow(row);
    renderDialog();
  });
}

/** Give one label to all images that are selected in the grid. */
function correctSelectedImages(classIndex) {
  runAction(async () => {
    const label = data.state.classes[classIndex];
    const entries = [...grid.selectedRows].map((row) => [row, label, labelName(row)]);
    if (!entries.length) {
      return;
    }
    await saveLabels(data, entries);
    byId("folder-labels-notice").hidden = true;
    undoStack.push({ entries, isBulk: true });
    announce(`${entries.length} images: ${label}.`);
    grid.clearSelection();
    renderGrid(true);
  });
}

function undoLast() {
  runAction(async () => {
    const last = undoStack.pop();
    if (!last) {
      return;
    }
    const reversed = last.entries.map(([row, label, previous]) => [row, previous, label]);
    if (last.isBulk) {
      await saveLabels(data, reversed);
      renderGrid(true);
    } else {
      const [row, label, previous] = reversed[0];
      await saveLabel(data, row, label, previous);
      grid.refreshRow(row);
    }
    announce("Undone.");
    renderSelection();
    if (byId("image-dialog").open) {
      renderDialog();
    }
  });
}

// The quality of the model

/** Load and show accuracy, confusion and calibration on the labeled images. */
async function renderQuality() {
  byId("summary").textContent = "…";
  const scores = await requestJson("scores");
  const hasLabels = scores.images > 0;
  for (const section of document.querySelectorAll("#quality-view section")) {
    section.hidden = !hasLabels;
  }
  if (!hasLabels) {
    byId("summary").textContent =
      "No image has a label that the model knows, so nothing can be compared. Press an image to label it.";
    return;
  }
  byId("summary").textContent = summarizeScores(scores);
  byId("confusion").replaceChildren(createConfusionTable(scores));
  const chartWidth = Math.min(400, Math.max(280, byId("calibration").clientWidth));
  const chartTitle = "Share of correct predictions, by probability";
  byId("calibration").replaceChildren(calibrationChart(chartWidth, { bins: scores.reliability, title: chartTitle }));
  byId("class-scores").replaceChildren(createClassTable(scores));
}

function summarizeScores(scores) {
  const { share, at_least: threshold, accuracy: confidentAccuracy } = scores.sure;
  const accuracyOfConfident =
    confidentAccuracy === null ? "" : `; it is right on ${formatPercent(confidentAccuracy, 1)} of those`;
  return (
    `The model agrees with ${formatPercent(scores.accuracy, 1)} of ${formatCount(scores.images)} labels ` +
    `(balanced over classes: ${formatPercent(scores.balanced_accuracy, 1)}). ` +
    `Its probabilities are off by ${formatPercent(scores.calibration_error, 1)} on average. ` +
    `For ${formatPercent(share)} of these images its confidence is at least ${formatPercent(threshold)}` +
    `${accuracyOfConfident}.`
  );
}

/** Create the table of confusions: a row for each label, and a column for each predicted class. */
function createConfusionTable({ classes, confusion }) {
  if (classes.length > MAX_TABLE_CLASSES) {
    const text = `${classes.length} classes are too many for a table; halfmoon evaluate --out writes it.`;
    return createElement("p", { class: "muted" }, text);
  }
  const createCell = (count, label, predicted, labelTotal) => {
    if (!count) {
      return createElement("td");
    }
    const share = count / labelTotal;
    const attributes = {
      type: "button",
      class: share > DARK_CELL_SHARE ? "dark" : null,
      style: `--share:${100 * share}`,
      "aria-label": `label ${label}, predicted ${predicted}: ${count}`,
      onclick: () => showImagesOf(label, predicted),
    };
    return createElement("td", null, createElement("button", attributes, formatCount(count)));
  };
  const rows = confusion.map((counts, labelIndex) => {
    const label = classes[labelIndex];
    const total = counts.reduce((sum, count) => sum + count, 0) || 1;
    const cells = counts.map((count, index) => createCell(count, label, classes[index], total));
    return createElement("tr", null, createElement("th", { scope: "row" }, label), cells);
  });
  const headings = classes.map((name) => createElement("th", { scope: "col" }, name));
  const head = createElement("thead", null, createElement("tr", null, createElement("td"), headings));
  return createElement("table", { class: "confusion" }, head, createElement("tbody", null, rows));
}

/** Create the table of precision, recall and F1 of each class. */
function createClassTable({ per_class: scoresByClass }) {
  const headings = ["precision", "recall", "F1", "labels"].map((text) => createElement("th", null, text));
  const head = createElement("tr", null, createElement("th", { class: "left" }, "class"), headings);
  const rows = scoresByClass.map((scores) => {
    const shares = [scores.precision, scores.recall, scores.f1];
    return createElement(
      "tr",
      null,
      createElement("th", { scope: "row" }, scores.class),
      shares.map((share) => createElement("td", null, formatPercent(share, 1))),
      createElement("td", null, formatCount(scores.support)),
    );
  });
  return createElement("table", null, createElement("thead", null, head), createElement("tbody", null, rows));
}

/** Show the images with a label and a predicted class in the grid. */
function showImagesOf(label, predicted) {
  byId("label-filter").value = String(data.state.classes.indexOf(label));
  byId("prediction-filter").value = String(data.state.classes.indexOf(predicted));
  switchView("grid");
  renderGrid();
  grid.focusPosition(0);
}

/** Show the view of the images ("grid") or of the quality of the model ("quality"). */
function switchView(name) {
  const showsQuality = name === "quality";
  byId("grid-view").hidden = showsQuality;
  byId("quality-view").hidden = !showsQuality;
  byId("tab-grid").setAttribute("aria-pressed", String(!showsQuality));
  byId("tab-quality").setAttribute("aria-pressed", String(showsQuality));
  if (showsQuality) {
    runAction(renderQuality);
  } else {
    fitGridToWindow();
  }
}

// Changes by the server and by other people

async function pollState() {
  try {
    const state = await requestJson(`state?since=${data.state.version}`);
    applyState(data, state);
    for (const [row] of state.changes) {
      grid.refreshRow(row);
    }
    clearStoppedNotice();
  } catch (error) {
    showNotice(error.message);
  }
  setTimeout(pollState, POLL_MS);
}

/** Wait until the model has predicted all images, and return its predictions. */
async function loadPredictions() {
  for (;;) {
    const { model } = await requestJson("state");
    if (model.error) {
      throw new Error(`The model cannot be used: ${model.error}`);
    }
    if (model.ready) {
      byId("progress").textContent = `${formatCount(data.paths.length)} images, model ${data.modelName}`;
      return requestJson("predictions");
    }
    byId("progress").textContent =
      `the model predicts the images: ${formatCount(model.done)} of ${formatCount(model.total)}`;
    await new Promise((resolve) => setTimeout(resolve, PREDICTION_POLL_MS));
  }
}

// Keyboard and buttons

const COMMANDS = {
  q: () => switchView(byId("quality-view").hidden ? "quality" : "grid"),
  u: undoLast,
  undo: undoLast,
  "?": () => byId("shortcuts").showModal(),
};

const GRID_COMMANDS = {
  x: () => byId("select-mode").click(),
  a: () => grid.selectVisibleRows(),
  Escape: () => grid.clearSelection(),
};

const DIALOG_COMMANDS = {
  ArrowLeft: () => openNeighbor(-1),
  ArrowRight: () => openNeighbor(1),
  z: () => viewer.toggleZoom(),
  "+": () => viewer.zoomBy(1),
  "-": () => viewer.zoomBy(-1),
  c: () => announce(viewer.selectNextPreset()),
  u: undoLast,
};

/** Run the command of a key, and return whether there is one. */
function handleKey(key) {
  if (!data.predictions) {
    return false;
  }
  const classIndex = assignKeys(data.state.classes).indexOf(key);
  if (classIndex >= 0 && grid.selectedRows.size && isGridShown()) {
    correctSelectedImages(classIndex);
    return true;
  }
  const command = COMMANDS[key] ?? (isGridShown() ? GRID_COMMANDS[key] : undefined);
  command?.();
  return command !== undefined;
}

/** Run the command of a key in the dialog, which `addKeyHandler` leaves out. */
function handleDialogKey(event) {
  const isInField = /^(INPUT|SELECT)$/.test(event.target.tagName);
  const isUndo = event.ctrlKey && event.key === "z";
  if (event.altKey || event.metaKey || (event.ctrlKey && !isUndo) || isInField) {
    return;
  }
  const key = normalizeKey(event);
  const classIndex = assignKeys(data.state.classes).indexOf(key);
  if (isUndo) {
    undoLast();
  } else if (classIndex >= 0) {
    correctOpenImage(classIndex);
  } else if (DIALOG_COMMANDS[key]) {
    DIALOG_COMMANDS[key]();
  } else {
    return;
  }
  event.preventDefault();
  event.stopPropagation();
}

function addListeners() {
  addKeyHandler(handleKey);
  byId("image-dialog").addEventListener("keydown", handleDialogKey);
  byId("image-dialog").addEventListener("close", () => grid.focusPosition(openPosition));
  for (const id of ["sort", "prediction-filter", "label-filter"]) {
    byId(id).addEventListener("change", () => renderGrid());
  }
  const clickHandlers = {
    "select-visible": () => grid.selectVisibleRows(),
    "clear-selection": () => grid.clearSelection(),
    "select-mode": () => {
      grid.isSelecting = !grid.isSelecting;
      renderSelection();
    },
    "grid-undo": undoLast,
    previous: () => openNeighbor(-1),
    next: () => openNeighbor(1),
    close: () => byId("image-dialog").close(),
    zoom: () => viewer.toggleZoom(),
    help: () => byId("shortcuts").showModal(),
    "tab-grid": () => switchView("grid"),
    "tab-quality": () => switchView("quality"),
  };
  for (const [id, handleClick] of Object.entries(clickHandlers)) {
    byId(id).addEventListener("click", handleClick);
  }
}

async function openPage() {
  const start = await requestJson("start");
  data.paths = start.paths;
  data.labels = start.labels;
  data.undecided = new Set(start.undecided_rows);
  data.state = start;
  data.modelName = start.model_name;
  byId("folder-labels-notice").hidden = !start.labels_from_folders;
  data.predictions = await loadPredictions();
  // Labels may have changed while the model predicted.
  applyState(data, await requestJson(`state?since=${data.state.version}`));
  renderFilters();
  if (!data.labels.some((label) => label >= 0)) {
    byId("sort").value = "uncertain";
  }
  fitGridToWindow();
  renderSelection();
  renderGrid();
  loadCaptions(data, () => {
    grid.captionHeight += CAPTION_LINE_PIXELS; // captions need a second line
    renderGrid(true);
  });
  setTimeout(pollState, POLL_MS);
}

addListeners();
try {
  await openPage();
} catch (error) {
  showNotice(error.message);
}
document.body.dataset.ready = "yes";
