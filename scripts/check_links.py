"""Check every internal link of a built site: `python scripts/check_links.py site`.

MkDocs checks the links it knows from Markdown. This checks what a reader gets: every `href` and `src` in the
HTML, cross-references and anchors in generated pages included. Links to other hosts are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors that one page offers and the addresses that it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one element."""
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.references.append(value)


def broken_links(site: Path) -> list[str]:
    """One line for each reference that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        for reference in page.references:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            where = f"{path.relative_to(site)}: {reference}"
            target = path
            if parts.path:
                base = site if parts.path.startswith("/") else path.parent
                target = (base / unquote(parts.path).lstrip("/")).resolve()
                if target.is_dir():
                    target /= "index.html"
            if not target.exists():
                problems.append(f"{where}: there is no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{where}: the page has no such anchor")
    return problems


def main() -> int:
    """Print what is broken; the exit code is 1 if anything is."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve()
    versions = sorted(page.parent for page in site.glob("*/index.html"))
    if not versions:
        print(f"{site}: expected the folder of a version with an index.html")
        return 1
    problems = [problem for version in versions for problem in broken_links(version)]
    print("\n".join(problems) or f"{site.name}: every internal link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
