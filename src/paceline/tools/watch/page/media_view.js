// Images, texts and histograms that a run has logged. Each kind has a slider of steps; at its end it follows the run.

const MEDIA = { image: "Images", text: "Texts", histogram: "Histograms" };

class MediaView {
  constructor(source, run) {
    this.parts = Object.entries(MEDIA).map(([kind, title]) => new MediaPart(source, run, kind, title));
    this.element = h("div", {});
  }

  // Parts without entries are not on the page. Returns whether one was added.
  set({ entries }) {
    for (const part of this.parts) part.set(entries.filter((entry) => entry.kind === part.kind));
    const shown = this.parts.filter((part) => part.cards.size);
    if (shown.length === this.element.childElementCount) return false;
    fill(this.element, shown.map((part) => part.element));
    this.draw();
    return true;
  }

  draw() { for (const part of this.parts) part.draw(); }
}

class MediaPart {
  constructor(source, run, kind, title) {
    Object.assign(this, { source, run, kind });
    this.cards = new Map(); // by name
    this.steps = [];
    this.step = null; // null: the last one
    this.slider = h("input", { type: "range", min: "0", "aria-label": `step of ${title.toLowerCase()}`, class: "steps", oninput: () => this.choose() });
    this.label = h("span", { class: "muted" });
    this.grid = h("div", { class: `grid ${kind}s` });
    this.element = h("section", { class: "part", id: `${kind}s` }, h("h2", {}, title), h("label", { class: "controls step" }, this.slider, this.label), this.grid);
  }

  set(entries) {
    const names = new Map();
    for (const entry of entries) names.set(entry.name, [...(names.get(entry.name) || []), entry]);
    this.steps = [...new Set(entries.map((entry) => entry.step))].sort((a, b) => a - b);
    for (const [name, found] of names) {
      if (!this.cards.has(name)) this.cards.set(name, this.kind === "image" ? new ImageCard(this, name) : this.kind === "text" ? new TextCard(name) : new HistogramCard(name));
      this.cards.get(name).set(found.sort((a, b) => a.step - b.step));
    }
    for (const name of this.cards.keys()) if (!names.has(name)) this.cards.delete(name);
    const elements = [...this.cards.values()].map((card) => card.element);
    if (elements.length !== this.grid.childElementCount || elements.some((each, n) => each !== this.grid.children[n])) fill(this.grid, elements);
    this.slider.max = String(Math.max(0, this.steps.length - 1));
    this.slider.disabled = this.steps.length < 2;
    this.show();
  }

  choose() {
    const n = Number(this.slider.value);
    this.step = n >= this.steps.length - 1 ? null : this.steps[n];
    this.show();
  }

  // Of each name, the last entry up to the chosen step.
  show() {
    const step = this.step === null ? this.steps[this.steps.length - 1] : this.step;
    this.slider.value = String(Math.max(0, lowerBound(this.steps, step)));
    const words = `step ${format.number(step)}`;
    this.slider.setAttribute("aria-valuetext", words);
    setText(this.label, this.steps.length < 2 ? words : `${words} of ${format.number(this.steps[this.steps.length - 1])}`);
    for (const card of this.cards.values()) card.show(step);
  }

  draw() { for (const card of this.cards.values()) if (card.draw) card.draw(); }
}

class MediaCard {
  constructor(name, body) {
    this.value = h("span", { class: "value" });
    this.note = h("p", { class: "muted note" });
    this.body = body;
    this.element = h("section", { class: "card" }, h("header", {}, h("h3", {}, name), h("span", { class: "grow" }), this.value), body, this.note);
  }

  set(entries) { this.entries = entries; }

  show(step) {
    const entry = this.entries[lowerBound(this.entries.map((each) => each.step), step + 1) - 1];
    this.body.hidden = !entry;
    setText(this.value, entry ? `step ${format.number(entry.step)}` : "");
    if (!entry) setText(this.note, `first logged at step ${format.number(this.entries[0].step)}`);
    else this.fill(entry);
    this.note.hidden = !this.note.textContent;
  }
}

class ImageCard extends MediaCard {
  constructor(part, name) {
    const image = h("img", { alt: "" });
    super(name, h("button", { class: "image", title: "enlarge", "aria-label": `enlarge ${name}`, onclick: () => this.enlarge() }, image));
    Object.assign(this, { part, name, image });
  }

  async fill(entry) {
    if (entry === this.shown || (this.shown && entry.step === this.shown.step && entry.time === this.shown.time)) return;
    this.shown = entry;
    this.say(entry.clipped ? "Values below 0 or above 1 were clipped." : "");
    Object.assign(this.image, { alt: `${this.name}, step ${entry.step}`, width: entry.width, height: entry.height });
    this.image.classList.toggle("small", entry.width < 300);
    try {
      const address = await this.part.source.image(this.part.run.id, entry);
      if (this.shown === entry) {
        URL.revokeObjectURL(this.image.src);
        this.image.src = address;
      } else URL.revokeObjectURL(address);
    } catch {
      if (this.shown === entry) this.say("This image can't be read.");
    }
  }

  say(text) {
    setText(this.note, text);
    this.note.hidden = !text;
  }

  enlarge() {
    const dialog = h("dialog", { class: "enlarged", "aria-label": this.name, onclick: () => dialog.remove(), onclose: () => dialog.remove() }, h("img", { src: this.image.src, alt: this.image.alt }));
    this.element.append(dialog);
    dialog.showModal();
  }
}

class TextCard extends MediaCard {
  constructor(name) { super(name, h("pre", { class: "text", tabindex: "0" })); }
  fill(entry) { setText(this.body, entry.text); }
}

class HistogramCard extends MediaCard {
  constructor(name) {
    const canvas = h("canvas", { class: "plot", role: "img" });
    super(name, h("div", { class: "plot-box" }, canvas));
    Object.assign(this, { name, canvas });
  }

  // All steps have one x axis, so that moving the slider shows what has changed.
  set(entries) {
    super.set(entries);
    this.low = Math.min(...entries.map((each) => each.low));
    this.high = Math.max(...entries.map((each) => each.low + each.width * each.counts.length));
  }

  fill(entry) {
    this.entry = entry;
    const about = entry.mean === undefined ? "no finite values" : `mean ${format.number(entry.mean)}, standard deviation ${format.number(entry.std)}`;
    setText(this.note, about + (entry.nonfinite && entry.mean !== undefined ? `, ${plural(entry.nonfinite, "value")} not finite` : ""));
    this.canvas.setAttribute("aria-label", `${this.name} at step ${entry.step}: ${about}`);
    this.draw();
  }

  draw() {
    if (!this.entry || !this.element.isConnected || this.body.hidden) return;
    const { low, width: step, counts } = this.entry;
    const palette = colors();
    const { context, width, height } = prepare(this.canvas, 180);
    const inner = width - LEFT - RIGHT;
    const atX = (value) => LEFT + ((value - this.low) / (this.high - this.low || 1)) * inner;
    const most = Math.max(1, ...counts);
    context.fillStyle = palette.series[0];
    counts.forEach((count, n) => {
      const tall = (count / most) * (height - TOP - BOTTOM);
      const left = atX(low + n * step);
      context.fillRect(left, height - BOTTOM - tall, Math.max(1, atX(low + (n + 1) * step) - left - 0.5), tall);
    });
    context.strokeStyle = palette.line;
    context.strokeRect(LEFT, height - BOTTOM + 0.5, inner, 0);
    context.fillStyle = palette.muted;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const value of ticks(this.low, this.high, Math.max(2, Math.floor(inner / 48)))) context.fillText(format.number(value), atX(value), height - BOTTOM + 8);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(0, most, 3)) if (Number.isInteger(value)) context.fillText(format.short(value), LEFT - 6, height - BOTTOM - (value / most) * (height - TOP - BOTTOM));
  }
}
