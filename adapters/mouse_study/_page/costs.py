"""What the runs cost, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mouse_study._page.groups import Group, Times, times
from mouse_study._page.html import megabytes, number, seconds, table, text
from mouse_study.results import Results, Run


def costs(results: Results, members: Sequence[Group]) -> str:
    """Time and memory beside each other."""
    wait, compute = results.series("wait"), results.series("compute")
    rows, bars = [], []
    for group in members:
        its = [run for run in group.runs if run.status != "failed" and run.steps]
        if its:
            found = [times(run, wait, compute) for run in its]
            mean = {part: float(np.mean([getattr(one, part) for one in found])) for part in _PARTS}
            bars.append((group, mean))
            rows.append((text(group.variant), text(group.framework), *_cells(its, found, mean)))
    most = max((sum(mean.values()) for _, mean in bars), default=0.0)
    if not rows:
        return ""
    head = (
        *("variant", "framework", "runs", "steps a second", "waiting", "waited", "computed", "first step"),
        *("compiling", "in all", "peak memory"),
    )
    shown = "".join(_bar(group, mean, most) for group, mean in bars)
    words = "".join(f'<li><i class="{part}"></i>{said}</li>' for part, said in _PARTS.items())
    return (
        '<section id="costs"><h2>Time and memory</h2><p class="dim">Means over the runs, memory the largest. Times are '
        "of the machine that the runs were on and of what else it did. The first step, which compiles or warms up, is "
        f'not counted in steps a second.</p><ul class="legend">{words}</ul><div class="bars">{shown}</div>'
        f"{table(head, rows, texts=2)}</section>"
    )


def _cells(its: Sequence[Run], found: Sequence[Times], mean: Mapping[str, float]) -> tuple[str, ...]:
    """What a row of the table says of a group's runs behind its names."""
    rates = [one.per_second for one in found if one.per_second is not None]
    in_steps = mean["wait"] + mean["compute"]
    return (
        number(len(its)),
        number(float(np.median(rates)), 3) if rates else "–",
        f"{100 * mean['wait'] / in_steps:.1f}%" if in_steps else "–",
        *(seconds(mean[part]) for part in ("wait", "compute", "first")),
        seconds(_mean(run.compile_seconds for run in its)),
        seconds(_mean(run.seconds for run in its)),
        megabytes(max((run.peak_memory for run in its if run.peak_memory is not None), default=None)),
    )


_PARTS = {
    "wait": "waiting for batches",
    "compute": "computing",
    "first": "first step",
    "rest": "start, evaluations and all else",
}


def _bar(group: Group, mean: Mapping[str, float], most: float) -> str:
    parts = "".join(
        f'<i class="{part}" style="width:{100 * mean[part] / most if most else 0:.2f}%"></i>' for part in _PARTS
    )
    name = f"{text(group.variant)} · {text(group.framework)}"
    return f'<span>{name}</span><span>{seconds(sum(mean.values()))}</span><div class="bar">{parts}</div>'


def runs(results: Results) -> str:
    """Every run: how it ended, on what, with what."""
    failed = [run for run in results.runs if run.status == "failed"]
    errors = ""
    if failed:
        rows = [(text(run.run), number(run.steps), f"<code>{text(run.error or 'no message')}</code>") for run in failed]
        errors = f"<h3>Failures</h3>{table(('run', 'steps', 'error'), rows, texts=3, classes=('', '', 'long'))}"
    every = [
        (
            text(run.run),
            text(run.status),
            f"<code>{text(run.fingerprint or '–')}</code>",
            f"<code>{text(run.digest or '–')}</code>",
            f"{number(run.steps)} of {number(results.steps)}",
            seconds(run.seconds),
            megabytes(run.peak_memory),
        )
        for run in sorted(results.runs, key=lambda run: (run.variant, run.framework, run.seed))
    ]
    head = ("run", "status", "fingerprint", "digest", "steps", "in all", "peak memory")
    return (
        f'<section id="runs"><h2>Runs</h2>{errors}{table(head, every, texts=4)}'
        f"<h3>Versions and machines</h3>{_places(results.runs)}</section>"
    )


def _places(every: Sequence[Run]) -> str:
    """Versions and machines, a row each, and what the runs of each framework had."""
    frameworks = sorted({run.framework for run in every})
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in every:
        for kind, said in (("version", run.versions), ("machine", run.machine)):
            for name, value in said.items():
                held = found.setdefault((kind, str(name)), {}).setdefault(run.framework, [])
                if str(value) not in held:
                    held.append(str(value))
    rows = [
        (text(name), *(text(", ".join(held.get(framework, ["–"]))) for framework in frameworks))
        for (_, name), held in sorted(found.items(), key=lambda item: (item[0][0] != "version", item[0][1]))
    ]
    return table(("", *frameworks), rows, texts=1 + len(frameworks), classes=("", *["long"] * len(frameworks)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
