"""The subcommand ``preprocess``: a function of one's own over all rows of recorded data, into a new dataset."""

from __future__ import annotations

import argparse

from mouse_core.cli import _data as data


def declare_preprocess(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``mouse preprocess``."""
    data.add_source(parser)
    data.add_alignment(parser)
    parser.add_argument("function", metavar="MODULE:NAME", help="a function of a dict of columns, by its module")
    parser.add_argument("target", metavar="TARGET", help="a new folder")
    parser.add_argument("--columns", metavar="A,B", type=data.names, help="only these columns are given to it")
    parser.add_argument("--num-workers", metavar="N", type=int, default=0, help="processes that run it (0: this one)")
    parser.add_argument("--block-rows", metavar="N", type=int, help="about how many rows it is given at a time")
    parser.add_argument("--version", default="", metavar="TEXT", help="of what the function calls, where that changes")


def run_preprocess(chosen: argparse.Namespace) -> int:
    """Write what a function makes of every row to a new dataset, once for the same rows and function.

    The function gets whole episodes, {column: array [n, ...]}, and returns new columns, or others in their places.

    examples:
      mouse preprocess recordings features:embed embedded              embed(columns) of features.py in this folder
      mouse preprocess recordings features:embed embedded --columns observation_image --num-workers 8

    After an interruption the same command goes on where it was. When all is there it says so, and computes nothing.

    status: 0 done, 2 data, a function or a target that cannot be used
    """
    from mouse_core import formats
    from mouse_core.formats.preprocessing import preprocess

    stream = formats.open(chosen.source, alignment=chosen.alignment, **data.how_to_read(chosen))
    done = preprocess(
        stream,
        data.function_of(chosen.function, "function"),
        chosen.target,
        columns=chosen.columns,
        num_workers=chosen.num_workers,
        version=chosen.version,
        block_rows=chosen.block_rows,
        progress=data.wants_bar(),
    )
    before = f", {done.resumed_rows:,} of them before an interruption" if done.resumed_rows else ""
    found = ", which were there" if done.reopened else before
    print(f"{done.path}: {done.rows:,} rows{found}, with the digest {done.digest}")  # noqa: T201
    return 0
