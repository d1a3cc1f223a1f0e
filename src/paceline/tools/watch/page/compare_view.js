// Several runs over each other. Runs that differ only in the seed are one line with a band.

const NUMBER_OF_COLORS = 8;

class CompareView {
  constructor(app, runs) {
    Object.assign(this, { app, runs });
    this.shared = new Shared();
    this.shared.smoothing = app.smoothing;
    this.shared.mode = app.mode;
    this.shared.onzoom = () => app.fetchDetail(this);
    this.charts = new Map();
    this.details = new Map();
    this.grouped = h("input", { type: "checkbox", checked: true, onchange: () => this.update() });
    this.bandNote = h("p", { class: "muted note" }, "Line: mean over seeds. Band: from the lowest to the highest value.");
    this.controls = app.controls(this);
    this.groupBox = h("label", {}, this.grouped, "group seeds");
    this.controls.prepend(this.groupBox);
    this.results = h("section", { class: "card wide" });
    this.settings = h("section", { class: "card wide" });
    this.grid = h("div", { class: "grid" });
    const part = (id, title, ...content) => h("section", { id, class: "part" }, h("h2", {}, title), content);
    this.element = h("main", {}, part("results", "Results", h("div", { class: "grid" }, this.results)), part("settings", "Settings that differ", h("div", { class: "grid" }, this.settings)),
      part("training", "Curves", this.controls, this.bandNote, this.grid));
  }

  update() {
    const known = this.runs.filter((run) => run.head);
    const seeds = seedGroups(known);
    const hasSeeds = seeds.some((group) => group.runs.length > 1);
    const isGrouped = hasSeeds && this.grouped.checked;
    const groups = isGrouped ? seeds : known.map((run) => ({ label: run.head.name, runs: [run] }));
    const palette = colors();
    groups.forEach((group, n) => { group.color = palette.series[n % NUMBER_OF_COLORS]; });
    this.groupBox.hidden = !hasSeeds;
    this.bandNote.hidden = !isGrouped;
    this.updateTables(known, groups);
    this.updateCharts(known, groups, palette);
  }

  updateTables(known, groups) {
    const rows = resultRows(known, groups);
    const settings = settingRows(groups);
    const key = JSON.stringify([rows, settings, groups]);
    if (key === this.tablesKey) return;
    this.tablesKey = key;
    const link = (run) => h("a", { href: `#run=${encodeURIComponent(run.id)}` }, run.head.name);
    const titles = groups.map((group) => {
      const swatch = h("i", { class: "swatch" });
      swatch.style.background = group.color;
      return [swatch, group.runs.length === 1 ? link(group.runs[0]) : group.label];
    });
    const members = groups.map((group) => group.runs.map((run) => [link(run), " "]));
    fill(this.results, table(["", ...titles], groups.length < known.length ? [["runs", ...members], ...rows] : rows, { class: "beside" }));
    fill(this.settings, settings.length ? table(["setting", ...groups.map((group) => group.label)], settings, { class: "beside" }) : h("p", { class: "muted" }, "none"));
  }

  updateCharts(known, groups, palette) {
    const key = JSON.stringify([known.map((run) => run.version), groups.length, palette.text, this.shared.mode]);
    if (key === this.curvesKey) return;
    this.curvesKey = key;
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
    for (const chart of this.charts.values()) {
      const [name] = chart.names;
      const curveOf = (group) => (group.runs.length === 1 ? this.curve(group.runs[0], name) : meanCurve(group.runs.map((run) => this.curve(run, name))));
      const series = groups.map((group) => ({ label: group.label, color: group.color, dots: name.startsWith("eval/"), curve: curveOf(group) }));
      chart.setSeries(markEqual(series.filter((each) => each.curve.x.length)));
    }
    this.shared.redraw();
  }

  curve(run, name) {
    const detail = this.details.get(run.id);
    return alongX((detail && detail[name]) || run.curves[name] || { x: [], y: [] }, this.shared.mode, run);
  }

  redraw() { this.shared.redraw(); }
  recolor() { this.curvesKey = null; this.update(); }
}

// Cells of a group: the value of its run, or the mean over seeds and what it lies between.
function resultRows(known, groups) {
  const cells = (text) => groups.map((group) => [...new Set(group.runs.map(text))].join(", "));
  const numbers = (value, show = format.number, unit = "") => groups.map((group) => {
    const found = group.runs.map(value).filter((each) => each !== null && each !== undefined);
    const mean = found.reduce((sum, each) => sum + each / found.length, 0);
    const spread = found.length > 1 && Math.min(...found) < Math.max(...found) ? ` (${show(Math.min(...found))} to ${show(Math.max(...found))})` : "";
    return found.length ? `${show(mean)}${spread}${unit}` : "–";
  });
  const lastOf = (run, name) => (run.curves[name] && run.curves[name].y.length ? last(run.curves[name].y) : null);
  const chosen = new Set(known.map((run) => run.head.save_best));
  const metrics = [...new Set(known.flatMap((run) => Object.keys(run.head.best)))].sort((a, b) => chosen.has(b) - chosen.has(a));
  const title = (name) => (name.startsWith("eval/") ? `validation ${name.slice(5)}` : name);
  const best = (name) => groups.map((group, n) => {
    const only = group.runs.length === 1 && group.runs[0].head.best[name];
    return only ? `${format.number(only[1])} (step ${format.number(only[0])})` : numbers((run) => run.head.best[name] && run.head.best[name][1])[n];
  });
  return [["state", ...cells((run) => run.head.state + (run.head.reason ? ` (${run.head.reason})` : ""))],
    ["step", ...cells((run) => `${format.number(run.head.step)}${run.head.total ? ` of ${format.number(run.head.total)}` : ""}`)],
    ...metrics.flatMap((name) => [[`best ${title(name)}`, ...best(name)], [`final ${title(name)}`, ...numbers((run) => lastOf(run, name))]]),
    ["throughput", ...numbers((run) => run.head.speed, format.short, ` ${known[0].head.speed_unit || ""}`)],
    ["elapsed", ...numbers((run) => run.about && run.about.time.total, format.seconds)]];
}

function settingRows(groups) {
  const recipes = groups.map((group) => group.runs.map(recipeOf));
  const keys = [...new Set(recipes.flat().flatMap((recipe) => [...recipe.keys()]))].filter((key) => new Set(recipes.flat().map((recipe) => recipe.get(key))).size > 1);
  return keys.map((key) => [key, ...recipes.map((members) => [...new Set(members.map((recipe) => (recipe.has(key) ? recipe.get(key) : "–")))].join(", "))]);
}
