"""The style and the script of the page, which hold no reference to anything outside of it."""

STYLE = """
:root { color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --ink: #1c2430; --dim: #5d6b7c; --line: #dfe4ea; --grid: #e9edf2;
  --main: #3b6ea8; --soft: #a9c3e0; --mark: #c8552d; --warn: #9a5b00; --warn-back: #fff4de; --note: #35607f;
  --note-back: #eaf2f8; --good: #2c7a4b; --good-back: #e7f5ec; }
@media (prefers-color-scheme: dark) { :root {
  --back: #12161b; --card: #1b2128; --ink: #e5eaf0; --dim: #98a5b3; --line: #2e3742; --grid: #28303a;
  --main: #79a9dd; --soft: #37536f; --mark: #f0936f; --warn: #f3c069; --warn-back: #33290f; --note: #9cc4e0;
  --note-back: #182a38; --good: #84d3a2; --good-back: #14301f; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main, header { max-width: 1180px; margin: 0 auto; padding: 0 16px; }
header { padding-top: 28px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 36px 0 12px; }
h3 { font-size: .95rem; margin: 0 0 6px; font-weight: 600; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.dim, .none { color: var(--dim); }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 0; padding: 0; list-style: none; }
.figures li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  flex: 1 1 auto; min-width: 96px; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures span { color: var(--dim); font-size: .85rem; }
.finding { border-radius: 10px; padding: 10px 14px; margin: 0 0 8px; overflow-wrap: anywhere; }
.finding b { font: 600 .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.warning { background: var(--warn-back); border-left: 4px solid var(--warn); }
.warning b { color: var(--warn); }
.note { background: var(--note-back); border-left: 4px solid var(--note); }
.note b { color: var(--note); }
.good { background: var(--good-back); border-left: 4px solid var(--good); }
.cards { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 262px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px; min-width: 0; }
.card p { font-size: .85rem; color: var(--dim); margin: 0 0 8px; }
svg { display: block; width: 100%; max-width: 420px; height: auto;
  font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg text { fill: var(--ink); } svg .dim { fill: var(--dim); }
.bar { fill: var(--main); } .other { fill: var(--soft); } .axis { stroke: var(--dim); } .grid { stroke: var(--grid); }
.zero { stroke: var(--line); stroke-dasharray: 3 3; } .span { stroke: var(--soft); stroke-width: 3; }
.mean { stroke: var(--mark); stroke-width: 2; } .trace { fill: none; stroke: var(--main); stroke-width: 1.6; }
.trace { stroke-linecap: round; } .gap { fill: var(--grid); }
.cursor { stroke: var(--mark); stroke-width: 1.5; } .bar.now { fill: var(--mark); }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid var(--line); border-radius: 12px;
  background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { color: var(--dim); font-weight: 600; } th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
td:first-child { font-weight: 600; }
.strip { display: flex; gap: 8px; overflow-x: auto; padding-bottom: 6px; }
.strip figure { margin: 0; flex: 0 0 auto; text-align: center; }
.strip img { height: 104px; display: block; border-radius: 6px; image-rendering: pixelated; background: var(--grid); }
figcaption { font-size: .75rem; color: var(--dim); }
.player { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr));
  align-items: start; }
.strips { display: grid; gap: 12px; }
@media (max-width: 720px) { h2 { margin-top: 28px; } }
.controls { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 0 0 12px; }
.controls input { flex: 1 1 160px; min-width: 120px; accent-color: var(--main); height: 32px; }
button, select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 6px 12px; min-height: 40px; min-width: 44px; max-width: 100%; }
button:focus-visible, select:focus-visible, input:focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
#frames { display: flex; gap: 10px; flex-wrap: wrap; margin-bottom: 10px; }
#frames img { width: min(100%, 320px); image-rendering: pixelated; border-radius: 8px; background: var(--grid); }
dl { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 2px 14px; margin: 0 0 12px; }
dt { color: var(--dim); overflow-wrap: anywhere; }
dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
footer { max-width: 1180px; margin: 36px auto 0; padding: 16px; color: var(--dim); font-size: .85rem; }
"""

SCRIPT = """
(function () {
  "use strict";
  var episodes = JSON.parse(document.getElementById("steps").textContent);
  var pick = document.getElementById("pick"), slide = document.getElementById("slide");
  var play = document.getElementById("play"), facts = document.getElementById("facts");
  var frames = document.getElementById("frames"), trace = document.getElementById("trace");
  var values = document.getElementById("values"), where = document.getElementById("where");
  var timer = null, episode = null;
  function shown(value) {
    if (value === null || value === undefined) { return "null"; }
    if (typeof value === "number") { return String(Number(value.toPrecision(5))); }
    if (Array.isArray(value)) {
      return "[" + value.slice(0, 12).map(shown).join(", ") + (value.length > 12 ? ", \\u2026" : "") + "]";
    }
    return String(value);
  }
  function fact(name, value) {
    var term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name; text.textContent = value; facts.append(term, text);
  }
  function part(kind, settings) {
    var made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    Object.keys(settings).forEach(function (key) { made.setAttribute(key, settings[key]); });
    return made;
  }
  function label(x, y, text, anchor) {
    var made = part("text", { x: x, y: y, "text-anchor": anchor, "class": "dim" });
    made.textContent = text; return made;
  }
  function known(value) { return value !== null; }
  function drawTrace(at) {
    var sums = episode.trace.sums, places = episode.trace.places, n = sums.length, last = places[n - 1] || 1;
    var low = Math.min.apply(null, sums.filter(known).concat(0)), runs = [], run = null;
    var high = Math.max.apply(null, sums.filter(known).concat(0)), span = high - low || 1;
    function x(place) { return 8 + 284 * place / last; }
    function y(value) { return 18 + 110 * (1 - (value - low) / span); }
    var parts = [part("line", { "class": "grid", x1: 8, x2: 292, y1: y(0), y2: y(0) })];
    sums.forEach(function (value, place) {
      var gap = place && places[place] !== places[place - 1] + 1;
      if (gap) {
        parts.push(part("rect", { "class": "gap", x: x(places[place - 1]), y: 18, height: 110,
          width: x(places[place]) - x(places[place - 1]) }));
      }
      if (gap || value === null) { run = null; }
      if (value === null) { return; }
      if (!run) { run = []; runs.push(run); }
      run.push(x(places[place]).toFixed(1) + "," + y(value).toFixed(1));
    });
    runs.forEach(function (points) {
      if (points.length < 2) { points.push(points[0]); }  // a dot
      parts.push(part("polyline", { "class": "trace", points: points.join(" ") }));
    });
    parts.push(
      part("line", { "class": "cursor", x1: x(episode.places[at]), x2: x(episode.places[at]), y1: 14, y2: 132 }),
      label(8, 12, "reward so far: " + shown(episode.sums[at]), "start"), label(8, 146, "step " + places[0], "start"),
      label(292, 146, "step " + places[n - 1], "end"));
    trace.replaceChildren.apply(trace, parts);
    document.getElementById("said").textContent = episode.said;
  }
  function drawValues(at) {
    var vector = episode.vector ? episode.vector.rows[at] : null;
    document.getElementById("vector").hidden = !vector;
    if (!vector) { return; }
    document.getElementById("vector-name").textContent = episode.vector.name;
    var low = episode.vector.low, high = episode.vector.high, n = vector.length, wide = 284 / n;
    function y(value) { return 10 + 120 * (1 - (value - low) / (high - low || 1)); }
    var zero = y(Math.min(Math.max(0, low), high)), parts = [
      part("line", { "class": "axis", x1: 8, x2: 292, y1: zero, y2: zero })];
    vector.forEach(function (value, place) {
      if (value === null) { return; }
      var top = Math.min(y(value), zero), bar = part("rect", { "class": "bar", x: 8 + place * wide, y: top,
        width: Math.max(wide - 1, 1), height: Math.max(Math.abs(y(value) - zero), 1) });
      var title = part("title", {}); title.textContent = place + ": " + shown(value); bar.append(title);
      parts.push(bar);
    });
    parts.push(label(8, 146, "0", "start"), label(292, 146, String(n - 1), "end"));
    values.replaceChildren.apply(values, parts);
  }
  function draw() {
    var at = Number(slide.value), step = episode.steps[at];
    where.textContent = "step " + episode.places[at] + " of " + episode.transitions;
    facts.replaceChildren();
    Object.keys(step).forEach(function (name) { fact(name, shown(step[name])); });
    frames.replaceChildren();
    Object.keys(episode.images).forEach(function (name) {
      var address = episode.images[name][at];
      if (address) {
        var image = document.createElement("img");
        image.src = address; image.alt = name + " at step " + episode.places[at]; frames.append(image);
      }
    });
    drawTrace(at); drawValues(at);
  }
  function stop() {
    clearInterval(timer); timer = null; play.textContent = "Play"; play.setAttribute("aria-pressed", "false");
  }
  function move(by) {
    var last = episode.steps.length - 1, next = Math.min(Math.max(Number(slide.value) + by, 0), last);
    slide.value = next; draw(); return next < last;
  }
  function choose() {
    stop(); episode = episodes[Number(pick.value)]; slide.max = episode.steps.length - 1; slide.value = 0; draw();
  }
  pick.addEventListener("change", choose);
  slide.addEventListener("input", function () { stop(); draw(); });
  document.getElementById("back").addEventListener("click", function () { stop(); move(-1); });
  document.getElementById("next").addEventListener("click", function () { stop(); move(1); });
  play.addEventListener("click", function () {
    if (timer) { stop(); return; }
    if (Number(slide.value) >= episode.steps.length - 1) { slide.value = 0; }
    play.textContent = "Stop"; play.setAttribute("aria-pressed", "true");
    timer = setInterval(function () { if (!move(1)) { stop(); } }, 100);
  });
  choose();
}());
"""
