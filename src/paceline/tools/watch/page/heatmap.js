// Ranks × time as colours. The scale is cividis, which people with any colour vision read in the same order.

const CIVIDIS = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [203, 186, 105], [255, 234, 70]];

function heat(fraction) {
  const at = Math.min(1, Math.max(0, fraction)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  return CIVIDIS[low].map((value, n) => Math.round(value + (CIVIDIS[low + 1][n] - value) * (at - low)));
}

const QUANTITIES = {
  relative: { label: "own time, relative", unit: (value) => `${value.toFixed(2)} ×`, note: "Time that a rank spends by itself in a step, as a multiple of the median: the others wait for ranks above 1", least: [0.9, 1.3] },
  own_time: { label: "own time", unit: format.seconds, note: "CPU time of the thread that trains, in a step; on GPUs, the time between two backwards" },
  collectives: { label: "in collectives", unit: format.percent, note: "Share of a step in which the thread that trains does not run and does not wait for data: exposed communication, waiting for slower ranks, or for a core", least: [0, 0.1] },
  data_wait: { label: "data wait", unit: format.percent, note: "Share of the time that a rank waits for its data loader", least: [0, 0.05] },
  memory: { label: "memory", unit: format.bytes, note: "Memory of tensors on a GPU; of the process on a CPU" },
  gpu: { label: "GPU utilization", unit: format.percent, note: "Share of the time in which a kernel was running", least: [0, 1] },
  slowdown: { label: "slowdown", unit: (value) => `${value.toFixed(2)} ×`, note: "How much slower a rank was than the others, where a warning said so", least: [1, 2] },
};

class HeatMap {
  constructor() {
    this.quantity = null;
    this.rank = null;
    this.buttons = h("div", { class: "segmented", role: "group", "aria-label": "quantity" });
    this.canvas = h("canvas", { class: "plot", role: "img", tabindex: "0" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.note = h("p", { class: "muted note" });
    this.key = h("div", { class: "key" });
    this.detail = h("div", {});
    this.element = h("section", { class: "card wide" },
      h("header", {}, h("h3", {}, "Ranks over time"), h("span", { class: "grow" }), this.buttons), this.note,
      h("div", { class: "plot-box" }, this.canvas, this.tip), this.key, this.detail);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", () => this.choose(this.hovered === this.rank ? null : this.hovered));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!step || !this.table) return;
      event.preventDefault();
      const ranks = this.table.ranks;
      const now = this.rank === null ? (step > 0 ? -1 : ranks.length) : ranks.indexOf(this.rank);
      this.choose(ranks[Math.min(ranks.length - 1, Math.max(0, now + step))]);
    });
  }

  set(table) {
    this.table = table;
    const known = Object.keys(QUANTITIES).filter((name) => table.rows[name]);
    this.element.hidden = !known.length;
    if (!known.length) return;
    if (!known.includes(this.quantity)) this.quantity = known[0];
    const key = known.join();
    if (key !== this.knownKey) {
      this.knownKey = key;
      fill(this.buttons, known.map((name) => h("button", {
        "data-quantity": name, onclick: () => { this.quantity = name; this.draw(); },
      }, QUANTITIES[name].label)));
    }
    this.draw();
  }

  get rows() { return this.table.rows[this.quantity]; }

  scale() {
    let [low, high] = QUANTITIES[this.quantity].least || [Infinity, -Infinity];
    for (const row of this.rows) for (const value of row) if (value !== null) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high > low ? high : low + (Math.abs(low) || 1) * 1e-3];
  }

  draw() {
    if (!this.table || this.element.hidden || !this.element.isConnected) return;
    const { label, note, unit } = QUANTITIES[this.quantity];
    for (const button of this.buttons.children) button.setAttribute("aria-pressed", String(button.dataset.quantity === this.quantity));
    setText(this.note, note + (this.table.sampled ? ". The files are long: cells are means of samples." : "."));
    const ranks = this.table.ranks;
    const rowHeight = Math.max(3, Math.min(20, Math.floor(420 / ranks.length)));
    const { context, width, height } = prepare(this.canvas, ranks.length * rowHeight + BOTTOM + 2);
    const columns = this.table.steps.length - 1;
    const palette = colors();
    const [low, high] = this.scale();
    this.size = { width, rowHeight, columns };
    const image = new OffscreenCanvas(columns, ranks.length);
    const pixels = image.getContext("2d");
    const data = pixels.createImageData(columns, ranks.length);
    this.rows.forEach((row, r) => row.forEach((value, c) => {
      if (value === null) return;
      data.data.set([...heat((value - low) / (high - low)), 255], 4 * (r * columns + c));
    }));
    pixels.putImageData(data, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, LEFT, 0, width - LEFT - RIGHT, ranks.length * rowHeight);
    context.fillStyle = palette.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / rowHeight);
    ranks.forEach((rank, r) => { if (r % every === 0) context.fillText(`rank ${rank}`, LEFT - 6, Math.max(6, (r + 0.5) * rowHeight)); });
    context.textAlign = "center";
    context.textBaseline = "top";
    const first = this.table.steps[0];
    const last = this.table.steps[columns];
    for (const value of ticks(first, last, Math.max(2, Math.floor(width / 110))))
      if (Number.isInteger(value)) context.fillText(format.short(value), LEFT + ((value - first) / (last - first)) * (width - LEFT - RIGHT), height - BOTTOM + 8);
    if (this.rank !== null && ranks.includes(this.rank)) {
      context.strokeStyle = palette.text;
      context.lineWidth = 2;
      context.strokeRect(LEFT, ranks.indexOf(this.rank) * rowHeight, width - LEFT - RIGHT, rowHeight);
    }
    this.canvas.setAttribute("aria-label", `${label} of ${plural(ranks.length, "rank")}, from ${unit(low)} to ${unit(high)}`);
    const bar = h("i", {});
    bar.style.background = `linear-gradient(90deg, ${[0, 0.2, 0.4, 0.6, 0.8, 1].map((at) => `rgb(${heat(at)})`).join(", ")})`;
    fill(this.key, h("span", {}, unit(low)), bar, h("span", {}, unit(high)), h("span", { class: "grow" }), h("span", {}, "step →"));
    this.drawDetail();
  }

  hover(event) {
    if (!this.size || !this.table) return;
    const box = this.canvas.getBoundingClientRect();
    const { width, rowHeight, columns } = this.size;
    const row = Math.floor((event.clientY - box.top) / rowHeight);
    const x = event.clientX - box.left;
    const column = Math.floor(((x - LEFT) / (width - LEFT - RIGHT)) * columns);
    const value = this.rows[row] && this.rows[row][column];
    this.hovered = this.table.ranks[row];
    this.tip.hidden = value === undefined;
    if (value === undefined) return;
    const steps = this.table.steps;
    const shown = value === null ? "no record" : QUANTITIES[this.quantity].unit(value);
    fill(this.tip, h("div", {}, `rank ${this.hovered} `, h("b", {}, shown)),
      h("div", { class: "muted" }, `steps ${format.number(Math.ceil(steps[column]))} to ${format.number(Math.ceil(steps[column + 1]) - 1)}`));
    this.tip.style.left = x > width / 2 ? "" : `${x + 12}px`;
    this.tip.style.right = x > width / 2 ? `${width - x + 12}px` : "";
    this.tip.style.top = `${Math.max(0, row * rowHeight - 50)}px`;
  }

  choose(rank) {
    if (rank === undefined) return;
    this.rank = rank;
    this.draw();
  }

  // The chosen rank beside the median of all.
  drawDetail() {
    if (this.rank === null || !this.table.ranks.includes(this.rank)) {
      if (this.chart) this.chart.remove();
      this.chart = null;
      fill(this.detail, h("p", { class: "muted note" }, "Select a rank to compare it with the median."));
      return;
    }
    const palette = colors();
    const columns = this.table.steps.slice(0, -1);
    const middle = columns.map((_, c) => {
      const values = this.rows.map((row) => row[c]).filter((value) => value !== null).sort((a, b) => a - b);
      return values.length ? values[values.length >> 1] : null;
    });
    const own = this.rows[this.table.ranks.indexOf(this.rank)];
    const title = `Rank ${this.rank}: ${QUANTITIES[this.quantity].label}`;
    if (!this.chart || this.chart.title !== title) {
      if (this.chart) this.chart.remove();
      this.chart = new Chart(new Shared(), { title, unit: QUANTITIES[this.quantity].unit, wide: true });
      fill(this.detail, this.chart.element);
    }
    this.chart.setSeries([
      { label: `rank ${this.rank}`, color: palette.series[1], curve: { x: columns, y: own } },
      { label: "median of all ranks", color: palette.series[0], curve: { x: columns, y: middle } },
    ]);
    this.chart.shared.redraw();
  }
}
