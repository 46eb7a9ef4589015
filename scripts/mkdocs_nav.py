"""MkDocs hook: makes the navigation from the files in docs/, so that a new page needs no entry anywhere.

Pages named in `extra.nav_order` come first and in that order; the others follow by name. A folder becomes a
section. Titles are the pages' own headings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def navigation(pages: list[str], first: list[str]) -> list[Any]:
    """The nav of `pages` (paths relative to docs/), as mkdocs.yml would hold it."""
    rank = {page: place for place, page in enumerate(first)}
    ordered = sorted(pages, key=lambda page: (rank.get(page, len(rank)), page))
    nav: list[Any] = []
    sections: dict[str, list[Any]] = {}
    for page in ordered:
        *folder, _ = page.split("/")
        if not folder:
            nav.append(page)
            continue
        title = folder[0].replace("-", " ").capitalize()
        if title not in sections:
            sections[title] = []
            nav.append({title: sections[title]})
        sections[title].append(page)
    return nav


def on_config(config: Any) -> Any:
    """Called by MkDocs when the configuration has been read."""
    docs = Path(config["docs_dir"])
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    config["nav"] = navigation(pages, config["extra"].get("nav_order", []))
    return config
