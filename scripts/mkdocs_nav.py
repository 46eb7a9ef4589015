"""MkDocs hook: makes the navigation from the files in docs/, so that a new page needs no entry anywhere.

Pages named in `extra.nav_order` come first and in that order; the others follow by name. A folder becomes a
section. Titles are the pages' own headings. A notebook becomes a page of its texts, its code and its outputs, and links
to the notebook lead to that page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


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
    pages += [path.relative_to(docs).with_suffix(".md").as_posix() for path in docs.rglob("*.ipynb")]
    config["nav"] = navigation(pages, config["extra"].get("nav_order", []))
    return config


def notebook_page(notebook: Any) -> str:
    """The Markdown of a notebook, read from JSON."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs when the files of docs/ are known."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return markdown.replace(".ipynb)", ".md)")
