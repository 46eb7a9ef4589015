"""The page of a study, put together and written."""

from __future__ import annotations

import os
from pathlib import Path

from mouse_study._files import replacing
from mouse_study._page.cards import Cards
from mouse_study._page.costs import costs, runs
from mouse_study._page.groups import groups, trained_names
from mouse_study._page.html import number, text
from mouse_study._page.learning import ends, learning
from mouse_study._page.parting import parting, same_data
from mouse_study._page.style import STYLE
from mouse_study.comparing import pairs, verdict
from mouse_study.results import Results

# What the browser may load: nothing but the style that stands in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(results: Results) -> str:
    """A study as one web page that needs nothing besides itself.

    It is a pure function of the results: the same ones give the same page, byte for byte, with the same version of
    matplotlib. Texts are escaped, and the page forbids the browser to load anything or to run a script.

    Args:
        results: what was recorded; of runs that are not finished, too.

    Returns:
        The page.
    """
    members, cards = groups(results), Cards()
    name = next(iter(trained_names(results)), "loss")
    found = pairs(results, name)
    data = verdict(found, results.missing)
    body = [
        _header(results),
        f'<p class="said {"good" if data.proven else "warning"}">{text(data.said)}</p></header>',
        "<main>",
        learning(results, members, cards),
        ends(results, members, cards),
        parting(found, members, name, cards),
        same_data(found),
        costs(results, members),
        runs(results),
        "</main>",
        "<footer>Made by <code>mouse study</code>. This page loads nothing from anywhere.</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(results.name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{STYLE}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _header(results: Results) -> str:
    every = results.runs
    figures = [
        ("variants", len({run.variant for run in every})),
        ("frameworks", len({run.framework for run in every})),
        ("seeds", len({run.seed for run in every})),
        ("steps a run", results.steps),
        ("runs done", sum(run.status == "done" for run in every)),
    ]
    unfinished = {status: sum(run.status == status for run in every) for status in ("partial", "failed")}
    figures += [(f"runs {status}", count) for status, count in unfinished.items() if count]
    items = "".join(f"<li><b>{number(value)}</b><span>{name}</span></li>" for name, value in figures)
    return (
        f'<header><h1>{text(results.name)}</h1><p class="dim">A study: '
        f"{text(', '.join(sorted({run.framework for run in every})) or 'no runs')}</p>"
        f'<ul class="figures">{items}</ul>'
    )


def page(results: Results, path: str | os.PathLike[str]) -> Path:
    """Write the page of a study; see ``to_html``.

    Args:
        results: what ``read`` or ``Study.run`` gave.
        path: where to; a folder gets ``page.html``.

    Returns:
        The file.

    Raises:
        StorageError: it cannot be written; what was there still is.
    """
    file = Path(path) / "page.html" if Path(path).is_dir() else Path(path)
    with replacing(file) as partial:
        partial.write_text(to_html(results), encoding="utf-8")
    return file
