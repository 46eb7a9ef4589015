"""MkDocs hook: makes the navigation from the files in docs/, the list of versions, and llms.txt.

Pages named in `extra.nav_order` come first and in that order; the others follow by name. A folder becomes a
section. Titles are the pages' own headings. A notebook becomes a page of its texts, its code and its outputs, and links
to the notebook lead to that page.

A version is built into a folder of its own in site/, beside earlier versions; versions.json lists them for the menu,
and index.html leads to the newest. llms.txt lists all pages with their first sentences and links to their Markdown,
which is part of the site.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

serving = False  # whether the command is `mkdocs serve`, which has one version
texts: dict[str, str] = {}  # the Markdown of each page, by path


def in_order(pages: Iterable[str], first: list[str]) -> list[str]:
    """Return `pages` with those of `first` at the start, in its order, and the others by name."""
    rank = {page: place for place, page in enumerate(first)}
    return sorted(pages, key=lambda page: (rank.get(page, len(rank)), page))


def navigation(pages: list[str], first: list[str]) -> list[Any]:
    """The nav of `pages` (paths relative to docs/), as mkdocs.yml would hold it."""
    nav: list[Any] = []
    sections: dict[str, list[Any]] = {}
    for page in in_order(pages, first):
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


def on_startup(command: str, **_: Any) -> None:
    """Called by MkDocs at the start of a command."""
    global serving
    serving = command == "serve"


def on_config(config: Any) -> Any:
    """Called by MkDocs when the configuration has been read."""
    docs = Path(config["docs_dir"])
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    pages += [path.relative_to(docs).with_suffix(".md").as_posix() for path in docs.rglob("*.ipynb")]
    config["nav"] = navigation(pages, config["extra"].get("nav_order", []))
    if not serving:
        project = tomllib.loads((docs.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        config["site_dir"] = str(Path(config["site_dir"]) / project["version"])
    texts.clear()
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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    markdown = markdown.replace(".ipynb)", ".md)")
    texts[page.file.src_uri] = markdown
    return markdown


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's prose, on one line; "" if the page has none."""
    prose = re.search(r"^[A-Z`*\[].*?(?=\n\n|\Z)", markdown, re.MULTILINE | re.DOTALL)
    return re.split(r"(?<=[.:])\s", prose[0] + " ")[0].replace("\n", " ").strip() if prose else ""


def on_post_build(config: Any) -> None:
    """Called by MkDocs when the site has been built."""
    site = Path(config["site_dir"])
    pages = []
    for name in in_order(texts, config["extra"].get("nav_order", [])):
        markdown = texts[name]
        (site / name).write_text(markdown, encoding="utf-8")
        title = next((line[2:] for line in markdown.splitlines() if line.startswith("# ")), name)
        pages.append(f"- [{title}]({name}): {first_sentence(markdown)}".removesuffix(": "))
    head = f"# {config['site_name']}\n\n> {config['site_description']}\n\n## Pages\n\n"
    (site / "llms.txt").write_text(head + "\n".join(pages) + "\n", encoding="utf-8")
    if serving:
        return
    versions = [folder.name for folder in site.parent.iterdir() if (folder / "index.html").is_file()]
    versions.sort(key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == versions[0])} for name in versions]
    (site.parent / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    leads = f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html"><a href="{versions[0]}/index.html">'
    page = f"<!doctype html><title>{config['site_name']}</title>{leads}{config['site_name']} {versions[0]}</a>\n"
    (site.parent / "index.html").write_text(page, encoding="utf-8")
