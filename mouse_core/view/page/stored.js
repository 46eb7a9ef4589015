// Answers that stand in the page itself, as in a report that is one file: of some episodes, thinned. No server is asked.

/** What `mouse_core.view.stored` writes into a page, which the answers of the server are taken from. */
export class Stored {
  constructor({ sources, list, kept, findings }) {
    this.list = list;
    this.kept = new Map(kept.map((one) => [one.episode.episode, one]));
    this.command = sources[0].stored.command;
    this.done = sources[0].done;
    this.progress = { generation: 0, rows: list.rows, counted: list.rows, total: list.total };
    this.answers = {
      sources: () => ({ sources }),
      findings: () => findings,
      episodes: (asked) => this.episodes(asked),
      points: (asked) => this.points(asked),
      episode: (asked) => this.episode(Number(asked.episode)),
      curves: (asked) => this.curves(asked),
      step: ({ begin }) => this.step(begin),
    };
  }

  answer(name, asked) {
    return this.answers[name](asked);
  }

  // ------------------------------------------------------------------ the list

  /** The rows of the list that meet the filters, in the order that is asked for; what has no value comes last. */
  rows(asked) {
    const { columns, episodes } = this.list;
    const tests = Object.entries(asked).flatMap(([key, wanted]) => {
      const [, kind, name] = /^(low|high|has)\.(.*)$/s.exec(key) ?? [];
      const at = columns.indexOf(name);
      if (at < 0 || wanted === "") return [];
      if (kind === "has") return [(row) => shown(row[at]).toLowerCase().includes(String(wanted).toLowerCase())];
      const limit = this.list.texts.includes(name) ? wanted : this.limit(name, wanted);
      return [(row) => row[at] !== null && (kind === "low" ? row[at] >= limit : row[at] <= limit)];
    });
    const at = Math.max(columns.indexOf(asked.sort), 0);
    const sign = asked.down === "1" ? -1 : 1;
    const compare = ({ [at]: one }, { [at]: other }) => {
      if (one === null || other === null) return (one === null) - (other === null);
      return one < other ? -sign : Number(one > other) * sign;
    };
    return episodes.filter((row) => tests.every((test) => test(row))).toSorted(compare);
  }

  /** A limit as a number; an end of episodes may be given by its name. */
  limit(name, wanted) {
    const code = name === "done" ? this.done.indexOf(wanted) : -1;
    const found = code < 0 ? Number(wanted) : code;
    if (Number.isNaN(found)) throw new Error(`${name}: expected a number as a limit, found ${wanted}`);
    return found;
  }

  episodes(asked) {
    const rows = this.rows(asked);
    const { columns, texts } = this.list;
    return { ...this.progress, matched: rows.length, columns, texts, episodes: rows.slice(asked.first, asked.first + asked.count) };
  }

  points(asked) {
    const rows = this.rows(asked);
    const column = (name) => rows.map((row) => row[Math.max(this.list.columns.indexOf(name), 0)]);
    const known = (values) => (values.some((value) => typeof value === "string") ? [...new Set(values.map(shown))].toSorted() : null);
    const places = (values, names) => (names ? values.map((value) => names.indexOf(shown(value))) : values);
    const [x, y] = [column(asked.x), column(asked.y)];
    const texts = { x: known(x), y: known(y) };
    return { ...this.progress, matched: rows.length, episodes: column("episode"), x: places(x, texts.x), y: places(y, texts.y), texts, colors: asked.color ? column(asked.color) : null };
  }

  // ------------------------------------------------------------------ an episode

  episode(number) {
    const { total } = this.list;
    const found = this.kept.get(number);
    if (!found && number < total) throw new Error(`The steps of episode ${number} are not in this file. All of them: ${this.command} --at e=${number}`);
    return { ...this.progress, episode: found?.episode ?? null, episodes: total, steps: found?.steps };
  }

  /** The episode that a row is of. */
  at(row) {
    return [...this.kept.values()].find(({ episode: { start, length } }) => start <= row && row < start + length);
  }

  curves({ begin, column, dims, from, to }) {
    const known = this.at(begin).curves[column] ?? [];
    return {
      column,
      curves: dims.map((dim) => {
        const { steps, values } = known[dim] ?? { steps: [], values: [] };
        const there = steps ?? values.map((_, step) => step);
        // A point beyond each end, so that the lines go on to there.
        const first = Math.max(there.findLastIndex((step) => step <= from), 0);
        const last = there.findIndex((step) => step >= to);
        const end = last < 0 ? there.length : last + 1;
        return { dim, steps: there.slice(first, end), values: values.slice(first, end) };
      }),
    };
  }

  step(row) {
    const { episode, steps, columns, values } = this.at(row);
    const at = steps ? steps.indexOf(row - episode.start) : row - episode.start;
    return { row, values: columns.map((name, place) => ({ name, texts: values[at]?.[place] ?? [] })) };
  }

  /** The last picture up to a row, and which row it is of. */
  picture({ begin, column }) {
    const { episode, pictures } = this.at(begin);
    const { steps, files } = pictures[column] ?? { steps: [], files: [] };
    const place = Math.max(steps.findLastIndex((step) => step <= begin - episode.start), 0);
    return { src: files[place] ?? "data:,", row: episode.start + (steps[place] ?? 0) };
  }
}

function shown(value) {
  return value === null ? "" : String(value);
}
