// Elements and numbers. Text from a run is only ever set as text, never as markup.

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const format = {
  // 1.4344, 7.6e-06, 12,345
  number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e").replace("e-", "e−");
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return String(Number(value.toPrecision(size >= 1000 ? 6 : 5)));
  },
  // 12.3k
  short(value) {
    if (value === null || value === undefined) return "–";
    for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
    return format.number(Number(value.toPrecision(3)));
  },
  percent(value) {
    if (value === null || value === undefined) return "–";
    return value > 0 && value < 5e-4 ? "< 0.1 %" : `${Number((100 * value).toFixed(Math.abs(value) < 0.995 ? 1 : 0))} %`;
  },
  bytes(value) {
    if (value === null || value === undefined) return "–";
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
    return `${value} B`;
  },
  // 120 ms, 4.2 s, 3 min 20 s, 2 h 5 min
  seconds(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
    if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
    if (size < 59.95) return `${Number(value.toPrecision(3))} s`;
    const minutes = Math.floor(Math.round(value) / 60);
    if (minutes < 60) return `${minutes} min ${Math.round(value) % 60} s`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
    return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
  },
  age(seconds) {
    for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]])
      if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
    return `${Math.max(0, Math.floor(seconds))} s`;
  },
  clock(time) {
    if (!(time > 0 && time < 1e11)) return "–";
    const date = new Date(time * 1000);
    const two = (number) => String(number).padStart(2, "0");
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  },
};

const plural = (count, thing) => `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;

// The first index whose value is at least `value`, in an increasing array.
function lowerBound(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return {
    text: get("--text"), muted: get("--muted"), line: get("--line"), card: get("--card"), bad: get("--bad"),
    warn: get("--warn"), good: get("--good"), accent: get("--accent"),
    series: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => get(`--series-${number}`)),
  };
}

// A canvas that fills its parent, with one unit per CSS pixel.
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(10, Math.floor(canvas.parentElement.clientWidth));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}
