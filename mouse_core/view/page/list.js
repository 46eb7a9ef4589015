// The list of all episodes: sorted, filtered, brushed; only the rows that are in sight are asked for.

import { ask, choice, element, later, latest, short, say } from "./tools.js";
import { Scatter } from "./charts.js";

const ROW = 30;
const PAGE = 100;
// Browsers show no element that is higher than some 30 million pixels.
const MOST_HEIGHT = 15_000_000;
const PAGES_KEPT = 60;
const WIDTHS = new Map([["episode", 96], ["length", 96], ["done", 88]]);

const ORDER = { sort: "episode", down: "" };
const AXES = { x: "episode", y: "return", color: "" };

export class List {
  /** pane: has open(episode), changed() and the source's number and description. */
  constructor(pane) {
    this.pane = pane;
    this.query = { ...ORDER };
    this.columns = [];
    this.pages = new Map();
    this.version = 0;
    this.matched = 0;
    this.chosen = null;
    this.axes = { ...AXES };
    this.said = element("p", { class: "dim progress" });
    this.scatter = new Scatter({
      onbrush: (x, y, texts) => this.brush(x, y, texts),
      onopen: (episode) => this.pane.open(episode),
    });
    this.plots = element("div", { class: "plots" });
    this.filters = element("details", { class: "filters" });
    this.header = element("div", { class: "row header" });
    this.room = element("div", { class: "room" });
    this.scroller = element("div", { class: "episodes", tabIndex: 0, ariaLabel: "episodes" }, this.header, this.room);
    this.scroller.addEventListener("scroll", () => this.show());
    this.root = element("div", { class: "side" }, this.plots, this.scatter.root, this.filters, this.said, this.scroller);
    this.reload = latest(() => this.load());
    this.replot = latest(() => this.plot());
    this.filtered = later(() => this.refresh(), 200);
    new ResizeObserver(() => this.show()).observe(this.scroller);
  }

  /** What the address says of the list: its order, its filters and what is plotted; nothing where all is as it begins. */
  address() {
    const asked = Object.entries({ ...this.query, ...this.axes }).filter(([name, value]) => value !== ({ ...ORDER, ...AXES })[name] && (value || name === "down"));
    return new URLSearchParams(asked).toString();
  }

  /** Take what an address says. */
  read(text) {
    this.query = { ...ORDER };
    this.axes = { ...AXES };
    for (const [name, value] of new URLSearchParams(text)) {
      if (Object.hasOwn(AXES, name)) this.axes[name] = value;
      else if (Object.hasOwn(ORDER, name) || /^(low|high|has)\./.test(name)) this.query[name] = value;
    }
  }

  source() {
    return { source: this.pane.source };
  }

  /** Ask anew, as what is asked for, or there, has changed. */
  refresh() {
    this.version += 1;
    this.pages.clear();
    this.reload();
    this.replot();
    this.pane.changed();
  }

  async load() {
    const version = this.version;
    try {
      await this.fetchPage(this.firstPage());
    } catch (error) {
      say(error.message);
      return;
    }
    // What is asked for has changed meanwhile, and is asked for next.
    if (version !== this.version) return;
    this.show();
  }

  async fetchPage(page) {
    const version = this.version;
    const found = await ask("episodes", { ...this.source(), ...this.query, first: page * PAGE, count: PAGE });
    if (version !== this.version) return;
    if (this.matched !== found.matched) this.grow(found.matched);
    if (this.columns.join("\n") !== found.columns.join("\n") || this.texts.join() !== found.texts.join()) {
      this.columns = found.columns;
      this.texts = found.texts;
      this.showColumns();
      this.replot();
    }
    while (this.pages.size > PAGES_KEPT) this.pages.delete(this.pages.keys().next().value);
    this.pages.set(page, found.episodes);
    const { total, matched } = found;
    this.total = total;
    this.said.textContent = `${matched.toLocaleString("en")} of ${total.toLocaleString("en")} episodes`;
  }

  grow(matched) {
    this.matched = matched;
    this.room.style.height = `${Math.min(matched * ROW, MOST_HEIGHT)}px`;
  }

  // ------------------------------------------------------------------ rows in sight

  /** The number of the first row in sight; of very long lists the scroll bar's place is a share of all. */
  first() {
    const height = Math.min(this.matched * ROW, MOST_HEIGHT);
    const sight = this.scroller.clientHeight - ROW;
    if (this.matched * ROW <= MOST_HEIGHT) return Math.floor(this.scroller.scrollTop / ROW);
    const share = this.scroller.scrollTop / Math.max(height - sight, 1);
    return Math.floor(Math.min(share, 1) * Math.max(this.matched - sight / ROW, 0));
  }

  firstPage() {
    return Math.floor(Math.max(this.first(), 0) / PAGE);
  }

  show() {
    const first = Math.max(this.first(), 0);
    const count = Math.min(Math.ceil(this.scroller.clientHeight / ROW) + 1, this.matched - first);
    const top = this.scroller.scrollTop - (this.matched * ROW <= MOST_HEIGHT ? this.scroller.scrollTop % ROW : 0);
    while (this.room.children.length > Math.max(count, 0)) this.room.lastChild.remove();
    const missing = new Set();
    for (let at = 0; at < count; at += 1) {
      const page = Math.floor((first + at) / PAGE);
      const values = this.pages.get(page)?.[(first + at) % PAGE];
      if (!values) missing.add(page);
      const row = this.room.children[at] ?? this.room.appendChild(this.newRow());
      row.style.transform = `translateY(${top + at * ROW}px)`;
      this.fill(row, values);
    }
    for (const page of missing) this.want(page);
  }

  want(page) {
    const key = `${this.version}/${page}`;
    this.wanted ??= new Set();
    if (this.wanted.has(key)) return;
    this.wanted.add(key);
    this.fetchPage(page).then(() => this.show(), (error) => say(error.message)).finally(() => this.wanted.delete(key));
  }

  newRow() {
    const row = element("div", { class: "row", onclick: () => row.episode !== undefined && this.pane.open(row.episode) });
    return row;
  }

  fill(row, values) {
    while (row.children.length < this.columns.length) row.append(element("span"));
    while (row.children.length > this.columns.length) row.lastChild.remove();
    row.episode = values?.[0];
    row.classList.toggle("chosen", values !== undefined && values[0] === this.chosen);
    this.columns.forEach((name, at) => {
      const text = values === undefined ? "" : this.shown(name, values[at]);
      const cell = row.children[at];
      if (cell.textContent !== text) cell.textContent = text;
      cell.classList.toggle("words", this.texts.includes(name));
    });
  }

  shown(name, value) {
    return name === "done" ? this.pane.endName(value) : short(value);
  }

  // ------------------------------------------------------------------ columns, filters, plots

  showColumns() {
    const widths = this.columns.map((name) => (this.texts.includes(name) ? "minmax(180px, 1fr)" : `${Math.max(WIDTHS.get(name) ?? 76, 40 + name.length * 8)}px`));
    this.root.style.setProperty("--columns", widths.join(" "));
    this.header.replaceChildren(...this.columns.map((name) => {
      const sorted = this.query.sort === name;
      const sign = sorted ? (this.query.down ? " ↓" : " ↑") : "";
      const words = this.texts.includes(name) ? "words" : "";
      return element("button", { class: words, textContent: name + sign, title: `sort by ${name}`, onclick: () => this.sortBy(name) });
    }));
    this.showFilters();
    this.showAxes();
  }

  sortBy(name) {
    const again = this.query.sort === name;
    this.query.down = again ? (this.query.down ? "" : "1") : name === "episode" ? "" : "1";
    this.query.sort = name;
    this.showColumns();
    this.scroller.scrollTop = 0;
    this.refresh();
  }

  showFilters() {
    const set = Object.keys(this.query).some((name) => name.includes(".") && this.query[name]);
    const tasks = element("datalist", { id: `tasks-${this.pane.source}` });
    const box = (key, hint) => element("input", {
      type: "text", value: this.query[key] ?? "", placeholder: hint, ariaLabel: `${key.replace(".", " ")}`, list: key === "has.task" ? tasks.id : "",
      oninput: (event) => {
        this.query[key] = event.target.value.trim();
        this.filtered();
      },
    });
    tasks.append(...(this.pane.description.tasks ?? []).map((value) => element("option", { value })));
    const rows = this.columns.map((name) => element("div", { class: "filter" }, element("label", { textContent: name }),
      ...(this.texts.includes(name) ? [box(`has.${name}`, "contains")] : [box(`low.${name}`, "min"), box(`high.${name}`, "max")])));
    const none = element("button", { textContent: "Show all", onclick: () => this.brush(null, null, {}, true) });
    this.filters.replaceChildren(element("summary", { textContent: "Filter" }), tasks, ...rows, none);
    if (set) this.filters.open = true;
  }

  showAxes() {
    const names = this.columns;
    if (!names.includes(this.axes.y)) this.axes.y = names.includes("return") ? "return" : "length";
    const pick = (key, label, options) => choice(options, this.axes[key], (value) => {
      this.axes[key] = value;
      this.replot();
      this.pane.changed();
    }, label);
    this.plots.replaceChildren(
      pick("y", "up", names), element("span", { class: "dim", textContent: "over" }), pick("x", "across", names),
      element("span", { class: "dim", textContent: "by" }), pick("color", "colours", ["", ...names]));
  }

  async plot() {
    if (!this.columns.length) return;
    const { x, y, color } = this.axes;
    const asked = { ...this.source(), x, y, color };
    const own = new Set([x, y].flatMap((name) => [`low.${name}`, `high.${name}`]));
    // Where a box is drawn the plot keeps what lies outside of it.
    for (const [name, value] of Object.entries(this.query)) if (name.includes(".") && !own.has(name)) asked[name] = value;
    try {
      const found = await ask("points", asked);
      this.scatter.draw(found, x, y, color, this.brushed(found));
    } catch (error) {
      say(error.message);
    }
  }

  brushed(found) {
    const { x, y } = this.axes;
    const [x0, x1, y0, y1] = [`low.${x}`, `high.${x}`, `low.${y}`, `high.${y}`].map((key) => this.query[key] || "");
    if (!(x0 + x1 + y0 + y1)) return null;
    const ends = (values, low, high, texts) => {
      const there = values.filter((value) => value !== null);
      const from = texts ? texts.findIndex((text) => text >= low) - 0.4 : this.codeOf(low);
      const to = texts ? texts.findLastIndex((text) => text <= high) + 0.4 : this.codeOf(high);
      return [low === "" ? Math.min(...there) : from, high === "" ? Math.max(...there) : to];
    };
    return { x: ends(found.x, x0, x1, found.texts.x), y: ends(found.y, y0, y1, found.texts.y) };
  }

  /** A limit as a number; an end of episodes may be given by its name. */
  codeOf(limit) {
    const code = this.pane.description.done.indexOf(limit);
    return code < 0 ? Number(limit) : code;
  }

  /** Show the episodes in a box of the plot, of which an axis may be places of texts; without one, all. */
  brush(x, y, texts = {}, all = false) {
    const names = [this.axes.x, this.axes.y];
    if (all) for (const key of Object.keys(this.query)) if (key.includes(".")) delete this.query[key];
    [x, y].forEach((range, at) => {
      const known = texts[at ? "y" : "x"];
      const within = known?.filter((_, place) => range[0] <= place && place <= range[1]);
      if (range !== null && this.texts.includes(names[at]) && !within?.length) return;
      for (const [place, kind] of ["low", "high"].entries()) {
        const key = `${kind}.${names[at]}`;
        if (range === null) delete this.query[key];
        else this.query[key] = known ? within.at(place ? -1 : 0) : String(Number(range[place].toPrecision(7)));
      }
    });
    this.showFilters();
    this.scroller.scrollTop = 0;
    this.refresh();
  }

  choose(episode) {
    this.chosen = episode;
    this.show();
  }

  /** The episode that comes so many behind the chosen one in the list; null where the list does not know. */
  async beside(by) {
    const at = await this.placeOf(this.chosen);
    const place = at === null ? 0 : at + by;
    if (place < 0 || place >= this.matched) return null;
    const page = Math.floor(place / PAGE);
    if (!this.pages.has(page)) await this.fetchPage(page);
    return this.pages.get(page)?.[place % PAGE]?.[0] ?? null;
  }

  async placeOf(episode) {
    for (const [page, rows] of this.pages) {
      const at = rows.findIndex((values) => values[0] === episode);
      if (at >= 0) return page * PAGE + at;
    }
    return this.query.sort === "episode" && !this.query.down && this.matched === this.total ? episode : null;
  }

  redraw() {
    this.scatter.redraw();
  }
}
