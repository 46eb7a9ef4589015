// Windows as a batch has them: after augmentation, with the steps that are not there, and those that are masked.

import { address, ask, element, later, latest, say, short } from "./tools.js";
import { Chart } from "./charts.js";

const MOST_PICTURES = 64;

export class Batches {
  /** pane: has source, description, open(episode, step). */
  constructor(pane) {
    this.pane = pane;
    this.asked = { index: "0", window: "0", view: "0" };
    this.form = element("div", { class: "controls form" });
    this.facts = element("p", { class: "dim" });
    this.link = element("button", { textContent: "Open the episode there" });
    this.strips = element("div");
    this.grid = element("div", { class: "charts" });
    this.said = element("p", { class: "dim said" });
    this.root = element("div", { class: "main" }, this.form, element("div", { class: "controls facts" }, this.facts, this.link), this.said, this.strips, this.grid);
    this.reload = latest(() => this.load());
    this.charts = [];
    new ResizeObserver(later(() => this.redraw())).observe(this.grid);
    this.showForm();
  }

  showForm() {
    const changed = later(() => this.reload(), 150);
    const number = (name, label) => element("label", {}, label, element("input", {
      type: "number", min: 0, value: this.asked[name], class: "number",
      oninput: (event) => { this.asked[name] = event.target.value; changed(); },
    }));
    const views = this.views > 1 ? [number("view", "view")] : [];
    this.form.replaceChildren(number("index", "batch"), number("window", "window"), ...views);
  }

  async load() {
    let found;
    try {
      found = await ask("window", { source: this.pane.source, ...this.asked });
      say("");
    } catch (error) {
      say(error.message);
      return;
    }
    if (this.views !== found.views) {
      this.views = found.views;
      this.showForm();
    }
    const there = found.there === null ? "" : `, of which ${found.there.filter(Boolean).length} are there`;
    const at = `, step ${short(found.episode.step)} of episode ${short(found.episode.episode)}`;
    this.facts.textContent = `Window ${found.window} of ${found.windows} begins at row ${short(found.start)}${at}; ${found.length} steps${there}.`;
    this.link.onclick = () => this.pane.open(found.episode.episode, found.episode.step);
    this.said.textContent = found.said;
    this.showStrips(found);
    this.showCharts(found);
  }

  showStrips(found) {
    this.strips.replaceChildren(...found.fields.filter(({ image }) => image).map(({ name, offsets }) => {
      const count = Math.min(offsets?.length ?? found.length, MOST_PICTURES);
      const pictures = Array.from({ length: count }, (_, step) => element("figure", { class: found.there?.[step] === false ? "absent" : "" },
        element("img", { loading: "lazy", alt: `${name} at step ${step}`, src: address("window-image", { source: this.pane.source, ...this.asked, field: name, step }) }),
        element("figcaption", { textContent: String(offsets?.[step] ?? step) })));
      return element("div", {}, element("h3", { textContent: name }), element("div", { class: "strip" }, ...pictures));
    }));
  }

  showCharts(found) {
    this.charts.forEach((chart) => chart.clear());
    const rows = [];
    for (const field of found.fields.filter(({ image }) => !image)) {
      const wide = field.values.length > 1;
      field.values.forEach((values, dim) => {
        const steps = field.offsets ?? values.map((_, step) => step);
        // The mask of a field with offsets says what is there; that of an augmentation, what was masked.
        const own = field.offsets === null ? stretches(field.masked, steps, true, "masked") : stretches(field.masked, steps, false, "absent");
        const marks = [...stretches(found.there, steps, false, "absent"), ...own];
        rows.push({ chart: new Chart(this, wide ? `${field.name}[${dim}]` : field.name, { stairs: /int|bool/.test(field.dtype) }), steps, values, marks });
      });
    }
    this.charts = rows.map(({ chart }) => chart);
    this.grid.replaceChildren(...this.charts.map(({ root }) => root));
    for (const { chart, steps, values, marks } of rows) {
      // Of fields with windows of their own the anchor is at 0.
      const [from, to] = [Math.min(...steps), Math.max(...steps)];
      chart.draw(steps, values, to > from ? [from - 0.5, to + 0.5] : [from - 1, to + 1], marks);
    }
  }

  // Charts are clicked and zoomed; a window has no cursor, and is short.
  moveTo() {}
  zoomTo() {}
  zoomAll() { this.redraw(); }

  redraw() {
    for (const chart of this.charts) chart.redraw();
  }
}

/** Stretches of steps at which a mask has a value, as marks of a chart. */
function stretches(mask, steps, value, kind) {
  const found = [];
  (mask ?? []).forEach((one, at) => {
    if (one !== value || steps[at] === undefined) return;
    if (found.length && found.at(-1).last === at - 1) Object.assign(found.at(-1), { to: steps[at], last: at });
    else found.push({ from: steps[at], to: steps[at], last: at, kind });
  });
  return found;
}
