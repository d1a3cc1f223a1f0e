// A line chart on a canvas.

class Chart {
  // `unit`: a function that formats values. Series: {label, color, curve: {x, y, lo?, hi?}, note?, dots?, scattered?, dashed?, faint?,
  // unnamed?, turn?}. `turn`: [number, count] of curves that lie over each other; each is drawn in dashes of its own.
  constructor(shared, { title, unit = format.number, smoothed = false, zero = false, wide = false, note = "" }) {
    Object.assign(this, { shared, title, unit, smoothed, zero, wide });
    this.series = [];
    this.log = false;
    this.value = h("span", { class: "value" });
    this.legend = h("div", { class: "legend" });
    this.canvas = h("canvas", { class: "plot", role: "img", tabindex: "0" });
    this.overlay = h("canvas", { class: "overlay", "aria-hidden": "true" });
    this.scale = h("button", { class: "small", title: "logarithmic scale", "aria-pressed": "false", onclick: () => this.toggleLog() }, "log");
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot = h("div", { class: "plot-box" }, this.canvas, this.overlay, this.tip);
    this.element = h("section", { class: `card chart${wide ? " wide" : ""}` },
      h("header", {}, h("h3", { title: note || null }, title), this.value, h("span", { class: "grow" }), this.scale, this.legend), this.plot);
    this.listen();
    shared.charts.add(this);
    // Only what is on screen is drawn: a page beside a training must not take its time.
    this.isVisible = false;
    this.observer = new IntersectionObserver(([entry]) => {
      this.isVisible = entry.isIntersecting;
      if (this.isVisible) shared.redraw();
    }, { rootMargin: "100px" });
    this.observer.observe(this.element);
  }

  remove() {
    this.shared.charts.delete(this);
    this.observer.disconnect();
    this.element.remove();
  }

  toggleLog() {
    this.log = !this.log;
    this.scale.setAttribute("aria-pressed", String(this.log));
    this.shared.redraw();
  }

  setSeries(series) {
    this.series = series;
    this.smoothings = null;
    const names = series.length > 1 ? series.filter((each) => !each.unnamed) : [];
    const key = JSON.stringify(names.map((each) => [each.label, each.color, each.note]));
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legendValues = names.map(() => h("b", {}));
    fill(this.legend, names.map((each, n) => {
      const swatch = h("i", { class: each.dots ? "dot" : "" });
      swatch.style.background = each.color;
      return h("span", {}, swatch, `${each.label} `, !each.scattered && this.legendValues[n], each.note && ` (${each.note})`);
    }));
  }

  // The last values, or those at the crosshair: beside the title, or in the legend of several series.
  showValues() {
    const text = (each) => {
      const found = each && this.valueAt(each, this.shared.cursor);
      return !found ? "–" : found.y === null ? "not finite" : this.unit(found.y);
    };
    const named = this.series.length > 1 ? this.series.filter((each) => !each.unnamed) : [];
    setText(this.value, named.length > 1 ? "" : text(this.series[0]));
    named.forEach((each, n) => setText(this.legendValues[n], text(each)));
  }

  smoothedValues(each, number) {
    const key = `${this.shared.smoothing} ${each.curve.x.length}`;
    if (!this.smoothings || this.smoothings.key !== key) this.smoothings = { key, values: [] };
    const values = this.smoothings.values;
    if (!values[number]) values[number] = smooth(each.curve.y, this.shared.smoothing);
    return values[number];
  }

  isSmoothed(each) { return this.smoothed && this.shared.smoothing > 0 && !each.dots && each.curve.x.length > 8; }

  bounds(first, last, each) {
    let low = Infinity;
    let high = -Infinity;
    const least = each.curve.lo || each.curve.y;
    const most = each.curve.hi || each.curve.y;
    for (let n = first; n < last; n++) {
      if (least[n] === null || most[n] === null || (this.log && most[n] <= 0)) continue;
      const bottom = this.log && least[n] <= 0 ? most[n] : least[n];
      if (bottom < low) low = bottom;
      if (most[n] > high) high = most[n];
    }
    return [low, high];
  }

  draw([left, right], palette, isPrinted = false) {
    this.range = [left, right];
    this.describe();
    if (this.isVisible || isPrinted) this.paint(left, right, palette);
  }

  paint(left, right, palette) {
    const { context, width, height } = prepare(this.canvas, this.wide ? 300 : 220);
    this.size = { width, height, left, right };
    const visible = this.series.map(({ curve }) => [
      Math.max(0, lowerBound(curve.x, left) - 1), Math.min(curve.x.length, lowerBound(curve.x, right) + 1)]);
    let low = Infinity;
    let high = -Infinity;
    this.series.forEach((each, number) => {
      const [least, most] = this.bounds(...visible[number], each);
      low = Math.min(low, least);
      high = Math.max(high, most);
    });
    if (low > high) [low, high] = [this.log ? 1 : 0, this.log ? 10 : 1];
    if (this.zero && !this.log) low = Math.min(0, low);
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    this.y = { low: this.zero && !this.log && low === 0 ? 0 : low - margin, high: high + margin };
    this.axes(context, palette);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 4, width - LEFT - RIGHT, height - TOP - BOTTOM + 8);
    context.clip();
    const order = this.series.map((_, number) => number).sort((a, b) => Boolean(this.series[b].faint) - Boolean(this.series[a].faint));
    for (const number of order) this.line(context, this.series[number], number, ...visible[number], palette);
    context.restore();
    this.drawCursor();
  }

  atX(value) { return LEFT + ((value - this.size.left) / (this.size.right - this.size.left)) * (this.size.width - LEFT - RIGHT); }
  fromX(pixel) { return this.size.left + ((pixel - LEFT) / (this.size.width - LEFT - RIGHT)) * (this.size.right - this.size.left); }
  atY(value) {
    const scaled = this.log ? Math.log10(Math.max(value, 1e-300)) : value;
    return TOP + (1 - (scaled - this.y.low) / (this.y.high - this.y.low)) * (this.size.height - TOP - BOTTOM);
  }

  axes(context, palette) {
    const { width, height, left, right } = this.size;
    context.strokeStyle = palette.line;
    context.fillStyle = palette.muted;
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const decades = this.log && this.y.high - this.y.low >= 1;
    const values = decades
      ? ticks(Math.ceil(this.y.low), Math.floor(this.y.high), 4).filter(Number.isInteger).map((power) => 10 ** power)
      : this.log ? ticks(10 ** this.y.low, 10 ** this.y.high, 4) : ticks(this.y.low, this.y.high, this.wide ? 6 : 4);
    for (const value of values) {
      if (this.log && value <= 0) continue;
      const y = Math.round(this.atY(value)) + 0.5;
      if (y < TOP - 2 || y > height - BOTTOM + 2) continue;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - RIGHT, y);
      context.stroke();
      context.fillText(this.unit(value), LEFT - 6, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const shown = this.shared.axis.ticks(left, right, Math.max(2, Math.floor((width - LEFT - RIGHT) / 64)));
    for (const value of shown) context.fillText(this.shared.axis.text(value, shown), this.atX(value), height - BOTTOM + 8);
  }

  line(context, each, number, first, last, palette) {
    const { x, y, lo, hi } = each.curve;
    const points = last - first;
    if (points <= 0) return;
    if (lo) this.band(context, each, first, last, lo, hi);
    const shown = this.isSmoothed(each) ? this.smoothedValues(each, number) : y;
    if (shown !== y) {
      context.globalAlpha = lo ? 0 : 0.28;
      this.stroke(context, each.color, 1, x, y, first, last);
      context.globalAlpha = 1;
    }
    const [turn, turns] = each.turn || [0, 1];
    context.setLineDash(turns > 1 ? [7, 7 * (turns - 1)] : each.dashed ? [6, 4] : []);
    context.lineDashOffset = -7 * turn;
    if (!each.scattered && (!each.dots || points > 1)) this.stroke(context, each.color, each.dots ? 1 : 1.8, x, shown, first, last);
    context.setLineDash([]);
    context.lineDashOffset = 0;
    if (each.dots || points < 3) {
      context.fillStyle = each.color;
      for (let n = first; n < last; n++)
        if (y[n] !== null) {
          context.beginPath();
          context.arc(this.atX(x[n]), this.atY(y[n]), (points > 80 ? 1.5 : 3) + 2 * (turns - 1 - turn), 0, 7);
          context.fill();
        }
    }
    context.fillStyle = palette.bad;
    const mark = (at) => context.fillRect(this.atX(at) - 1, this.size.height - BOTTOM - 5, 3, 5);
    for (let n = first; n < last; n++) if (y[n] === null) mark(x[n]);
    for (const at of each.curve.bad || []) mark(at);
  }

  band(context, each, first, last, lo, hi) {
    context.fillStyle = each.color;
    context.globalAlpha = 0.18;
    context.beginPath();
    for (let n = first; n < last; n++) if (hi[n] !== null) context.lineTo(this.atX(each.curve.x[n]), this.atY(hi[n]));
    for (let n = last - 1; n >= first; n--) if (lo[n] !== null) context.lineTo(this.atX(each.curve.x[n]), this.atY(lo[n]));
    context.fill();
    context.globalAlpha = 1;
  }

  // Of many points in one column of pixels, the lowest, the highest and the last one are drawn.
  stroke(context, color, width, x, y, first, last) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    const isDense = last - first > 2 * this.size.width;
    let isOpen = false;
    let column = null;
    let low, high, end;
    const close = () => {
      if (column === null) return;
      if (low < high) for (const value of [low, high]) context.lineTo(column, value);
      context.lineTo(column, end);
      column = null;
    };
    for (let n = first; n < last; n++) {
      if (y[n] === null || (this.log && y[n] <= 0)) { close(); isOpen = false; continue; }
      const at = isDense ? Math.round(this.atX(x[n])) : this.atX(x[n]);
      const value = this.atY(y[n]);
      if (column !== at) {
        close();
        if (!isOpen) context.moveTo(at, value);
        isOpen = true;
        column = at;
        low = high = value;
      } else {
        if (value < low) low = value;
        if (value > high) high = value;
      }
      end = value;
    }
    close();
    context.stroke();
  }

  // The last value of a series, or the one at the crosshair.
  valueAt(each, cursor) {
    const { x, y } = each.curve;
    if (!x.length) return null;
    if (cursor === null) return { x: x[x.length - 1], y: y[y.length - 1], n: y.length - 1 };
    let n = lowerBound(x, cursor);
    if (n >= x.length || (n > 0 && cursor - x[n - 1] < x[n] - cursor)) n -= 1;
    return { x: x[n], y: y[n], n };
  }

  describe() {
    const texts = this.series.map((each) => {
      const last = this.valueAt(each, null);
      return last ? `${each.label} ${last.y === null ? "not finite" : this.unit(last.y)}` : `${each.label} without values`;
    });
    const range = this.range.map((x) => this.shared.axis.describe(x)).join(" to ");
    this.canvas.setAttribute("aria-label", `${this.title}: ${texts.join(", ") || "no values"}; ${range}`);
  }

  drawCursor() {
    if (!this.size || !this.isVisible) return;
    const { context, width, height } = prepare(this.overlay, this.size.height);
    const cursor = this.shared.cursor;
    this.showValues();
    if (this.selection) {
      const palette = colors();
      context.fillStyle = palette.accent;
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(...this.selection), TOP, Math.abs(this.selection[1] - this.selection[0]), height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    if (cursor === null || cursor < this.size.left || cursor > this.size.right) {
      this.tip.hidden = true;
      return;
    }
    const palette = colors();
    const x = Math.round(this.atX(cursor)) + 0.5;
    context.strokeStyle = palette.muted;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    for (const each of this.series) {
      const at = this.valueAt(each, cursor);
      if (!at || at.y === null || each.faint) continue;
      context.fillStyle = each.color;
      context.beginPath();
      context.arc(this.atX(at.x), this.atY(at.y), 3.5, 0, 7);
      context.fill();
    }
    this.showTip(cursor, x, width);
  }

  showTip(cursor, x, width) {
    this.tip.hidden = !this.hovered;
    if (!this.hovered) return;
    const rows = this.series.map((each) => {
      if (each.faint) return null;
      const at = this.valueAt(each, cursor);
      if (!at) return null;
      const swatch = h("i", {});
      swatch.style.background = each.color;
      const spread = each.curve.lo && at.y !== null && each.curve.lo[at.n] !== each.curve.hi[at.n]
        ? ` (${this.unit(each.curve.lo[at.n])} to ${this.unit(each.curve.hi[at.n])})` : "";
      return h("div", {}, swatch, `${each.label} `, h("b", {}, at.y === null ? "not finite" : this.unit(at.y)), spread);
    });
    const place = this.series[0] && this.valueAt(this.series[0], cursor);
    fill(this.tip, h("div", { class: "muted" }, this.shared.axis.describe(place ? place.x : cursor)), rows);
    const isRight = x > width / 2;
    this.tip.style.left = isRight ? "" : `${x + 10}px`;
    this.tip.style.right = isRight ? `${width - x + 10}px` : "";
  }

  listen() {
    const pixel = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    const clamp = (value) => Math.min(Math.max(value, LEFT), this.size.width - RIGHT);
    let start = null;
    let panned = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.size) return;
      this.canvas.setPointerCapture(event.pointerId);
      if (event.shiftKey) panned = { at: pixel(event), range: this.shared.range };
      else start = clamp(pixel(event));
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.size) return;
      this.hovered = true;
      const at = pixel(event);
      if (panned && this.shared.zoom) {
        const moved = this.fromX(panned.at) - this.fromX(at);
        this.shared.setZoom(panned.range.map((each) => each + moved));
      }
      if (start !== null && Math.abs(at - start) > 4) this.selection = [start, clamp(at)];
      this.shared.setCursor(this.fromX(clamp(at)));
    });
    this.canvas.addEventListener("pointerup", () => {
      const selection = this.selection;
      start = panned = this.selection = null;
      if (selection && Math.abs(selection[1] - selection[0]) > 4)
        this.shared.setZoom([this.fromX(Math.min(...selection)), this.fromX(Math.max(...selection))]);
    });
    this.canvas.addEventListener("pointercancel", () => { start = panned = this.selection = null; });
    this.canvas.addEventListener("pointerleave", () => {
      this.hovered = false;
      this.shared.setCursor(null);
    });
    this.canvas.addEventListener("dblclick", () => this.shared.setZoom(null));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a page scrolls
      event.preventDefault();
      this.shared.zoomBy(event.deltaY > 0 ? 1.25 : 0.8);
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("blur", () => {
      this.hovered = false;
      this.shared.setCursor(null);
    });
  }

  onKey(event) {
    const shared = this.shared;
    const [low, high] = shared.range;
    const at = shared.cursor === null ? high : shared.cursor;
    const move = (fraction) => {
      this.hovered = true;
      shared.setCursor(Math.min(high, Math.max(low, at + fraction * (high - low))));
    };
    const actions = {
      ArrowLeft: () => (event.shiftKey ? shared.pan(-0.2) : move(-0.01)),
      ArrowRight: () => (event.shiftKey ? shared.pan(0.2) : move(0.01)),
      "+": () => shared.zoomBy(0.7),
      "=": () => shared.zoomBy(0.7),
      "-": () => shared.zoomBy(1 / 0.7),
      Home: () => shared.setZoom(null),
      Escape: () => shared.setZoom(null),
    };
    if (actions[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      event.stopPropagation();
      actions[event.key]();
    }
  }
}
