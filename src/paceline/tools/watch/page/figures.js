// Figures that are not curves: where the time went, what happened when, step times, the layout of ranks.

const TIME_COLORS = {
  training: 3, start: 7, rendezvous: 7, load: 6, compile: 4, evaluation: 1, saves: 5, hung: 2, lost: 2, down: 2, end: 7,
};

function timeBar(time, title = "Where the time went") {
  const palette = colors();
  const parts = time.parts.filter((part) => part.seconds > 0).sort((a, b) => (b.name === "training") - (a.name === "training"));
  const color = (part) => palette.series[(TIME_COLORS[part.name] || 8) - 1];
  const bar = h("div", { class: "time-bar", role: "img", "aria-label": parts.map((part) => `${part.label} ${format.seconds(part.seconds)}`).join(", ") },
    parts.map((part, n) => {
      const segment = h("i", { title: `${part.label}: ${format.seconds(part.seconds)}`, class: n % 2 ? "striped" : "" });
      segment.style.flexGrow = String(part.seconds);
      segment.style.backgroundColor = color(part);
      return segment;
    }));
  const rows = parts.map((part) => {
    const swatch = h("i", {});
    swatch.style.background = color(part);
    return h("div", {}, swatch, h("span", {}, part.label), h("b", {}, format.seconds(part.seconds)), h("span", { class: "muted" }, format.percent(part.seconds / time.total)));
  });
  return h("section", { class: "card wide" }, h("header", {}, h("h3", {}, title), h("span", { class: "value" }, format.seconds(time.total))), bar, h("div", { class: "time-parts" }, rows));
}

const LANES = [
  ["start", "▶", "accent", ["launched"]],
  ["restore", "↺", "accent", ["restored"]],
  ["evaluation", "●", "series-1", ["evaluated"]],
  ["save", "◆", "good", ["saved"]],
  ["warning", "▲", "warn", ["warning", "save-failed", "hang", "continued"]],
  ["end", "■", "muted", ["finished", "ended"]],
  ["lost", "?", "warn", ["lost"]],
  ["failure", "✖", "bad", ["failed"]],
];

function describeEvent(event) {
  const at = event.step === undefined ? "" : ` at step ${format.number(event.step)}`;
  const lasted = event.seconds === undefined ? "" : `, ${format.seconds(event.seconds)}`;
  const texts = {
    launched: event.generation ? `restart ${event.generation} on ${plural(event.ranks || 0, "rank")}` : `start on ${plural(event.ranks || 0, "rank")}, ${plural(event.nodes || 1, "node")}`,
    restored: `checkpoint loaded${at}${lasted}`, saved: `checkpoint saved${at}${lasted}`, "save-failed": `save failed${at}`,
    evaluated: `evaluation${lasted}`, hang: `no progress${lasted}: ${event.text}`, continued: `progress again${lasted}`,
    failed: `failure: ${event.text}${event.rank === undefined ? "" : ` on rank ${event.rank}`}${at}`,
    finished: `training ended${at}`, ended: `launch ended with status ${event.status}`, warning: event.text,
    lost: `last sign of life${event.text ? ` (${event.text})` : ""}: nothing recorded the end`,
  };
  return texts[event.event] || event.event;
}

class EventLine {
  constructor() {
    this.canvas = h("canvas", { class: "plot", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.list = h("ol", { class: "events" });
    this.element = h("section", { class: "card wide" }, h("header", {}, h("h3", {}, "What happened when")), h("div", { class: "plot-box" }, this.canvas, this.tip), this.list);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  set(events, head) {
    this.events = events;
    this.head = head;
    this.element.hidden = !events.length;
    const notable = events.filter((event) => !["saved", "evaluated", "finished"].includes(event.event)).slice(-12);
    fill(this.list, notable.map((event) => h("li", {}, h("time", {}, format.clock(event.time)), ` ${describeEvent(event)}`)));
    this.canvas.setAttribute("aria-label", `${plural(events.length, "event")}; the notable ones are listed below`);
    this.draw();
  }

  draw() {
    if (!this.events || !this.events.length || !this.element.isConnected) return;
    const palette = colors();
    const lanes = LANES.filter(([, , , kinds]) => this.events.some((event) => kinds.includes(event.event)));
    const { context, width, height } = prepare(this.canvas, lanes.length * 22 + BOTTOM);
    const low = this.events[0].time;
    const high = Math.max(this.events[this.events.length - 1].time, this.head.state === "running" ? this.head.now : 0, low + 1);
    const atX = (time) => 84 + ((time - low) / (high - low)) * (width - 84 - RIGHT);
    const style = getComputedStyle(document.documentElement);
    this.places = [];
    context.textBaseline = "middle";
    lanes.forEach(([name, sign, color, kinds], row) => {
      const y = row * 22 + 11;
      context.fillStyle = palette.muted;
      context.textAlign = "right";
      context.fillText(name, 76, y);
      context.strokeStyle = palette.line;
      context.beginPath();
      context.moveTo(84, y + 0.5);
      context.lineTo(width - RIGHT, y + 0.5);
      context.stroke();
      context.fillStyle = style.getPropertyValue(`--${color}`).trim();
      context.textAlign = "center";
      for (const event of this.events) if (kinds.includes(event.event)) {
        context.fillText(sign, atX(event.time), y);
        this.places.push({ x: atX(event.time), y, event });
      }
    });
    context.fillStyle = palette.muted;
    context.textBaseline = "top";
    for (const value of timeTicks(0, high - low, Math.max(2, Math.floor(width / 110))))
      context.fillText(format.seconds(value), atX(low + value), height - BOTTOM + 6);
  }

  hover(pointer) {
    const box = this.canvas.getBoundingClientRect();
    const x = pointer.clientX - box.left;
    const y = pointer.clientY - box.top;
    const near = (this.places || []).filter((place) => Math.abs(place.x - x) < 9 && Math.abs(place.y - y) < 11);
    this.tip.hidden = !near.length;
    if (!near.length) return;
    const { event } = near[near.length - 1];
    fill(this.tip, h("div", {}, describeEvent(event)), h("div", { class: "muted" }, format.clock(event.time)), near.length > 1 && h("div", { class: "muted" }, `and ${near.length - 1} more here`));
    this.tip.style.left = x > box.width / 2 ? "" : `${x + 12}px`;
    this.tip.style.right = x > box.width / 2 ? `${box.width - x + 12}px` : "";
    this.tip.style.top = `${y + 12}px`;
  }
}

class Histogram {
  constructor(title) {
    this.value = h("span", { class: "value" });
    this.canvas = h("canvas", { class: "plot", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("section", { class: "card chart" }, h("header", {}, h("h3", {}, title), this.value), h("div", { class: "plot-box" }, this.canvas, this.tip));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }

  set(found) {
    this.found = found;
    this.element.hidden = !found;
    if (found) setText(this.value, `median ${format.seconds(found.p50)}, 99 % below ${format.seconds(found.p99)}`);
    this.draw();
  }

  draw() {
    if (!this.found || !this.element.isConnected) return;
    const { low, width: step, counts } = this.found;
    const palette = colors();
    const { context, width, height } = prepare(this.canvas, 220);
    const most = Math.max(...counts);
    const wide = (width - LEFT - RIGHT) / counts.length;
    this.place = { wide };
    context.fillStyle = palette.series[0];
    counts.forEach((count, n) => {
      const tall = (count / most) * (height - TOP - BOTTOM);
      context.fillRect(LEFT + n * wide + 0.5, height - BOTTOM - tall, Math.max(1, wide - 1), tall);
    });
    context.fillStyle = palette.muted;
    context.textAlign = "center";
    context.textBaseline = "top";
    const high = low + step * counts.length;
    for (const value of ticks(low, high, Math.max(2, Math.floor(width / 120))))
      context.fillText(format.seconds(value), LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT), height - BOTTOM + 8);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(0, most, 3)) context.fillText(format.short(value), LEFT - 6, height - BOTTOM - (value / most) * (height - TOP - BOTTOM));
    this.canvas.setAttribute("aria-label", `step times: median ${format.seconds(this.found.p50)}, from ${format.seconds(this.found.least)} to ${format.seconds(this.found.most)}`);
  }

  hover(event) {
    const { low, width: step, counts } = this.found;
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    const n = Math.floor((x - LEFT) / this.place.wide);
    this.tip.hidden = counts[n] === undefined;
    if (counts[n] === undefined) return;
    fill(this.tip, h("div", {}, h("b", {}, plural(counts[n], "log point"))), h("div", { class: "muted" }, `${format.seconds(low + n * step)} to ${format.seconds(low + (n + 1) * step)} per step`));
    this.tip.style.left = `${Math.min(x + 12, this.canvas.clientWidth - 190)}px`;
  }
}

// Ranks in their nodes. A rank that is hovered or focused shows with whom it communicates on each axis.
function layoutGrid(layout) {
  const ranks = layout.ranks || 1;
  const nodes = layout.nodes || 1;
  const axes = layout.axes.length ? layout.axes : [];
  const coordinates = (rank) => {
    const found = [];
    for (const [, degree] of [...axes].reverse()) {
      found.unshift(rank % degree);
      rank = Math.floor(rank / degree);
    }
    return found;
  };
  const palette = colors();
  const cells = [];
  const highlight = (rank) => {
    cells.forEach((cell, other) => {
      cell.style.boxShadow = "";
      cell.classList.toggle("dim", rank !== null && rank !== other);
      if (rank === null || rank === other) return;
      const a = coordinates(rank);
      const b = coordinates(other);
      const differing = a.map((_, n) => n).filter((n) => a[n] !== b[n]);
      if (differing.length === 1) {
        cell.classList.remove("dim");
        cell.style.boxShadow = `inset 0 0 0 3px ${palette.series[differing[0]]}`;
      }
    });
  };
  const perNode = Math.ceil(ranks / nodes);
  const boxes = Array.from({ length: Math.min(nodes, 128) }, (_, node) => h("div", { class: "node" }, h("div", { class: "muted" }, `node ${node}`), h("div", { class: "cells" },
    Array.from({ length: Math.max(0, Math.min(perNode, ranks - node * perNode)) }, (_, local) => {
      const rank = node * perNode + local;
      const where = coordinates(rank);
      const text = axes.map(([name], n) => `${name} ${where[n]}`).join(", ");
      const cell = h("button", { class: "rank", title: text ? `rank ${rank}: ${text}` : `rank ${rank}`, onmouseenter: () => highlight(rank), onfocus: () => highlight(rank), onblur: () => highlight(null) },
        h("b", {}, String(rank)), axes.length > 0 && h("small", {}, where.join("·")));
      cells[rank] = cell;
      return cell;
    }))));
  const legend = axes.map(([name, degree], n) => {
    const swatch = h("i", {});
    swatch.style.background = palette.series[n];
    return h("span", {}, swatch, `${name} ${degree}`);
  });
  return h("section", { class: "card wide layout", onmouseleave: () => highlight(null) },
    h("header", {}, h("h3", {}, "Layout"), h("span", { class: "value" }, `${layout.strategy ? `${layout.strategy}: ` : ""}${plural(ranks, "rank")} on ${plural(nodes, "node")}`), h("span", { class: "grow" }), h("div", { class: "legend" }, legend)),
    axes.length > 0 && h("p", { class: "muted note" }, `Numbers below a rank are its coordinates (${axes.map(([name]) => name).join("·")}). Point at a rank to see its groups.`),
    h("div", { class: "nodes" }, boxes));
}

function profileCard(profiles) {
  const palette = colors();
  const parts = [["compute", "compute", 2], ["exposed", "exposed communication", 1], ["idle", "idle", 6]];
  const bars = profiles.map((profile) => h("div", { class: "profile" }, h("span", {}, `rank ${profile.rank}`), h("div", { class: "time-bar", title: parts.map(([name, label]) => `${label} ${format.seconds(profile[name] / 1e3)}`).join(", ") },
    parts.map(([name, , color]) => {
      const segment = h("i", {});
      segment.style.flexGrow = String(Math.max(0, profile[name]));
      segment.style.backgroundColor = palette.series[color];
      return segment;
    })), h("span", { class: "muted" }, `${format.seconds(profile.step / 1e3)} per step, ${format.percent(profile.exposed / (profile.step || 1))} exposed`)));
  const operations = profiles[0].operations;
  return h("section", { class: "card wide" }, h("header", {}, h("h3", {}, "Profile"), h("span", { class: "grow" }), h("div", { class: "legend" }, parts.map(([, label, color]) => {
    const swatch = h("i", {});
    swatch.style.background = palette.series[color];
    return h("span", {}, swatch, label);
  }))), bars, operations.length > 0 && table(["operation (rank " + profiles[0].rank + ")", "per step", "calls per step"], operations.map(([name, milliseconds, calls]) => [name, format.seconds(milliseconds / 1e3), format.number(calls)])));
}

function table(titles, rows, attributes = {}) {
  return h("div", { class: "table-box" }, h("table", attributes, h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}
