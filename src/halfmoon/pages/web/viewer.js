/**
 * A viewer of one image in full depth, with window, zoom and pan. It never changes the file.
 *
 * A window is the range of gray values that is drawn from black to white. Its center and width are in the units of the
 * file, such as Hounsfield units in a CT.
 *
 * @typedef {Object} DecodedImage
 * @property {number} width - In pixels.
 * @property {number} height - In pixels.
 * @property {ImageData} pixels - Pixels as the server sent them.
 * @property {?Uint16Array} codes - Stored value of each pixel of an image with more than 8 bits, otherwise null.
 * @property {boolean} isGray - Whether the image has no color.
 * @property {number} slope - Gray value = slope * stored value + intercept.
 * @property {number} intercept
 * @property {number} low - Gray value that is black by default.
 * @property {number} high - Gray value that is white by default.
 * @property {string} [modality] - Modality of a DICOM image, such as "CT".
 * @property {Float64Array} [cumulativeShares] - Share of pixels at or below each stored value; computed when needed.
 */

import { byId } from "./common.js";

const ZOOM_FACTORS = [1, 1.5, 2, 3, 4, 6, 8, 12, 16];
const MAX_ZOOM = 16;
const SMALL_IMAGE_PIXELS = 64; // images with shorter sides are drawn with visible pixels
const MAX_CACHED_IMAGES = 5;
const CODE_COUNT_16_BIT = 65536;
const CODE_COUNT_8_BIT = 256;

// Center and width of the usual windows of a CT, in Hounsfield units.
const CT_WINDOWS = { lung: [-600, 1500], soft: [40, 400], bone: [400, 1800], brain: [40, 80] };

/** Horizontal and vertical drag in pixels, for `ImageViewer.adjustWindow`, that each arrow key replaces. */
export const ARROW_KEY_DRAGS = { ArrowLeft: [-16, 0], ArrowRight: [16, 0], ArrowUp: [0, -16], ArrowDown: [0, 16] };

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

const roundToFiveDigits = (value) => Number(value.toPrecision(5));

/** Check whether red, green and blue are equal, in a sample of about 5,000 pixels. */
export function hasOnlyGrays(channels) {
  const pixelCount = channels.length / 4;
  const step = 4 * Math.max(1, Math.floor(pixelCount / 5000));
  for (let index = 0; index < channels.length; index += step) {
    if (channels[index] !== channels[index + 1] || channels[index] !== channels[index + 2]) {
      return false;
    }
  }
  return true;
}

/**
 * Fetch and decode an image.
 *
 * @param {number} row - Row of the image in the folder.
 * @returns {Promise<DecodedImage>}
 * @throws {Error} The server cannot decode the image; `status` is the HTTP status.
 */
async function fetchImage(row) {
  const response = await fetch(`image/${row}`);
  if (!response.ok) {
    throw Object.assign(new Error(await response.text()), { status: response.status });
  }
  const grayScale = JSON.parse(response.headers.get("x-grays")); // null for images of 8 bits
  // Color management and alpha would change the values of pixels.
  const bitmapOptions = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
  const bitmap = await createImageBitmap(await response.blob(), bitmapOptions);
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const pixels = context.getImageData(0, 0, width, height);
  let codes = null;
  if (grayScale) {
    // The server sends 16-bit values as two channels: red is the high byte, green the low one.
    codes = new Uint16Array(width * height);
    for (let index = 0; index < codes.length; index++) {
      codes[index] = (pixels.data[4 * index] << 8) | pixels.data[4 * index + 1];
    }
  }
  const isGray = codes !== null || hasOnlyGrays(pixels.data);
  return { width, height, pixels, codes, isGray, slope: 1, intercept: 0, low: 0, high: 255, ...grayScale };
}

/**
 * Compute the share of pixels at or below each stored value.
 *
 * @param {DecodedImage} image
 * @returns {Float64Array}
 */
function computeCumulativeShares(image) {
  const counts = new Float64Array(image.codes ? CODE_COUNT_16_BIT : CODE_COUNT_8_BIT);
  if (image.codes) {
    for (const code of image.codes) {
      counts[code]++;
    }
  } else {
    image.pixels.data.forEach((value, index) => {
      const isAlpha = index % 4 === 3;
      if (!isAlpha) {
        counts[value]++;
      }
    });
  }
  for (let code = 1; code < counts.length; code++) {
    counts[code] += counts[code - 1];
  }
  const total = counts.at(-1);
  return counts.map((count) => count / total);
}

function cumulativeSharesOf(image) {
  image.cumulativeShares ??= computeCumulativeShares(image);
  return image.cumulativeShares;
}

/** Viewer of one image. */
export class ImageViewer {
  /**
   * @param {HTMLElement} stage - Element that contains the canvas; it receives pointer and wheel events.
   * @param {HTMLCanvasElement} canvas
   * @param {{preset: HTMLSelectElement, center: HTMLInputElement, width: HTMLInputElement}} controls
   * @param {function(number)} [onUnreadable] - Called with the row of an image that the server cannot decode.
   */
  constructor(stage, canvas, controls, onUnreadable = () => {}) {
    this.stage = stage;
    this.canvas = canvas;
    this.controls = controls;
    this.onUnreadable = onUnreadable;
    this.row = -1;
    this.image = null; // the drawn image, null if it cannot be read
    this.zoom = 1;
    this.x = 0; // shift of the zoomed image from the center, in CSS pixels
    this.y = 0;
    this.scale = 1; // CSS pixels of an image pixel
    this.windowRange = [0, 255]; // gray values of black and white
    this.cache = new Map(); // promises of decoded images by row, the oldest first
    this.pointers = new Map(); // last position of each pressed pointer by its id
    this.frameRequest = 0;
    this.listenToControls();
    this.listenToPointers();
    new ResizeObserver(() => this.updateLayout()).observe(stage);
  }

  listenToControls() {
    this.controls.preset.addEventListener("change", () => this.applyPreset());
    for (const name of ["center", "width"]) {
      this.controls[name].addEventListener("input", () => this.selectCustomWindow());
    }
  }

  listenToPointers() {
    const zoomByWheel = (event) => {
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1 : -1);
    };
    this.stage.addEventListener("wheel", zoomByWheel, { passive: false });
    this.stage.addEventListener("dblclick", () => this.toggleZoom());
    this.stage.addEventListener("contextmenu", (event) => event.preventDefault());
    this.stage.addEventListener("pointerdown", (event) => {
      this.stage.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    });
    this.stage.addEventListener("pointermove", (event) => {
      if (this.pointers.has(event.pointerId)) {
        this.handleDrag(event);
      }
    });
    for (const name of ["pointerup", "pointercancel"]) {
      this.stage.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
  }

  /**
   * Handle the move of a pressed pointer: two fingers zoom. One pointer moves a zoomed image, and otherwise changes the
   * window, as it always does with the right button or Shift.
   */
  handleDrag(event) {
    const [previousX, previousY] = this.pointers.get(event.pointerId);
    const otherPointers = [...this.pointers].filter(([id]) => id !== event.pointerId);
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    const deltaX = event.clientX - previousX;
    const deltaY = event.clientY - previousY;
    if (otherPointers.length) {
      const [, [otherX, otherY]] = otherPointers[0];
      const distance = Math.hypot(event.clientX - otherX, event.clientY - otherY);
      const previousDistance = Math.hypot(previousX - otherX, previousY - otherY);
      this.zoom = clamp(this.zoom * (distance / Math.max(1, previousDistance)), 1, MAX_ZOOM);
      this.updateLayout();
    } else if (this.zoom > 1 && !event.shiftKey && event.buttons !== 2) {
      this.panTo(this.x + deltaX, this.y + deltaY);
    } else {
      this.adjustWindow(deltaX, deltaY);
    }
  }

  /**
   * Change the window as by a drag: to the right it gets wider, downward its center rises.
   *
   * @param {number} deltaX - Pixels to the right.
   * @param {number} deltaY - Pixels downward.
   */
  adjustWindow(deltaX, deltaY) {
    const { center, width } = this.controls;
    center.value = roundToFiveDigits(Number(center.value) + (deltaY * Number(width.value)) / 300);
    width.value = roundToFiveDigits(Number(width.value) * Math.exp(deltaX / 150));
    this.selectCustomWindow();
  }

  selectCustomWindow() {
    this.controls.preset.value = "custom";
    this.requestDraw();
  }

  /**
   * Show an image. The zoom is reset unless it is the shown one already.
   *
   * @param {number} row - Row of the image in the folder.
   * @param {string} description - Text for screen readers.
   */
  async showImage(row, description) {
    if (row !== this.row) {
      this.row = row;
      this.zoom = 1;
      this.x = 0;
      this.y = 0;
    }
    this.canvas.setAttribute("aria-label", description);
    const image = await this.loadImage(row).catch(() => null);
    if (row !== this.row) {
      return; // another image was requested meanwhile
    }
    this.image = image;
    this.stage.classList.toggle("unreadable", !image);
    this.stage.classList.toggle("gray", Boolean(image?.isGray));
    this.canvas.dataset.row = row;
    if (!image) {
      return;
    }
    this.canvas.width = image.width;
    this.canvas.height = image.height;
    this.updateControls();
    this.applyPreset();
    this.updateLayout();
  }

  /** Show only the controls that the image can use: photographs have no window, and only a CT has those of a CT. */
  updateControls() {
    const { preset, center, width } = this.controls;
    center.parentElement.hidden = !this.image.isGray;
    width.parentElement.hidden = !this.image.isGray;
    for (const option of preset.querySelectorAll(".ct")) {
      option.disabled = this.image.modality !== "CT";
      option.hidden = option.disabled;
    }
    if (preset.selectedOptions[0].disabled) {
      preset.value = "file";
    }
  }

  /**
   * Load an image, or get it from the cache.
   *
   * @param {number} row - Row of the image in the folder.
   * @returns {Promise<DecodedImage>}
   */
  loadImage(row) {
    if (!this.cache.has(row)) {
      const image = fetchImage(row);
      image.catch((error) => {
        this.cache.delete(row);
        if (error.status === 415) {
          this.onUnreadable(row);
        }
      });
      this.cache.set(row, image);
    }
    const excess = Math.max(0, this.cache.size - MAX_CACHED_IMAGES);
    for (const oldRow of [...this.cache.keys()].slice(0, excess)) {
      if (oldRow !== row) {
        this.cache.delete(oldRow);
      }
    }
    return this.cache.get(row);
  }

  /** Load the images that are probably shown next. */
  preloadImages(rows) {
    for (const row of rows) {
      this.loadImage(row).catch(() => {}); // reported when the image is shown
    }
  }

  /** Set the window of the selected preset; a custom window remains for the next images as well. */
  applyPreset() {
    if (!this.image) {
      return;
    }
    const { preset, center, width } = this.controls;
    if (preset.value !== "custom") {
      const [low, high] = this.computePresetRange(preset.value);
      center.value = roundToFiveDigits((low + high) / 2);
      width.value = roundToFiveDigits(high - low);
      this.windowRange = [low, high];
    }
    this.requestDraw();
  }

  /** Compute the gray values of black and white of a preset. */
  computePresetRange(preset) {
    const { low, high, slope, intercept } = this.image;
    if (CT_WINDOWS[preset]) {
      const [center, width] = CT_WINDOWS[preset];
      return [center - width / 2, center + width / 2];
    }
    if (preset === "stretch") {
      const shares = cumulativeSharesOf(this.image);
      const percentiles = [0.01, 0.99].map((share) => shares.findIndex((cumulative) => cumulative >= share));
      // A negative slope swaps the ends.
      return percentiles.map((code) => slope * code + intercept).sort((a, b) => a - b);
    }
    return [low, high];
  }

  /** Draw the image in the next frame; several requests in one frame draw it once. */
  requestDraw() {
    if (this.controls.preset.value === "custom") {
      const center = Number(this.controls.center.value);
      const width = Math.max(1e-9, Number(this.controls.width.value));
      this.windowRange = [center - width / 2, center + width / 2];
    }
    if (this.frameRequest) {
      return;
    }
    this.frameRequest = requestAnimationFrame(() => {
      this.frameRequest = 0;
      if (this.image) {
        this.drawImage();
      }
    });
  }

  /** Compute the brightness (0 to 255) of each stored value, by the window and the preset. */
  computeBrightnessTable() {
    const { codes, slope, intercept } = this.image;
    const preset = this.controls.preset.value;
    const table = new Uint8ClampedArray(codes ? CODE_COUNT_16_BIT : CODE_COUNT_8_BIT);
    if (preset === "equalize") {
      table.set(cumulativeSharesOf(this.image).map((share) => 255 * share));
      return table;
    }
    const [black, white] = this.windowRange.map((gray) => (gray - intercept) / slope).sort((a, b) => a - b);
    for (let code = 0; code < table.length; code++) {
      const share = clamp((code - black) / (white - black || 1), 0, 1);
      // Rounded as in training, so that the shown pixels are those that a model sees.
      const brightness = Math.floor(share * 255 + 0.5);
      table[code] = preset === "invert" ? 255 - brightness : brightness;
    }
    return table;
  }

  drawImage() {
    const { codes, pixels, width, height } = this.image;
    const table = this.computeBrightnessTable();
    const output = new ImageData(width, height);
    for (let index = 0; index < output.data.length; index += 4) {
      for (let channel = 0; channel < 3; channel++) {
        const code = codes ? codes[index / 4] : pixels.data[index + channel];
        output.data[index + channel] = table[code];
      }
      output.data[index + 3] = 255;
    }
    this.canvas.getContext("2d").putImageData(output, 0, 0);
    this.canvas.dataset.preset = this.controls.preset.value;
  }

  /** Fit the image into the stage, times the zoom. */
  updateLayout() {
    if (!this.image) {
      return;
    }
    const { width, height } = this.image;
    this.scale = Math.min(this.stage.clientWidth / width, this.stage.clientHeight / height) * this.zoom;
    this.canvas.style.width = `${width * this.scale}px`;
    this.canvas.style.height = `${height * this.scale}px`;
    // The pixels of a small or a zoomed image are shown as they are; a photograph that fits is smooth.
    const isSmall = Math.max(width, height) < SMALL_IMAGE_PIXELS;
    const showsPixels = this.scale >= 3 && (this.zoom > 1 || isSmall);
    this.canvas.style.imageRendering = showsPixels ? "pixelated" : "auto";
    this.panTo(this.x, this.y);
  }

  /** Shift the image from the center, at most to its edges. */
  panTo(x, y) {
    const maxX = Math.max(0, (this.image.width * this.scale - this.stage.clientWidth) / 2);
    const maxY = Math.max(0, (this.image.height * this.scale - this.stage.clientHeight) / 2);
    this.x = clamp(x, -maxX, maxX);
    this.y = clamp(y, -maxY, maxY);
    this.canvas.style.transform = `translate(calc(-50% + ${this.x}px), calc(-50% + ${this.y}px))`;
    this.stage.classList.toggle("zoomed", this.zoom > 1);
  }

  /** Zoom in by a number of steps, or out if it is negative. */
  zoomBy(steps) {
    const current = ZOOM_FACTORS.findLastIndex((factor) => factor <= this.zoom);
    this.zoom = ZOOM_FACTORS[clamp(current + steps, 0, ZOOM_FACTORS.length - 1)];
    this.updateLayout();
  }

  toggleZoom() {
    this.zoom = this.zoom === 1 ? 3 : 1;
    this.updateLayout();
  }

  /**
   * Select the next preset of the window.
   *
   * @returns {string} Its name, for screen readers.
   */
  selectNextPreset() {
    const { preset } = this.controls;
    const options = [...preset.options].filter((option) => !option.disabled && option.value !== "custom");
    const current = options.indexOf(preset.selectedOptions[0]); // -1 for a custom window
    preset.value = options[(current + 1) % options.length].value;
    this.applyPreset();
    return preset.selectedOptions[0].textContent;
  }
}

/** Find the controls of the viewer, which viewer_tools.html has. */
export function findViewerControls() {
  return { preset: byId("window-preset"), center: byId("window-center"), width: byId("window-width") };
}
