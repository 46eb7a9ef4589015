// One source: its list, and beside it an episode or a batch. Two of these stand side by side.

import { ask, choice, element, say } from "./tools.js";
import { List } from "./list.js";
import { Episode } from "./episode.js";
import { Batches } from "./batches.js";

export class Pane {
  /** page: has sources, changed(pane), stepped(pane, step). */
  constructor(page, source) {
    this.page = page;
    this.source = source;
    this.open_ = null;
    this.tab = "episodes";
    this.list = new List(this);
    this.episode = new Episode(this);
    this.batches = new Batches(this);
    this.picker = element("span", { class: "picker" });
    this.size = element("span", { class: "dim" });
    this.tabs = ["episodes", "batches"].map((name) => element("button", { textContent: name, value: name, onclick: () => this.turnTo(name) }));
    this.body = element("div", { class: "body" });
    this.root = element("section", { class: "pane", onpointerdown: () => this.page.use(this) },
      element("div", { class: "top" }, this.picker, this.size, element("span", { class: "tabs" }, ...this.tabs)), this.body);
  }

  get description() {
    return this.page.sources[this.source];
  }

  endName(code) {
    return this.description.done[code] ?? String(code);
  }

  start(place) {
    this.describe();
    const { batches } = this.description;
    this.list.read(place.list ?? "");
    this.list.refresh();
    this.turnTo(batches ? place.tab ?? (place.episode === undefined ? "batches" : "episodes") : "episodes");
    this.open(place.episode ?? 0, place.step, place.range, true);
  }

  describe() {
    const names = this.page.sources.map(({ name }) => name);
    this.picker.replaceChildren(names.length > 1
      ? choice(names, this.description.name, (name) => this.use(names.indexOf(name)), "dataset")
      : element("b", { textContent: names[0] }));
    const { rows, alignment, batches } = this.description;
    this.tabs.forEach((button) => (button.hidden = !batches));
    this.size.textContent = `${rows.toLocaleString("en")} steps, ${alignment}`;
  }

  use(source) {
    this.source = source;
    this.start({});
  }

  turnTo(tab) {
    this.tab = tab;
    this.tabs.forEach((button) => button.classList.toggle("chosen", button.value === tab));
    this.episode.stop();
    const main = tab === "batches" ? this.batches : this.episode;
    this.body.replaceChildren(this.list.root, main.root);
    if (tab === "batches") this.batches.reload();
    else main.redraw();
    this.changed();
  }

  /** Show an episode. */
  async open(number, step, range, stay = false) {
    const asked = Symbol("asked");
    this.asked = asked;
    let found;
    try {
      found = await ask("episode", { source: this.source, episode: number });
    } catch (error) {
      this.failed(error);
      return;
    }
    if (this.asked !== asked) return;
    if (!found.episode) {
      if (found.episodes) say(`There is no episode ${number}; the last is ${found.episodes - 1}.`);
      return;
    }
    if (this.tab !== "episodes" && !stay) this.turnTo("episodes");
    this.open_ = number;
    this.list.choose(number);
    say("");
    await this.episode.show(found.episode, step, range);
    this.changed();
  }

  async neighbour(by) {
    const number = await this.list.beside(by);
    // Beside another pane the cursor stays where that one's is.
    if (number !== null) await this.open(number, this.page.follows ? this.episode.step : 0, this.page.follows ? this.episode.range : undefined);
  }

  /** Rows came, or are others now. */
  async grown(before) {
    this.describe();
    if (before.rows === this.description.rows && before.generation === this.description.generation) return;
    this.list.refresh();
    const known = this.episode.length;
    if (before.generation !== this.description.generation || !known || before.rows === this.episode.begin + known) {
      await this.open(this.open_ ?? 0, this.episode.step, this.episode.range && before.rows ? undefined : this.episode.range, true);
    }
  }

  failed(error) {
    if (error.status === 409) this.page.refresh();
    else say(error.message);
  }

  changed() {
    this.page.changed();
  }

  stepped(step) {
    this.page.stepped(this, step);
  }

  zoomed(range) {
    this.page.zoomed(this, range);
  }

  /** What the address says of this pane. */
  place() {
    const said = { d: this.description.name, e: this.open_ ?? 0, s: this.episode.step };
    const [from, to] = this.episode.range ?? [0, 0];
    if (this.tab !== "episodes") said.t = this.tab;
    if (to && (from > 0 || to < this.episode.length)) said.z = `${from}-${to}`;
    const list = this.list.address();
    if (list) said.l = list;
    return said;
  }

  redraw() {
    this.list.redraw();
    this.episode.redraw();
    this.batches.redraw();
  }
}
