// What all parts of the page use. Texts of the data only ever become text nodes.

/** An element with properties and children; children that are no elements become text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** The address of an answer. */
export function address(name, asked = {}) {
  const given = Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `${name}?${new URLSearchParams(given)}`;
}

/** An answer of the server; an error says what it says. */
export async function ask(name, asked = {}) {
  let answer;
  try {
    answer = await fetch(address(name, asked));
  } catch {
    throw new Error("The viewer has ended. Start it again with mouse view.");
  }
  const said = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(said.error), { status: answer.status });
  return said;
}

/** A number in few characters; the rest as text. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? value.toLocaleString("en") : value.toExponential(4);
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** Calls of a function come together: only the last of some within a while counts. */
export function later(call, wait = 120) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}

/** One asynchronous call at a time; of those asked for meanwhile only the last is made. */
export function latest(call) {
  let running = false;
  let waiting = null;
  return async function next(...given) {
    waiting = given;
    if (running) return;
    running = true;
    try {
      while (waiting) {
        const now = waiting;
        waiting = null;
        await call(...now);
      }
    } finally {
      running = false;
    }
  };
}

const waiting = [];

/** Calls that take a while are made in turn, a few in each frame, so that the page stays smooth. */
export function soon(call) {
  if (waiting.push(call) > 1) return;
  const some = () => {
    const until = performance.now() + 8;
    while (waiting.length && performance.now() < until) {
      waiting[0]();
      waiting.shift();
    }
    if (waiting.length) requestAnimationFrame(some);
  };
  requestAnimationFrame(some);
}

/** Says an error where the user looks. */
export function say(message) {
  const place = document.querySelector("#said");
  place.textContent = message;
  place.hidden = !message;
}

/** A drop-down of texts. */
export function choice(options, chosen, onchange, label) {
  const made = element("select", { onchange: () => onchange(made.value), ariaLabel: label });
  for (const option of options) made.append(element("option", { value: option, textContent: option || "none" }));
  made.value = chosen;
  return made;
}

/** What a dimension of a column is called: its place, 7 of [2, 5] is "1,2", and its name where it has one. */
export function label({ name, shape, names }, dim) {
  if (!shape.length) return name;
  const found = [];
  for (let left = dim, at = shape.length - 1; at >= 0; at -= 1) {
    found.unshift(at ? left % shape[at] : left);
    left = Math.floor(left / shape[at]);
  }
  return `${name}[${found.join(",")}]${names[dim] ? ` ${names[dim]}` : ""}`;
}

/** A colour of the page's style. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
