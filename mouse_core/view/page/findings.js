// What is wrong with the rows: looked for when somebody asks, each finding a link to its dataset, episode and step.

import { ask, element, later, say, short } from "./tools.js";
import { Bars } from "./charts.js";

const EVERY = 400, MOST_LINKS = 3;
const LEVELS = ["error", "warning", "note"];

export class Findings {
  /** pane: has source, description, open(episode, step), address(episode, step) and inspected(). */
  constructor(pane) {
    this.pane = pane;
    this.report = null;
    this.start = element("button", { textContent: "Look for what is wrong", onclick: () => this.ask(true) });
    this.said = element("p", { class: "dim" });
    this.content = element("div");
    this.root = element("div", { class: "main findings-main" }, element("div", { class: "controls" }, this.start, this.said), this.content);
    this.bars = [];
    this.sight = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) this.bars.find(({ root }) => root === target)?.draw();
    }, { rootMargin: "200px" });
    new ResizeObserver(later(() => this.redraw())).observe(this.content);
  }

  /** Another source, or rows that are others now. */
  reset() {
    this.report = null;
    this.show();
    this.ask(false);
  }

  /** What was found of an episode; where it is not the one that the step is of, without the step. */
  of(number) {
    return (this.report?.findings ?? []).filter(({ episode, episodes }) => episode === number || episodes.includes(number))
      .map((one) => (one.episode === number ? one : { ...one, step: null }));
  }

  async ask(start) {
    if (this.pane.description.inspected === "nothing") return;
    const source = this.pane.source;
    clearTimeout(this.timer);
    let found;
    try {
      found = await ask("findings", { source, start: start ? "1" : "" });
    } catch (error) {
      say(error.message);
      return;
    }
    if (source !== this.pane.source) return;
    this.state = found.state;
    this.report = found.report ?? null;
    this.start.hidden = found.state === "running";
    this.start.textContent = this.report ? "Look again" : "Look for what is wrong";
    const share = found.total ? `, ${Math.floor((100 * found.done) / found.total)} %` : "";
    this.said.textContent = {
      none: "All steps are read once for it, while the page stays as it is.",
      running: `Looking: ${found.done.toLocaleString("en")} steps${share}.`,
      failed: found.error,
      done: this.report ? `Of ${this.report.rows.toLocaleString("en")} steps.` : "",
    }[found.state];
    if (found.state === "running") this.timer = setTimeout(() => this.ask(false), EVERY);
    this.show();
    if (this.report) this.pane.inspected();
  }

  show() {
    this.sight.disconnect();
    this.bars.forEach((one) => one.clear());
    const { report } = this;
    if (!report) {
      this.bars = [];
      this.content.replaceChildren();
      return;
    }
    const loud = report.findings.filter(({ level }) => level !== "note").length;
    const head = loud ? `${short(loud)} ${loud === 1 ? "warning" : "warnings"}` : "No warnings";
    const sorted = report.findings.toSorted((one, other) => LEVELS.indexOf(one.level) - LEVELS.indexOf(other.level));
    const row = (cells, tag, kind) => element("tr", {}, ...cells.map((text) => element(tag, { textContent: text, class: kind ?? "" })));
    this.bars = report.plots.filter(({ counts, low }) => (counts ?? low).length).map((one) => new Bars(one));
    this.content.replaceChildren(
      element("h2", { class: loud ? "" : "good", textContent: head }),
      element("ul", { class: "findings" }, ...sorted.map((one) => this.line(one))),
      element("h3", { textContent: report.heading }),
      ...report.facts.map((text) => element("p", { class: "dim facts", textContent: text })),
      ...report.tables.map(({ title, head, rows }) => element("div", { class: "wide", tabIndex: 0, ariaLabel: title || "columns" }, element("table", { class: title ? "numbers" : "" },
        element("thead", {}, row(head, "th")), element("tbody", {}, ...rows.map((cells) => row(cells, "td")))))),
      element("div", { class: "charts" }, ...this.bars.map(({ root }) => root)));
    this.bars.forEach(({ root }) => this.sight.observe(root));
  }

  line({ level, code, message, episode, step, episodes }) {
    const to = (number, at, textContent) => element("a", {
      href: this.pane.address(number, at), textContent,
      onclick: (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        this.pane.open(number, at);
      },
    });
    const others = episodes.filter((number) => number !== episode), shown = others.slice(0, MOST_LINKS);
    const links = episode === null ? [] : [to(episode, step ?? 0, `episode ${short(episode)}${step === null ? "" : `, step ${short(step)}`}`)];
    for (const number of shown) links.push(links.length ? ", " : "", to(number, 0, short(number)));
    if (others.length > shown.length) links.push(`, and ${short(others.length - shown.length)} more`);
    return element("li", { class: `finding ${level}` }, element("b", { textContent: level }), " ", element("code", { textContent: code }), " ",
      element("span", { textContent: message }), " ", ...links);
  }

  redraw() {
    for (const one of this.bars) if (one.drawn) one.draw();
  }
}
