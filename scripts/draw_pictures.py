"""Draw the pictures of README and docs as SVG: `python -m scripts.draw_pictures` writes them to docs/assets/.

The windows in the pictures are those that `BatchSource` plans, so what is drawn is what happens. A test holds the
files to what this script draws.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from mouse_core import BatchSource, DatasetStore
from mouse_core.sampling import Blocks, Pool

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"

INK, SOFT, LINE, PAPER = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
# As wide as the text of a page.
WIDTH = 760
# One (fill, edge) a meaning, the same in all pictures.
GREY = ("#f3f4f6", "#9ca3af")
BLUE = ("#dbeafe", "#2563eb")
GREEN = ("#dcfce7", "#15803d")
AMBER = ("#fef3c7", "#b45309")
VIOLET = ("#ede9fe", "#6d28d9")
ROSE = ("#ffe4e6", "#be123c")
TEAL = ("#ccfbf1", "#0f766e")
SANS = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Picture:
    """An SVG under construction; coordinates in pixels from the top left.

    Args:
        width, height: Of the whole.
        title: Says what is to be seen, for readers who cannot.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{SANS}" font-size="14">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, colour: tuple[str, str] = GREY, *, radius: float = 6
    ) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{colour[0]}" stroke="{colour[1]}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        colour: str = INK,
        anchor: str = "middle",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """A line of text on the baseline `y`."""
        family = f' font-family="{MONO}"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" text-anchor="{anchor}"{family}{weight}>'
            f"{escape(words)}</text>"
        )

    def path(
        self, points: str, *, arrow: bool = False, colour: str = INK, dashed: bool = False, width: float = 1.5
    ) -> None:
        """A line along an SVG path."""
        extra = (' marker-end="url(#head)"' if arrow else "") + (' stroke-dasharray="4 4"' if dashed else "")
        self.parts.append(f'<path d="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{extra}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow."""
        self.path(f"M{x1:g},{y1:g} L{x2:g},{y2:g}", arrow=True)

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def overview() -> Picture:
    """From a store to a batch in a framework."""
    picture = Picture(
        WIDTH,
        282,
        "A store of datasets and appended rows gives a snapshot; seed, index and snapshot give a plan, the starts of "
        "windows; the plan's windows are gathered into a batch, which becomes a TensorDict, a dict of JAX arrays or a "
        "dict of NumPy arrays.",
    )
    picture.text(WIDTH / 2, 34, "batch(i) = f(seed, i, snapshot)", size=20, mono=True, bold=True)
    head, top, line, below = 70, 82, 150, 244

    picture.box(14, top, 152, 136)
    picture.text(90, head, "DatasetStore", bold=True, mono=True)
    for row, (label, colour) in enumerate(
        [("dataset on disk", BLUE), ("another dataset", BLUE), ("appended rows", GREEN)]
    ):
        picture.box(24, top + 11 + 39 * row, 132, 35, colour, radius=3)
        picture.text(90, top + 33 + 39 * row, label)
    _caption(picture, 90, below, "steps in order,", "read where they lie")

    picture.arrow(170, line, 198, line)
    picture.box(202, line - 33, 102, 66, VIOLET)
    picture.text(253, line - 3, "snapshot", bold=True)
    picture.text(253, line + 17, "rows 0..N-1", size=13)
    _caption(picture, 253, below, "fixed while", "the store grows")

    picture.arrow(308, line, 336, line)
    picture.text(386, head, "seed, i", mono=True, bold=True)
    picture.arrow(386, head + 10, 386, line - 37)
    picture.box(340, line - 33, 92, 66, AMBER)
    picture.text(386, line - 3, "plan", bold=True)
    picture.text(386, line + 17, "starts [B]", size=13)
    _caption(picture, 386, below, "made before", "anything is read")

    picture.arrow(436, line, 464, line)
    rows, columns, cell = 4, 7, 15
    left, above = 470, line - 30
    middle = left + cell * columns / 2
    for row in range(rows):
        for column in range(columns):
            picture.box(left + cell * column, above + cell * row, cell, cell, BLUE if row % 2 else GREEN, radius=0)
    picture.text(middle, head, "batch(i)", bold=True, mono=True)
    picture.text(middle, above - 9, "S steps", size=13, colour=SOFT)
    picture.text(middle, above + cell * rows + 18, "B windows", size=13, colour=SOFT)
    _caption(picture, middle, below, "every field", "[B, S, ...]")

    ends = [
        ("mouse_torch", "TensorDict[B, S]"),
        ("mouse_jax", "dict of jax.Array"),
        ("mouse_core", "dict of NumPy arrays"),
    ]
    for number, (package, what) in enumerate(ends):
        y = line - 68 + 46 * number
        picture.arrow(580, line, 598, y + 22)
        picture.box(602, y, 148, 42)
        picture.text(676, y + 18, package, bold=True, mono=True, size=13)
        picture.text(676, y + 34, what, size=12)
    _caption(picture, 676, below, "the same numbers", "in the same order")
    return picture


def _caption(picture: Picture, x: float, y: float, *lines: str) -> None:
    for number, line in enumerate(lines):
        picture.text(x, y + 18 * number, line, colour=SOFT, size=13)


def alignment() -> Picture:
    """Two episodes as rows, and which action belongs to which observation."""
    picture = Picture(
        WIDTH,
        476,
        "An episode of three transitions is four rows. Row t holds the observation at t and the action, reward and "
        "done that led to it. The action chosen on seeing the observation of row t stands in row t+1. The first row "
        "of an episode holds a placeholder action, reward 0 and done 0.",
    )
    columns = [("row", 44), ("episode_step", 112), ("observation", 106), ("action", 122), ("reward", 62), ("done", 50)]
    rows = [
        ("0", "o₀", "placeholder", "0", "0"),
        ("1", "o₁", "a₀", "r₁", "0"),
        ("2", "o₂", "a₁", "r₂", "0"),
        ("3", "o₃", "a₂", "r₃", "1"),
        ("0", "o₀′", "placeholder", "0", "0"),
        ("1", "o₁′", "a₀′", "r₁′", "0"),
    ]
    left, top, height = 14, 66, 58
    edges = [left]
    for _, width in columns:
        edges.append(edges[-1] + width)
    middles = [(first + second) / 2 for first, second in pairwise(edges)]
    picture.text((edges[3] + edges[6]) / 2, 24, "what led to this observation", size=13, colour=SOFT)
    picture.path(f"M{edges[3] + 8},32 L{edges[6]},32", colour=LINE)
    for (name, _), middle in zip(columns, middles, strict=True):
        picture.text(middle, 54, name, mono=True, size=13, bold=True)
    for number, (step, observation, action, reward, done) in enumerate(rows):
        y = top + height * number
        first = step == "0"
        picture.box(left, y, edges[-1] - left, height, (("#eff6ff", "#f0fdf4")[number >= 4], LINE), radius=0)
        line = y + height / 2 + 5
        picture.text(middles[0], line, str(number), colour=SOFT)
        picture.text(middles[1], line, step)
        picture.box(middles[2] - 27, y + 13, 54, height - 26, BLUE)
        picture.text(middles[2], line, observation, bold=True)
        picture.box(middles[3] - 50, y + 13, 100, height - 26, GREY if first else AMBER)
        picture.text(middles[3], line, action, bold=not first, colour=SOFT if first else INK)
        picture.text(middles[4], line, reward, colour=SOFT if first else INK)
        picture.text(middles[5], line, done, colour=SOFT if first else INK, bold=done == "1")
        if not first:
            # Seen there, chosen here, led to this.
            picture.arrow(middles[2] + 28, y - height / 2 + 8, middles[3] - 52, y + height / 2 - 7)
            picture.arrow(middles[3] - 52, y + height / 2 + 6, middles[2] + 30, y + height / 2 + 6)

    notes = {
        0: ("The first row: nothing led to it.", "The action is a placeholder,", "reward and done are 0."),
        1: ("a₀ was chosen on seeing o₀,", "and led to o₁. Learn from", "(o₀, a₀): rows t and t+1."),
        3: ("The last observation is a row:", "T transitions are T+1 rows."),
        4: ("No action leaves o₃: leave out", "a pair whose row t+1 has", "episode_step 0."),
    }
    for number, lines in notes.items():
        y = top + height * number + height / 2 + 5 - 9 * (len(lines) - 1)
        for line_number, words in enumerate(lines):
            picture.text(edges[-1] + 16, y + 18 * line_number, words, anchor="start", size=13)
    y = top + height * len(rows)
    legend = [
        (left, left + 22, "to the right and down: seen in row t, chosen, written into row t+1"),
        (left + 22, left, "to the left: led to the observation of its own row"),
    ]
    for number, (start, end, words) in enumerate(legend):
        picture.arrow(start, y + 20 + 22 * number, end, y + 20 + 22 * number)
        picture.text(left + 32, y + 25 + 22 * number, words, anchor="start", size=13)
    return picture


# What the picture of sampling shows; docs/guides/sampling.md runs the same.
EPISODES = (9, 6, 11)
SEQUENCE_LENGTH = 5
BATCH_SIZE = 2
SEED = 2


def episodes_store() -> DatasetStore:
    """26 rows of three episodes, as the pictures of windows show them."""
    store = DatasetStore()
    for rows in EPISODES:
        done = np.zeros(rows, np.int64)
        done[-1] = 1
        store.extend(
            {
                "action": np.zeros(rows, np.int64),
                "reward": np.zeros(rows, np.float32),
                "done": done,
                "episode_step": np.arange(rows),
            }
        )
    return store


def _stream(picture: Picture, left: float, y: float, cell: float, height: float) -> None:
    """The rows of the episodes side by side, each with its episode_step; some with their number beneath."""
    row = 0
    for number, rows in enumerate(EPISODES):
        colour = (BLUE, GREEN, VIOLET)[number]
        for step in range(rows):
            picture.box(left + cell * row, y, cell, height, colour, radius=0)
            if row % SEQUENCE_LENGTH == 0:
                picture.text(left + cell * (row + 0.5), y + height + 15, str(row), size=11, bold=True)
            picture.text(left + cell * (row + 0.5), y + height / 2 + 4, str(step), size=11, colour=SOFT)
            row += 1
        middle = left + cell * (row - rows / 2)
        picture.text(middle, y - 8, f"episode {'ABC'[number]}", size=12, colour=colour[1], bold=True)


def sampling() -> Picture:
    """The first batches of all four modes over the same rows."""
    store = episodes_store()
    left, cell, bar = 124, 24, 18
    modes = [
        ("random", 3, "anywhere, each draw by itself"),
        ("last", 1, "the end of the snapshot; every batch is the same"),
        ("sequential", 3, "batch 2 begins epoch 1; the window left of epoch 0 is dropped"),
        ("batch", 3, "batch 2 takes the last window of epoch 0 and the first of epoch 1"),
    ]
    lane = BATCH_SIZE * bar + 8
    height = 96 + sum(lane * batches + 40 for _, batches, _ in modes) + 34
    picture = Picture(
        WIDTH,
        height,
        "The windows of the first batches of each sampling mode over 26 rows of three episodes. Windows of random "
        "begin anywhere; last takes the windows at the end; sequential and batch take each of the windows side by "
        "side once in an epoch. Windows cross the ends of episodes.",
    )
    _stream(picture, left, 34, cell, 26)
    picture.text(left - 12, 52, "episode_step", anchor="end", size=13)
    picture.text(left - 12, 75, "row", anchor="end", size=13)
    y = 90
    for mode, batches, remark in modes:
        source = BatchSource(store, SEQUENCE_LENGTH, BATCH_SIZE, sampling=mode, seed=SEED)
        picture.text(left - 12, y + 20, f'"{mode}"', anchor="end", mono=True, bold=True)
        picture.text(left, y + 20, remark, anchor="start", size=13, colour=SOFT)
        y += 30
        for index in range(batches):
            picture.text(left - 12, y + lane / 2, f"batch {index}", anchor="end", size=13)
            picture.box(left, y, cell * len(store), lane - 5, ("#fafafa", "#e5e7eb"), radius=3)
            for number, start in enumerate(source.plan(index).starts.tolist()):
                windows = len(store) // SEQUENCE_LENGTH
                later = {"sequential": index >= len(source), "batch": index * BATCH_SIZE + number >= windows}
                colour = (PAPER, AMBER[1]) if later.get(mode) else AMBER
                x, above = left + cell * start, y + 2 + bar * number
                picture.box(x, above, cell * SEQUENCE_LENGTH, bar - 2, colour, radius=3)
                picture.text(x + 14, above + 12.5, str(start), size=12, bold=True)
            y += lane
        y += 10
    picture.box(left, y + 4, 40, bar - 2, AMBER, radius=3)
    picture.text(left + 50, y + 16, "a window of S = 5 rows, and its start", anchor="start", size=13)
    picture.box(left + 356, y + 4, 40, bar - 2, (PAPER, AMBER[1]), radius=3)
    picture.text(left + 406, y + 16, "the same, of epoch 1", anchor="start", size=13)
    return picture


# What the picture of windows by field shows; docs/guides/windows-by-field.md runs the same.
OFFSETS = {"obs_discrete": [-2, -1, 0], "action": range(4)}
ANCHORS = (3, 6)


def numbered_store() -> DatasetStore:
    """The first two episodes of the pictures; o and a have the number of their step in the stream."""
    store = DatasetStore()
    row = 0
    for rows in EPISODES[:2]:
        number = np.arange(row, row + rows)
        done = (np.arange(rows) == rows - 1).astype(np.int64)
        chosen = np.where(np.arange(rows) == 0, 99, number - 1)  # the action that arrived with the row
        reward, step = np.zeros(rows, np.float32), np.arange(rows)
        store.extend(
            {"action": chosen, "reward": reward, "done": done, "episode_step": step, "observation_discrete": number}
        )
        row += rows
    return store


def windows_by_field() -> Picture:
    """Which rows two anchors deliver, and what becomes of those that are not there."""
    store = numbered_store()
    source = BatchSource(store, batch_size=len(store), sampling="last", windows=OFFSETS)
    batch = source[0]
    left, cell, height = 150, 38, 28
    picture = Picture(
        WIDTH,
        372,
        "Two anchors in an episode of nine rows. Of each the observations are the anchor's own and the two before, "
        "the action from the four rows behind, where the transitions that leave the anchor's observation stand. Of the "
        "anchor near the end two actions are not there: the last one stands for them, and the mask says so.",
    )
    for number, (name, letter) in enumerate((("observation", "o"), ("action", "a"))):
        y = 36 + (height + 2) * number
        picture.text(left - 12, y + 19, name, anchor="end", size=13, mono=True)
        row = 0
        for episode, rows in enumerate(EPISODES[:2]):
            for step in range(rows):
                placeholder = letter == "a" and step == 0
                colour = GREY if placeholder else (BLUE, GREEN)[episode]
                picture.box(left + cell * row, y, cell, height, colour, radius=0)
                shown = "–" if placeholder else f"{letter}{row - number}"
                picture.text(left + cell * (row + 0.5), y + 19, shown, size=12, colour=SOFT)
                if not number:
                    picture.text(left + cell * (row + 0.5), y - 8, str(row), size=11, bold=True)
                row += 1
    picture.text(left - 12, 28, "row", anchor="end", size=13)
    tops = {anchor: 130 + 106 * place for place, anchor in enumerate(ANCHORS)}
    for anchor, y in tops.items():
        x = left + cell * (anchor + 0.5)
        picture.path(f"M{x:g},98 L{x:g},{y + 70:g}", dashed=True, colour=VIOLET[1])
    for anchor, y in tops.items():
        picture.text(left - 12, y - 6, f"anchor {anchor}", anchor="end", bold=True)
        for lane, (name, offsets) in enumerate(OFFSETS.items()):
            line = y + 34 * lane
            picture.text(left - 12, line + 19, name, anchor="end", size=13, mono=True)
            letter = "oa"[lane]
            for value, there, offset in zip(batch[name][anchor], batch[f"{name}_mask"][anchor], offsets, strict=True):
                row = anchor + offset + (letter == "a")
                colour = AMBER if there else (PAPER, AMBER[1])
                picture.box(left + cell * row + 2, line, cell - 4, height, colour, radius=4)
                picture.text(left + cell * (row + 0.5), line + 19, f"{letter}{value}", size=12, bold=bool(there))
    y = 336
    picture.box(left, y, 34, 22, AMBER, radius=4)
    picture.text(left + 44, y + 16, "there: the mask is True", anchor="start", size=13)
    picture.box(left + 250, y, 34, 22, (PAPER, AMBER[1]), radius=4)
    picture.text(left + 294, y + 16, "not there: the edge stands for it", anchor="start", size=13)
    return picture


# What the picture of packed windows shows; docs/guides/ragged.md runs the same.
LONGEST, LENGTHS_SEED = 8, 153


def ragged() -> Picture:
    """Four windows of lengths of their own: where they lie, padded, and packed."""
    store = episodes_store()
    options = {"lengths": range(1, LONGEST + 1), "boundary": "episode", "batch_size": 4, "seed": LENGTHS_SEED}
    padded = BatchSource(store, **options)  # type: ignore[arg-type]
    packed = BatchSource(store, packed=True, **options)[0]  # type: ignore[arg-type]
    starts, mask, steps = padded.plan(0).starts.tolist(), padded[0]["mask"], padded[0]["time"]
    rows, colours = len(packed["time"]), (AMBER, ROSE, TEAL, GREY)
    left, cell, height = 124, 24, 24
    picture = Picture(
        WIDTH,
        388,
        "Four windows of different lengths in 26 rows of three episodes. Padded they are four rows of eight steps, of "
        "which some are not there. Packed they lie one behind the other: cu_seqlens says where each begins, position "
        "counts the steps of each, and sequence_id the windows.",
    )
    _stream(picture, left, 34, cell, 26)
    picture.text(left - 12, 52, "episode_step", anchor="end", size=13)
    picture.text(left - 12, 75, "row", anchor="end", size=13)
    lengths = mask.sum(axis=1).tolist()
    for window, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        picture.box(left + cell * start, 86 + 10 * window, cell * length, 7, colours[window], radius=3)
    picture.text(left - 12, 108, "windows", anchor="end", size=13)
    y = 146
    picture.text(left - 12, y + 16, "padded", anchor="end", bold=True)
    picture.text(left - 12, y + 34, "[B, S]", anchor="end", size=12, mono=True)
    picture.text(
        left + cell * (LONGEST + 0.7), y + 16, "mask is False where steps", anchor="start", size=13, colour=SOFT
    )
    picture.text(left + cell * (LONGEST + 0.7), y + 34, "are not there", anchor="start", size=13, colour=SOFT)
    for window in range(4):
        for step in range(LONGEST):
            there = bool(mask[window, step])
            x, above = left + cell * step, y + height * window
            picture.box(x, above, cell, height - 3, colours[window] if there else (PAPER, LINE), radius=0)
            picture.text(x + cell / 2, above + 15, str(steps[window, step]), size=11, colour=INK if there else LINE)
    y = 270
    picture.text(left - 12, y + 16, "packed", anchor="end", bold=True)
    picture.text(left + cell * rows + 10, y + 15, f"[T], T = {rows}", anchor="start", size=12, mono=True)
    for place in range(rows):
        window = int(packed["sequence_id"][place])
        x = left + cell * place
        picture.box(x, y, cell, height - 3, colours[window], radius=0)
        picture.text(x + cell / 2, y + 15, str(packed["time"][place]), size=11)
        for line, name in enumerate(("position", "sequence_id")):
            picture.text(x + cell / 2, y + 42 + 20 * line, str(packed[name][place]), size=11, colour=SOFT)
    for line, name in enumerate(("position", "sequence_id")):
        picture.text(left - 12, y + 42 + 20 * line, name, anchor="end", size=12, mono=True)
    picture.text(left - 12, y + 100, "cu_seqlens", anchor="end", size=12, mono=True)
    for bound in packed["cu_seqlens"].tolist():
        x = left + cell * bound
        picture.path(f"M{x:g},{y - 5} L{x:g},{y + 82}", dashed=True, colour=LINE)
        picture.text(x, y + 100, str(bound), size=12, bold=True)
    return picture


def snapshots() -> Picture:
    """A store that grows, and a loader that sees it only at refresh()."""
    picture = Picture(
        WIDTH,
        232,
        "A loader reads a snapshot of 300 rows. Rows appended later are not in its batches until refresh(), which "
        "takes a snapshot of 400 rows and begins a new epoch at the next index.",
    )
    left, scale = 104, 1.6
    bars = [
        ("store", [(0, 300, BLUE, "300 rows"), (300, 100, GREEN, "100 appended later")]),
        ("snapshot", [(0, 300, VIOLET, "rows 0 .. 299")]),
        ("refreshed", [(0, 400, VIOLET, "rows 0 .. 399")]),
    ]
    for number, (name, stretches) in enumerate(bars):
        y = 18 + 44 * number
        picture.text(left - 16, y + 21, name, anchor="end", bold=True)
        for first, rows, colour, label in stretches:
            picture.box(left + scale * first, y, scale * rows, 32, colour, radius=3)
            picture.text(left + scale * (first + rows / 2), y + 21, label)
    y = 168
    picture.text(left - 16, y + 21, "batches", anchor="end", bold=True)
    for index in range(9):
        x = left + 64 * index + (64 if index >= 4 else 0)
        picture.box(x, y, 56, 32, AMBER, radius=3)
        picture.text(x + 28, y + 21, f"i = {index}", size=13)
    x = left + 64 * 4 + 28
    picture.path(f"M{x},{y - 8} L{x},{y + 38}", dashed=True)
    picture.text(x, y + 54, "refresh(): a new epoch begins at i = 4", size=13, colour=SOFT)
    return picture


def blocks() -> Picture:
    """Which rows batches read, drawn uniformly and from blocks, and what that costs in randomness."""
    picture = Picture(
        WIDTH,
        318,
        "Windows drawn uniformly lie anywhere in every batch. Those from blocks lie in 16 blocks at a time, each of "
        "which is used up and gives place to another. The mean of 64 batches varies 28 times as much as uniformly with "
        "a pool of 64 blocks of 4 megabytes, 2 times with 1,024 blocks of 256 kilobytes, which take as much memory.",
    )
    zeros, height, top = np.zeros(8000, np.int8), 210, 50
    store = DatasetStore()
    store.extend({"action": zeros, "reward": zeros, "done": zeros})
    for left, name, sampling in ((44, '"random"', "random"), (268, '"blocks"', Blocks(rows=160, pool=16))):
        source = BatchSource(store, 4, 8, sampling=sampling, fields=["reward"])
        picture.text(left + 96, top - 16, f"sampling={name}", mono=True, bold=True, size=13)
        picture.box(left, top, 192, height, ("#ffffff", LINE), radius=2)
        places = [(index, start) for index in range(94) for start in source.plan(index).starts.tolist()]
        dots = "".join(
            f"M{left + 2 + 2 * index},{top + 2 + start * (height - 4) / 8000:.0f}h2" for index, start in places
        )
        picture.path(dots, colour=BLUE[1])
        picture.text(left + 96, top + height + 20, "batches", size=13, colour=SOFT)
    picture.text(38, top + 12, "0", size=12, colour=SOFT, anchor="end")
    picture.text(38, top + height, "N", size=12, colour=SOFT, anchor="end")
    _caption(
        picture,
        252,
        top + height + 44,
        "a dot is a window, where it begins; 16 blocks are open at a time",
    )
    _variances(picture, 536, top, 200, height)
    return picture


def _variances(picture: Picture, left: float, top: float, width: float, height: float) -> None:
    """How variable the means of 1 to 512 batches are, for three pools, on logarithmic scales."""
    pools = [(2, 312, ROSE, "64 of 4 MB"), (8, 78, AMBER, "256 of 1 MB"), (32, 20, GREEN, "1,024 of 256 KB")]
    picture.text(left + width / 2, top - 32, "variance of a mean of batches", size=13, bold=True)
    picture.text(left + width / 2, top - 16, "1: as drawn uniformly", size=12, colour=SOFT)
    picture.box(left, top, width, height, ("#ffffff", LINE), radius=2)

    def place(value: float) -> float:
        return top + height - 14 - (height - 26) * float(np.log10(max(value, 0.7))) / np.log10(200)

    for value in (1, 10, 100):
        picture.path(f"M{left},{place(value):.1f} h{width}", colour="#e5e7eb")
        picture.text(left - 6, place(value) + 4, str(value), size=12, colour=SOFT, anchor="end")
    counts = [2**power for power in range(10)]
    across = [left + 8 + (width - 16) * number / 9 for number in range(10)]
    picture.text(left + 8, top + 20, "pool of", size=12, colour=SOFT, anchor="start")
    for number, (lanes, block, colour, label) in enumerate(pools, 1):
        pool = Pool(218_750, 32, lanes, block, 64, 12_800)
        heights = [place(pool.variance(count)) for count in counts]
        points = " L".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, heights, strict=True))
        picture.path(f"M{points}", colour=colour[1])
        picture.text(left + 8, top + 20 + 16 * number, label, size=12, colour=colour[1], anchor="start")
    for number in (0, 3, 6, 9):
        picture.text(across[number], top + height + 20, str(counts[number]), size=12, colour=SOFT)
    _caption(picture, left + width / 2, top + height + 44, "batches of 32 windows")


def pictures() -> dict[str, str]:
    """Every picture's SVG by file name."""
    drawn = {
        "overview": overview,
        "alignment": alignment,
        "sampling": sampling,
        "snapshots": snapshots,
        "windows-by-field": windows_by_field,
        "ragged": ragged,
        "blocks": blocks,
    }
    return {f"{name}.svg": draw().svg() for name, draw in drawn.items()}


def main() -> None:
    """Write the pictures."""
    ASSETS.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (ASSETS / name).write_text(svg, encoding="utf-8")
        print(ASSETS / name)


if __name__ == "__main__":
    main()
