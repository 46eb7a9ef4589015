"""Prints the results of ``mouse bench``, with rich if it is installed."""

from __future__ import annotations

from collections.abc import Sequence

from mouse_core._base.progress import aligned, console, item
from mouse_core.bench.running import BenchReport

_HEAD = ("", "batches/s", "GB/s", "of the floor", "ms a batch (quartiles)")


def show(report: BenchReport) -> None:
    """Print a report."""
    out = console()
    if out is None:
        print("\n".join(plain(report)))  # noqa: T201
        return
    from rich.table import Table

    for line in heading(report):
        out.print(line)
    table = Table(*_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows(report):
        table.add_row(*row)
    out.print(table)
    for line in facts(report):
        out.print(line)
    out.print("\nRecommended", style="bold")
    for sentence in report.advice:
        out.print(f"- {sentence}")


def plain(report: BenchReport) -> list[str]:
    """Render a report as lines of plain text."""
    table = aligned([_HEAD, *rows(report)])
    return [*heading(report), "", *table, "", *facts(report), "", "Recommended", *map(item, report.advice)]


def heading(report: BenchReport) -> list[str]:
    """Describe the dataset and the batches."""
    batch = report.batch
    fields = ", ".join(f"{name} {kind}" for name, kind in batch["fields"].items())
    dataset = report.dataset
    if "run" in batch:
        batches = f"batches of {batch['run']}, {batch['megabytes']:.3g} MB: {fields}"
    else:
        length = batch["sequence_length"]
        of = "rows" if length is None else f"windows of S={length} steps"
        around = "".join(f", {name} at {_offsets(found)}" for name, found in (batch["windows"] or {}).items())
        within = "" if batch["boundary"] == "stream" else f", within {batch['boundary']}s"
        batches = (
            f"batches of B={batch['batch_size']} {of}{around}, {batch['sampling']}{within}, "
            f"{batch['megabytes']:.3g} MB ({batch['megabytes stored']:.3g} MB as stored): {fields}"
        )
    return [
        f"{dataset['name']}: {dataset['rows']:,} steps, opened in {dataset['seconds to open']:.2g} s",
        batches,
        ", ".join(f"{name}: {value}" for name, value in report.machine.items()),
    ]


def _offsets(offsets: Sequence[int]) -> str:
    """Return offsets in the form of the option --window."""
    first, last = offsets[0], offsets[-1]
    if len(offsets) > 2 and list(offsets) == list(range(first, last + 1)):
        return f"{first}:{last + 1}"
    return ",".join(map(str, offsets))


def rows(report: BenchReport) -> list[tuple[str, ...]]:
    """Return a row of texts for each way to get batches."""
    return [
        (
            line.name,
            f"{line.batches_per_second:,.{0 if line.batches_per_second >= 10 else 2}f}",
            f"{line.gigabytes_per_second:.3g}",
            "" if line.floor_share is None else f"{line.floor_share:.0%}",
            "{1:.3g} ({0:.3g} to {2:.3g})".format(*line.milliseconds),
        )
        for line in report.lines
    ]


def facts(report: BenchReport) -> list[str]:
    """Describe the cost of first batches and of decoding."""
    lines = []
    if "rows written a second" in report.batch:
        lines.append(f"written: {report.batch['rows written a second']:,.0f} rows/s, many at once")
    for name, first in report.first.items():
        memory = "" if first.added_megabytes is None else f"; private memory {first.added_megabytes:+.3g} MB"
        lines.append(f"{name}: {first.first_seconds:.2g} s from the store to the first batch{memory}")
    lines += [f"{name}: {line}" for name, line in report.reports.items()]
    if report.decoding_share is not None:
        lines.append(f"decoding images: {report.decoding_share:.0%} of the time of a batch")
    if "run" not in report.batch and all(line.floor_share is None for line in report.lines):
        lines.append(
            "no floor: some fields are encoded, of varying length or at offsets of their own, or rows lie elsewhere or "
            "in several recordings, so there is no plain copy to compare with"
        )
    return lines
