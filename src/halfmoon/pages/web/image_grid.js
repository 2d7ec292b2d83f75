/**
 * A scrolling grid of images that has elements only for visible cells, so that ten thousand scroll as fast as ten.
 *
 * A row is the index of an image in the folder, and a position is its place in the grid.
 */

import { createElement } from "./common.js";
import { hasOnlyGrays } from "./viewer.js";

const REQUEST_DELAY_MS = 70; // a cell must be visible for this time before its image is requested
const PADDING_PIXELS = 4; // at the left and the right side of the grid
const SMALL_IMAGE_PIXELS = 96; // narrower images are drawn with visible pixels
const SAMPLE_SIDE_PIXELS = 16; // of the copy of an image whose colors are read

/**
 * @typedef {Object} CellContent
 * @property {string} title - Tooltip of the cell.
 * @property {(string|Node)[]} lines - Texts below the image.
 * @property {boolean} [isMarked] - Whether the cell is marked as one whose label is probably wrong.
 */

/** Check whether a loaded image is gray, such as a radiograph. */
function isGray(image) {
  const context = new OffscreenCanvas(SAMPLE_SIDE_PIXELS, SAMPLE_SIDE_PIXELS).getContext("2d");
  context.drawImage(image, 0, 0, SAMPLE_SIDE_PIXELS, SAMPLE_SIDE_PIXELS);
  return hasOnlyGrays(context.getImageData(0, 0, SAMPLE_SIDE_PIXELS, SAMPLE_SIDE_PIXELS).data);
}

/** Grid of images, of which some can be selected. */
export class ImageGrid {
  /**
   * @param {HTMLElement} container - Scrolling element of the grid.
   * @param {Object} options
   * @param {function(number): CellContent} options.describeCell - Returns the content of a row's cell.
   * @param {function(number)} options.onOpen - Called with the position of a cell after a click or Enter.
   * @param {function(number): string} options.imageUrl - Returns the URL of a row's image.
   * @param {function()} [options.onSelect] - Called when the selection changes. If it is given, images can be selected:
   *   with Shift, Ctrl, Space, a drag, and with a click while `isSelecting`.
   * @param {function(number)} [options.onUnreadable] - Called with a row whose image the server cannot decode.
   * @param {number} [options.minCellWidth] - In pixels.
   * @param {number} [options.captionHeight] - Height of the texts below an image, in pixels.
   */
  constructor(
    container,
    { describeCell, onOpen, imageUrl, onSelect = null, onUnreadable = null, minCellWidth = 132, captionHeight = 40 },
  ) {
    this.container = container;
    this.describeCell = describeCell;
    this.onOpen = onOpen;
    this.imageUrl = imageUrl;
    this.onSelect = onSelect;
    this.onUnreadable = onUnreadable;
    this.minCellWidth = minCellWidth;
    this.captionHeight = captionHeight;

    this.rows = []; // shown rows by position
    this.cells = new Map(); // elements by position
    this.focusedPosition = 0;
    this.columns = 0; // 0 while the container has no size
    this.cellWidth = 0;
    this.cellHeight = 0;

    this.selectedRows = new Set();
    this.isSelecting = false; // whether a click selects an image instead of opening it
    this.lastSelectedPosition = null; // where a selection with Shift starts
    this.dragStartPosition = -1;
    this.isDragging = false;

    // Has the height of all cells, so that the container's scroll bar is right.
    this.content = createElement("div", { class: "grid-content" });
    container.append(this.content);
    container.addEventListener("scroll", () => this.drawVisibleCells(), { passive: true });
    container.addEventListener("keydown", (event) => this.handleKey(event));
    if (onSelect) {
      this.listenToSelection();
    }
    new ResizeObserver(() => this.updateLayout()).observe(container);
  }

  listenToSelection() {
    const findPosition = (event) => Number(event.target.closest?.(".cell")?.dataset.position ?? -1);
    this.container.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) {
        this.dragStartPosition = findPosition(event);
      }
    });
    this.container.addEventListener("pointerover", (event) => {
      const position = findPosition(event);
      const isPressed = (event.buttons & 1) === 1;
      if (!isPressed || this.dragStartPosition < 0 || position < 0 || position === this.dragStartPosition) {
        return;
      }
      this.isDragging = true;
      this.selectRows(this.rowsBetween(this.dragStartPosition, position));
    });
    // In the capturing phase, before the listener of the cell, which opens the image.
    this.container.addEventListener("click", (event) => this.handleSelectionClick(event, findPosition(event)), {
      capture: true,
    });
    // The click of a drag comes after its pointerup, and must still see that it was a drag.
    addEventListener("pointerup", () => setTimeout(() => this.endDrag()));
  }

  endDrag() {
    this.dragStartPosition = -1;
    this.isDragging = false;
  }

  handleSelectionClick(event, position) {
    const wasDrag = this.isDragging;
    this.endDrag();
    const selects = wasDrag || event.shiftKey || event.ctrlKey || event.metaKey || this.isSelecting;
    if (position < 0 || !selects) {
      return;
    }
    event.stopPropagation();
    if (wasDrag) {
      return;
    }
    if (event.shiftKey) {
      const start = this.lastSelectedPosition ?? position;
      this.selectRows([...this.selectedRows, ...this.rowsBetween(start, position)]);
    } else {
      this.toggleSelection(position);
    }
    this.lastSelectedPosition = position;
  }

  rowsBetween(start, end) {
    return this.rows.slice(Math.min(start, end), Math.max(start, end) + 1);
  }

  toggleSelection(position) {
    const row = this.rows[position];
    const rows = new Set(this.selectedRows);
    if (!rows.delete(row)) {
      rows.add(row);
    }
    this.selectRows(rows);
  }

  /** Select these rows, and no others. */
  selectRows(rows) {
    this.selectedRows = new Set(rows);
    for (const [position, cell] of this.cells) {
      cell.classList.toggle("selected", this.selectedRows.has(this.rows[position]));
    }
    this.onSelect();
  }

  clearSelection() {
    this.selectRows([]);
  }

  /** Select the rows whose cells are completely visible, at least one line of cells. */
  selectVisibleRows() {
    const { scrollTop, clientHeight } = this.container;
    const start = Math.ceil(scrollTop / this.cellHeight) * this.columns;
    const end = Math.floor((scrollTop + clientHeight) / this.cellHeight) * this.columns;
    this.selectRows(this.rows.slice(start, Math.max(end, start + this.columns)));
  }

  /**
   * Show images.
   *
   * @param {number[]} rows - Rows of the images in their order.
   * @param {boolean} [keepsScroll] - Whether scroll position and focus remain.
   */
  showRows(rows, keepsScroll = false) {
    this.rows = rows;
    if (!keepsScroll) {
      this.container.scrollTop = 0;
      this.focusedPosition = 0;
    }
    this.focusedPosition = Math.min(this.focusedPosition, Math.max(0, rows.length - 1));
    this.updateLayout(true);
  }

  /** Update the texts of a row, if it is visible. */
  refreshRow(row) {
    for (const [position, cell] of this.cells) {
      if (this.rows[position] === row) {
        this.updateCell(cell, position);
      }
    }
  }

  /**
   * Compute the size of the cells from that of the container, and draw the visible ones.
   *
   * @param {boolean} [redrawsAll] - Whether all cells are created again, also if their size remains.
   */
  updateLayout(redrawsAll = false) {
    const width = this.container.clientWidth - 2 * PADDING_PIXELS;
    if (width <= 0) {
      return; // the container is hidden
    }
    const columns = Math.max(2, Math.floor(width / this.minCellWidth));
    const cellWidth = Math.floor(width / columns);
    if (redrawsAll || cellWidth !== this.cellWidth || columns !== this.columns) {
      this.columns = columns;
      this.cellWidth = cellWidth;
      this.cellHeight = cellWidth + this.captionHeight;
      this.content.style.height = `${Math.ceil(this.rows.length / columns) * this.cellHeight}px`;
      for (const position of [...this.cells.keys()]) {
        this.removeCell(position);
      }
    }
    this.drawVisibleCells();
  }

  /** Create the cells that are visible, or one line above or below, and remove the others. */
  drawVisibleCells() {
    if (!this.columns) {
      return;
    }
    const { scrollTop, clientHeight } = this.container;
    const firstLine = Math.max(0, Math.floor(scrollTop / this.cellHeight) - 1);
    const endLine = Math.ceil((scrollTop + clientHeight) / this.cellHeight) + 1;
    const start = firstLine * this.columns;
    const end = Math.min(this.rows.length, endLine * this.columns);
    for (const [position, cell] of [...this.cells]) {
      const isOutside = position < start || position >= end;
      // Without the focused cell, keys would no longer reach the grid.
      if (isOutside && !cell.contains(document.activeElement)) {
        this.removeCell(position);
      }
    }
    for (let position = start; position < end; position++) {
      if (!this.cells.has(position)) {
        this.addCell(position);
      }
    }
  }

  removeCell(position) {
    const cell = this.cells.get(position);
    clearTimeout(cell.requestTimer);
    cell.remove();
    this.cells.delete(position);
  }

  addCell(position) {
    const left = PADDING_PIXELS + (position % this.columns) * this.cellWidth;
    const top = Math.floor(position / this.columns) * this.cellHeight;
    const cell = createElement("button", {
      type: "button",
      class: "cell",
      "data-position": position,
      tabindex: position === this.focusedPosition ? 0 : -1,
      style: `left:${left}px;top:${top}px;width:${this.cellWidth}px;height:${this.cellHeight}px`,
      onclick: () => this.onOpen(position),
    });
    const image = createElement("img", { alt: "", draggable: "false", decoding: "async" });
    image.addEventListener("load", () => {
      image.classList.toggle("small", image.naturalWidth < SMALL_IMAGE_PIXELS);
      image.classList.toggle("gray", isGray(image));
    });
    image.addEventListener("error", () => {
      image.replaceWith(createElement("span", { class: "unreadable" }, "cannot be read"));
      this.onUnreadable?.(this.rows[position]);
    });
    cell.append(image);
    this.updateCell(cell, position);
    const url = this.imageUrl(this.rows[position]); // the position may have another row when the timer ends
    cell.requestTimer = setTimeout(() => {
      image.src = url;
    }, REQUEST_DELAY_MS);
    this.content.append(cell);
    this.cells.set(position, cell);
  }

  updateCell(cell, position) {
    const row = this.rows[position];
    const { title, lines, isMarked } = this.describeCell(row);
    cell.title = title;
    cell.classList.toggle("marked", Boolean(isMarked));
    cell.classList.toggle("selected", this.selectedRows.has(row));
    while (cell.childNodes.length > 1) {
      cell.lastChild.remove(); // all but the image
    }
    cell.append(...lines.map((line) => createElement("span", { class: "caption" }, line)));
  }

  handleKey(event) {
    if (event.key === " " && this.onSelect) {
      event.preventDefault();
      this.lastSelectedPosition = this.focusedPosition;
      this.toggleSelection(this.focusedPosition);
      return;
    }
    const visibleLines = Math.max(1, Math.floor(this.container.clientHeight / this.cellHeight));
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.columns,
      ArrowDown: this.columns,
      PageUp: -visibleLines * this.columns,
      PageDown: visibleLines * this.columns,
      Home: -Infinity,
      End: Infinity,
    };
    const step = steps[event.key];
    if (step === undefined || !this.rows.length) {
      return;
    }
    event.preventDefault();
    this.focusPosition(this.focusedPosition + step);
  }

  /** Move the focus to a position, or the nearest existing one, and scroll to it. */
  focusPosition(position) {
    this.cells.get(this.focusedPosition)?.setAttribute("tabindex", -1);
    this.focusedPosition = Math.min(this.rows.length - 1, Math.max(0, position));
    const top = Math.floor(this.focusedPosition / this.columns) * this.cellHeight;
    const bottom = top + this.cellHeight;
    if (top < this.container.scrollTop) {
      this.container.scrollTop = top;
    } else if (bottom > this.container.scrollTop + this.container.clientHeight) {
      this.container.scrollTop = bottom - this.container.clientHeight;
    }
    // A focused cell is never removed, so the old one loses the focus before the cells are drawn.
    document.activeElement?.blur?.();
    this.drawVisibleCells();
    const cell = this.cells.get(this.focusedPosition);
    cell?.setAttribute("tabindex", 0);
    cell?.focus({ preventScroll: true });
  }
}
