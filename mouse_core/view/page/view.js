// The page: which sources there are, one pane or two, keys, and the address that names what is shown.

import { ask, element, later, say } from "./tools.js";
import { Pane } from "./pane.js";

const EVERY = 2000;

class Page {
  constructor(sources) {
    this.sources = sources;
    this.panes = [];
    this.room = element("main");
    this.missing = element("p", { class: "said", role: "status", hidden: true });
    this.both = element("button", { textContent: "Side by side", onclick: () => this.split(this.panes.length < 2) });
    this.together = element("input", { type: "checkbox", checked: true });
    this.follow = element("label", { class: "follow", hidden: true }, this.together, "one cursor");
    const keys = "space plays, ← → steps (with shift 10), [ ] episodes, + − 0 zoom";
    document.body.replaceChildren(
      element("header", {}, element("h1", { textContent: "mouse view" }), element("span", { class: "dim keys", textContent: keys }), this.follow, this.both),
      element("p", { id: "said", class: "said", role: "alert", hidden: true }), this.missing, this.room);
    this.write = later(() => this.writeAddress(), 150);
  }

  /** Show what an address names; without one the first episode of the first source. */
  open(hash) {
    const asked = new URLSearchParams(hash.replace(/^#/, ""));
    const places = ["", "2"].map((suffix) => placeOf(asked, suffix, this.sources)).filter((place) => place !== null);
    const unknown = ["d", "d2"].map((key) => asked.get(key)).filter((name) => name !== null && !this.sources.some((one) => one.name === name));
    if (!places.length) places.push({ source: 0 });
    this.panes = places.map(({ source }) => new Pane(this, source));
    this.lay();
    this.panes.forEach((pane, at) => pane.start(places[at]));
    this.missing.textContent = unknown.length ? `The address names ${unknown.map((name) => JSON.stringify(name)).join(" and ")}, which is not shown here.` : "";
    this.missing.hidden = !unknown.length;
  }

  /** Whether panes move together. */
  get follows() {
    return this.panes.length > 1 && this.together.checked;
  }

  /** The pane that keys are for: the one that was touched last. */
  use(pane) {
    this.active = pane;
    this.panes.forEach((one) => one.root.classList.toggle("active", one === pane));
  }

  lay() {
    this.use(this.panes.includes(this.active) ? this.active : this.panes[0]);
    this.room.replaceChildren(...this.panes.map(({ root }) => root));
    this.room.classList.toggle("two", this.panes.length > 1);
    this.both.textContent = this.panes.length > 1 ? "One" : "Side by side";
    this.follow.hidden = this.panes.length < 2;
  }

  split(two) {
    if (two) {
      const pane = new Pane(this, (this.panes[0].source + 1) % this.sources.length);
      this.panes.push(pane);
      this.lay();
      pane.start({});
    } else {
      this.panes.length = 1;
      this.lay();
    }
    this.panes[0].redraw();
    this.changed();
  }

  changed() {
    this.write?.();
  }

  stepped(pane, step) {
    if (!this.follows) return;
    for (const other of this.panes) if (other !== pane && other.tab === "episodes") other.episode.moveTo(step, true);
  }

  zoomed(pane, range) {
    if (!this.follows) return;
    const whole = range[1] - range[0] >= pane.episode.length;
    for (const { tab, episode } of this.panes) {
      if (episode === pane.episode || tab !== "episodes") continue;
      if (whole) episode.zoomAll(true);
      else episode.zoomTo(range[0], range[1] - 1, true);
    }
  }

  writeAddress() {
    const said = new URLSearchParams();
    this.panes.forEach((pane, at) => {
      for (const [name, value] of Object.entries(pane.place())) said.set(name + (at ? "2" : ""), value);
    });
    this.written = `#${said}`;
    history.replaceState(null, "", this.written);
  }

  async refresh() {
    let found;
    try {
      found = await ask("sources");
    } catch (error) {
      say(error.message);
      return;
    }
    const before = this.sources;
    this.sources = found.sources;
    for (const pane of this.panes) await pane.grown(before[pane.source]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range") return;
    const pane = this.active;
    const by = event.shiftKey ? 10 : 1;
    const acts = {
      " ": () => pane.episode.play(),
      ArrowRight: () => pane.episode.moveTo(pane.episode.step + by),
      ArrowLeft: () => pane.episode.moveTo(pane.episode.step - by),
      Home: () => pane.episode.moveTo(0),
      End: () => pane.episode.moveTo(Infinity),
      "[": () => pane.neighbour(-1),
      "]": () => pane.neighbour(1),
      "+": () => pane.episode.zoomBy(0.5),
      "-": () => pane.episode.zoomBy(2),
      0: () => pane.episode.zoomAll(),
    };
    if (!acts[event.key] || pane.tab !== "episodes") return;
    event.preventDefault();
    acts[event.key]();
  }
}

/** What an address names for a pane; null where it names nothing that there is. */
function placeOf(asked, suffix, sources) {
  const name = asked.get(`d${suffix}`);
  const source = sources.findIndex((one) => one.name === name);
  if (name === null && !(suffix === "" && asked.has("e"))) return null;
  if (name !== null && source < 0) return null;
  const number = (key) => (/^\d+$/.test(asked.get(key + suffix) ?? "") ? Number(asked.get(key + suffix)) : undefined);
  const zoom = /^(\d+)-(\d+)$/.exec(asked.get(`z${suffix}`) ?? "");
  const tab = asked.get(`t${suffix}`) === "batches" ? "batches" : undefined;
  return { source: Math.max(source, 0), list: asked.get(`l${suffix}`) ?? "", tab, episode: number("e"), step: number("s"), range: zoom ? [Number(zoom[1]), Number(zoom[2])] : undefined };
}

async function start() {
  const { sources } = await ask("sources");
  const page = new Page(sources);
  page.open(location.hash);
  document.addEventListener("keydown", (event) => page.key(event));
  window.addEventListener("hashchange", () => location.hash !== page.written && page.open(location.hash));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.panes.forEach((pane) => pane.redraw()));
  const again = async () => {
    if (!document.hidden) await page.refresh();
    setTimeout(again, EVERY);
  };
  setTimeout(again, EVERY);
}

start().catch((error) => {
  document.body.replaceChildren(element("p", { class: "said", textContent: error.message }));
});
