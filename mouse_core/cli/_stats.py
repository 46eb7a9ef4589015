"""The subcommand ``stats``: statistics of recorded data by field and dimension, printed and saved beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mouse_core._base.progress import aligned
from mouse_core.cli import _data as data

if TYPE_CHECKING:
    from mouse_core.statistics.by_field import FieldStatistics

_HEAD = ("field", "count", "mean", "std", "min", "q01", "q50", "q99", "max")
# Of wider fields the first dimensions are shown.
_SHOWN = 16


def declare_stats(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse stats``."""
    data.add_source(parser)
    data.add_fields(parser)
    parser.add_argument(
        "--save", metavar="FOLDER", help="also write meta/stats.json there, as LeRobot has it; usually the source"
    )


def run_stats(chosen: argparse.Namespace) -> int:
    """Show mean, deviation, range and quantiles of every field, by dimension, and save them beside the data.

    examples:
      mouse stats recordings                            a folder of save_to_disk, Minari, RLDS, LeRobot, TED, ...
      mouse stats recordings --fields action,obs_continuous
      mouse stats recordings --save recordings          meta/stats.json in it, for Statistics.load and for LeRobot
    """
    from mouse_core.bench.opening import opened
    from mouse_core.statistics.by_field import statistics

    with opened(chosen.source, progress=data.wants_bar(), **data.how_to_read(chosen)) as found:
        counted = statistics(found.to_store(), chosen.fields, progress=data.wants_bar())
        rows = [row for name, one in counted.items() for row in _rows(name, one)]
        print("\n".join(aligned([_HEAD, *rows])))  # noqa: T201
        if chosen.save:
            counted.save(chosen.save)
            print(f"\nwrote {Path(chosen.save) / 'meta' / 'stats.json'}")  # noqa: T201
    return 0


def _rows(name: str, found: FieldStatistics) -> Iterator[tuple[str, ...]]:
    counts = found.count.reshape(-1)
    quantiles = [found.quantiles.get(share) for share in (0.01, 0.5, 0.99)]
    every = (found.mean, found.std, found.min, *quantiles, found.max)
    values = [None if one is None else one.reshape(-1) for one in every]
    for place in range(min(len(counts), _SHOWN)):
        numbers = ("" if one is None else f"{one[place]:.6g}" for one in values)
        yield (f"{name}[{place}]" if found.mean.shape else name, f"{counts[place]:,}", *numbers)
    if len(counts) > _SHOWN:
        yield (f"{name}: {len(counts) - _SHOWN} more", *[""] * (len(_HEAD) - 1))
