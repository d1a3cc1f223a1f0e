// The list of runs: searched, sorted, with columns that one chooses. What is chosen is in the address.
//
//   #list&search=tag:baseline&sort=-best:eval/accuracy&columns=state,curve,best,set:optimizer.lr

const MAX_COMPARED = 40;

class ListView {
  constructor(app) {
    this.app = app;
    this.chosen = new Set();
    this.rows = new Map(); // by the id of a run: what it was made of, and its element
    this.readAddress();
    this.search = h("input", { type: "search", id: "list-search", placeholder: "search  ( / )", "aria-label": "search runs", title: "words, key=value, tag:word", value: this.words, oninput: () => this.searchFor(this.search.value) });
    this.count = h("span", { class: "muted", role: "status" });
    this.compare = h("button", { disabled: true, onclick: () => { location.hash = `compare=${[...this.chosen].map(encodeURIComponent).join(",")}`; } });
    this.chooser = new ColumnChooser(this);
    this.all = h("input", { type: "checkbox", "aria-label": "choose all runs that are shown", onchange: () => this.chooseAll(this.all.checked) });
    this.head = h("tr", {});
    this.body = h("tbody", {});
    this.table = h("div", { class: "table-box" }, h("table", { class: "runs" }, h("thead", {}, this.head), this.body));
    this.empty = h("p", { class: "muted" });
    this.element = h("main", {}, h("div", { class: "controls" }, h("h2", {}, "Runs"), this.count, h("span", { class: "grow" }), this.search,
      h("button", { onclick: () => this.chooser.open() }, "Columns"), this.compare), h("section", { class: "card" }, this.table, this.empty), this.chooser.element);
  }

  readAddress() {
    const address = new URLSearchParams(location.hash.slice(1));
    const columns = address.get("columns");
    this.words = address.get("search") || "";
    this.sort = address.get("sort") || "-updated";
    this.keys = columns === null ? DEFAULT_COLUMNS : columns.split(",").filter(Boolean);
  }

  writeAddress() {
    const parts = [["search", this.words], ["sort", this.sort === "-updated" ? "" : this.sort], ["columns", this.keys === DEFAULT_COLUMNS ? "" : this.keys.join(",") || ","]];
    const text = parts.filter(([, value]) => value).map(([name, value]) => `&${name}=${encodeURIComponent(value).replace(/%(2C|3A|2F)/g, decodeURIComponent)}`).join("");
    this.app.listAddress = `#list${text}`;
    history.replaceState(null, "", this.app.listAddress);
    this.update();
  }

  searchFor(words) {
    this.words = words;
    if (this.search.value !== words) this.search.value = words;
    this.writeAddress();
  }

  // First upward, then downward, then the newest first again.
  sortBy(key) {
    this.sort = this.sort === key ? `-${key}` : this.sort === `-${key}` ? "-updated" : key;
    this.writeAddress();
  }

  showColumns(keys) {
    this.keys = keys;
    this.writeAddress();
  }

  update() {
    const { runs, defaults } = this.app;
    const known = new Map([NAME_COLUMN, ...columnsOf(runs, defaults)].map((column) => [column.key, column]));
    const hasTags = runs.some((run) => run.tags && run.tags.length);
    const columns = ["run", ...this.keys].map((key) => known.get(key)).filter((column) => column && (column.key !== "tags" || hasTags || this.keys !== DEFAULT_COLUMNS));
    const words = this.words.toLowerCase().split(/\s+/).filter(Boolean);
    const sorted = known.get(this.sort.replace(/^-/, "")) || known.get("updated");
    this.shown = runs.filter((run) => matches(run, words, columns, defaults)).sort(compareRuns(sorted, this.sort.startsWith("-") ? -1 : 1));
    for (const id of this.chosen) if (!runs.some((run) => run.id === id)) this.chosen.delete(id);
    this.drawHead(columns);
    this.drawRows(columns);
    this.drawChosen();
    setText(this.count, this.shown.length === runs.length ? String(runs.length) : `${this.shown.length} of ${runs.length}`);
    this.table.hidden = !this.shown.length;
    this.empty.hidden = this.shown.length > 0;
    setText(this.empty, runs.length ? "No run matches the search." : "No runs yet. Start one: paceline train");
    this.chooser.update(columnsOf(runs, defaults));
  }

  drawHead(columns) {
    const key = JSON.stringify([columns.map((column) => column.key), this.sort]);
    if (key === this.headKey) return;
    this.headKey = key;
    this.rows.clear();
    fill(this.head, h("th", {}, this.all), columns.map((column) => {
      const direction = this.sort === column.key ? "ascending" : this.sort === `-${column.key}` ? "descending" : null;
      const sign = direction === "ascending" ? " ↑" : direction ? " ↓" : "";
      return h("th", { scope: "col", "aria-sort": direction }, h("button", { class: "sort", title: column.note || null, onclick: () => this.sortBy(column.key) }, `${column.title}${sign}`));
    }));
  }

  // A row is made again only if its run has changed: a reader may be selecting text, and hundreds of rows take a moment.
  drawRows(columns) {
    const rows = this.shown.map((run) => {
      const key = JSON.stringify([{ ...run, updated: format.age(this.app.now - run.updated) }, Object.keys(this.app.defaults).length]);
      const known = this.rows.get(run.id);
      if (known && known.key === key) return known.element;
      const box = h("input", { type: "checkbox", "data-run": run.id, "aria-label": `choose ${run.name}`, checked: this.chosen.has(run.id), onchange: () => this.choose(run.id, box.checked) });
      const element = h("tr", {}, h("td", {}, box), columns.map((column) => h("td", { class: column.group === "Settings" ? "text" : null }, cellOf(column, run, this))));
      this.rows.set(run.id, { key, element });
      return element;
    });
    const now = [...this.body.children];
    if (now.length === rows.length && now.every((element, n) => element === rows[n])) return;
    const focused = document.activeElement && this.body.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    fill(this.body, rows);
    if (focused) for (const box of this.body.querySelectorAll("input")) if (box.dataset.run === focused) box.focus();
  }

  choose(id, isChosen) {
    if (isChosen) this.chosen.add(id);
    else this.chosen.delete(id);
    this.drawChosen();
  }

  chooseAll(isChosen) {
    for (const run of this.shown) this.choose(run.id, isChosen);
    for (const box of this.body.querySelectorAll("input")) box.checked = isChosen;
  }

  drawChosen() {
    const count = this.chosen.size;
    this.all.checked = this.shown.length > 0 && this.shown.every((run) => this.chosen.has(run.id));
    this.compare.disabled = count < 2 || count > MAX_COMPARED;
    setText(this.compare, count < 2 ? "Choose runs to compare" : count > MAX_COMPARED ? `Choose at most ${MAX_COMPARED} runs` : `Compare ${count} runs`);
  }

  redraw() {}

  recolor() {
    this.rows.clear();
    this.update();
  }
}

// A dialog with a box for every column.
class ColumnChooser {
  constructor(list) {
    this.list = list;
    this.columns = [];
    this.filter = h("input", { type: "search", placeholder: "filter", "aria-label": "filter columns", oninput: () => this.draw() });
    this.box = h("div", { class: "choices" });
    this.element = h("dialog", { class: "chooser", "aria-label": "columns" }, h("header", {}, h("h2", {}, "Columns"), this.filter), this.box,
      h("footer", {}, h("button", { onclick: () => { list.showColumns(DEFAULT_COLUMNS); this.draw(); } }, "Default"), h("button", { onclick: () => this.element.close() }, "Close")));
    this.element.addEventListener("click", (event) => { if (event.target === this.element) this.element.close(); });
  }

  open() {
    this.draw();
    this.element.showModal();
  }

  update(columns) {
    const isNew = columns.length !== this.columns.length;
    this.columns = columns;
    if (isNew && this.element.open) this.draw();
  }

  draw() {
    const wanted = this.filter.value.toLowerCase();
    const groups = [...new Set(this.columns.map((column) => column.group))];
    fill(this.box, groups.map((group) => {
      const found = this.columns.filter((column) => column.group === group && column.title.toLowerCase().includes(wanted));
      return found.length > 0 && h("fieldset", {}, h("legend", {}, group), found.map((column) => this.choice(column)));
    }));
  }

  choice(column) {
    const { list } = this;
    const box = h("input", { type: "checkbox", checked: list.keys.includes(column.key), onchange: () => list.showColumns(box.checked ? [...list.keys, column.key] : list.keys.filter((key) => key !== column.key)) });
    return h("label", {}, box, column.title);
  }
}
