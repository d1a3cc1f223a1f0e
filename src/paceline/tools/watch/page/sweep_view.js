// The page of a sweep: the best trial, the history of the search, the metric by each parameter, and all trials.

const TRIAL_PILLS = { complete: "finished", running: "running", failed: "failed", pruned: "interrupted" };
const COLORED = 5; // curves of the best trials

class SweepView {
  constructor(app) {
    this.app = app;
    this.order = null; // [column, direction]; null: the best first
    this.top = h("div", {});
    this.charts = h("div", { class: "charts" });
    this.table = h("div", { class: "table-box" });
    this.count = h("span", { class: "value" });
    this.element = h("main", {}, this.top, this.charts, h("section", { class: "part" }, h("h2", {}, "Trials"), h("section", { class: "card" }, this.table)));
  }

  set(sweep) {
    const key = JSON.stringify(sweep);
    if (key === this.key) return;
    Object.assign(this, { key, sweep });
    const better = (a, b) => (sweep.minimizes ? a < b : a > b);
    this.done = sweep.trials.filter((trial) => trial.state === "complete" && trial.value !== null);
    this.best = this.done[0]; // they are ranked
    this.sheet = new SheetView({ parts: this.parts(better) });
    fill(this.charts, this.sheet.grid);
    fill(this.top, this.tiles());
    this.drawTable();
    this.update();
  }

  tiles() {
    const { trials, metric, counts, space } = this.sweep;
    const tile = (label, value, more) => h("div", { class: "tile" }, h("div", { class: "muted", title: label }, label), h("div", { class: "big", title: value }, value), h("div", { class: "muted" }, more || " "));
    const steps = trials.reduce((sum, trial) => sum + trial.steps, 0);
    return h("div", { class: "tiles sweep" },
      tile(`best ${metric}`, this.best ? format.number(this.best.value) : "–", this.best ? `trial ${this.best.number}` : "no trial has completed"),
      tile("trials", format.number(trials.length), counts),
      steps > 0 && tile("steps", format.number(steps), "of all trials"),
      this.best && space.map(({ key }) => tile(key, valueText(this.best.params[key]), `in trial ${this.best.number}`)));
  }

  parts(better) {
    const { metric, trials, space } = this.sweep;
    const y = { label: metric, unit: "number", from_zero: false };
    const parts = [];
    const ordered = [...this.done].sort((a, b) => a.number - b.number);
    if (ordered.length) {
      let best = null;
      const line = ordered.flatMap(({ number, value }) => { // in steps
        const before = best;
        best = before === null || better(value, before) ? value : before;
        return before === null || best === before ? [[number, best]] : [[number, before], [number, best]];
      });
      parts.push({ kind: "chart", title: "History", x: { label: "trial", unit: "number", from_zero: true }, y,
        series: [{ name: "best so far", points: [], line }, { name: "trials", points: ordered.map(({ number, value }) => [number, value]), line: [] }] });
    }
    const curves = trials.filter((trial) => trial.curve.length > 1);
    if (curves.length) parts.push({ kind: "chart", title: "Curves", x: { label: "step", unit: "number", from_zero: false }, y,
      series: curves.map((trial, n) => ({ name: `trial ${trial.number}`, points: [], line: trial.curve, faint: n >= COLORED })) });
    for (const { key, log, choices } of ordered.length ? space : []) {
      const place = (trial) => (choices ? choices.findIndex((choice) => same(choice, trial.params[key])) : trial.params[key]);
      const points = ordered.filter((trial) => trial !== this.best).map((trial) => [place(trial), trial.value]);
      parts.push({ kind: "chart", title: `${metric} by ${key}`, y, x: { label: key, log: log && 10, unit: "number", from_zero: false, names: choices && choices.map(valueText) },
        series: [{ name: "best", points: [[place(this.best), this.best.value]], line: [] }, { name: "trials", points, line: [] }] });
    }
    const importances = Object.entries(this.sweep.importances);
    if (importances.length) parts.push({ kind: "bars", title: "Importance of parameters", rows: importances, note: "How much of the metric's variation each parameter explains (PED-ANOVA)" });
    return parts;
  }

  columns() {
    return [["trial", (trial) => trial.number], [this.sweep.metric, (trial) => trial.value], ["state", (trial) => trial.state], ["steps", (trial) => trial.steps],
      ["time", (trial) => trial.seconds], ...this.sweep.space.map(({ key }) => [key, (trial) => trial.params[key]])];
  }

  drawTable() {
    const columns = this.columns();
    const [column, direction] = this.order || [];
    const value = columns[column] && columns[column][1];
    const rows = value ? [...this.sweep.trials].sort((a, b) => direction * compare(value(a), value(b))) : this.sweep.trials;
    const sort = (n) => {
      this.order = column === n ? (direction > 0 ? [n, -1] : null) : [n, 1];
      this.drawTable();
      this.table.querySelectorAll("th button")[n].focus();
    };
    const sign = (n) => (n !== column ? "" : direction > 0 ? " ▲" : " ▼");
    const head = columns.map(([title], n) => h("th", { scope: "col", "aria-sort": n !== column ? "none" : direction > 0 ? "ascending" : "descending" }, h("button", { class: "sort", onclick: () => sort(n) }, title, sign(n))));
    const cells = (trial) => [this.link(trial), trial.value === null ? "–" : format.number(trial.value), h("span", { class: `pill ${TRIAL_PILLS[trial.state] || ""}`, title: trial.verdict || null }, trial.state),
      format.number(trial.steps), format.seconds(trial.seconds), ...this.sweep.space.map(({ key }) => valueText(trial.params[key]))];
    fill(this.table, h("table", { class: "trials" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows.flatMap((trial) => [
      h("tr", { class: trial === this.best ? "best" : "" }, cells(trial).map((cell) => h("td", {}, cell))),
      trial.verdict && h("tr", {}, h("td", {}), h("td", { class: "muted", colspan: String(columns.length - 1) }, trial.verdict)),
    ].filter(Boolean)))));
  }

  // On a live page, the run of a trial.
  link(trial) {
    const run = this.app && this.app.runs.find(({ name }) => name.endsWith(String(trial.number).padStart(4, "0")));
    return run ? h("a", { href: `#run=${run.id}` }, String(trial.number)) : String(trial.number);
  }

  update() { if (this.sheet) this.sheet.update(); }
  redraw() { if (this.sheet) this.sheet.redraw(); }
  recolor() { this.update(); }
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const valueText = (value) => (typeof value === "number" ? format.number(value) : typeof value === "string" ? value : value === undefined ? "–" : JSON.stringify(value));

// Without a value comes after all values.
function compare(a, b) {
  const [isNone, isOtherNone] = [a, b].map((value) => value === null || value === undefined);
  if (isNone || isOtherNone) return isNone - isOtherNone;
  return typeof a === "number" && typeof b === "number" ? a - b : valueText(a).localeCompare(valueText(b));
}

function barsCard({ title, rows, note }) {
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, title)), h("div", { class: "bars" }, rows.map(([name, share]) => {
    const bar = h("i", {});
    bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    return h("div", {}, h("span", {}, name), h("span", { class: "track" }, bar), h("b", {}, format.percent(share)));
  })), h("p", { class: "muted note" }, note));
}
