// The page of one run.

const KNOWN = {
  loss: { title: "Loss", group: "training", wide: true, smoothed: true, with: ["eval/loss"] },
  lr: { title: "Learning rate", group: "training", zero: true },
  grad_norm: { title: "Gradient norm", group: "training", smoothed: true },
  loss_scale: { title: "Loss scale", group: "training", unit: format.short },
  samples_per_second: { title: "Throughput", group: "speed", unit: (value) => `${format.short(value)}/s`, zero: true, smoothed: true, note: "samples per second, over all ranks" },
  mfu: { title: "MFU", group: "speed", unit: format.percent, zero: true, note: "model FLOPs utilization: share of the peak of the device" },
  tflops_per_device: { title: "TFLOP/s per device", group: "speed", zero: true },
  data_wait: { title: "Data wait", group: "speed", unit: format.percent, zero: true, smoothed: true, note: "share of the time that the slowest rank waits for its data loader" },
  sent_mb: { title: "Sent per step", group: "speed", unit: (value) => `${format.number(value)} MB`, zero: true, note: "MB that a rank sends in a step" },
};
const HIDDEN = ["time", "skipped", "straggler", "slowdown"];

// Which charts a run has, in their order: [{key, names, ...options}]
function chartsOf(names) {
  const known = Object.keys(KNOWN).filter((name) => names.has(name) || (KNOWN[name].with || []).some((other) => names.has(other)));
  const charts = known.map((name) => ({ key: name, names: [name, ...(KNOWN[name].with || [])].filter((each) => names.has(each)), ...KNOWN[name] }));
  const first = charts.filter((chart) => chart.key === "loss");
  const taken = new Set([...Object.keys(KNOWN), "eval/loss", ...HIDDEN]);
  const others = [...names].filter((name) => !taken.has(name) && !name.startsWith("sent_mb/"));
  const evaluations = others.filter((name) => name.startsWith("eval/")).map((name) => ({ key: name, names: [name], title: `${name.slice(5)} (validation)`, group: "training" }));
  const logged = others.filter((name) => !name.startsWith("eval/")).map((name) => ({ key: name, names: [name], title: name, group: "training", smoothed: true }));
  return [...first, ...evaluations, ...charts.filter((chart) => chart.key !== "loss"), ...logged];
}

const labelOf = (name) => (name === "eval/loss" ? "validation" : name === "loss" ? "training" : name.replace("eval/", ""));

// Curves by step as curves by the chosen x. Between log points, times are interpolated.
function alongX(curve, mode, run) {
  if (mode === "step") return curve;
  if (mode === "samples") return run.head.batch ? { ...curve, x: curve.x.map((step) => step * run.head.batch) } : { x: [], y: [] };
  const times = run.curves.time;
  if (!times || !times.x.length || run.head.began === null) return { x: [], y: [] };
  const at = (step) => {
    const n = Math.min(times.x.length - 1, Math.max(1, lowerBound(times.x, step)));
    if (times.x.length === 1) return times.y[0] - run.head.began;
    const share = (step - times.x[n - 1]) / (times.x[n] - times.x[n - 1]);
    return Math.max(0, times.y[n - 1] + share * (times.y[n] - times.y[n - 1]) - run.head.began);
  };
  return { ...curve, x: curve.x.map(at) };
}

// The range of x of whole curves, whatever part of them is drawn.
function extentOf(runs, mode) {
  let low = Infinity;
  let high = -Infinity;
  for (const run of runs)
    for (const [name, { x }] of Object.entries(run.curves)) {
      if (!x.length || HIDDEN.includes(name)) continue;
      const ends = alongX({ x: [x[0], x[x.length - 1]], y: [] }, mode, run).x;
      low = Math.min(low, ...ends);
      high = Math.max(high, ...ends);
    }
  return low <= high ? [low, high === low ? low + 1 : high] : null;
}

class RunView {
  constructor(app, run) {
    Object.assign(this, { app, run });
    this.shared = new Shared();
    this.shared.smoothing = app.smoothing;
    this.shared.mode = app.mode;
    this.shared.onzoom = () => app.fetchDetail(this);
    this.charts = new Map();
    this.heatmap = new HeatMap();
    this.histogram = new Histogram("Step time");
    this.eventLine = new EventLine();
    this.banner = h("div", {});
    this.tiles = h("div", { class: "tiles" });
    this.progress = h("div", { class: "progress", role: "progressbar", "aria-label": "steps" }, h("i", {}));
    this.grids = { training: h("div", { class: "grid" }), speed: h("div", { class: "grid" }), ranks: h("div", { class: "grid" }), time: h("div", { class: "grid" }), about: h("div", { class: "grid" }), logs: h("div", { class: "grid" }) };
    const titles = { training: "Training", speed: "Speed", ranks: "Ranks", time: "Time", about: "Recipe and checkpoints", logs: "Logs" };
    this.sections = Object.entries(titles).map(([name, title]) => h("section", { id: name, class: "part" }, h("h2", {}, title), this.grids[name]));
    this.media = new MediaView(app.source, run);
    this.element = h("main", {}, this.banner, this.tiles, this.progress, this.app.controls(this), this.sections.slice(0, 1), this.media.element, this.sections.slice(1));
    this.log = new LogCard(app.source, run);
    fill(this.grids.ranks, this.layout = h("div", { class: "wide" }), this.heatmap.element);
    fill(this.grids.time, this.time = h("div", { class: "wide" }), this.eventLine.element);
    fill(this.grids.logs, this.log.element);
    this.recipe = new RecipeCard();
    this.parts = { profile: h("div", { class: "wide" }), checkpoints: h("div", {}), environment: h("div", {}), derived: h("div", {}) };
    fill(this.grids.about, this.parts.profile, h("div", { class: "columns" }, h("div", {}, this.parts.checkpoints, this.parts.environment, this.parts.derived), h("div", {}, this.recipe.element)));
  }

  charted() { return [...this.charts.values()]; }

  update() {
    const { head, about, curves, ranks } = this.run;
    this.updateTiles(head, about);
    this.updateBanner(head, about);
    if (this.run.version !== this.shownVersion) this.updateCurves(curves);
    if (about && about !== this.shownAbout) this.updateAbout(about, head);
    if (ranks && ranks !== this.shownRanks) {
      this.shownRanks = ranks;
      this.heatmap.set(ranks);
      this.histogram.set(ranks.step_times);
      this.log.setRanks(about ? about.logs : []);
    }
    if (this.run.media && this.run.media !== this.shownMedia) {
      this.shownMedia = this.run.media;
      if (this.media.set(this.run.media)) this.app.showParts();
    }
  }

  updateTiles(head, about) {
    const curve = (name) => this.run.curves[name];
    const last = (name) => (curve(name) && curve(name).y.length ? curve(name).y[curve(name).y.length - 1] : undefined);
    const best = (name) => (head.best[name] ? `best ${format.number(head.best[name][1])} at step ${format.number(head.best[name][0])}` : "");
    const chosen = head.best[head.save_best]; // of save_best
    const ended = head.state !== "running";
    const left = head.total && head.step && head.speed && head.batch && head.speed_unit === "samples/s" ? ((head.total - head.step) * head.batch) / head.speed : null;
    const training = about && about.time.total ? about.time.parts.find((part) => part.name === "training").seconds / about.time.total : null;
    const layout = about ? about.layout : {};
    const tile = (label, value, more) => h("div", { class: "tile" }, h("div", { class: "muted" }, label), h("div", { class: "big" }, value), h("div", { class: "muted" }, more || " "));
    const validation = last("eval/loss");
    const busy = last("mfu");
    fill(this.tiles,
      chosen && tile(`best ${metricTitle(head.save_best)}`, format.number(chosen[1]), `at step ${format.number(chosen[0])}, last ${format.number(last(head.save_best))}`),
      tile("loss", last("loss") === undefined ? "–" : last("loss") === null ? "not finite" : format.number(last("loss")), best("loss")),
      validation !== undefined && head.save_best !== "eval/loss" && tile("validation loss", validation === null ? "not finite" : format.number(validation), best("eval/loss")),
      tile("step", head.step === null ? "–" : format.number(head.step), head.total ? `of ${format.number(head.total)}${head.epoch === null ? "" : `, epoch ${head.epoch}`}` : head.epoch === null ? "" : `epoch ${head.epoch}`),
      tile("throughput", head.speed === null ? "–" : format.short(head.speed), head.speed_unit),
      busy !== undefined && tile("MFU", format.percent(busy), ""),
      about && tile("elapsed", format.seconds(about.time.total), !ended && left ? `${format.seconds(left)} left` : ended ? "" : "running"),
      training !== null && tile("in training steps", format.percent(training), about.restarts ? plural(about.restarts, "restart") : "of the time"),
      layout.ranks && tile("ranks", format.number(layout.ranks), `${plural(layout.nodes || 1, "node")}${layout.strategy ? `, ${layout.strategy}` : ""}`),
      head.skipped > 0 && tile("skipped steps", format.number(head.skipped), "not finite"));
    const share = head.total && head.step !== null ? Math.min(1, head.step / head.total) : null;
    this.progress.hidden = share === null;
    if (share !== null) {
      this.progress.firstChild.style.width = `${100 * share}%`;
      this.progress.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    }
  }

  updateBanner(head, about) {
    const key = JSON.stringify([head.state, head.reason, head.problems, head.read, about && about.verdict, about && about.hangs, about && about.warnings]);
    if (key === this.bannerKey) return;
    this.bannerKey = key;
    const verdict = about && about.verdict;
    const hang = head.state === "running" && head.reason === "hung" && about && about.hangs[about.hangs.length - 1];
    const warnings = about ? about.warnings : [];
    fill(this.banner,
      verdict && h("section", { class: `card banner ${verdict.state === "failed" ? "bad" : "warn"}`, role: "alert" }, h("h2", {}, `${verdict.state === "failed" ? "✖ Failed" : "■ Interrupted"}: ${verdict.reason}${verdict.step === undefined ? "" : ` after step ${format.number(verdict.step)}`}`),
        verdict.place && h("p", {}, `at ${verdict.place}`), verdict.lines.length > 0 && h("pre", {}, verdict.lines.join("\n"))),
      hang && h("section", { class: "card banner warn", role: "alert" }, h("h2", {}, "■ No progress"), h("p", {}, `${hang.ranks.length ? `ranks ${hang.ranks.slice(0, 16).join(", ")}` : "ranks"} for ${format.seconds(hang.seconds)} (${hang.kind})`)),
      warnings.length > 0 && h("details", { class: "card banner warn" }, h("summary", {}, `▲ ${plural(warnings.length, "warning")}`), h("ul", {}, warnings.map((line) => h("li", {}, line.replace(/^warning: /, ""))))),
      head.problems.length > 0 && h("section", { class: "card banner" }, h("h2", {}, "Not everything could be read"), h("ul", {}, head.problems.map((line) => h("li", {}, line)))),
      head.read < 1 && h("section", { class: "card banner", role: "status" }, h("p", {}, `Reading the metrics: ${format.percent(head.read)}. The last steps are shown.`)));
  }

  updateCurves(curves) {
    this.shownVersion = this.run.version;
    if (this.run.rewinds !== this.shownRewinds) {
      this.detail = null; // steps may have been trained again
      if (this.shared.zoom) this.app.fetchDetail(this);
    }
    this.shownRewinds = this.run.rewinds;
    this.shared.full = extentOf([this.run], this.shared.mode);
    const palette = colors();
    const names = new Set(Object.keys(curves));
    const wanted = chartsOf(names);
    const key = wanted.map((chart) => chart.key).join("\n");
    if (key !== this.chartsKey) {
      this.chartsKey = key;
      for (const group of ["training", "speed"]) {
        const cards = wanted.filter((chart) => chart.group === group).map((options) => {
          if (!this.charts.has(options.key)) this.charts.set(options.key, Object.assign(new Chart(this.shared, options), { names: options.names }));
          const chart = this.charts.get(options.key);
          chart.names = options.names;
          return chart.element;
        });
        fill(this.grids[group], cards, group === "speed" && this.histogram.element);
      }
    }
    for (const chart of this.charted())
      chart.setSeries(chart.names.map((name, n) => ({ label: labelOf(name), color: palette.series[n], dots: name.startsWith("eval/"), curve: alongX(this.curve(name), this.shared.mode, this.run) })));
    this.shared.redraw();
  }

  // In a range that is zoomed into, the server sends more points.
  curve(name) { return (this.detail && this.detail[name]) || this.run.curves[name] || { x: [], y: [] }; }

  updateAbout(about, head) {
    this.shownAbout = about;
    fill(this.layout, about.layout.ranks ? layoutGrid(about.layout) : null);
    fill(this.time, about.time.total ? timeBar(about.time) : null);
    this.eventLine.set(about.events, head);
    this.log.setRanks(about.logs);
    this.recipe.set(about.recipe);
    const derived = about.derived.length > 0 && h("section", { class: "card" }, h("header", {}, h("h3", {}, "Derived values")), table(["", "value", "reason"], about.derived));
    const environment = h("section", { class: "card" }, h("header", {}, h("h3", {}, "Environment")), about.environment.length ? table(["", ""], about.environment) : h("p", { class: "muted" }, "not recorded"));
    fill(this.parts.profile, about.profiles.length > 0 && profileCard(about.profiles));
    fill(this.parts.checkpoints, checkpointCard(about.checkpoints));
    fill(this.parts.environment, environment);
    fill(this.parts.derived, derived);
  }

  redraw() {
    this.shared.redraw();
    for (const figure of [this.heatmap, this.histogram, this.eventLine, this.media]) figure.draw();
  }

  // After a change of the theme.
  recolor() {
    this.updateCurves(this.run.curves);
    if (this.run.about) this.updateAbout(this.run.about, this.run.head);
    this.redraw();
  }
}

function checkpointCard(checkpoints) {
  const rows = checkpoints.map((each) => [each.name, each.step === null ? "–" : format.number(each.step), format.bytes(each.size),
    each.check === "complete" ? "✓ complete" : each.check ? `✖ ${each.check}` : "not checked", each.marks.join(", ")]);
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, "Checkpoints"), h("span", { class: "value" }, String(checkpoints.length))),
    rows.length ? table(["name", "step", "size", "check", ""], rows) : h("p", { class: "muted" }, "none"),
    rows.length > 0 && h("p", { class: "muted note" }, "Checked: the hash of the manifest, and the sizes of files. To check every tensor: paceline checkpoint verify"));
}

class RecipeCard {
  constructor() {
    this.filter = h("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys of the recipe", oninput: () => this.draw() });
    this.all = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.body = h("div", {});
    this.element = h("section", { class: "card" }, h("header", {}, h("h3", {}, "Recipe"), h("span", { class: "grow" }), this.filter, h("label", {}, this.all, " defaults")), this.body);
  }

  set(rows) {
    const key = JSON.stringify(rows);
    if (key === this.key) return; // somebody may be reading or typing
    this.key = key;
    this.rows = rows;
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.toLowerCase();
    const rows = this.rows.filter(([key, value, origin]) => (this.all.checked || wanted || origin !== "default") && `${key} ${value}`.toLowerCase().includes(wanted));
    fill(this.body, rows.length ? table(["key", "value", "from"], rows) : h("p", { class: "muted" }, this.rows.length ? "no such key" : "no readable recipe"));
  }
}

class LogCard {
  constructor(source, run) {
    Object.assign(this, { source, run });
    this.rank = h("select", { "aria-label": "rank", onchange: () => this.load() });
    this.search = h("input", { type: "search", id: "log-search", placeholder: "search  ( / )", "aria-label": "search in the log", oninput: () => this.later() });
    this.count = h("span", { class: "muted" });
    this.lines = h("pre", { class: "log", tabindex: "0" });
    this.element = h("section", { class: "card wide" }, h("header", {}, h("h3", {}, "Log of"), this.rank, this.search, this.count), this.lines);
    this.number = 0;
  }

  setRanks(ranks) {
    const key = ranks.join();
    if (key === this.key) return;
    this.key = key;
    const chosen = this.rank.value;
    fill(this.rank, ranks.map((rank) => h("option", { value: rank }, `rank ${rank}`)));
    const failed = this.run.about && this.run.about.verdict ? this.run.about.verdict.rank : undefined;
    if (chosen) this.rank.value = chosen;
    else if (failed !== undefined && ranks.includes(failed)) this.rank.value = String(failed);
    if (ranks.length) this.load();
    else fill(this.lines, "no logs");
  }

  // While a run writes to it.
  follow() {
    const box = this.element.getBoundingClientRect();
    if (this.run.head.state === "running" && box.top < innerHeight && box.bottom > 0) this.load();
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 150);
  }

  async load() {
    if (!this.rank.value) return;
    const number = ++this.number;
    const search = this.search.value;
    let found;
    try {
      found = await this.source.log(this.run.id, Number(this.rank.value), search);
    } catch (error) {
      found = { lines: [], problem: String(error.message || error) };
    }
    if (number !== this.number) return; // a later answer is there already
    const isAtEnd = this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 20;
    setText(this.count, found.problem || (search ? `${plural(found.found, "line")} found` : found.skipped ? `the last ${plural(found.lines.length, "line")}` : plural(found.lines.length, "line")));
    fill(this.lines, found.lines.map(([line, text]) => h("div", { class: text.startsWith("warning: ") ? "warning" : "" }, h("i", {}, String(line)), marked(text, search))));
    if (isAtEnd || search) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

function marked(text, search) {
  if (!search) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(search.toLowerCase()); at >= 0; at = lower.indexOf(search.toLowerCase(), from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...parts, text.slice(from)];
}
