// Which view is shown, and keeping it up to date.

const POLL = 1000; // milliseconds between two questions to the server
const RANKS_EVERY = 4; // of which one is about ranks
const MAX_POINTS = 6000; // of a curve; then the server is asked for a shorter one

class App {
  constructor(root) {
    this.root = root;
    this.source = openSource();
    this.runs = [];
    this.listAddress = "#list"; // with its search, order and columns
    this.known = new Map(); // values by the id of a run
    this.mode = (this.source.values && this.source.values.by) || "step";
    this.smoothing = 0.6;
    this.paused = false;
    this.round = 0;
    this.theme = this.stored("theme");
    this.title = h("h1", {});
    this.status = h("span", { class: "status" });
    this.pill = h("span", {});
    this.nav = h("nav", { "aria-label": "parts of the page" });
    this.body = h("div", {});
    this.help = this.helpDialog();
    fill(root, h("header", { class: "top" }, h("a", { class: "brand", href: "#" }, "paceline"), this.title, this.pill, h("span", { class: "grow" }), this.status,
      h("button", { class: "icon", title: "light or dark (t)", "aria-label": "light or dark", onclick: () => this.toggleTheme() }, "◐"),
      h("button", { class: "icon", title: "keyboard (?)", "aria-label": "keyboard", onclick: () => this.help.showModal() }, "?")), this.nav, this.body, this.help);
    this.applyTheme();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.view && this.view.redraw()).observe(this.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.applyTheme());
    addEventListener("beforeprint", () => this.forPrint(true));
    addEventListener("afterprint", () => this.forPrint(false));
  }

  // A report that was opened as a file may have no storage.
  stored(name) {
    try { return localStorage.getItem(`paceline-${name}`); } catch { return null; }
  }

  get isDark() { return this.theme ? this.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; }

  applyTheme(isDark = this.isDark) {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    if (this.view) this.view.recolor();
  }

  toggleTheme() {
    this.theme = this.isDark ? "light" : "dark";
    try { localStorage.setItem("paceline-theme", this.theme); } catch { /* not kept */ }
    this.applyTheme();
  }

  forPrint(isPrinted) {
    this.applyTheme(isPrinted ? false : this.isDark);
    if (this.view && this.view.shared) { // before the paper is filled, not in the next frame
      const palette = colors();
      for (const chart of this.view.shared.charts) chart.draw(this.view.shared.range, palette, true);
    }
  }

  helpDialog() {
    const keys = [["?", "this list"], ["/", "search in the list or the log"], ["1 … 6", "go to a part of the page"], ["r", "reset the zoom"], ["x", "x axis: step, time or samples"], ["s", "more or less smoothing"], ["t", "light or dark"], ["p", "pause or continue updates"], ["g", "list of runs"],
      ["drag", "zoom into a chart; shift and drag moves, a double click resets"], ["← →", "on a chart: move the crosshair; with shift, move the range"], ["+ −", "on a chart: zoom"], ["↑ ↓", "on the table of ranks: select a rank"]];
    const dialog = h("dialog", { "aria-label": "keyboard" }, h("h2", {}, "Keyboard"), table(["key", ""], keys.map(([key, text]) => [h("kbd", {}, key), text])), h("button", { onclick: () => dialog.close() }, "Close"));
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    return dialog;
  }

  controls(view) {
    const modes = h("div", { class: "segmented", role: "group", "aria-label": "x axis" }, ["step", "time", "samples"].map((mode) => h("button", { "data-mode": mode, "aria-pressed": String(mode === this.mode), onclick: () => this.setMode(mode) }, mode)));
    const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.smoothing), "aria-label": "smoothing", oninput: (event) => this.setSmoothing(Number(event.target.value)) });
    const reset = h("button", { class: "reset", onclick: () => view.shared.setZoom(null) }, "reset zoom");
    return h("div", { class: "controls" }, modes, h("label", {}, "smoothing ", slider), h("span", { class: "grow" }), h("button", { title: "zoom out", "aria-label": "zoom out", onclick: () => view.shared.zoomBy(2) }, "−"), h("button", { title: "zoom in", "aria-label": "zoom in", onclick: () => view.shared.zoomBy(0.5) }, "+"), reset);
  }

  setMode(mode) {
    this.mode = mode;
    for (const button of this.body.querySelectorAll("[data-mode]")) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    this.view.shared.mode = mode;
    this.view.shared.setZoom(null); // and draws everything again
  }

  setSmoothing(weight) {
    this.smoothing = Math.min(0.99, Math.max(0, weight));
    if (!this.view.shared) return;
    this.view.shared.smoothing = this.smoothing;
    this.view.shared.redraw();
    for (const slider of this.body.querySelectorAll('input[aria-label="smoothing"]')) slider.value = String(this.smoothing);
  }

  async start() {
    const { sheet, sweep } = this.source.values || {};
    if (sheet) return this.showAlone(sheet.title, new SheetView(sheet));
    if (sweep) return this.showAlone(sweep.title, new SweepView(null), sweep);
    await this.refreshRuns();
    await this.refreshSweep();
    await this.route();
    if (this.source.live) this.poll();
  }

  showAlone(title, view, values) {
    document.title = `${title} – paceline`;
    setText(this.title, title);
    this.view = view;
    fill(this.body, view.element);
    if (values) view.set(values);
    view.update();
  }

  async refreshRuns() {
    const found = await this.source.runs(this.version);
    const before = new Map(this.runs.map((run) => [run.id, run]));
    this.runs = found.runs.map((run) => (run.name === undefined ? before.get(run.id) : run)); // else it has not changed
    this.now = found.now;
    this.version = found.version;
    this.defaults = found.defaults || {};
    this.chosen = found.chosen || [];
  }

  // Without Optuna, a study is a list of trials.
  async refreshSweep() { this.sweep = this.source.live ? await this.source.sweep().catch(() => ({})) : {}; }

  // #run=ID, #compare=ID,ID or #list…
  async route() {
    const address = new URLSearchParams(location.hash.slice(1));
    const wanted = (address.get("run") || address.get("compare") || "").split(",");
    let ids = wanted.filter((id) => this.runs.some((run) => run.id === id));
    if (!location.hash.slice(1) && this.chosen.length) ids = this.chosen;
    if (address.has("list")) this.listAddress = location.hash;
    this.view = null;
    if (!ids.length && this.sweep.trials && !address.has("list")) {
      this.view = new SweepView(this);
      this.view.set(this.sweep);
    } else if (!ids.length) this.view = new ListView(this);
    else {
      const runs = ids.map((id) => this.runOf(id));
      await Promise.all(runs.map((run) => this.refresh(run)));
      this.view = runs.length === 1 ? new RunView(this, runs[0]) : new CompareView(this, runs);
    }
    this.shown = ids;
    fill(this.body, this.view.element);
    this.showParts();
    this.show();
    scrollTo(0, 0);
    this.refreshRanks(this.view);
  }

  // Links to the parts of the page.
  showParts() {
    const isSweep = this.view instanceof SweepView;
    fill(this.nav, this.sweep.trials && !isSweep && h("a", { href: "#sweep" }, "Sweep"), this.source.live && (this.shown.length > 0 || isSweep) && h("a", { href: this.listAddress }, "Runs"), [...this.body.querySelectorAll(".part")].map((part) => h("a", { href: location.hash, onclick: (event) => { event.preventDefault(); part.scrollIntoView({ behavior: "smooth" }); } }, part.querySelector("h2").textContent)));
  }

  runOf(id) {
    if (!this.known.has(id)) this.known.set(id, { id, curves: {}, cursor: "", head: null, about: null, ranks: null });
    return this.known.get(id);
  }

  async refresh(run) {
    const isLong = Object.values(run.curves).some((curve) => curve.x.length > MAX_POINTS);
    const asked = run.cursor;
    const found = await this.source.run(run.id, isLong ? "" : asked, run.aboutId);
    if (run.cursor !== asked) return; // another answer has come first
    if (found.about) { run.about = found.about; run.aboutId = found.about_id; }
    run.head = found.head;
    if (found.curves && (found.fresh !== false || Object.keys(found.curves).length)) {
      run.version = (run.version || 0) + 1;
      if (found.fresh !== false) {
        run.curves = found.curves;
        run.rewinds = (run.rewinds || 0) + 1;
      }
      if (found.fresh === false) for (const [name, curve] of Object.entries(found.curves)) append(run.curves, name, curve);
      run.cursor = found.cursor;
    }
  }

  // After the curves: the files of many ranks take a moment.
  async refreshRanks(view) {
    if (!(view instanceof RunView) || view.isAsking) return;
    view.isAsking = true;
    try {
      const { id, ranks, media } = view.run;
      const [newRanks, newMedia] = await Promise.all([this.source.ranks(id, ranks && ranks.version), this.source.media(id, media && media.version)]);
      if (!newRanks.rows && !newMedia.entries) return;
      if (newRanks.rows) view.run.ranks = newRanks;
      if (newMedia.entries) view.run.media = newMedia;
      if (view === this.view) view.update();
    } catch { // the next question about the run says what is wrong
    } finally {
      view.isAsking = false;
    }
  }

  show() {
    const heads = this.shown.map((id) => this.runOf(id).head);
    setText(this.title, heads.length === 1 ? heads[0].name : heads.length ? `${heads.length} runs` : this.view instanceof SweepView ? this.sweep.title : "");
    fill(this.pill, heads.length === 1 ? statePill(heads[0]) : null);
    document.title = heads.length === 1 ? `${SIGNS[heads[0].state]} ${heads[0].name} – paceline` : heads.length ? `${heads.length} runs – paceline` : "paceline";
    const last = Math.max(...heads.map((head) => head.updated), 0);
    setText(this.status, !this.source.live ? `report of ${format.clock(this.source.values.written)}` : this.paused ? "paused" : heads.length ? `updated ${format.age(heads[0].now - last)} ago` : "live");
    this.status.classList.toggle("live", this.source.live && !this.paused);
    this.view.update();
  }

  async poll() {
    for (;;) {
      const isPartial = !this.shown.length && this.runs.some((run) => run.settings === undefined); // columns are still being read
      await new Promise((resolve) => setTimeout(resolve, isPartial ? POLL / 10 : POLL));
      if (this.paused || document.hidden) continue;
      this.round += 1;
      try {
        const shown = this.shown;
        if (!shown.length) await this.refreshRuns();
        for (const id of shown) await this.refresh(this.runOf(id));
        if (shown !== this.shown) continue;
        if (this.view instanceof SweepView && this.round % RANKS_EVERY === 0) {
          await this.refreshSweep();
          if (this.sweep.trials) this.view.set(this.sweep);
        }
        this.show();
        if (this.round % RANKS_EVERY === 0) this.refreshRanks(this.view);
        if (this.round % 2 === 0 && this.view.log) this.view.log.follow();
      } catch (error) {
        setText(this.status, `disconnected: ${error.message || error}`);
        this.status.classList.remove("live");
      }
    }
  }

  // More points for the range that is zoomed into.
  async fetchDetail(view) {
    const zoom = view.shared.zoom;
    const mode = view.shared.mode;
    clearTimeout(this.detailTimer);
    if (!zoom) {
      view.detail = null;
      if (view.details) view.details.clear();
      view.recolor();
      return;
    }
    this.detailTimer = setTimeout(async () => {
      for (const run of view.runs || [view.run]) {
        const [low, high] = zoom.map((x) => toStep(x, mode, run));
        const found = await this.source.curves(run.id, Math.max(0, low), high);
        if (!found || view.shared.zoom !== zoom) return;
        if (view.details) view.details.set(run.id, { ...found, time: run.curves.time });
        else view.detail = { ...found, time: run.curves.time };
      }
      view.recolor();
    }, 200);
  }

  onKey(event) {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
    if (event.key === "Escape" && isTyping) event.target.blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    const shared = this.view && this.view.shared;
    const parts = this.body.querySelectorAll(".part");
    const next = { step: "time", time: "samples", samples: "step" };
    const actions = {
      "?": () => this.help.showModal(),
      "/": () => { const box = document.getElementById("log-search") || document.getElementById("list-search"); if (box) box.focus(); },
      t: () => this.toggleTheme(),
      r: () => shared && shared.setZoom(null),
      x: () => shared && this.setMode(next[this.mode]),
      s: () => shared && this.setSmoothing(this.smoothing >= 0.9 ? 0 : this.smoothing + 0.3),
      p: () => { this.paused = !this.paused; this.show(); },
      g: () => { if (this.source.live) location.hash = this.listAddress; },
    };
    const action = actions[event.key] || (parts[Number(event.key) - 1] && (() => parts[Number(event.key) - 1].scrollIntoView({ behavior: "smooth" })));
    if (!action) return;
    event.preventDefault();
    action();
  }
}

function append(curves, name, added) {
  const curve = curves[name] || { x: [], y: [] };
  const joined = { x: curve.x.concat(added.x), y: curve.y.concat(added.y) };
  if (curve.lo) {
    joined.bad = curve.bad;
    joined.lo = curve.lo.concat(added.y);
    joined.hi = curve.hi.concat(added.y);
  }
  curves[name] = joined;
}

function toStep(x, mode, run) {
  if (mode === "step") return x;
  if (mode === "samples") return x / (run.head.batch || 1);
  const times = run.curves.time;
  if (!times || !times.x.length) return 0;
  const since = times.y.map((time) => time - run.head.began);
  const n = Math.min(times.x.length - 1, Math.max(1, lowerBound(since, x)));
  if (times.x.length === 1) return times.x[0];
  const share = (x - since[n - 1]) / (since[n] - since[n - 1] || 1);
  return times.x[n - 1] + share * (times.x[n] - times.x[n - 1]);
}

const app = new App(document.getElementById("app"));
app.start().catch((error) => {
  fill(app.body, h("main", {}, h("section", { class: "card banner bad", role: "alert" }, h("h2", {}, "This page can't be shown"), h("p", {}, String(error.message || error)))));
});
