"""A page that is one file: the viewer's, with what it is told, its scripts and its style in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path

from mouse_core.errors import ConfigError
from mouse_core.inspect import Report, inspect
from mouse_core.store.views import Store
from mouse_core.view._server import plotly_script
from mouse_core.view.opening import shown_of
from mouse_core.view.stored.answers import report_alone, stored

_PAGE = Path(__file__).parent.parent / "page"
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class) (\w+)", re.MULTILINE)
# What the browser may run: the two scripts that these digests are of. It may load nothing. Plotly sets styles.
_POLICY = (
    "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def check_plotly() -> None:
    """Raise ImportError, which says what to install, where there is nothing to draw plots with."""
    plotly_script()


def to_html(
    store: Store | None,
    report: Report | None = None,
    *,
    name: str = "store",
    command: str = "",
    files: bool = False,
    why: str = "",
) -> str:
    """The viewer's page as one file, with some episodes of a store, and what is wrong with it.

    It holds everything that it shows and loads nothing, so it can be mailed, or opened from a folder. Of many episodes
    up to ten are there step by step (the first, those of the highest, median and lowest return, the shortest, the
    longest, and those that findings name), thinned: the page takes some 5 MB, which Plotly takes, and 8 MB more at
    most. Texts of the data are text, and the page has the browser run no script but its own.

    Args:
        store: The store; None: only the report is shown.
        report: What ``inspect`` found; None: it is asked.
        name: What to call the store.
        command: How all of it is seen, ``mouse view recordings``; said to whoever asks for what is not here.
        files: Whether pictures are there that rows name by path, and those of videos. Whoever has the page has them, so
            that is for data whose paths are known to lead to nothing private.
        why: Why there is only a report.

    Raises:
        ConfigError: Neither a store nor a report.
        DataError: The data are damaged.
        ImportError: Plotly, which draws the plots, is not installed: it comes with the extra ``view``.
    """
    plotly = plotly_script().read_text(encoding="utf-8")
    command = command or "mouse view"
    if isinstance(store, Store):
        (one,) = shown_of([(name, store)])
        held = stored(one, inspect(store) if report is None else report, command=command, files=files)
    elif store is None and report is not None:
        held = report_alone(report, name=name, command=command, why=why)
    else:
        raise ConfigError(f"to_html: expected a store, or a report alone, found {type(store).__name__}")
    # Nothing in it can end the element that it stands in.
    data = json.dumps(held, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    scripts = [_inline(plotly), _inline(_bundled())]
    title = escape(name.encode("utf-8", "replace").decode())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>\n{(_PAGE / 'view.css').read_text(encoding='utf-8')}</style></head>\n"
        f"<body><noscript>This page is made of scripts.</noscript>\n"
        f'<script type="application/json" id="stored">{data}</script>\n'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _POLICY.format(digests=" ".join(f"'sha256-{digest}'" for digest in digests))


def _inline(script: str) -> str:
    """A script as it may stand in a page: it does not end the element, and the browser reads what its digest is of."""
    lines = script.replace("\r\n", "\n").replace("\r", "\n").replace("<!--", "<\\!--")
    return re.sub(r"</(?=script)", r"<\\/", lines, flags=re.IGNORECASE)


def _bundled() -> str:
    """The modules of the page as one script, each a function that gives what it exports, those imported first."""
    made: dict[str, str] = {}

    def add(name: str) -> None:
        text = (_PAGE / f"{name}.js").read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(text):
            if other not in made:
                add(other)
        exported = ", ".join(found for _, found in _EXPORT.findall(text))
        text = _IMPORT.sub(r"const \1 = module_\2;", _EXPORT.sub(r"\1 \2", text))
        made[name] = f"const module_{name} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"

    add("view")
    return "\n".join(['(() => {\n"use strict";', *made.values(), "})();"])
