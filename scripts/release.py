"""Builds the release of this commit into `dist/`: the wheel, the sdist and SHA256SUMS.

The files are built twice and must have the same bytes; their times are the time of the commit, so anybody who builds
this commit gets the same files. `--tag v0.1.0`, which publishing needs, also requires that the tag names the version
and that no blank is left: lines with FILL IN state what only a publisher can know.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from scripts.check_wheel import ROOT, check_contents, reproducible

# Files of a release that can have blanks.
FILES = ("CITATION.cff", "SECURITY.md", "pyproject.toml", "mkdocs.yml", ".github/workflows/release.yml")


def version() -> str:
    """Return the version; raise SystemExit if files of the project state different versions."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if cited is None or cited[1] != stated:
        raise SystemExit(f"CITATION.cff: expected version {stated} as in pyproject.toml, found {cited and cited[1]}")
    if f"## {stated}" not in changes:
        raise SystemExit(f"CHANGELOG.md: expected an entry for version {stated}, found none")
    return str(stated)


def blanks() -> list[str]:
    """Return "file:line: text" for each line that a publisher has to fill in."""
    found = []
    for name in FILES:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if "FILL IN" in line]
    return found


def git(*words: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Check, build, and write `dist/`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tag", help="the tag that is published: it must name the version, and no blank may be left")
    tag = parser.parse_args().tag
    number, left = version(), blanks()
    if tag is not None and tag != f"v{number}":
        raise SystemExit(f"--tag: expected v{number}, found {tag}")
    if left:
        print("To fill in before publishing:", *left, sep="\n  ", file=sys.stderr)
        if tag is not None:
            raise SystemExit(1)
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"expected a checkout without changes, found:\n{changed}")
    made = ROOT / "dist"
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        files = reproducible(Path(folder).resolve(), since=int(git("show", "-s", "--format=%ct", "HEAD")))
        check_contents(next(file for file in files if file.suffix == ".whl"))
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        for file in files:
            shutil.copy(file, made)
    sums = "".join(f"{hashlib.sha256((made / file.name).read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (made / "SHA256SUMS").write_text(sums, encoding="utf-8")
    print(sums, end="")


if __name__ == "__main__":
    main()
