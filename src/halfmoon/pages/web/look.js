// One image at a time: fitted, zoomed, dragged; with brightness and contrast that change nothing but what is seen.

import { byId } from "./common.js";

const STEPS = [1, 1.5, 2, 3, 4, 6, 8, 12, 16];

export class Look {
  constructor(stage, image, tools, source) {
    Object.assign(this, { stage, image, tools, source, row: -1, zoom: 1, x: 0, y: 0 });
    image.addEventListener("load", () => this.place());
    image.addEventListener("error", () => stage.classList.add("broken"));
    for (const tool of Object.values(tools)) tool.addEventListener("input", () => this.paint());
    tools.look.addEventListener("input", () => this.load());
    stage.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.by(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
    stage.addEventListener("dblclick", () => this.toggle());
    stage.addEventListener("pointerdown", (event) => {
      if (this.zoom === 1) return;
      stage.setPointerCapture(event.pointerId);
      this.from = [event.clientX - this.x, event.clientY - this.y];
    });
    stage.addEventListener("pointermove", (event) => this.from && this.move(event.clientX - this.from[0], event.clientY - this.from[1]));
    for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, () => (this.from = null));
    new ResizeObserver(() => this.place()).observe(stage);
  }

  show(row, alt) {
    if (row !== this.row) Object.assign(this, { row, zoom: 1, x: 0, y: 0 });
    this.image.alt = alt;
    this.load();
  }

  load() {
    if (this.row < 0) return;
    this.stage.classList.remove("broken");
    const wanted = this.source(this.row, this.tools.look.value);
    if (this.image.getAttribute("src") !== wanted) this.image.src = wanted;
    else this.place();
    this.paint();
  }

  ahead(rows) {
    this.waiting = rows.map((row) => Object.assign(new Image(), { src: this.source(row, this.tools.look.value) }));
  }

  paint() {
    this.image.style.filter = `brightness(${this.tools.brightness.value}%) contrast(${this.tools.contrast.value}%)`;
  }

  place() {
    const { naturalWidth: w, naturalHeight: h } = this.image;
    if (!w) return;
    const fit = Math.min(this.stage.clientWidth / w, this.stage.clientHeight / h);
    this.scale = fit * this.zoom;
    this.image.style.width = `${w * this.scale}px`;
    this.image.style.height = `${h * this.scale}px`;
    this.image.style.imageRendering = this.scale >= 3 ? "pixelated" : "auto";
    this.move(this.x, this.y);
  }

  move(x, y) {
    const room = (inner, outer) => Math.max(0, (inner - outer) / 2);
    const across = room(this.image.naturalWidth * this.scale, this.stage.clientWidth);
    const down = room(this.image.naturalHeight * this.scale, this.stage.clientHeight);
    this.x = Math.min(across, Math.max(-across, x));
    this.y = Math.min(down, Math.max(-down, y));
    this.image.style.transform = `translate(calc(-50% + ${this.x}px), calc(-50% + ${this.y}px))`;
    this.stage.classList.toggle("zoomed", this.zoom > 1);
  }

  by(steps) {
    const at = STEPS.indexOf(this.zoom);
    this.zoom = STEPS[Math.min(STEPS.length - 1, Math.max(0, at + steps))];
    this.place();
  }

  toggle() {
    this.zoom = this.zoom === 1 ? 3 : 1;
    this.place();
  }

  cycle() {
    const select = this.tools.look;
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    this.load();
    return select.selectedOptions[0].textContent;
  }

  reset() {
    for (const name of ["brightness", "contrast"]) this.tools[name].value = 100;
    this.tools.look.selectedIndex = 0;
    this.zoom = 1;
    this.load();
  }
}

export const tools = () => ({ look: byId("look"), brightness: byId("brightness"), contrast: byId("contrast") });
