// The columns of the list of runs: {key, title, group, value: what is sorted and searched, cell: what is shown}.

const SIGNS = { running: "●", finished: "✓", failed: "✖", interrupted: "‖", unknown: "?" };

function statePill(head) {
  return h("span", { class: `pill ${head.state}` }, `${SIGNS[head.state] || "?"} ${head.state}${head.reason ? ` (${head.reason})` : ""}`);
}

const metricTitle = (name) => (name.startsWith("eval/") ? `validation ${name.slice(5)}` : name);

// Of the metric of save_best, or else the loss.
function bestOf(run) {
  const found = run.best && run.curve && run.best[run.curve];
  return found ? { metric: run.curve, step: found[0], value: found[1] } : null;
}

const FIXED_COLUMNS = [
  { key: "state", title: "state", value: (run) => run.state, cell: statePill },
  { key: "tags", title: "tags", value: (run) => (run.tags || []).join(" "), cell: (run, list) => (run.tags || []).map((tag) => h("button", { class: "tag", onclick: () => list.searchFor(`tag:${tag}`) }, tag)) },
  { key: "curve", title: "curve", value: (run) => run.curve || "", cell: (run) => sparkline(run.sparkline || [], metricTitle(run.curve || "")) },
  { key: "best", title: "best", note: "of the metric of save_best; without it, the lowest loss", value: (run) => (bestOf(run) ? bestOf(run).value : null), cell: (run) => { const best = bestOf(run); return best ? [h("b", {}, format.number(best.value)), h("small", {}, `${metricTitle(best.metric)}, step ${format.number(best.step)}`)] : "–"; } },
  { key: "loss", title: "loss", value: (run) => run.loss },
  { key: "step", title: "step", value: (run) => run.step, cell: (run) => (run.step === null ? "–" : `${format.number(run.step)}${run.total_steps ? ` of ${format.number(run.total_steps)}` : ""}`) },
  { key: "speed", title: "speed", value: (run) => run.speed, cell: (run) => (run.speed === null ? "–" : `${format.short(run.speed)} ${run.speed_unit}`) },
  { key: "updated", title: "updated", value: (run) => run.updated, cell: (run, list) => `${format.age(list.app.now - run.updated)} ago` },
].map((column) => ({ ...column, group: "Run" }));
const NAME_COLUMN = { key: "run", title: "run", value: (run) => run.name, cell: (run) => h("a", { href: `#run=${encodeURIComponent(run.id)}` }, run.name) };
const DEFAULT_COLUMNS = ["state", "tags", "curve", "best", "loss", "step", "speed", "updated"];

// A setting that a recipe does not name has the default; without a readable recipe, nothing is known.
const settingOf = (run, key, defaults) => (!run.settings ? null : key in run.settings ? run.settings[key] : key in defaults ? defaults[key] : null);

// All that can be chosen.
function columnsOf(runs, defaults) {
  const names = (part) => [...new Set(runs.flatMap((run) => Object.keys(run[part] || {})))].sort();
  const metric = (key, title, value) => ({ key, title, group: "Metrics", value });
  return [...FIXED_COLUMNS,
    ...names("best").map((name) => metric(`best:${name}`, `best ${metricTitle(name)}`, (run) => (run.best && run.best[name] ? run.best[name][1] : null))),
    ...names("last").filter((name) => !HIDDEN.includes(name)).map((name) => metric(`last:${name}`, `last ${metricTitle(name)}`, (run) => (run.last && name in run.last ? run.last[name] : null))),
    ...names("settings").filter((key) => key !== "tags").map((key) => ({ key: `set:${key}`, title: key, group: "Settings", value: (run) => asNumber(settingOf(run, key, defaults)) }))];
}

const asNumber = (text) => (text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function cellOf(column, run, list) {
  if (column.cell) return column.cell(run, list);
  const value = column.value(run);
  return typeof value === "number" ? format.number(value) : value === null || value === undefined ? "–" : value;
}

// Numbers before texts; what is missing comes last in either direction.
function compareRuns(column, direction) {
  return (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    const missing = (value) => value === null || value === undefined || value === "";
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
    return direction * (typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  };
}

// Every word has to be in what is shown of a run, in its name, or be a setting `key=value`; `tag:word` is a whole tag.
function matches(run, words, columns, defaults) {
  if (!words.length) return true;
  const settings = Object.keys(run.settings ? { ...defaults, ...run.settings } : {}).map((key) => `${key}=${settingOf(run, key, defaults)}`);
  const text = [run.name, run.state, run.reason, ...(run.tags || []), ...columns.map((column) => column.value(run)), ...settings].join("\n").toLowerCase();
  return words.every((word) => (word.startsWith("tag:") ? (run.tags || []).some((tag) => tag.toLowerCase() === word.slice(4)) : text.includes(word)));
}

const SPARK_WIDTH = 96, SPARK_HEIGHT = 24;

function sparkline(values, title) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return "–";
  const ratio = window.devicePixelRatio || 1;
  const canvas = h("canvas", { class: "sparkline", role: "img", title, width: SPARK_WIDTH * ratio, height: SPARK_HEIGHT * ratio, "aria-label": `${title}: from ${format.number(known[0])} to ${format.number(known[known.length - 1])}` });
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.strokeStyle = context.fillStyle = colors().series[0];
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  const place = (value, n) => [2 + (n / Math.max(1, values.length - 1)) * (SPARK_WIDTH - 5), SPARK_HEIGHT - 3 - ((value - low) / (high - low || 1)) * (SPARK_HEIGHT - 6)];
  values.forEach((value, n) => {
    if (value === null) return;
    context[n === 0 || values[n - 1] === null ? "moveTo" : "lineTo"](...place(value, n));
  });
  context.stroke();
  context.beginPath();
  const end = values.lastIndexOf(known[known.length - 1]);
  context.arc(...place(values[end], end), 2, 0, 7);
  context.fill();
  return canvas;
}
