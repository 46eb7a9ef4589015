"""The command ``mouse``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import getdoc
from typing import Any

from mouse_core.cli import _data as data
from mouse_core.cli._looking import declare_inspect, declare_stats, declare_view, run_inspect, run_stats, run_view
from mouse_core.cli._preprocess import declare_preprocess, run_preprocess
from mouse_core.cli._recording import declare_record, run_record
from mouse_core.cli._tokenizing import declare_tokenize, run_tokenize
from mouse_core.cli._uploading import declare_push, declare_upload, run_push, run_upload
from mouse_core.cli._verifying import declare_repair, declare_verify, run_repair, run_verify
from mouse_core.cli.command import Command, others
from mouse_core.errors import AlignmentWarning, ConfigError, MouseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What stands after ``mouse``; by default the process's.

    Returns:
        The exit status: 0; 1 where ``mouse inspect --strict`` has warnings, or ``mouse verify --strict`` nothing to
        compare with, or not for all that is read; 2 after an error that the user can mend,
        which is printed in one line, or without a command, which lists them; 130 after an interruption from the
        keyboard.
    """
    parser = argparse.ArgumentParser(
        prog="mouse",
        description="Recorded experience for reinforcement learning.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    asked = list(sys.argv[1:] if arguments is None else arguments)
    more = {} if asked[:1] and asked[0] in _COMMANDS else others()
    for name, (declare, run) in (_COMMANDS | more | _COMMANDS).items():  # nobody takes the place of ours
        purpose, _, examples = (getdoc(run) or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=purpose[:1].lower() + purpose[1:].removesuffix("."),
            description=purpose,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        declare(command)
        command.set_defaults(run=run)
    chosen = parser.parse_args(arguments)
    if chosen.version:
        print(f"mouse-data {_version()}")  # noqa: T201
        return 0
    if chosen.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _warnings_in_a_line(chosen.command):
            status: int = chosen.run(chosen)
    except KeyboardInterrupt:
        print(f"mouse {chosen.command}: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except (MouseError, OSError, ImportError) as error:
        message = " ".join(str(error).split()).removeprefix(f"{chosen.command}: ")
        print(f"mouse {chosen.command}: {message}", file=sys.stderr)  # noqa: T201
        return 2
    return status


@contextmanager
def _warnings_in_a_line(command: str) -> Iterator[None]:
    """Warnings about the data, each once, without the line of our own code that Python would show."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, AlignmentWarning):
            python(message, category, *where, **more)
        elif str(message) not in shown:
            shown.add(str(message))
            print(f"mouse {command}: warning: {message}", file=sys.stderr)  # noqa: T201

    with warnings.catch_warnings():
        warnings.simplefilter("always", AlignmentWarning)
        python, warnings.showwarning = warnings.showwarning, show
        yield


_EXAMPLES = """examples:
  mouse record CartPole-v1 runs/cartpole --episodes 100 --seed 0
  mouse inspect recordings --html report.html
  mouse view recordings
  mouse convert halfcheetah.hdf5 halfcheetah --final mark
  mouse preprocess halfcheetah features:embed embedded
  mouse tokenize prompts.jsonl tokens --tokenizer tokenizer.json --as prompts --max-length 550
  mouse verify halfcheetah
  mouse bench halfcheetah --sequence-length 64 --batch-size 32
  mouse push halfcheetah your-org/halfcheetah
  mouse upload runs/cartpole s3://bucket/cartpole

mouse COMMAND --help says more."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # which takes a while

    try:
        return version("mouse-data")
    except PackageNotFoundError:  # used from where it lies
        return "of a source folder"


# ---------------------------------------------------------------------- mouse bench


def _declare_bench(parser: argparse.ArgumentParser) -> None:
    data.add_source(parser, hub=True)
    parser.add_argument("more", metavar="SOURCE", nargs="*", help="others, of which windows are mixed")
    parser.add_argument(
        "--weights", type=_numbers, metavar="W,W", help="how often windows are of each source, by their order (equally)"
    )
    parser.add_argument(
        "--sequence-length",
        type=data.positive,
        metavar="S",
        help="steps in a window (64; with --window or --replay: single rows)",
    )
    parser.add_argument("--batch-size", type=data.positive, default=32, metavar="B", help="windows in a batch (32)")
    data.add_fields(parser)
    parser.add_argument(
        "--dtype", action="append", metavar="FIELD=DTYPE", type=_pair, default=[], help="deliver a field in this dtype"
    )
    parser.add_argument(
        "--sampling",
        metavar="NAME",
        default="random",
        help='how windows are drawn, as a loader takes it: "random", "sequential", "batch", "blocks" (random)',
    )
    parser.add_argument(
        "--boundary",
        choices=("stream", "episode", "task"),
        default="stream",
        help="what windows end with (stream: none)",
    )
    parser.add_argument(
        "--window",
        action="append",
        metavar="FIELD=FIRST:END",
        type=_window,
        default=[],
        help="deliver a field at these offsets around each row, or at some, FIELD=-4,-2,0; may be given several times",
    )
    parser.add_argument(
        "--replay",
        type=data.positive,
        metavar="ROWS",
        help="measure a replay buffer in memory, instead, which so many rows are written to",
    )
    parser.add_argument(
        "--frameworks", metavar="A,B", type=data.names, help="numpy, torch, jax; by default those that are installed"
    )
    parser.add_argument(
        "--run",
        dest="own",
        metavar="MODULE:FUNCTION",
        help="measure what this function makes of the store, a loader, a buffer or batches to iterate over, instead; "
        "it is tried with several num_workers where it takes them",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure, about (10)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def _run_bench(chosen: argparse.Namespace) -> int:
    """Measure how fast batches of a dataset are, and say what to change.

    examples:
      mouse bench recordings --sequence-length 64 --batch-size 32
      mouse bench your-org/your-dataset --split train --frameworks numpy,torch
      mouse bench recordings --sampling blocks              data larger than memory, read in long stretches
      mouse bench recordings --dtype obs_continuous=float32 --json figures.json
      mouse bench recordings --boundary episode --window obs_continuous=-1:1 --window action=0:16
      mouse bench expert beginner --weights 3,1             windows of a mixture
      mouse bench recordings --replay 1000000 --batch-size 256 --frameworks torch
      mouse bench recordings --run my_run:loader            whatever a function of yours makes for your run
    """
    from mouse_core.bench.opening import mixed, opened
    from mouse_core.bench.own import bench_own
    from mouse_core.bench.replaying import bench_replay
    from mouse_core.bench.running import bench
    from mouse_core.bench.show import show

    _check_bench(chosen)
    make = None if chosen.own is None else data.function_of(chosen.own, "--run")
    how: dict[str, Any] = {"fields": chosen.fields, "frameworks": chosen.frameworks, "seconds": chosen.seconds}
    how |= {"sequence_length": chosen.sequence_length, "batch_size": chosen.batch_size}
    with ExitStack() as stack:
        sources = [chosen.source, *chosen.more]
        options: dict[str, Any] = {"progress": data.wants_bar(), **data.how_to_read(chosen)}
        parts = [stack.enter_context(opened(source, **options)) for source in sources]
        found = parts[0] if len(parts) == 1 else mixed(parts, chosen.weights)
        if make is not None:
            report = bench_own(found, make, name=chosen.own, seconds=chosen.seconds)
        elif chosen.replay is not None:
            report = bench_replay(found, capacity=chosen.replay, **how)
        else:
            windows = dict(chosen.window) or None
            how |= {"sampling": chosen.sampling, "boundary": chosen.boundary, "windows": windows}
            report = bench(found, dtypes=dict(chosen.dtype), **how)
    show(report)
    if chosen.json:
        data.write_text(chosen.json, report.to_json())
    return 0


def _check_bench(chosen: argparse.Namespace) -> None:
    """Refuse options that say nothing of what is measured."""
    loaders = {"--dtype": chosen.dtype, "--window": chosen.window, "--boundary": chosen.boundary != "stream"}
    loaders["--sampling"] = chosen.sampling != "random"
    asked = {"--run": chosen.own is not None, "--replay": chosen.replay is not None}
    refused = loaders if asked["--replay"] else {}
    if asked["--run"]:
        refused = {**loaders, "--fields": chosen.fields, "--frameworks": chosen.frameworks, "--replay": chosen.replay}
    given = [name for name, value in refused.items() if value]
    if given:
        why = "which its function chooses" if asked["--run"] else "which are for loaders"
        raise ConfigError(f"{'--run' if asked['--run'] else '--replay'}: expected no {' or '.join(given)}, {why}")
    if chosen.weights is not None and len(chosen.weights) != 1 + len(chosen.more):
        found = f"{len(chosen.weights)} for {1 + len(chosen.more)}"
        raise ConfigError(f"--weights: expected a number for each source, found {found}")
    if chosen.replay is not None and chosen.more:
        raise ConfigError(f"--replay: expected one source, found {1 + len(chosen.more)}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, found {text!r}") from None


def _window(text: str) -> tuple[str, list[int]]:
    name, _, offsets = text.partition("=")
    first, colon, end = offsets.partition(":")
    try:
        found = list(range(int(first), int(end))) if colon else [int(one) for one in offsets.split(",")]
    except ValueError:
        found = []
    if not name or not found:
        raise argparse.ArgumentTypeError(f"expected FIELD=FIRST:END or FIELD=OFFSET,OFFSET, found {text!r}")
    return name, found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected FIELD=DTYPE, found {text!r}")
    return name, value


_COMMANDS: dict[str, Command] = {
    "record": (declare_record, run_record),
    "inspect": (declare_inspect, run_inspect),
    "view": (declare_view, run_view),
    "convert": (data.declare_convert, data.run_convert),
    "preprocess": (declare_preprocess, run_preprocess),
    "tokenize": (declare_tokenize, run_tokenize),
    "stats": (declare_stats, run_stats),
    "verify": (declare_verify, run_verify),
    "repair": (declare_repair, run_repair),
    "push": (declare_push, run_push),
    "upload": (declare_upload, run_upload),
    "bench": (_declare_bench, _run_bench),
}

if __name__ == "__main__":
    sys.exit(main())
