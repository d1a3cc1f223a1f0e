// Where the values come from: a server, or the document itself.

class LiveSource {
  constructor() {
    this.live = true;
    this.token = new URLSearchParams(location.search).get("token") || "";
  }

  async ask(path, values) {
    const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null && value !== undefined));
    const answer = await fetch(`${path}?${query}`, { headers: { Authorization: `Bearer ${this.token}` }, cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim() || `the server answered ${answer.status}`);
    return answer;
  }

  async get(path, values = {}) { return (await this.ask(path, values)).json(); }

  runs(known) { return this.get("api/runs", { known }); }
  run(id, cursor, about) { return this.get("api/run", { id, cursor, about }); }
  curves(id, low, high) { return this.get("api/curves", { id, low: Math.floor(low), high: Math.ceil(high) }); }
  ranks(id, known) { return this.get("api/ranks", { id, known }); }
  log(id, rank, search) { return this.get("api/log", { id, rank, search }); }
  sweep() { return this.get("api/sweep"); }
  media(id, known) { return this.get("api/media", { id, known }); }
  async image(id, { name, step }) { return URL.createObjectURL(await (await this.ask("api/image", { id, name, step })).blob()); }
}

class EmbeddedSource {
  constructor(values) {
    this.live = false;
    this.values = values;
  }

  find(id) { return this.values.runs.find((run) => run.id === id); }
  async runs() { return { runs: this.values.runs.map((run) => ({ id: run.id, ...run.head })), chosen: this.values.chosen }; }
  async run(id, cursor) { return cursor ? { head: this.find(id).head } : this.find(id); }
  async curves() { return null; }
  async ranks(id) { return this.find(id).ranks; }
  async media(id) { return this.find(id).media; }
  async image(id, { data }) { return `data:image/png;base64,${data}`; }

  async log(id, rank, search) {
    const log = this.find(id).log[rank] || { lines: [], skipped: 0, problem: "the log of this rank is not part of the report" };
    const lines = log.lines.filter(([, text]) => text.toLowerCase().includes(search.toLowerCase()));
    return { ...log, lines, found: lines.length };
  }
}

function openSource() {
  const embedded = document.getElementById("values");
  return embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new LiveSource();
}
