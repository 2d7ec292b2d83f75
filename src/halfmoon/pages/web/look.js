// Show one image in full depth, with window and level, zoom and pan. The file is not changed.

import { byId } from "./common.js";

const STEPS = [1, 1.5, 2, 3, 4, 6, 8, 12, 16];
const TINY = 64; // pixels of a side
const KEPT = 5; // decoded images in memory

// Center and width of the usual windows of a CT, in Hounsfield units.
const CT = { lung: [-600, 1500], soft: [40, 400], bone: [400, 1800], brain: [40, 80] };

// Whether red, green and blue are equal in a sample of the pixels.
function isGray(channels) {
  const step = 4 * Math.max(1, Math.floor(channels.length / 4 / 5000));
  for (let n = 0; n < channels.length; n += step) if (channels[n] !== channels[n + 1] || channels[n] !== channels[n + 2]) return false;
  return true;
}

// An image as it was sent: 16-bit grays in two bytes, or 8 bits a channel.
async function read(row) {
  const answer = await fetch(`image/${row}`);
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  const grays = JSON.parse(answer.headers.get("x-grays"));
  const bitmap = await createImageBitmap(await answer.blob(), { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const { width, height } = bitmap;
  const flat = new OffscreenCanvas(width, height).getContext("2d");
  flat.drawImage(bitmap, 0, 0);
  const pixels = flat.getImageData(0, 0, width, height);
  const codes = grays && Uint16Array.from({ length: width * height }, (_, n) => (pixels.data[4 * n] << 8) | pixels.data[4 * n + 1]);
  const gray = Boolean(codes) || isGray(pixels.data);
  return { width, height, pixels, codes, gray, slope: 1, intercept: 0, low: 0, high: 255, ...grays };
}

// The share of pixels at or below each code.
function shares(image) {
  const counts = new Float64Array(image.codes ? 65536 : 256);
  if (image.codes) for (const code of image.codes) counts[code]++;
  else for (let n = 0; n < image.pixels.data.length; n++) if (n % 4 !== 3) counts[image.pixels.data[n]]++;
  for (let code = 1; code < counts.length; code++) counts[code] += counts[code - 1];
  return counts.map((count) => count / counts.at(-1));
}

export class Look {
  constructor(stage, canvas, tools) {
    Object.assign(this, { stage, canvas, tools, row: -1, zoom: 1, x: 0, y: 0, decoded: new Map(), pointers: new Map() });
    tools.look.addEventListener("change", () => this.preset());
    for (const name of ["center", "width"]) tools[name].addEventListener("input", () => this.own());
    stage.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.by(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
    stage.addEventListener("dblclick", () => this.toggle());
    stage.addEventListener("contextmenu", (event) => event.preventDefault());
    stage.addEventListener("pointerdown", (event) => {
      stage.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    });
    stage.addEventListener("pointermove", (event) => this.pointers.has(event.pointerId) && this.dragged(event));
    for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    new ResizeObserver(() => this.place()).observe(stage);
  }

  // Drag moves a zoomed image and else sets the window, as the right button and Shift always do; two fingers zoom.
  dragged(event) {
    const [x, y] = this.pointers.get(event.pointerId);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    const [across, down] = [event.clientX - x, event.clientY - y];
    if (others.length) {
      const [[, [a, b]]] = others;
      this.zoom = Math.min(16, Math.max(1, this.zoom * (Math.hypot(event.clientX - a, event.clientY - b) / Math.max(1, Math.hypot(x - a, y - b)))));
      this.place();
    } else if (this.zoom > 1 && !event.shiftKey && event.buttons !== 2) this.move(this.x + across, this.y + down);
    else this.turn(across, down);
  }

  // Change the window by pixels of a drag: across its width, down its center.
  turn(across, down) {
    const { center, width } = this.tools;
    center.value = round(Number(center.value) + (down * width.value) / 300);
    width.value = round(width.value * Math.exp(across / 150));
    this.own();
  }

  own() {
    this.tools.look.value = "own";
    this.paint();
  }

  async show(row, alt) {
    if (row !== this.row) Object.assign(this, { row, zoom: 1, x: 0, y: 0 });
    this.canvas.setAttribute("aria-label", alt);
    const image = await this.decode(row).catch(() => null);
    if (row !== this.row) return;
    this.stage.classList.toggle("broken", !image);
    this.stage.classList.toggle("gray", Boolean(image?.gray));
    this.shown = image;
    this.canvas.dataset.row = row;
    if (!image) return;
    for (const name of ["center", "width"]) this.tools[name].parentElement.hidden = !image.gray; // a photograph has no window
    Object.assign(this.canvas, { width: image.width, height: image.height });
    const { look } = this.tools;
    for (const option of look.querySelectorAll(".ct")) option.disabled = option.hidden = image.modality !== "CT";
    if (look.selectedOptions[0].disabled) look.value = "file";
    this.preset();
    this.place();
  }

  decode(row) {
    if (!this.decoded.has(row)) {
      const image = read(row);
      image.catch((error) => {
        this.decoded.delete(row);
        if (error.status === 415) this.unreadable?.(row);
      });
      this.decoded.set(row, image);
    }
    for (const old of [...this.decoded.keys()].slice(0, Math.max(0, this.decoded.size - KEPT))) if (old !== row) this.decoded.delete(old);
    return this.decoded.get(row);
  }

  ahead(rows) {
    for (const row of rows) this.decode(row).catch(() => {});
  }

  // Set the chosen window; a custom one is used for the next images as well.
  preset() {
    if (!this.shown) return;
    const { low, high, slope, intercept } = this.shown;
    const { look, center, width } = this.tools;
    let ends = [low, high];
    if (CT[look.value]) ends = [CT[look.value][0] - CT[look.value][1] / 2, CT[look.value][0] + CT[look.value][1] / 2];
    if (look.value === "stretch") {
      this.shown.shares ??= shares(this.shown);
      ends = [0.01, 0.99].map((share) => slope * this.shown.shares.findIndex((each) => each >= share) + intercept).sort((a, b) => a - b);
    }
    if (look.value !== "own") {
      center.value = round((ends[0] + ends[1]) / 2);
      width.value = round(ends[1] - ends[0]);
      this.ends = ends;
    }
    this.paint();
  }

  paint() {
    if (this.tools.look.value === "own") {
      const [center, width] = [Number(this.tools.center.value), Math.max(1e-9, Number(this.tools.width.value))];
      this.ends = [center - width / 2, center + width / 2];
    }
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      if (this.shown) this.draw();
    });
  }

  draw() {
    const { codes, pixels, slope, intercept, width, height } = this.shown;
    const way = this.tools.look.value;
    const [a, b] = this.ends.map((end) => (end - intercept) / slope).sort((one, other) => one - other);
    const table = Uint8ClampedArray.from({ length: codes ? 65536 : 256 }, (_, code) => Math.floor(Math.min(1, Math.max(0, (code - a) / (b - a || 1))) * 255 + 0.5));
    if (way === "equalize") table.set((this.shown.shares ??= shares(this.shown)).map((share) => 255 * share));
    if (way === "invert") for (let code = 0; code < table.length; code++) table[code] = 255 - table[code];
    const seen = new ImageData(width, height);
    for (let n = 0; n < seen.data.length; n += 4) {
      for (let k = 0; k < 3; k++) seen.data[n + k] = table[codes ? codes[n >> 2] : pixels.data[n + k]];
      seen.data[n + 3] = 255;
    }
    this.canvas.getContext("2d").putImageData(seen, 0, 0);
    this.canvas.dataset.look = way;
  }

  place() {
    if (!this.shown) return;
    const { width, height } = this.shown;
    this.scale = Math.min(this.stage.clientWidth / width, this.stage.clientHeight / height) * this.zoom;
    this.canvas.style.width = `${width * this.scale}px`;
    this.canvas.style.height = `${height * this.scale}px`;
    // The pixels of a tiny or a zoomed image are shown as they are; a photograph that fits is smooth.
    this.canvas.style.imageRendering = this.scale >= 3 && (this.zoom > 1 || Math.max(width, height) < TINY) ? "pixelated" : "auto";
    this.move(this.x, this.y);
  }

  move(x, y) {
    const room = (inner, outer) => Math.max(0, (inner - outer) / 2);
    const across = room(this.shown.width * this.scale, this.stage.clientWidth);
    const down = room(this.shown.height * this.scale, this.stage.clientHeight);
    this.x = Math.min(across, Math.max(-across, x));
    this.y = Math.min(down, Math.max(-down, y));
    this.canvas.style.transform = `translate(calc(-50% + ${this.x}px), calc(-50% + ${this.y}px))`;
    this.stage.classList.toggle("zoomed", this.zoom > 1);
  }

  by(steps) {
    const at = STEPS.findLastIndex((step) => step <= this.zoom);
    this.zoom = STEPS[Math.min(STEPS.length - 1, Math.max(0, at + steps))];
    this.place();
  }

  toggle() {
    this.zoom = this.zoom === 1 ? 3 : 1;
    this.place();
  }

  cycle() {
    const { look } = this.tools;
    const options = [...look.options].filter((option) => !option.disabled && option.value !== "own");
    look.value = options[(options.indexOf(look.selectedOptions[0]) + 1) % options.length].value;
    this.preset();
    return look.selectedOptions[0].textContent;
  }
}

// The arrows as steps of `turn`.
export const ARROWS = { ArrowLeft: [-16, 0], ArrowRight: [16, 0], ArrowUp: [0, -16], ArrowDown: [0, 16] };

const round = (value) => Number(value.toPrecision(5));

export const tools = () => ({ look: byId("look"), center: byId("center"), width: byId("width") });
