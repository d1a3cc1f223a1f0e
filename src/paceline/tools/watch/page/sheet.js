// A page of measurements: charts with axes of their own, tables and text (watch/sheet.py).

const UNITS = { number: format.number, bytes: format.bytes, rate: (value) => `${format.short(value)}B/s`, seconds: format.seconds };

class SheetView {
  constructor(sheet) {
    this.charts = [];
    this.draws = { chart: (part) => this.chart(part), table: tableCard, text: (part) => h("p", { class: "wide said" }, part.text), time: (part) => timeBar(part, part.title), bars: barsCard };
    this.parts = sheet.parts;
    this.grid = h("div", { class: "grid" });
    this.element = h("main", {}, this.grid);
  }

  update() {
    if (!this.grid.childElementCount) fill(this.grid, this.parts.map((part) => this.draws[part.kind](part)));
    const palette = colors();
    for (const { chart, series } of this.charts)
      chart.setSeries(series.map((each) => ({ ...each, color: each.faint ? `${palette.muted}60` : palette.series[each.number % palette.series.length] })));
    this.redraw();
  }

  // On a logarithmic axis, curves are drawn by the logarithm of x.
  chart({ title, x, y, series }) {
    const names = x.names || [];
    const place = (value) => (x.log ? Math.log(value) / Math.log(x.log) : value);
    const value = (at) => (x.log ? x.log ** at : at);
    const text = (at) => (names.length ? names[Math.round(at)] || "" : UNITS[x.unit](Number(value(at).toPrecision(4))));
    const whole = (low, high, count) => ticks(low, high, Math.min(count, x.log || names.length ? Math.max(1, Math.round(high - low)) : count));
    const shared = new Shared({ ticks: x.log || names.length ? (...given) => whole(...given).filter(Number.isInteger) : whole, text, describe: (at) => `${x.label} ${text(at)}` });
    const made = new Chart(shared, { title, unit: UNITS[y.unit], zero: !y.log && y.from_zero, note: `${y.label} by ${x.label}` });
    if (y.log) made.toggleLog();
    const curve = (points) => ({ x: points.map((point) => place(point[0])), y: points.map((point) => point[1]) });
    const drawn = series.flatMap((each, number) => [
      each.line.length && { label: each.name, number, curve: curve(each.line), dashed: each.dashed, faint: each.faint, unnamed: each.faint || each.points.length > 0 },
      each.points.length && { label: each.name, number, curve: curve(each.points), dots: true, scattered: true },
    ]).filter(Boolean);
    for (const each of drawn) if (!isSorted(each.curve.x)) sortCurve(each.curve);
    if (!x.log && x.from_zero) shared.full = [0, Math.max(1e-9, ...drawn.flatMap((each) => each.curve.x)) * 1.02];
    else if (drawn.length && drawn.every((each) => each.scattered)) shared.full = padded(drawn.flatMap((each) => each.curve.x), names.length);
    this.charts.push({ chart: made, series: drawn });
    return made.element;
  }

  redraw() { for (const { chart } of this.charts) chart.shared.redraw(); }
  recolor() { this.update(); }
}

const isSorted = (values) => values.every((value, n) => n === 0 || values[n - 1] <= value);

// Points at the ends are whole; names have equal places.
function padded(values, names) {
  const [low, high] = names ? [0, names - 1] : [Math.min(...values), Math.max(...values)];
  const margin = names ? 0.5 : 0.04 * (high - low) || 0.5;
  return [low - margin, high + margin];
}

function sortCurve(curve) {
  const order = curve.x.map((_, n) => n).sort((a, b) => curve.x[a] - curve.x[b]);
  Object.assign(curve, { x: order.map((n) => curve.x[n]), y: order.map((n) => curve.y[n]) });
}

function tableCard({ title, head, rows }) {
  return h("section", { class: "card" }, title && h("header", {}, h("h3", {}, title)), table(head, rows, { class: "numbers" }));
}
