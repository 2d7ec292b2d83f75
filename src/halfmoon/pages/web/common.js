/**
 * Functions that all pages share: elements, requests, keyboard shortcuts, dialogs, and labels.
 *
 * Texts from files and people are inserted as text nodes and never parsed as HTML.
 *
 * @typedef {Object} LabelState The state of all labels, as the server's endpoint /state describes it.
 * @property {number} version - Grows with every change of a label.
 * @property {[row: number, label: number, undecided: number][]} changes - Images that changed after the version of
 *   the page.
 * @property {string[]} classes - Names of the classes.
 * @property {number[]} counts - Number of labels of each class.
 * @property {number[]} rare_classes - Indices of the classes with far fewer labels than others.
 *
 * @typedef {Object} FolderData Images of the folder, and their labels. A row is the index of an image in the folder.
 * @property {string[]} paths - Path of each image.
 * @property {number[]} labels - Class index of each image, -1 for none.
 * @property {Set<number>} undecided - Rows of the images that a person could not label.
 * @property {LabelState} state - The latest state of the labels.
 * @property {Object<number, string>} [captions] - Captions of DICOM images by row.
 * @property {?string} by - Name that the server records with each label: null for none, "" to ask for it.
 * @property {string} [annotator] - Name of the person who labels on this page.
 */

const STOPPED_MESSAGE = "halfmoon no longer runs: it was stopped in the terminal. All labels so far are saved.";

// Keys of classes are the digits and then these letters, which no command uses.
const CLASS_LETTERS = "abdefghijklopqrtvxy";
const COMMAND_KEYS = "cmnsuwz+-/?=";

/** Error of a request that the server refused, or to which it does not respond. */
export class RequestError extends Error {
  /**
   * @param {number} status - HTTP status; 0 if the server does not respond.
   * @param {{error?: string, current?: string}} body - Message of the error; for a conflict also the image's label.
   */
  constructor(status, body) {
    super(body.error ?? "The server of this page sent an invalid response.");
    this.status = status;
    this.currentLabel = body.current;
  }
}

/**
 * Create an HTML element.
 *
 * @param {string} tag - Name of the element.
 * @param {?Object} attributes - Attributes by name; those that start with "on" are event listeners. The value true sets
 *   an attribute without a value; null, undefined and false leave the attribute out.
 * @param {...(Node|string|Array|null|undefined)} children - Contents; arrays are flattened, null and undefined skipped.
 * @returns {HTMLElement}
 */
export function createElement(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const formatCount = (number) => number.toLocaleString("en");

export const formatPercent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

/**
 * Request JSON from the server of this page.
 *
 * @param {string} path - Path relative to the page.
 * @param {Object} [body] - JSON to send by POST; without it the request is a GET.
 * @returns {Promise<Object>} The JSON of the response.
 * @throws {RequestError} The server refused the request, or does not respond.
 */
export async function requestJson(path, body) {
  const options =
    body === undefined
      ? {}
      : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new RequestError(0, { error: STOPPED_MESSAGE });
  }
  const content = await response.json().catch(() => ({}));
  if (!response.ok) {
    throw new RequestError(response.status, content);
  }
  return content;
}

/** Show a message at the top of the page; "" hides it. */
export function showNotice(text, isError = true) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.textContent = text;
  notice.classList.toggle("error", isError);
}

/** Remove the notice that the server was stopped, after it has responded again. */
export function clearStoppedNotice() {
  if (byId("notice").textContent === STOPPED_MESSAGE) {
    showNotice("");
  }
}

/** Let screen readers read a text. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/**
 * Assign a key to each class: its name if all names are single characters, otherwise digits and letters.
 *
 * @param {string[]} classes - Names of the classes.
 * @returns {string[]} A key for each class, "" for classes beyond the available keys.
 */
export function assignKeys(classes) {
  const names = classes.map((name) => name.toLowerCase());
  const areKeys = names.every((name) => name.length === 1 && !COMMAND_KEYS.includes(name));
  if (areKeys && new Set(names).size === names.length) {
    return names;
  }
  const keys = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "0", ...CLASS_LETTERS];
  return classes.map((_, index) => keys[index] ?? "");
}

/** Return the key of an event; letters are lower case. */
export const normalizeKey = (event) => (event.key.length === 1 ? event.key.toLowerCase() : event.key);

/**
 * Call a handler for each key, unless the focus is in a field or a dialog is open.
 *
 * @param {function(string): boolean} handleKey - Receives the key ("undo" for Ctrl+Z), and returns whether it used it.
 */
export function addKeyHandler(handleKey) {
  // A select keeps the focus after a choice; without it the next key is a command.
  document.addEventListener("change", (event) => event.target.blur());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey && event.key.toLowerCase() === "z") {
      if (handleKey("undo")) {
        event.preventDefault();
      }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) {
      return;
    }
    const target = event.target.tagName;
    if (document.querySelector("dialog[open]") || /^(INPUT|SELECT|TEXTAREA)$/.test(target)) {
      return;
    }
    // These keys press the focused button.
    if ((event.key === " " || event.key === "Enter") && /^(BUTTON|A|SUMMARY)$/.test(target)) {
      return;
    }
    if (handleKey(normalizeKey(event))) {
      event.preventDefault();
    }
  });
}

/** Move some rows to the end, without changing the order otherwise. */
export function moveToEnd(rows, lastRows) {
  if (!lastRows.size) {
    return rows;
  }
  return [...rows.filter((row) => !lastRows.has(row)), ...rows.filter((row) => lastRows.has(row))];
}

/** Return the caption of a DICOM image, or the file name of any other image. */
export const imageName = (data, row) => data.captions?.[row] ?? data.paths[row].split("/").at(-1);

/** Return the path of an image, after its caption if it has one. */
export function imageTitle(data, row) {
  const path = data.paths[row];
  const caption = data.captions?.[row];
  return caption ? `${caption} (${path})` : path;
}

/**
 * Load the captions of DICOM images, which takes long in large folders.
 *
 * @param {FolderData} data - Gets the captions.
 * @param {function()} onLoaded - Called if there are any.
 */
export async function loadCaptions(data, onLoaded) {
  const { captions } = await requestJson("captions").catch(() => ({ captions: {} }));
  data.captions = captions;
  if (Object.keys(captions).length) {
    onLoaded();
  }
}

/**
 * Ask a question in a dialog.
 *
 * @param {string} title - Heading of the dialog.
 * @param {string} text - The question.
 * @param {[value: string, text: string][]} buttons - Values and texts of the buttons; the first is the main one.
 * @returns {Promise<string>} Value of the pressed button, "" for Escape.
 */
export function askQuestion(title, text, buttons) {
  return new Promise((resolve) => {
    const dialog = createElement("dialog", { "aria-label": title });
    const buttonElements = buttons.map(([value, label], index) =>
      createElement(
        "button",
        { type: "button", class: index === 0 ? "main" : null, onclick: () => dialog.close(value) },
        label,
      ),
    );
    dialog.append(
      createElement("h2", null, title),
      createElement("p", null, text),
      createElement("div", { class: "button-row" }, buttonElements),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Measure the widest word of names in the font of an element, in pixels, so that no column breaks a word. */
function measureWidestWord(element, names) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = getComputedStyle(element).font;
  const words = names.flatMap((name) => name.split(/\s+/));
  return Math.ceil(Math.max(...words.map((word) => context.measureText(word).width)));
}

/**
 * Show a button for each class, with its key, the number of its labels, and a note if it has few.
 *
 * @param {HTMLElement} container - Element that gets the buttons.
 * @param {LabelState} state - Classes and counts.
 * @param {Object} options
 * @param {number} [options.current] - Class of the shown image, -1 for none.
 * @param {string} [options.suggested] - Name of the class that the model predicts, "" for none.
 * @param {function(number)} options.onPress - Called with the class index of a pressed button.
 */
export function renderClassButtons(container, state, { current = -1, suggested = "", onPress }) {
  const largestCount = Math.max(1, ...state.counts);
  const keys = assignKeys(state.classes);
  container.style.setProperty("--word-width", `${measureWidestWord(container, state.classes)}px`);
  const buttons = state.classes.map((name, index) => {
    const classNames = [];
    if (name === suggested) {
      classNames.push("suggested");
    }
    if (index === current) {
      classNames.push("current");
    }
    const key = keys[index];
    const count = state.counts[index];
    const rareNote = state.rare_classes.includes(index) ? createElement("span", { class: "rare" }, "few labels") : null;
    const attributes = {
      type: "button",
      class: classNames.join(" ") || null,
      "data-class": index,
      "aria-keyshortcuts": key || null,
      "aria-pressed": index === current ? "true" : null,
      onclick: () => onPress(index),
    };
    return createElement(
      "button",
      attributes,
      createElement("kbd", null, key || "·"),
      createElement("span", { class: "name" }, name),
      createElement("span", { class: "muted numeric" }, rareNote, ` ${formatCount(count)}`),
      createElement("span", { class: "bar", style: `width:${(100 * count) / largestCount}%` }),
    );
  });
  container.replaceChildren(...buttons);
}

/**
 * Show how many images of a grid are selected, and the buttons that label all of them.
 *
 * @param {import("./image_grid.js").ImageGrid} grid
 * @param {LabelState} state - Classes and counts.
 * @param {function(number)} onPress - Called with the class index of a pressed button.
 */
export function renderBulkButtons(grid, state, onPress) {
  const count = grid.selectedRows.size;
  byId("bulk-labels").hidden = count === 0;
  byId("clear-selection").hidden = count === 0;
  byId("selection-count").textContent = `${formatCount(count)} selected`;
  byId("select-mode").setAttribute("aria-pressed", String(grid.isSelecting));
  if (count) {
    renderClassButtons(byId("bulk-class-buttons"), state, { onPress });
  }
}

/** Let the grid of images fill the window below the elements above it. */
export function fitGridToWindow() {
  const grid = byId("image-grid");
  const heightAbove = Math.ceil(grid.getBoundingClientRect().top + scrollY);
  grid.style.setProperty("--height-above", `${heightAbove}px`);
}

/**
 * Apply the changes of a new state to the labels of the page.
 *
 * @param {FolderData} data
 * @param {LabelState} state - State from the server, with the changes since the version of the page.
 */
export function applyState(data, state) {
  for (const [row, label, isUndecided] of state.changes) {
    data.labels[row] = label;
    if (isUndecided) {
      data.undecided.add(row);
    } else {
      data.undecided.delete(row);
    }
  }
  data.state = state;
}

/**
 * Save the label of an image. If another person has changed the label meanwhile, ask which one to keep.
 *
 * @param {FolderData} data
 * @param {number} row - Row of the image.
 * @param {string} label - Name of its class; "" removes the label.
 * @param {string} previous - Name of its class that the page showed, "" for none.
 * @returns {Promise<boolean>} False if the other person's label was kept.
 * @throws {RequestError} The server refused the label.
 */
export async function saveLabel(data, row, label, previous) {
  const send = (expectedLabel) =>
    requestJson("label", {
      row,
      label,
      previous: expectedLabel,
      by: data.annotator ?? "",
      since: data.state.version,
    });
  try {
    applyState(data, await send(previous));
    return true;
  } catch (error) {
    if (error.status !== 409) {
      throw error;
    }
    const currentText = error.currentLabel || "no label";
    const newText = label || "no label";
    const choice = await askQuestion(
      "Another person labeled this image",
      `${data.paths[row]}: its label is now ${currentText}. Your label is ${newText}.`,
      [
        ["keep", `Keep ${currentText}`],
        ["change", `Change to ${newText}`],
      ],
    );
    if (choice !== "change") {
      return false;
    }
    applyState(data, await send(error.currentLabel));
    return true;
  }
}

/**
 * Save the labels of several images, all or none.
 *
 * @param {FolderData} data
 * @param {[row: number, label: string, previous: string][]} entries - New and shown label of each image, "" for none.
 * @throws {RequestError} The server refused the labels.
 */
export async function saveLabels(data, entries) {
  const state = await requestJson("labels", { entries, by: data.annotator ?? "", since: data.state.version });
  applyState(data, state);
}

/** Ask for the annotator's name if labels are recorded with names, once per browser tab. */
export function askAnnotatorName(data) {
  if (data.by === null) {
    return;
  }
  data.annotator = data.by || sessionStorage.getItem("annotator") || "";
  if (data.annotator) {
    return;
  }
  const input = createElement("input", { type: "text", maxlength: 100, "aria-label": "your name", required: true });
  const form = createElement(
    "form",
    { method: "dialog" },
    createElement("h2", null, "Your name"),
    createElement("p", null, "Your name is recorded with each label in labels.csv."),
    input,
    createElement("div", { class: "button-row" }, createElement("button", { class: "main" }, "Start")),
  );
  const dialog = createElement("dialog", { "aria-label": "Your name" }, form);
  dialog.addEventListener("close", () => {
    data.annotator = input.value.trim() || "somebody";
    sessionStorage.setItem("annotator", data.annotator);
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
