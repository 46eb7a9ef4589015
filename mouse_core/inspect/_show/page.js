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
      return "[" + value.slice(0, 12).map(shown).join(", ") + (value.length > 12 ? ", \u2026" : "") + "]";
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
