// Runs beside each other: which of them differ only in the seed, the mean of their curves, and curves that lie over each other.

const NO_SETTINGS = new Set(["run", "tags", "report", "quiet", "resume"]); // none of these changes what is trained

const recipeOf = (run) => new Map((run.about ? run.about.recipe : []).filter(([key]) => !NO_SETTINGS.has(key)).map(([key, value]) => [key, value]));

// [{label, runs}], in the order of their first runs. Runs without a recipe are groups of their own.
function seedGroups(runs) {
  const groups = new Map();
  for (const run of runs) {
    const recipe = [...recipeOf(run)];
    const key = recipe.length ? JSON.stringify(recipe.filter(([name]) => name !== "seed")) : `run ${run.id}`;
    groups.set(key, [...(groups.get(key) || []), run]);
  }
  return [...groups.values()].map((members) => ({ label: groupLabel(members), runs: members }));
}

function groupLabel(runs) {
  const [first, ...others] = runs.map((run) => run.head.name);
  if (!others.length) return first;
  let length = first.length;
  for (const name of others) while (!name.startsWith(first.slice(0, length))) length -= 1;
  const common = first.slice(0, length).replace(/[-_./ ]*(seed|s)?[-_=./ ]*$/i, "");
  return `${common || `${first}, …`} · ${plural(runs.length, "seed")}`;
}

// The mean of curves, with the lowest and the highest value at each point: of those curves that have reached it.
function meanCurve(curves) {
  const known = curves.filter((curve) => curve.x.length);
  if (known.length < 2) return known[0] || { x: [], y: [] };
  const x = known.reduce((most, curve) => (last(curve.x) > last(most.x) ? curve : most)).x;
  const band = { x, y: [], lo: [], hi: [] };
  const rows = known.map((curve) => along(curve, x));
  for (let n = 0; n < x.length; n++) {
    const values = rows.map((row) => row[n]).filter((value) => value !== null);
    band.y.push(values.length ? values.reduce((sum, value) => sum + value / values.length, 0) : null);
    band.lo.push(values.length ? Math.min(...values) : null);
    band.hi.push(values.length ? Math.max(...values) : null);
  }
  return band;
}

const last = (values) => values[values.length - 1];

// The values of a curve at other positions: between two points on a line, outside of the curve null.
function along({ x, y }, positions) {
  let n = 0;
  return positions.map((at) => {
    while (n < x.length && x[n] < at) n += 1;
    if (x[n] === at) return y[n];
    if (n === 0 || n === x.length || y[n] === null || y[n - 1] === null) return null;
    return y[n - 1] + ((at - x[n - 1]) / (x[n] - x[n - 1])) * (y[n] - y[n - 1]);
  });
}

const SAME = 2e-3; // of the range of a curve: less than a pixel

// Curves that would hide each other are drawn in turns, and the legend says how much they differ.
function markEqual(series) {
  const leaders = [];
  for (const each of series) {
    const leader = leaders.find((other) => distance(other.curve, each.curve) <= SAME * spread(other.curve));
    if (!leader) {
      leaders.push(Object.assign(each, { followers: [each] }));
      continue;
    }
    leader.followers.push(each);
    const most = distance(leader.curve, each.curve);
    each.note = most ? `within ${format.number(Number(most.toPrecision(1)))} of ${leader.label}` : `same as ${leader.label}`;
  }
  for (const { followers } of leaders) if (followers.length > 1) followers.forEach((each, n) => { each.turn = [n, followers.length]; });
  return series;
}

// The largest difference at the points that both curves have; infinite if they share few of them.
function distance(a, b) {
  const length = Math.min(a.x.length, b.x.length);
  if (length < 2 || length < 0.5 * Math.max(a.x.length, b.x.length)) return Infinity;
  let most = 0;
  for (let n = 0; n < length; n++) {
    if (a.x[n] !== b.x[n] || (a.y[n] === null) !== (b.y[n] === null)) return Infinity;
    if (a.y[n] !== null) most = Math.max(most, Math.abs(a.y[n] - b.y[n]));
  }
  return most;
}

function spread({ y }) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of y) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  return high - low;
}
