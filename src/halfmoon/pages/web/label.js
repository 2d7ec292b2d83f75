/* global lineChart */
/**
 * The page of `halfmoon site label`: unlabeled images one by one, the most useful first, or all images in a grid.
 *
 * A row is the index of an image in the folder.
 */

import {
  addKeyHandler,
  announce,
  applyState,
  askAnnotatorName,
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
  moveToEnd,
  renderBulkButtons,
  renderClassButtons,
  requestJson,
  saveLabel,
  saveLabels,
  showNotice,
} from "./common.js";
import { ImageGrid } from "./image_grid.js";
import { ARROW_KEY_DRAGS, ImageViewer, findViewerControls } from "./viewer.js";

const REORDER_AFTER_LABELS = 20;
const POLL_MS = 3000; // time between two requests for changes, such as other people's labels
const BUSY_POLL_MS = 700; // the same while the server trains or predicts
const MANY_CLASSES = 12; // with more classes there is a search field
const CAPTION_LINE_PIXELS = 16;

/** @type {import("./common.js").FolderData & Object} */
const data = {
  paths: [],
  labels: [],
  undecided: new Set(),
  state: null,
  notes: {}, // text by row
  disagreements: [], // rows to which two readers gave different labels
  order: [], // unlabeled rows, the most useful first
  ranks: new Map(), // {uncertainty, uncertaintyRank, distanceRank} by row of the order
  unreadable: new Set(), // rows that the server cannot decode
  similar: null, // {row, rows}: all rows, the most similar to `row` first
};
const skippedRows = new Set(JSON.parse(sessionStorage.getItem("skipped") ?? "[]")); // also after a reload
const undoStack = []; // {kind: "label" | "labels" | "undecided" | "skip", ...}
let currentRow = -1; // the image of the single view, -1 for none
let isShownInOrder = false; // whether the image is shown because it is the next one
let suggestedClass = ""; // the class that the model predicts for the image, if suggestions are on
let givenLabelCount = 0;

const viewer = new ImageViewer(byId("stage"), byId("image"), findViewerControls(), moveUnreadableToEnd);
const grid = new ImageGrid(byId("image-grid"), {
  describeCell,
  onOpen: (position) => showImage(grid.rows[position]),
  imageUrl: (row) => `image/${row}?small=1`,
  onSelect: renderSelection,
  onUnreadable: (row) => data.unreadable.add(row),
});

const isGridShown = () => !byId("grid-view").hidden;
const labelName = (row) => (data.labels[row] >= 0 ? data.state.classes[data.labels[row]] : "");
const needsLabel = (row) => data.labels[row] < 0 && !data.undecided.has(row);
const allRows = () => [...data.paths.keys()];

// Actions of the person

let pendingActions = 0; // actions that run or wait
let lastAction = Promise.resolve();

/**
 * Run an action after the ones before it, and show its error.
 *
 * @param {function(): Promise<void>} action
 * @param {boolean} [waits] - Whether it waits for a running action. Otherwise it is dropped, because it was meant for
 *   an image that is no longer shown then.
 */
function runAction(action, waits = false) {
  if (pendingActions && !waits) {
    return;
  }
  pendingActions += 1;
  lastAction = lastAction
    .then(action)
    .then(
      () => showNotice(""),
      (error) => showNotice(error.message),
    )
    .finally(() => {
      pendingActions -= 1;
    });
}

/** Label the current image, and show the next one. */
function labelCurrentImage(classIndex) {
  runAction(async () => {
    if (currentRow < 0) {
      return;
    }
    const row = currentRow;
    const previous = labelName(row);
    const label = data.state.classes[classIndex];
    const wasUndecided = data.undecided.has(row);
    const isSaved = await saveLabel(data, row, label, previous);
    if (!isSaved) {
      applyState(data, await requestJson(`state?since=${data.state.version}`));
      showNextImage();
      return;
    }
    undoStack.push({ kind: "label", row, label, previous, wasUndecided });
    skippedRows.delete(row);
    storeSkippedRows();
    announce(`${label}.`);
    givenLabelCount += 1;
    if (givenLabelCount % REORDER_AFTER_LABELS === 0) {
      await reloadOrder();
    }
    showNextImage();
  });
}

/** Give one label to all images that are selected in the grid. */
function labelSelectedImages(classIndex) {
  runAction(async () => {
    const rows = [...grid.selectedRows];
    if (!rows.length) {
      return;
    }
    const label = data.state.classes[classIndex];
    const entries = rows.map((row) => [row, label, labelName(row)]);
    const undecidedRows = rows.filter((row) => data.undecided.has(row));
    await saveLabels(data, entries);
    undoStack.push({ kind: "labels", entries, undecidedRows });
    givenLabelCount += rows.length;
    announce(`${rows.length} images: ${label}.`);
    refreshGridView();
  });
}

/** Mark all unlabeled images that are selected in the grid as undecided. */
function markSelectedUndecided() {
  runAction(async () => {
    if (!grid.selectedRows.size) {
      return;
    }
    for (const row of [...grid.selectedRows].filter(needsLabel)) {
      await saveUndecided(row, true);
      undoStack.push({ kind: "undecided", row });
    }
    refreshGridView();
  });
}

function refreshGridView() {
  grid.clearSelection();
  render();
  renderGrid(true);
}

/** Move the current image to the end of the order, and show the next one. */
function skipCurrentImage() {
  runAction(async () => {
    if (currentRow < 0) {
      return;
    }
    // The set is in the order of insertion: an image that is skipped again is the last one.
    skippedRows.delete(currentRow);
    skippedRows.add(currentRow);
    storeSkippedRows();
    undoStack.push({ kind: "skip", row: currentRow });
    const [nextRow] = nextRows(1);
    showImage(nextRow ?? currentRow);
  });
}

/** Mark the current image as undecided, and show the next one. */
function markCurrentUndecided() {
  runAction(async () => {
    if (currentRow < 0) {
      return;
    }
    const row = currentRow;
    await saveUndecided(row, true);
    undoStack.push({ kind: "undecided", row });
    announce("Not sure.");
    showNextImage();
  });
}

/** Record whether a person could not label an image. */
async function saveUndecided(row, undecided) {
  const body = { row, undecided, by: data.annotator ?? "", since: data.state.version };
  applyState(data, await requestJson("undecided", body));
}

/** Undo the last label, mark or skip, and show its image. */
function undoLast() {
  runAction(async () => {
    const last = undoStack.at(-1);
    if (!last) {
      return;
    }
    if (last.kind === "label") {
      const isSaved = await saveLabel(data, last.row, last.previous, last.label);
      if (isSaved && last.wasUndecided) {
        await saveUndecided(last.row, true);
      }
    } else if (last.kind === "labels") {
      await saveLabels(
        data,
        last.entries.map(([row, label, previous]) => [row, previous, label]),
      );
      for (const row of last.undecidedRows) {
        await saveUndecided(row, true);
      }
    } else if (last.kind === "undecided") {
      await saveUndecided(last.row, false);
    } else {
      skippedRows.delete(last.row);
      storeSkippedRows();
    }
    undoStack.pop(); // only after the server has undone it
    announce("Undone.");
    if (isGridShown()) {
      render();
      renderGrid(true);
    } else {
      showImage(last.kind === "labels" ? last.entries[0][0] : last.row);
    }
  }, true);
}

function saveNote() {
  const row = currentRow;
  const note = byId("note").value.trim();
  runAction(async () => {
    const body = { row, note, by: data.annotator ?? "", since: data.state.version };
    applyState(data, await requestJson("note", body));
    data.notes[row] = note;
  }, true);
}

function startTraining() {
  runAction(async () => {
    applyState(data, await requestJson("train", {}));
    render();
  }, true);
}

function storeSkippedRows() {
  sessionStorage.setItem("skipped", JSON.stringify([...skippedRows]));
}

// The order of the images

/** List the unlabeled rows in their order; skipped images are after the others, and unreadable ones at the end. */
function listQueue() {
  const rows = data.order.filter((row) => needsLabel(row) && !skippedRows.has(row));
  return moveToEnd([...rows, ...[...skippedRows].filter(needsLabel)], data.unreadable);
}

/** List the next rows of the queue, without the current one. */
const nextRows = (count) =>
  listQueue()
    .filter((row) => row !== currentRow)
    .slice(0, count);

/** Take over the order of a response of /queue. */
function applyOrder(response) {
  data.order = response.order;
  data.ranks = new Map();
  response.order.forEach((row, index) => {
    data.ranks.set(row, {
      uncertainty: response.uncertainty[index],
      uncertaintyRank: response.uncertainty_rank[index],
      distanceRank: response.distance_rank[index],
    });
  });
}

async function reloadOrder() {
  applyOrder(await requestJson(`queue?order=${byId("order").value}`));
}

/** Describe why an image is at its place in the order; "" for a random order. */
function describeRanks(row) {
  const { uncertainty, uncertaintyRank, distanceRank } = data.ranks.get(row) ?? {};
  if (!uncertaintyRank) {
    return "";
  }
  const rank = `rank ${formatCount(uncertaintyRank)} of ${formatCount(data.ranks.size)}`;
  const distance = distanceRank ? `; distance to labeled images: rank ${formatCount(distanceRank)}` : "";
  return `uncertainty ${uncertainty.toFixed(2)}, ${rank}${distance}`;
}

/** Remember that an image cannot be read. If it is shown because it is the next one, show another one instead. */
function moveUnreadableToEnd(row) {
  const wasKnown = data.unreadable.has(row);
  data.unreadable.add(row);
  if (wasKnown || row !== currentRow || !isShownInOrder) {
    return;
  }
  announce("An image cannot be read; it is shown after all others.");
  showNextImage();
}

// The view of a single image

function showNextImage() {
  let [row] = nextRows(1);
  if (row === undefined) {
    const isLast = currentRow >= 0 && needsLabel(currentRow);
    row = isLast ? currentRow : -1;
  }
  showImage(row, true);
}

/**
 * Show an image in the single view, or that there is none.
 *
 * @param {number} row - Its row, -1 for none.
 * @param {boolean} [isNext] - Whether it is shown because it is the next one in the order.
 */
function showImage(row, isNext = false) {
  currentRow = row;
  isShownInOrder = isNext;
  switchView("single");
  byId("no-image").hidden = row >= 0;
  byId("image").hidden = row < 0;
  if (row < 0) {
    const { undecided } = data.state;
    byId("no-image").textContent = undecided
      ? `Every other image has a label. ${formatCount(undecided)} marked “not sure” are under All images.`
      : "Every image has a label.";
    byId("path").textContent = "";
    byId("ranks").textContent = "";
  } else {
    byId("path").textContent = imageTitle(data, row);
    byId("ranks").textContent = describeRanks(row);
    byId("note").value = data.notes[row] ?? "";
    viewer.showImage(row, data.paths[row]);
    viewer.preloadImages(nextRows(3));
  }
  render();
  updateSuggestion();
}

/** Show the image before (-1) or after (1) the current one in its folder, as in a series. */
function showNeighbor(step) {
  const folderOf = (row) => data.paths[row]?.split("/").slice(0, -1).join("/");
  const row = currentRow + step;
  if (currentRow >= 0 && folderOf(row) === folderOf(currentRow)) {
    showImage(row);
  }
}

/** Show the state of the labels, of the model and of the training. */
function render() {
  const { state } = data;
  const hasImage = currentRow >= 0;
  const hasManyClasses = state.classes.length > MANY_CLASSES;
  byId("progress").textContent = `${formatCount(state.labeled)} of ${formatCount(state.total)} labeled`;

  const container = byId("class-buttons");
  container.classList.toggle("many", hasManyClasses);
  renderClassButtons(container, state, {
    current: hasImage ? data.labels[currentRow] : -1,
    suggested: suggestedClass,
    onPress: labelCurrentImage,
  });
  for (const button of container.children) {
    button.disabled = !hasImage;
  }
  byId("class-search").hidden = !hasManyClasses;
  filterClassButtons();

  byId("undo").disabled = !undoStack.length;
  byId("grid-undo").disabled = !undoStack.length;
  byId("skip").disabled = !hasImage;
  byId("undecided").disabled = !hasImage;
  byId("note").hidden = !hasImage;
  renderModel();
  renderTraining();
}

/** Show the progress of the model's predictions, and the controls that need them. */
function renderModel() {
  const { model } = data.state;
  const hasPredictions = data.state.predictions_version > 0;
  const hasFailed = Boolean(model?.error);
  let status = "";
  if (!hasPredictions && !model) {
    status = "order: random";
  } else if (!hasPredictions && !hasFailed) {
    status = `the model predicts the images: ${formatCount(model.done)} of ${formatCount(model.total)}`;
  }
  byId("model-status").textContent = status;
  for (const id of ["order-control", "similar", "grid-similar"]) {
    byId(id).hidden = !hasPredictions;
  }
  byId("suggestions-control").hidden = !hasPredictions && (!model || hasFailed);
  if (hasFailed && !hasPredictions) {
    showNotice(`The model cannot be used, so the order is random: ${model.error}`);
  }
}

function renderTraining() {
  const { training } = data.state;
  byId("train").disabled = Boolean(training.progress);
  byId("training-status").textContent = training.summary;
  byId("training-status").classList.toggle("bad", Boolean(training.error));
  drawLearningCurve(training.points);
}

/** Draw the accuracy of all trainings over their numbers of labels, if there is a new training. */
function drawLearningCurve(points) {
  const container = byId("learning-curve");
  const isDrawn = container.dataset.pointCount === String(points.length) && container.firstChild;
  if (!points.length || isDrawn) {
    return;
  }
  const valuesOf = (key) => points.map((point) => point[key]);
  const line = {
    style: { title: "correct in cross-validation", color: "var(--link)" },
    x: valuesOf("labels"),
    mean: valuesOf("accuracy"),
    low: valuesOf("low"),
    high: valuesOf("high"),
    hasErrorBars: true,
    marksAllPoints: true,
  };
  const chart = lineChart(Math.max(240, container.clientWidth), {
    lines: [line],
    title: "Percent correct in cross-validation",
    xLabel: "labels",
    percent: true,
    hasTicksAtPoints: true,
    height: 150,
  });
  container.replaceChildren(chart);
  container.dataset.pointCount = points.length;
}

/** Show the model's prediction of the current image, if suggestions are on. */
async function updateSuggestion() {
  suggestedClass = "";
  const text = byId("suggestion");
  text.hidden = !byId("suggestions").checked || currentRow < 0;
  if (text.hidden) {
    render();
    return;
  }
  const row = currentRow;
  const { label, probability } = await requestJson(`prediction/${row}`).catch(() => ({ label: "" }));
  if (row !== currentRow || !byId("suggestions").checked) {
    return; // the person went on meanwhile
  }
  suggestedClass = label;
  text.textContent = label
    ? `The model predicts ${label}, ${formatPercent(probability)}.`
    : "The model has no prediction for this image.";
  render();
}

/** Show only the classes whose names contain the text of the search field. */
function filterClassButtons() {
  const text = byId("class-search").value.trim().toLowerCase();
  for (const button of byId("class-buttons").children) {
    const name = data.state.classes[button.dataset.class].toLowerCase();
    button.hidden = !name.includes(text);
  }
}

/** Label the image with the first class that the search found (Enter), or leave the search (Escape). */
function handleClassSearchKey(event) {
  if (event.key !== "Enter" && event.key !== "Escape") {
    return;
  }
  const search = byId("class-search");
  const firstButton = [...byId("class-buttons").children].find((button) => !button.hidden);
  const hasText = search.value.trim() !== "";
  search.value = "";
  filterClassButtons();
  search.blur();
  if (event.key === "Enter" && firstButton && hasText) {
    labelCurrentImage(Number(firstButton.dataset.class));
  }
}

// The view of all images in a grid

/** List the filters of the grid: {value, title, listRows}. */
function listFilters() {
  const filters = [
    { value: "waiting", title: "without a label, in this order", listRows: listQueue },
    { value: "all", title: "all", listRows: allRows },
    {
      value: "undecided",
      title: "not sure",
      listRows: () => [...data.undecided].filter((row) => data.labels[row] < 0).sort((a, b) => a - b),
    },
    { value: "disagreements", title: "readers disagree", listRows: () => data.disagreements },
    { value: "labeled", title: "with a label", listRows: () => allRows().filter((row) => data.labels[row] >= 0) },
  ];
  if (data.similar) {
    const title = `like ${imageName(data, data.similar.row)}`;
    filters.push({ value: "similar", title, listRows: () => data.similar.rows });
  }
  data.state.classes.forEach((title, index) => {
    const listRows = () => allRows().filter((row) => data.labels[row] === index);
    filters.push({ value: `class-${index}`, title, listRows });
  });
  return filters;
}

/**
 * Show the images of a filter in the grid.
 *
 * @param {boolean} [keepsScroll] - Whether the scroll position remains.
 * @param {string} [value] - Value of the filter; the selected one if it is missing.
 */
function renderGrid(keepsScroll = false, value = byId("filter").value || "waiting") {
  const filters = listFilters();
  const filter = filters.find((each) => each.value === value) ?? filters[0];
  const select = byId("filter");
  select.replaceChildren(...filters.map((each) => createElement("option", { value: each.value }, each.title)));
  select.value = filter.value;
  const rows = moveToEnd(filter.listRows(), data.unreadable);
  byId("image-count").textContent = `${formatCount(rows.length)} images`;
  grid.showRows(rows, keepsScroll);
}

/** Describe a cell of the grid, as `ImageGrid` needs it. */
function describeCell(row) {
  const label = labelName(row);
  const missingLabel = data.undecided.has(row) ? "not sure" : "no label";
  const labelLine = label ? createElement("b", null, label) : createElement("span", { class: "muted" }, missingLabel);
  return {
    title: `${imageTitle(data, row)}: ${label || missingLabel}`,
    lines: [labelLine, imageName(data, row)],
  };
}

function renderSelection() {
  renderBulkButtons(grid, data.state, labelSelectedImages);
}

/** Show all images in the grid, the most similar to one first. */
function showSimilarImages(row) {
  runAction(async () => {
    if (row === undefined || row < 0) {
      return;
    }
    const { rows } = await requestJson(`similar/${row}`);
    data.similar = { row, rows };
    switchView("grid");
    renderGrid(false, "similar");
  });
}

/** Show all images, the most similar to the selected or focused one first. */
function showSimilarToSelected() {
  const [selectedRow] = grid.selectedRows;
  showSimilarImages(selectedRow ?? grid.rows[grid.focusedPosition]);
}

/** Show the view of a single image ("single") or of all images ("grid"). */
function switchView(name) {
  const showsGrid = name === "grid";
  if (isGridShown() === showsGrid) {
    return;
  }
  byId("grid-view").hidden = !showsGrid;
  byId("single-view").hidden = showsGrid;
  byId("tab-single").setAttribute("aria-pressed", String(!showsGrid));
  byId("tab-grid").setAttribute("aria-pressed", String(showsGrid));
  if (showsGrid) {
    fitGridToWindow();
    renderGrid();
    grid.focusPosition(0);
  }
}

// Changes by the server and by other people

async function pollState() {
  try {
    const previous = data.state;
    const state = await requestJson(`state?since=${previous.version}`);
    const hasNewPredictions = state.predictions_version !== previous.predictions_version;
    applyState(data, state);
    if (hasNewPredictions) {
      await reloadOrder();
      if (currentRow >= 0) {
        byId("ranks").textContent = describeRanks(currentRow);
      }
      updateSuggestion();
    }
    for (const [row] of state.changes) {
      grid.refreshRow(row);
    }
    const hasProgress =
      state.model?.done !== previous.model?.done || state.training.summary !== previous.training.summary;
    if (hasNewPredictions || state.changes.length || hasProgress) {
      render();
    }
    const isCurrentLabeled = state.changes.some(([row, label]) => row === currentRow && label >= 0);
    if (isCurrentLabeled && currentRow >= 0 && !pendingActions && !isGridShown()) {
      announce("Another person labeled this image.");
      showNextImage();
    }
    clearStoppedNotice();
    const isPredicting = state.model && !state.model.ready && !state.model.error;
    setTimeout(pollState, state.training.progress || isPredicting ? BUSY_POLL_MS : POLL_MS);
  } catch (error) {
    showNotice(error.message);
    setTimeout(pollState, POLL_MS);
  }
}

// Keyboard and buttons

const openShortcuts = () => byId("shortcuts").showModal();

const GRID_COMMANDS = {
  w: () => switchView("single"),
  u: undoLast,
  undo: undoLast,
  "=": showSimilarToSelected,
  x: () => byId("select-mode").click(),
  a: () => grid.selectVisibleRows(),
  n: markSelectedUndecided,
  Escape: () => grid.clearSelection(),
};

const SINGLE_COMMANDS = {
  w: () => switchView("grid"),
  u: undoLast,
  undo: undoLast,
  Backspace: undoLast,
  s: skipCurrentImage,
  n: markCurrentUndecided,
  z: () => viewer.toggleZoom(),
  "+": () => viewer.zoomBy(1),
  "-": () => viewer.zoomBy(-1),
  c: () => announce(viewer.selectNextPreset()),
  m: () => {
    if (!byId("suggestions-control").hidden) {
      byId("suggestions").click();
    }
  },
  "=": () => {
    if (data.state.predictions_version) {
      showSimilarImages(currentRow);
    }
  },
  "/": () => byId("class-search").focus(),
  "?": openShortcuts,
  PageUp: () => showNeighbor(-1),
  PageDown: () => showNeighbor(1),
};

/** Run the command of a key, and return whether there is one. */
function handleKey(key) {
  if (!data.state) {
    return false;
  }
  const classIndex = assignKeys(data.state.classes).indexOf(key);
  if (isGridShown()) {
    if (classIndex >= 0 && grid.selectedRows.size) {
      labelSelectedImages(classIndex);
      return true;
    }
    GRID_COMMANDS[key]?.();
    return key in GRID_COMMANDS;
  }
  if (classIndex >= 0) {
    labelCurrentImage(classIndex);
    return true;
  }
  if (ARROW_KEY_DRAGS[key] && currentRow >= 0) {
    viewer.adjustWindow(...ARROW_KEY_DRAGS[key]);
    return true;
  }
  SINGLE_COMMANDS[key]?.();
  return key in SINGLE_COMMANDS;
}

function addListeners() {
  addKeyHandler(handleKey);
  const clickHandlers = {
    undo: undoLast,
    skip: skipCurrentImage,
    undecided: markCurrentUndecided,
    zoom: () => viewer.toggleZoom(),
    "previous-in-folder": () => showNeighbor(-1),
    "next-in-folder": () => showNeighbor(1),
    similar: () => showSimilarImages(currentRow),
    train: startTraining,
    help: openShortcuts,
    "tab-single": () => switchView("single"),
    "tab-grid": () => switchView("grid"),
    "grid-undo": undoLast,
    "grid-similar": showSimilarToSelected,
    "select-visible": () => grid.selectVisibleRows(),
    "clear-selection": () => grid.clearSelection(),
    "select-mode": () => {
      grid.isSelecting = !grid.isSelecting;
      renderSelection();
    },
  };
  for (const [id, handleClick] of Object.entries(clickHandlers)) {
    byId(id).addEventListener("click", handleClick);
  }
  byId("filter").addEventListener("change", () => renderGrid());
  byId("suggestions").addEventListener("change", updateSuggestion);
  byId("note").addEventListener("change", saveNote);
  byId("class-search").addEventListener("input", filterClassButtons);
  byId("class-search").addEventListener("keydown", handleClassSearchKey);
  byId("order").addEventListener("change", () =>
    runAction(async () => {
      await reloadOrder();
      showNextImage();
    }),
  );
}

async function openPage() {
  const start = await requestJson("start");
  data.paths = start.paths;
  data.labels = start.labels;
  data.undecided = new Set(start.undecided_rows);
  data.by = start.by;
  data.notes = start.notes;
  data.disagreements = start.disagreements;
  data.state = start;
  applyOrder(start);
  askAnnotatorName(data);
  if (start.labels_from_folders) {
    showNotice(
      "Some labels are names of class folders. Your first label writes all of them to a labels.csv, " +
        "which is used from then on.",
      false,
    );
  }
  showNextImage();
  loadCaptions(data, () => {
    grid.captionHeight += CAPTION_LINE_PIXELS; // captions need a second line
    if (currentRow >= 0) {
      byId("path").textContent = imageTitle(data, currentRow);
    }
    if (isGridShown()) {
      renderGrid(true);
    }
  });
  setTimeout(pollState, BUSY_POLL_MS);
}

addListeners();
try {
  await openPage();
} catch (error) {
  showNotice(error.message);
}
document.body.dataset.ready = "yes";
