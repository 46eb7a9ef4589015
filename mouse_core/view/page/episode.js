// One episode: pictures of all cameras, curves of every dimension, a step's values, and a cursor through all of them.

import { address, ask, choice, element, label, later, latest, short, soon } from "./tools.js";
import { Chart } from "./charts.js";

const SPEEDS = ["1", "5", "10", "30", "60", "120", "300"];
// Values of wider columns are cut in the table; their curves have all of them.
const MOST_VALUES = 16;

export class Episode {
  /** pane: has source, description, changed(), stepped(step) and neighbour(by). */
  constructor(pane) {
    this.pane = pane;
    this.step = 0;
    this.title = element("h2");
    this.facts = element("p", { class: "dim facts" });
    this.cameras = element("div", { class: "cameras" });
    this.charts = [];
    this.grid = element("div", { class: "charts" });
    this.values = element("dl", { class: "values" });
    this.search = element("input", {
      type: "search", placeholder: "Curves whose name contains …", ariaLabel: "curves", oninput: later(() => this.filter()),
    });
    this.root = element("div", { class: "main" }, this.bar(), this.cameras, this.search, this.grid, this.values);
    this.fetchStep = latest((step) => this.loadStep(step));
    this.fetchCurves = later(() => this.loadCurves(), 30);
    this.sight = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "200px" });
    new ResizeObserver(later(() => this.redraw())).observe(this.grid);
  }

  bar() {
    const button = (text, title, onclick) => element("button", { textContent: text, title, onclick });
    this.playing = button("▶", "play, or stop (space)", () => this.play());
    this.playing.classList.add("play");
    this.speed = choice(SPEEDS, "30", () => {}, "steps a second");
    this.slider = element("input", { type: "range", min: 0, max: 0, value: 0, ariaLabel: "step", oninput: () => this.moveTo(Number(this.slider.value)) });
    this.number = element("input", { type: "number", min: 0, class: "number", ariaLabel: "step number", onchange: () => this.moveTo(Number(this.number.value)) });
    return element("div", { class: "bar" },
      element("div", { class: "titles" }, this.title, this.facts),
      element("div", { class: "controls" },
        button("[", "the episode before in the list ([)", () => this.pane.neighbour(-1)),
        button("]", "the next episode in the list (])", () => this.pane.neighbour(1)),
        this.playing, this.speed, element("span", { class: "dim", textContent: "steps/s" }),
        this.slider, this.number,
        button("+", "zoom in (+)", () => this.zoomBy(0.5)), button("−", "zoom out (−)", () => this.zoomBy(2)),
        button("all", "the whole episode (0)", () => this.zoomAll())));
  }

  // ------------------------------------------------------------------ which episode

  /** Show an episode, as the server describes it. */
  async show(found, step, range) {
    this.stop();
    this.begin = found.start;
    this.length = found.length;
    this.range = this.within(range ?? [0, this.length]);
    this.title.textContent = `Episode ${short(found.episode)}`;
    const facts = [`${short(found.length)} steps`, this.pane.endName(found.done)];
    if ("return" in found) facts.unshift(`return ${short(found.return)}`);
    if (found.task) facts.push(String(found.task));
    this.facts.textContent = facts.join(" · ");
    this.slider.max = this.length - 1;
    this.number.max = this.length - 1;
    this.layOut();
    this.redraw();
    this.moveTo(step ?? 0, true);
  }

  layOut() {
    const columns = this.pane.description.columns;
    const key = JSON.stringify(columns.map(({ name, width, kind }) => [name, width, kind]));
    if (this.laidOut !== key) {
      this.laidOut = key;
      this.sight.disconnect();
      this.charts.forEach((chart) => chart.clear());
      this.pictures = columns.filter(({ kind }) => kind === "image").map(({ name }) => {
        const image = element("img", { alt: name });
        const figure = element("figure", {}, image, element("figcaption", { textContent: name }));
        return { name, image, figure, load: latest((row) => this.loadPicture(image, name, row)) };
      });
      this.cameras.replaceChildren(...this.pictures.map(({ figure }) => figure));
      this.charts = columns.filter(({ kind }) => kind === "numbers").flatMap((column) =>
        Array.from({ length: Math.max(column.width, 1) }, (_, dim) => this.newChart(column, dim)));
      this.grid.replaceChildren(...this.charts.map((chart) => chart.root));
      this.charts.forEach((chart) => this.sight.observe(chart.root));
      this.search.hidden = this.charts.length < 8;
    }
    this.stale();
  }

  newChart(column, dim) {
    const stairs = /^(u?int|bool|dictionary)/.test(column.type);
    const chart = new Chart(this, label(column, dim), { stairs });
    return Object.assign(chart, { column: column.name, dim, visible: false, fresh: false });
  }

  filter() {
    const wanted = this.search.value.toLowerCase();
    for (const chart of this.charts) chart.root.hidden = !chart.name.toLowerCase().includes(wanted);
  }

  // ------------------------------------------------------------------ curves

  stale() {
    for (const chart of this.charts) chart.fresh = false;
    this.fetchCurves();
  }

  seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const chart = this.charts.find(({ root }) => root === target);
      if (chart) chart.visible = isIntersecting;
    }
    this.fetchCurves();
  }

  /** Ask for the curves in sight, those of one column together. */
  async loadCurves() {
    const wanted = Map.groupBy(this.charts.filter((chart) => chart.visible && !chart.fresh), ({ column }) => column);
    const [from, to] = this.range;
    const key = this.shown();
    for (const [column, charts] of wanted) {
      for (let at = 0; at < charts.length; at += 32) {
        const some = charts.slice(at, at + 32);
        some.forEach((chart) => { chart.fresh = true; });
        const asked = { ...this.rows(), column, dims: some.map(({ dim }) => dim), from, to, points: Math.max(some[0].frame.clientWidth, 300) };
        try {
          const found = await ask("curves", asked);
          if (key !== this.shown()) return;
          found.curves.forEach(({ steps, values }, at_) => soon(() => key === this.shown() && some[at_].draw(steps, values, this.axis())));
        } catch (error) {
          some.forEach((chart) => { chart.fresh = false; });
          this.pane.failed(error);
          return;
        }
      }
    }
  }

  /** Which curves are shown: those of other steps are not drawn any more. */
  shown() {
    return `${this.pane.source}/${this.begin}/${this.range[0]}/${this.range[1]}`;
  }

  rows() {
    return { source: this.pane.source, generation: this.pane.description.generation, begin: this.begin, end: this.begin + this.length };
  }

  axis() {
    const [from, to] = this.range;
    return to - from > 1 ? [from, to - 1] : [from - 0.5, from + 0.5];
  }

  within([from, to]) {
    const size = Math.max(Math.min(Math.round(to - from), this.length), Math.min(2, this.length));
    const begin = Math.max(0, Math.min(Math.round(from), this.length - size));
    return [begin, begin + size];
  }

  /** Show the steps from one to another; a pane beside this one follows, unless it told this one. */
  zoomTo(from, to, told = false) {
    const range = this.within([from, to + 1]);
    if (range[0] === this.range[0] && range[1] === this.range[1]) {
      this.charts.forEach((chart) => chart.visible && chart.redraw());
      return;
    }
    this.range = range;
    this.stale();
    this.pane.changed();
    if (!told) this.pane.zoomed(range);
  }

  zoomBy(share) {
    const [from, to] = this.range;
    const size = Math.max((to - from) * share, 2);
    const middle = this.step >= from && this.step < to ? this.step : (from + to) / 2;
    const left = middle - ((middle - from) / (to - from)) * size;
    this.zoomTo(left, left + size - 1);
  }

  zoomAll(told = false) {
    this.zoomTo(0, this.length - 1, told);
  }

  // ------------------------------------------------------------------ the cursor

  /** Put the cursor at a step; others that follow are told, unless they told this one. */
  moveTo(step, told = false) {
    if (!this.length) return;
    this.step = Math.max(0, Math.min(Math.round(step) || 0, this.length - 1));
    this.slider.value = this.step;
    this.number.value = this.step;
    for (const chart of this.charts) chart.at(this.step);
    this.fetchStep(this.begin + this.step);
    for (const picture of this.pictures ?? []) picture.load(this.begin + this.step);
    this.pane.changed();
    if (!told) this.pane.stepped(this.step);
  }

  async loadStep(row) {
    try {
      const found = await ask("step", { source: this.pane.source, generation: this.pane.description.generation, begin: row });
      const texts = new Map(found.values.map(({ name, texts: shown }) => [name, shown]));
      for (const chart of this.charts) chart.value.textContent = texts.get(chart.column)?.[chart.dim] ?? "";
      const names = new Map(this.pane.description.columns.map((column) => [column.name, column.names]));
      this.values.replaceChildren(...found.values.flatMap(({ name, texts: shown }) => {
        const called = (dim) => (names.get(name)?.[dim] ? `${names.get(name)[dim]} ` : "");
        const texts_ = shown.slice(0, MOST_VALUES).map((text, dim) => called(dim) + text);
        return [element("dt", { textContent: name }), element("dd", { textContent: texts_.join("  ") + (shown.length > MOST_VALUES ? "  …" : "") })];
      }));
    } catch (error) {
      this.pane.failed(error);
    }
  }

  loadPicture(image, column, row) {
    return new Promise((done) => {
      image.onload = () => { image.classList.remove("missing"); done(); };
      image.onerror = () => { image.classList.add("missing"); done(); };
      image.src = address("image", { source: this.pane.source, generation: this.pane.description.generation, begin: row, column });
    });
  }

  play() {
    if (this.frame) return this.stop();
    if (this.step >= this.length - 1) this.moveTo(0);
    this.playing.textContent = "❚❚";
    let before = performance.now();
    let at = this.step;
    const tick = (now) => {
      at += ((now - before) / 1000) * Number(this.speed.value);
      before = now;
      if (Math.floor(at) > this.step) this.moveTo(Math.floor(at));
      if (this.step >= this.length - 1) this.stop();
      else this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
    return undefined;
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.playing.textContent = "▶";
  }

  redraw() {
    for (const chart of this.charts) {
      if (chart.visible) chart.redraw();
      else chart.fresh = false; // drawn anew, in another size or other colours, once it is in sight
    }
  }
}
