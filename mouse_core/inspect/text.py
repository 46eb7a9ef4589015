"""Showing a report in the terminal, with rich where it is installed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from mouse_core._base.progress import aligned, console, item
from mouse_core.inspect._checks.finding import Finding
from mouse_core.inspect.report import ColumnReport, Report
from mouse_core.spec import from_json

COLUMN_HEAD = ("column", "type", "shape", "nulls", "NaN", "min", "max", "mean")
_EPISODE_HEAD = ("", "min", "5%", "median", "95%", "max", "mean")
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_ACTIONS = 12
_MOST_TASKS = 8


def show(report: Report, *, viewer: Sequence[str] = ()) -> None:
    """Print a report.

    Args:
        report: What was found.
        viewer: The command that shows the data as they were read, word by word, to which the place of a finding is
            added; by default ``mouse view`` of the report's source.
    """
    out = console()
    if out is None:
        print("\n".join(plain(report, viewer)))  # noqa: T201
        return
    from rich.table import Table
    from rich.text import Text

    out.print(heading(report), style="bold")
    for title, head, rows in tables(report):
        table = Table(*head, title=title or None, title_justify="left")
        for place, column in enumerate(table.columns):
            column.justify = "right" if place > (2 if head is COLUMN_HEAD else 0) else "left"
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row)
        out.print(table)
    for line in facts(report):
        out.print(line)
    for title, style, found in _findings(report):
        out.print(f"\n{title}", style="bold")
        for finding in found:
            out.print(Text.assemble("- ", (finding.code, style), f": {finding.message}", (_place(finding), "dim")))
    for line in _seen(report, viewer):
        out.print(f"\n{line}", highlight=False, markup=False, soft_wrap=True)
    if not report.warnings:
        out.print("\nNo warnings", style="bold green")


def plain(report: Report, viewer: Sequence[str] = ()) -> list[str]:
    """Format a report as lines of text."""
    lines = [heading(report), ""]
    for title, head, rows in tables(report):
        lines += [title] if title else []
        lines += [*aligned([head, *rows], left=len(head)), ""]
    lines += facts(report)
    for title, _, found in _findings(report):
        lines += ["", title, *(item(f"{finding.code}: {finding.message}{_place(finding)}") for finding in found)]
    lines += [line for seen in _seen(report, viewer) for line in ("", seen)]
    return lines if report.warnings else [*lines, "", "No warnings"]


def _findings(report: Report) -> Iterator[tuple[str, str, list[Finding]]]:
    """Title, colour and findings of each kind that there is."""
    levels = (("error", "Errors", "red"), ("warning", "Warnings", "yellow"), ("note", "Notes", "cyan"))
    for level, title, colour in levels:
        found = [finding for finding in report.findings if finding.level == level]
        if found:
            yield title, colour, found


def _place(finding: Finding) -> str:
    return "" if finding.place is None else f" [{finding.place}]"


def _seen(report: Report, viewer: Sequence[str]) -> list[str]:
    """Return the command that shows the first place of a finding."""
    places = [finding.place for finding in report.findings if finding.place is not None]
    words = viewer or ["mouse", "view", report.source]
    return [f"To see it: {shlex.join([*words, '--at', places[0]])}"] if places else []


def heading(report: Report) -> str:
    """Describe the inspected rows."""
    parts = [f"{report.rows:,} rows"]
    if report.episodes is not None:
        parts += [f"{report.episodes.count:,} episodes", f"{report.episodes.transitions:,} transitions"]
    return f"{report.source} ({report.format}): {', '.join(parts)}"


def tables(report: Report) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """Title, head and rows of every table."""
    found: list[tuple[str, Sequence[str], list[tuple[str, ...]]]] = [
        ("", COLUMN_HEAD, [column_cells(column) for column in report.columns])
    ]
    if report.episodes is not None and report.episodes.count:
        rows = []
        for name, numbers in (("length", report.episodes.lengths), ("return", report.episodes.returns)):
            quantiles = numbers.quantiles or (None,) * 5
            shown = (numbers.low, quantiles[0], quantiles[2], quantiles[4], numbers.high, numbers.mean)
            rows.append((name, *(number(value) for value in shown)))
        found.append(("episodes", _EPISODE_HEAD, rows))
    return found


def column_cells(column: ColumnReport) -> tuple[str, ...]:
    """Return the cells of a column in the table of columns, in the order of ``COLUMN_HEAD``."""
    return (
        column.name,
        column.dtype,
        shape_text(column),
        f"{column.nulls:,}" if column.nulls else "",
        f"{column.nans:,}" if column.nans else "",
        number(column.low),
        number(column.high),
        number(column.mean),
    )


def shape_text(column: ColumnReport) -> str:
    """The shape of a row as text."""
    if isinstance(column.shape, str):
        return column.shape
    return "" if column.shape is None else f"[{', '.join(map(str, column.shape))}]"


def facts(report: Report, *, histograms: bool = True) -> list[str]:
    """Alignment, what else the data say of themselves, ends of episodes and actions, a line each.

    Args:
        report: What was found.
        histograms: Whether one line is histograms of returns and lengths.
    """
    lines = [f"alignment: {report.alignment} ({report.alignment_found})", *said(report)]
    episodes = report.episodes
    if episodes is not None:
        codes = ", ".join(f"{code}: {count:,}" for code, count in episodes.done_codes.items())
        lines.append(f"done codes: {codes}")
        lines.append(
            f"episodes: {episodes.terminated:,} terminated, {episodes.truncated:,} truncated, {episodes.open:,} "
            f"without an end (found by {episodes.found_by})"
        )
        if histograms:
            lines.append(f"returns: {bars(episodes.returns.counts)}   lengths: {bars(episodes.lengths.counts)}")
    if report.actions is not None:
        lines.append(f"actions: {actions_text(report)}")
    return lines


def said(report: Report) -> list[str]:
    """Return the metadata beside the alignment, one line each."""
    metadata, lines = report.metadata, []
    if metadata.get("environments"):
        lines.append(f"environment: {', '.join(metadata['environments'])}")
    if metadata.get("tasks"):
        shown = [f"{task}: {text}" for task, text in list(metadata["tasks"].items())[:_MOST_TASKS]]
        more = len(metadata["tasks"]) - _MOST_TASKS
        lines.append("tasks: " + "; ".join(shown) + (f"; and {more:,} more" if more > 0 else ""))
    if metadata.get("fields"):
        lines.append(f"fields of its own: {', '.join(item['name'] for item in metadata['fields'])}")
    lines += [f"values of {column.name}: {from_json(column.spec)!r}" for column in report.columns if column.spec]
    return lines + [
        f"{name}: {metadata[name]}" for name in ("max_action_dim", "max_obs_continuous_dim") if name in metadata
    ]


def actions_text(report: Report) -> str:
    """Describe the usage of actions in a line."""
    actions = report.actions
    if actions is None:
        return ""
    if actions.counts is not None:
        total = max(1, sum(actions.counts.values()))
        return _some([f"{name}: {count / total:.1%}" for name, count in actions.counts.items()])
    places = actions.places
    if not places or "low" not in places:
        return "continuous"
    spans = zip(places["low"], places["high"], strict=True)
    return _some([f"{place}: {number(low)} to {number(high)}" for place, (low, high) in enumerate(spans)])


def _some(items: Sequence[str]) -> str:
    more = len(items) - _MOST_ACTIONS
    return ", ".join(items[:_MOST_ACTIONS]) + (f" and {more} more" if more > 0 else "")


def bars(counts: Sequence[int], width: int = 24) -> str:
    """A histogram in a line of text."""
    if not counts:
        return "-"
    size = -(-len(counts) // width)
    joined = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    highest = max(joined) or 1
    return "".join(_BARS[0 if not count else 1 + round((len(_BARS) - 2) * count / highest)] for count in joined)


def number(value: float | None) -> str:
    """A number in at most about eight characters; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int) and abs(value) < 10_000_000:
        return f"{int(value):,}"
    return f"{value:.4g}"
