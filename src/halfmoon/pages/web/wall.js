// A wall of images that has elements only for visible images, so that ten thousand scroll as fast as ten.

import { html } from "./common.js";

const PAUSE = 70; // ms that a cell is visible before its image is requested

export class Wall {
  // `fill(row)` returns {title, lines: [text or element], odd}; `open(place)` is called for a click or Enter. Where
  // `changed` is given, rows can be selected: by Shift, Ctrl, Space, a drag, and while `selecting` by a click.
  // `unreadable(row)` is called for an image that the server cannot decode.
  constructor(host, { fill, open, source, changed = null, unreadable = null, side = 132, extra = 40 }) {
    Object.assign(this, { host, fill, open, source, changed, unreadable, wanted: side, extra, chosen: new Set(), selecting: false });
    this.rows = [];
    this.cells = new Map();
    this.focused = 0;
    this.room = html("div", { class: "room" });
    host.append(this.room);
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    host.addEventListener("keydown", (event) => this.walk(event));
    if (changed) this.listen();
    new ResizeObserver(() => this.layout()).observe(host);
  }

  listen() {
    const placeOf = (event) => Number(event.target.closest?.(".cell")?.dataset.place ?? -1);
    this.host.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) this.from = placeOf(event);
    });
    this.host.addEventListener("pointerover", (event) => {
      const place = placeOf(event);
      if (!(event.buttons & 1) || !(this.from >= 0) || place < 0 || place === this.from) return;
      this.dragging = true;
      this.choose(this.range(this.from, place));
    });
    this.host.addEventListener("click", (event) => {
      const place = placeOf(event);
      const drag = this.dragging;
      Object.assign(this, { from: -1, dragging: false });
      if (place < 0 || (!drag && !event.shiftKey && !event.ctrlKey && !event.metaKey && !this.selecting)) return;
      event.stopPropagation();
      if (drag) return;
      if (event.shiftKey) this.choose([...this.chosen, ...this.range(this.last ?? place, place)]);
      else this.flip(place);
      this.last = place;
    }, { capture: true });
    addEventListener("pointerup", () => setTimeout(() => Object.assign(this, { from: -1, dragging: false })));
  }

  range(a, b) {
    return this.rows.slice(Math.min(a, b), Math.max(a, b) + 1);
  }

  flip(place) {
    const row = this.rows[place];
    this.choose(this.chosen.has(row) ? [...this.chosen].filter((each) => each !== row) : [...this.chosen, row]);
  }

  choose(rows) {
    this.chosen = new Set(rows);
    for (const [place, cell] of this.cells) cell.classList.toggle("chosen", this.chosen.has(this.rows[place]));
    this.changed();
  }

  // The rows of the completely visible cells.
  inSight() {
    const first = Math.ceil(this.host.scrollTop / this.tall) * this.columns;
    const last = Math.floor((this.host.scrollTop + this.host.clientHeight) / this.tall) * this.columns;
    return this.rows.slice(first, Math.max(last, first + this.columns));
  }

  show(rows, keep = false) {
    this.rows = rows;
    if (!keep) {
      this.host.scrollTop = 0;
      this.focused = 0;
    }
    this.focused = Math.min(this.focused, Math.max(0, rows.length - 1));
    this.layout(true);
  }

  refresh(row) {
    for (const [place, cell] of this.cells) if (this.rows[place] === row) this.dress(cell, place);
  }

  layout(anew = false) {
    const width = this.host.clientWidth - 8;
    if (width <= 0) return;
    const columns = Math.max(2, Math.floor(width / this.wanted));
    const side = Math.floor(width / columns);
    if (!anew && side === this.side && columns === this.columns) return this.draw();
    Object.assign(this, { columns, side, tall: side + this.extra });
    this.room.style.height = `${Math.ceil(this.rows.length / columns) * this.tall}px`;
    for (const cell of this.cells.values()) {
      clearTimeout(cell.timer);
      cell.remove();
    }
    this.cells.clear();
    this.draw();
  }

  draw() {
    if (!this.columns) return;
    const first = Math.max(0, Math.floor(this.host.scrollTop / this.tall) - 1) * this.columns;
    const last = Math.min(this.rows.length, (Math.ceil((this.host.scrollTop + this.host.clientHeight) / this.tall) + 1) * this.columns);
    for (const [place, cell] of this.cells) {
      if (place < first || place >= last) {
        if (cell.contains(document.activeElement)) continue;
        clearTimeout(cell.timer);
        cell.remove();
        this.cells.delete(place);
      }
    }
    for (let place = first; place < last; place++) if (!this.cells.has(place)) this.add(place);
  }

  add(place) {
    const cell = html("button", { type: "button", class: "cell", "data-place": place, tabindex: place === this.focused ? 0 : -1, onclick: () => this.open(place) });
    cell.style.cssText = `left:${4 + (place % this.columns) * this.side}px;top:${Math.floor(place / this.columns) * this.tall}px;width:${this.side}px;height:${this.tall}px`;
    const image = html("img", { alt: "", draggable: "false", decoding: "async" });
    image.addEventListener("load", () => image.classList.toggle("tiny", image.naturalWidth < 96));
    image.addEventListener("error", () => {
      image.replaceWith(html("span", { class: "unread" }, "cannot be read"));
      this.unreadable?.(this.rows[place]);
    });
    cell.append(image);
    this.dress(cell, place);
    const source = this.source(this.rows[place]); // which may have changed when the timer ends
    cell.timer = setTimeout(() => (image.src = source), PAUSE);
    this.room.append(cell);
    this.cells.set(place, cell);
  }

  dress(cell, place) {
    const { title, lines, odd } = this.fill(this.rows[place]);
    // Its text is its name; the title describes it.
    cell.title = title;
    cell.classList.toggle("odd", Boolean(odd));
    cell.classList.toggle("chosen", this.chosen.has(this.rows[place]));
    while (cell.childNodes.length > 1) cell.lastChild.remove();
    cell.append(...lines.map((line) => html("span", { class: "cap" }, line)));
  }

  walk(event) {
    if (event.key === " " && this.changed) {
      event.preventDefault();
      return this.flip((this.last = this.focused));
    }
    const page = Math.max(1, Math.floor(this.host.clientHeight / this.tall)) * this.columns;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.rows.length) return;
    event.preventDefault();
    this.focus(this.focused + by);
  }

  focus(place) {
    this.cells.get(this.focused)?.setAttribute("tabindex", -1);
    this.focused = Math.min(this.rows.length - 1, Math.max(0, place));
    const top = Math.floor(this.focused / this.columns) * this.tall;
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top + this.tall > this.host.scrollTop + this.host.clientHeight) this.host.scrollTop = top + this.tall - this.host.clientHeight;
    document.activeElement?.blur?.();
    this.draw();
    const cell = this.cells.get(this.focused);
    cell?.setAttribute("tabindex", 0);
    cell?.focus({ preventScroll: true });
  }
}
