// The axes of charts, and what the charts of a page share: their range of x and their crosshair.

const LEFT = 54, RIGHT = 12, TOP = 10, BOTTOM = 24;

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= raw);
  if (high - low < 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low]; // no number lies between
  const first = Math.ceil(low / step);
  const last = Math.min(Math.floor(high / step + 1e-9), first + 100);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// With as many digits as neighbours need to differ.
function tickText(value, values) {
  const distance = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(value);
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(value) >= size) return `${Number((value / size).toFixed(Math.max(0, Math.ceil(Math.log10(size / distance)))))}${unit}`;
  return format.number(value);
}

function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => (high - low) / each <= count);
  if (!step || high - low < 5) return ticks(low, high, count);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

// Exponential moving average, corrected for its start; `weight` is that of the past. Gaps are kept.
function smooth(values, weight) {
  let mean = 0;
  let power = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    power *= weight;
    return mean / (1 - power);
  });
}

// How x is labelled: where its ticks are, the text of a tick, and a place in words.
const X_AXES = {
  step: {
    ticks: (low, high, count) => ticks(low, high, count).filter(Number.isInteger), text: tickText,
    describe: (value) => `step ${format.number(Math.round(value))}`,
  },
  time: { ticks: timeTicks, text: format.seconds, describe: (value) => `${format.seconds(value)} after the start` },
  samples: { ticks: (low, high, count) => ticks(low, high, count).filter(Number.isInteger), text: tickText, describe: (value) => plural(Math.round(value), "sample") },
};

// What the charts of a page have in common.
class Shared {
  constructor(axis = null) {
    this.own = axis;
    this.charts = new Set();
    this.zoom = null; // [low, high] in units of x
    this.cursor = null;
    this.smoothing = 0.6;
    this.mode = "step";
    this.pending = false;
    this.full = null; // [low, high] of whole curves, where those that are drawn are a part of them
    this.onzoom = () => {};
  }

  get extent() {
    if (this.full) return this.full;
    let low = Infinity;
    let high = -Infinity;
    for (const chart of this.charts)
      for (const { curve } of chart.series)
        if (curve.x.length) {
          low = Math.min(low, curve.x[0]);
          high = Math.max(high, curve.x[curve.x.length - 1]);
        }
    return low <= high ? [low, high === low ? low + 1 : high] : [0, 1];
  }

  get range() { return this.zoom || this.extent; }
  get axis() { return this.own || X_AXES[this.mode]; }

  setZoom(zoom) {
    const [low, high] = this.extent;
    if (zoom) {
      const width = Math.min(high - low, Math.max(zoom[1] - zoom[0], (high - low) * 1e-6, 1e-6));
      const start = Math.min(Math.max(zoom[0], low), high - width);
      zoom = width >= (high - low) * 0.999 ? null : [start, start + width];
    }
    this.zoom = zoom;
    this.onzoom(zoom);
    this.redraw();
  }

  // `by`: fraction of the range, around its middle or the crosshair.
  zoomBy(factor) {
    const [low, high] = this.range;
    const middle = this.cursor !== null && this.cursor >= low && this.cursor <= high ? this.cursor : (low + high) / 2;
    this.setZoom([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }

  pan(fraction) {
    const [low, high] = this.range;
    if (this.zoom) this.setZoom([low + (high - low) * fraction, high + (high - low) * fraction]);
  }

  setCursor(cursor) {
    this.cursor = cursor;
    for (const chart of this.charts) chart.drawCursor();
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      const palette = colors();
      const range = this.range;
      for (const chart of this.charts) chart.draw(range, palette);
    });
  }
}
