// Several runs over each other, and a list of runs.

const DASHES = 8;

class CompareView {
  constructor(app, runs) {
    Object.assign(this, { app, runs });
    this.shared = new Shared();
    this.shared.smoothing = app.smoothing;
    this.shared.mode = app.mode;
    this.shared.onzoom = () => app.fetchDetail(this);
    this.charts = new Map();
    this.details = new Map();
    this.results = h("section", { class: "card wide" });
    this.recipes = h("section", { class: "card wide" });
    this.grid = h("div", { class: "grid" });
    this.element = h("main", {}, h("div", { class: "grid" }, this.results), app.controls(this), h("section", { id: "training", class: "part" }, h("h2", {}, "Curves"), this.grid), h("section", { id: "about", class: "part" }, h("h2", {}, "Recipes"), h("div", { class: "grid" }, this.recipes)));
  }

  update() {
    const palette = colors();
    const color = (n) => palette.series[n % DASHES];
    const known = this.runs.filter((run) => run.head);
    const swatch = (n) => { const element = h("i", { class: "swatch" }); element.style.background = color(n); return element; };
    const best = (run, name) => (run.head.best[name] ? `${format.number(run.head.best[name][1])} (step ${format.number(run.head.best[name][0])})` : "–");
    const last = (run, name) => { const curve = run.curves[name]; return curve && curve.y.length ? format.number(curve.y[curve.y.length - 1]) : "–"; };
    const metrics = [...new Set(known.flatMap((run) => Object.keys(run.head.best)))];
    const title = (name) => (name.startsWith("eval/") ? `validation ${name.slice(5)}` : name);
    const rows = [["state", ...known.map((run) => run.head.state + (run.head.reason ? ` (${run.head.reason})` : ""))],
      ["step", ...known.map((run) => `${format.number(run.head.step)}${run.head.total ? ` of ${format.number(run.head.total)}` : ""}`)],
      ...metrics.flatMap((name) => [[`final ${title(name)}`, ...known.map((run) => last(run, name))], [`best ${title(name)}`, ...known.map((run) => best(run, name))]]),
      ["throughput", ...known.map((run) => (run.head.speed === null ? "–" : `${format.short(run.head.speed)} ${run.head.speed_unit}`))],
      ["elapsed", ...known.map((run) => (run.about && run.about.time.total ? format.seconds(run.about.time.total) : "–"))]];
    const key = JSON.stringify([rows, known.map((run) => run.about && run.aboutId), document.documentElement.dataset.theme]);
    if (key !== this.tablesKey) {
      this.tablesKey = key;
      fill(this.results, h("header", {}, h("h3", {}, "Results")), table(["", ...known.map((run, n) => h("a", { href: `#run=${encodeURIComponent(run.id)}` }, swatch(n), run.head.name))], rows));
      this.updateRecipes(known);
    }
    this.shared.full = extentOf(known, this.shared.mode);
    const names = new Set(known.flatMap((run) => Object.keys(run.curves)));
    const wanted = chartsOf(names).flatMap((chart) => chart.names.map((name) => ({ ...chart, key: name, names: [name], title: chart.names.length > 1 ? `${chart.title} (${labelOf(name)})` : chart.title, wide: name === "loss" })));
    const chartsKey = wanted.map((chart) => chart.key).join("\n");
    if (chartsKey !== this.chartsKey) {
      this.chartsKey = chartsKey;
      fill(this.grid, wanted.map((options) => {
        if (!this.charts.has(options.key)) this.charts.set(options.key, Object.assign(new Chart(this.shared, options), { names: options.names }));
        return this.charts.get(options.key).element;
      }));
    }
    for (const chart of this.charts.values())
      chart.setSeries(known.map((run, n) => ({ label: run.head.name, color: color(n), dots: chart.names[0].startsWith("eval/"), curve: alongX(this.curve(run, chart.names[0]), this.shared.mode, run) })).filter((each) => each.curve.x.length));
    this.shared.redraw();
  }

  curve(run, name) {
    const detail = this.details.get(run.id);
    return (detail && detail[name]) || run.curves[name] || { x: [], y: [] };
  }

  updateRecipes(known) {
    const maps = known.map((run) => new Map((run.about ? run.about.recipe : []).map(([key, value]) => [key, value])));
    const keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((key) => new Set(maps.map((map) => map.get(key))).size > 1);
    fill(this.recipes, h("header", {}, h("h3", {}, "Keys that differ")), keys.length ? table(["key", ...known.map((run) => run.head.name)], keys.map((key) => [key, ...maps.map((map) => (map.has(key) ? map.get(key) : "–"))])) : h("p", { class: "muted" }, "no differences"));
  }

  redraw() { this.shared.redraw(); }
  recolor() { this.update(); }
}

class ListView {
  constructor(app) {
    this.app = app;
    this.chosen = new Set();
    this.box = h("div", {});
    this.button = h("button", { disabled: true, onclick: () => { location.hash = `compare=${[...this.chosen].map(encodeURIComponent).join(",")}`; } }, "Compare");
    this.element = h("main", {}, h("div", { class: "controls" }, h("h2", {}, "Runs"), h("span", { class: "grow" }), this.button), h("section", { class: "card" }, this.box));
  }

  update() {
    const runs = this.app.runs;
    const now = this.app.now;
    const key = JSON.stringify(runs.map(({ updated, ...run }) => run));
    if (key === this.key) {
      for (const cell of this.box.querySelectorAll("[data-updated]")) setText(cell, `${format.age(now - Number(cell.dataset.updated))} ago`);
      return;
    }
    this.key = key;
    for (const id of this.chosen) if (!runs.some((run) => run.id === id)) this.chosen.delete(id);
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.run : null;
    fill(this.box, runs.length ? table(["", "run", "state", "step", "loss", "speed", "updated"], runs.map((run) => [
      h("input", { type: "checkbox", "data-run": run.id, "aria-label": `choose ${run.name}`, ...(this.chosen.has(run.id) ? { checked: true } : {}), onchange: (event) => this.choose(run.id, event.target.checked) }),
      h("a", { href: `#run=${encodeURIComponent(run.id)}` }, run.name), statePill(run), run.step === null ? "–" : `${format.number(run.step)}${run.total ? ` of ${format.number(run.total)}` : ""}`,
      run.loss === null || run.loss === undefined ? "–" : format.number(run.loss), run.speed === null ? "–" : `${format.short(run.speed)} ${run.speed_unit}`, h("span", { "data-updated": run.updated }, `${format.age(now - run.updated)} ago`)]))
      : h("p", { class: "muted" }, "No runs yet. Start one: paceline train"));
    if (focused) for (const box of this.box.querySelectorAll("input")) if (box.dataset.run === focused) box.focus();
    this.draw();
  }

  choose(id, isChosen) {
    if (isChosen) this.chosen.add(id);
    else this.chosen.delete(id);
    this.draw();
  }

  draw() {
    this.button.disabled = this.chosen.size < 2;
    setText(this.button, this.chosen.size < 2 ? "Choose runs to compare" : `Compare ${this.chosen.size} runs`);
  }

  redraw() {}
  recolor() {}
}

const SIGNS = { running: "●", finished: "✓", failed: "✖", interrupted: "‖", unknown: "?" };

function statePill(head) {
  return h("span", { class: `pill ${head.state}` }, `${SIGNS[head.state] || "?"} ${head.state}${head.reason ? ` (${head.reason})` : ""}`);
}
