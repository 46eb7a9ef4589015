// Plots, drawn by Plotly: a curve over steps, and points of episodes.

import { colour, element, later, short } from "./tools.js";

const LEFT = 58;
const RIGHT = 10;
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };

function axis(more) {
  return {
    color: colour("dim"),
    gridcolor: colour("grid"),
    linecolor: colour("line"),
    zeroline: false,
    ...more,
  };
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("dim"), size: 11, family: "system-ui, sans-serif" },
    showlegend: false,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    ...more,
  };
}

/** One curve over steps, with a cursor. What is moved, zoomed and clicked is told to its owner. */
export class Chart {
  /**
   * owner: has moveTo(step), zoomTo(from, to) and zoomAll().
   * name: what the curve is of. stairs: whether values hold until the next step, as codes do.
   */
  constructor(owner, name, { stairs = false, height = 104 } = {}) {
    this.owner = owner;
    this.name = name;
    this.stairs = stairs;
    this.height = height;
    this.value = element("span", { class: "value" });
    this.plot = element("div", { class: "plot" });
    this.line = element("div", { class: "cursor", hidden: true });
    this.frame = element("div", { class: "frame" }, this.plot, this.line);
    this.frame.style.height = `${height}px`;
    const head = element("div", { class: "head" }, element("span", { class: "name", textContent: name, title: name }), this.value);
    this.root = element("div", { class: "chart" }, head, this.frame);
    this.range = [0, 1];
    this.step = null;
    this.listen();
  }

  listen() {
    let down = null;
    // Plotly covers the page while something is dragged, so the end is heard by the window.
    this.frame.addEventListener("pointerdown", (event) => {
      down = event.clientX;
      const up = (end) => {
        window.removeEventListener("pointerup", up, true);
        if (Math.abs(end.clientX - down) < 4) this.owner.moveTo(this.stepAt(end.clientX));
      };
      window.addEventListener("pointerup", up, true);
    });
    this.frame.addEventListener("dblclick", () => this.owner.zoomAll());
  }

  stepAt(clientX) {
    const box = this.frame.getBoundingClientRect();
    const share = (clientX - box.left - LEFT) / Math.max(box.width - LEFT - RIGHT, 1);
    return Math.round(this.range[0] + share * (this.range[1] - this.range[0]));
  }

  /** Draw points; marks are stretches of steps with a kind, which are shaded. */
  draw(steps, values, range, marks = []) {
    this.drawn = [steps, values, range, marks];
    this.range = range;
    const shapes = marks.map(({ from, to, kind }) => ({
      type: "rect", xref: "x", yref: "paper", x0: from - 0.5, x1: to + 0.5, y0: 0, y1: 1,
      fillcolor: colour(kind), opacity: 0.35, line: { width: 0 }, layer: "below",
    }));
    const few = steps.length <= 80;
    const trace = {
      x: steps, y: values, type: "scatter", mode: few ? "lines+markers" : "lines", connectgaps: false, hoverinfo: "x+y",
      line: { color: colour("main"), width: 1.4, shape: this.stairs ? "hv" : "linear" },
      marker: { color: colour("main"), size: 3 },
    };
    const width = this.frame.clientWidth || 300;
    const made = layout({
      width, height: this.height, margin: { l: LEFT, r: RIGHT, t: 4, b: 20 }, dragmode: "zoom", shapes,
      xaxis: axis({ range: [...range], nticks: Math.max(Math.floor(width / 90), 2), tickformat: ",d" }),
      yaxis: axis({ fixedrange: true, nticks: 4 }),
    });
    const before = Boolean(this.plot.data);
    window.Plotly.react(this.plot, [trace], made, CONFIG);
    if (!before) {
      this.plot.on("plotly_relayout", (change) => {
        const from = change["xaxis.range[0]"];
        if (from !== undefined) this.owner.zoomTo(Math.floor(from), Math.ceil(change["xaxis.range[1]"]));
      });
    }
    this.place();
  }

  redraw() {
    if (this.drawn) this.draw(...this.drawn);
  }

  /** Put the cursor at a step. */
  at(step) {
    this.step = step;
    this.place();
  }

  place() {
    const [from, to] = this.range;
    const share = (this.step - from) / Math.max(to - from, 1e-9);
    this.line.hidden = this.step === null || share < 0 || share > 1;
    this.line.style.left = `calc(${LEFT}px + (100% - ${LEFT + RIGHT}px) * ${share})`;
  }

  clear() {
    window.Plotly.purge(this.plot);
  }
}

const GROUPS = ["#4c78a8", "#d1762f", "#54a24b", "#b279a2", "#c44e52", "#2f9e9e", "#9d755d", "#8f8f2f"];

/** Points of episodes; a box that is drawn selects, a click opens. */
export class Scatter {
  constructor({ onbrush, onopen }) {
    this.root = element("div", { class: "scatter" });
    this.onbrush = onbrush;
    this.onopen = onopen;
    new ResizeObserver(later(() => this.redraw())).observe(this.root);
  }

  /** found: x, y and colors by episode, and the texts that x and y are places of. name: what the colours are of. */
  draw(found, xName, yName, name, brushed) {
    this.drawn = [found, xName, yName, name, brushed];
    const { traces, legend } = this.traces(found, name);
    const shapes = brushed === null ? [] : [{
      type: "rect", xref: "x", yref: "y", x0: brushed.x[0], x1: brushed.x[1], y0: brushed.y[0], y1: brushed.y[1],
      line: { color: colour("mark"), width: 1 }, fillcolor: colour("mark"), opacity: 0.15,
    }];
    const ends = { automargin: true, nticks: 6 };
    const made = layout({
      width: this.root.clientWidth || 340, height: 190 + (legend ? 34 : 0), margin: { l: LEFT, r: RIGHT, t: 6, b: 34 }, dragmode: "select", shapes,
      showlegend: legend, legend: { orientation: "h", x: 0, y: -0.32, yanchor: "top", font: { size: 10 }, itemclick: false, itemdoubleclick: false },
      xaxis: axis({ title: { text: escaped(xName), standoff: 6 }, ...ends, ...ticks(found.texts.x, 4) }),
      yaxis: axis({ title: { text: escaped(yName), standoff: 6 }, ...ends, ...ticks(found.texts.y, 6) }),
    });
    const before = Boolean(this.root.data);
    window.Plotly.react(this.root, traces, made, CONFIG);
    if (before) return;
    this.root.on("plotly_selected", (event) => {
      if (event && event.range) this.onbrush(event.range.x.toSorted(order), event.range.y.toSorted(order), this.drawn[0].texts);
    });
    this.root.on("plotly_click", (event) => this.onopen(event.points[0].customdata));
    this.root.on("plotly_doubleclick", () => this.onbrush(null, null));
  }

  traces(found, name) {
    const all = found.x.map((_, at) => at);
    const place = (at, axis_) => found.texts[axis_]?.[found[axis_][at]] ?? short(found[axis_][at]);
    const points = (kept, marker, words = "") => ({
      x: kept.map((at) => found.x[at]), y: kept.map((at) => found.y[at]), customdata: kept.map((at) => found.episodes[at]),
      text: kept.map((at) => `episode ${found.episodes[at]}<br>${escaped(place(at, "x"))}, ${escaped(place(at, "y"))}${found.colors ? `<br>${escaped(name)} ${escaped(short(found.colors[at]))}` : ""}`),
      type: "scatter", mode: "markers", name: escaped(words || "–"), hovertemplate: "%{text}<extra></extra>", marker: { size: 5, opacity: 0.75, ...marker },
      selected: { marker: { opacity: 0.9 } }, unselected: { marker: { opacity: 0.75 } },
    });
    if (!found.colors) return { traces: [points(all, { color: colour("main") })], legend: false };
    const kinds = Map.groupBy(all, (at) => short(found.colors[at]));
    if (kinds.size > GROUPS.length && found.colors.some((value) => typeof value === "number")) {
      const bar = { thickness: 8, outlinewidth: 0, nticks: 4, len: 1, title: { text: escaped(name), side: "right", font: { size: 10 } } };
      const missing = all.filter((at) => found.colors[at] === null);
      const there = all.filter((at) => found.colors[at] !== null);
      const shades = { color: there.map((at) => found.colors[at]), colorscale: "Viridis", colorbar: bar };
      return { traces: [points(there, shades), points(missing, { color: colour("absent") })], legend: false };
    }
    // Of many kinds those with most episodes have a colour of their own.
    const sorted = [...kinds].toSorted(([, one], [, other]) => other.length - one.length);
    const own = sorted.length > GROUPS.length ? sorted.slice(0, GROUPS.length - 1) : sorted;
    const others = sorted.slice(own.length).flatMap(([, kept]) => kept);
    const made = own.map(([words, kept], at) => points(kept, { color: GROUPS[at] }, cut(words)));
    if (others.length) made.push(points(others, { color: colour("absent") }, `${sorted.length - own.length} others`));
    return { traces: made, legend: true };
  }

  redraw() {
    if (this.drawn) this.draw(...this.drawn);
  }
}

const cut = (text, most = 18) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Of an axis whose values are places of texts, some of these. */
function ticks(texts, most) {
  if (!texts) return {};
  const step = Math.max(Math.ceil(texts.length / most), 1);
  const some = texts.map((_, at) => at).filter((at) => at % step === 0);
  return { tickvals: some, ticktext: some.map((at) => escaped(cut(texts[at] || "–", 12))), tickangle: 0 };
}

const order = (one, other) => one - other;

// Plotly reads some tags in titles; names of columns are texts.
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
