"""Runs tests with other versions of the packages that this project stands on, in a fresh environment.

    python -m scripts.downstream pinned                        # the versions of constraints.txt
    python -m scripts.downstream pinned torch tensordict       # the newest of these two, the others as pinned
    python -m scripts.downstream oldest numpy==2.0.2           # the lower bounds of pyproject.toml, but for NumPy
    python -m scripts.downstream newest --extras test,trainers -- -m trainers tests/trainers

The arguments after ``--`` go to pytest; without them it runs TESTS. The program prints a row of
`docs/versions.md`, and ends with an error if tests fail.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from scripts.check_wheel import ROOT, lowest

# Packages whose versions a row of the table states, where they are installed.
NAMES = ("numpy", "pyarrow", "datasets", "torch", "tensordict", "jax", "torchrl", "flashbax")
NAMES += ("transformers", "trl", "accelerate", "lightning", "lerobot")
# Tests of golden batches, conformance suites, formats and adapters, which use most of what the packages offer.
TESTS = "core/test_golden.py core/test_conformance.py core/test_batches.py core/test_datasets.py core/test_opening.py"
TESTS += " core/test_images.py core/test_text.py core/test_save.py core/test_narrow_floats.py core/test_spec_spaces.py"
TESTS += " core/formats torch/test_conformance.py torch/test_data_loader.py torch/test_replay.py torch/test_ted.py"
TESTS += " jax/test_conformance.py jax/test_device.py jax/test_to_grain.py parity"
VERSIONS = """
import importlib.metadata as metadata, sys
print("Python", sys.version.split()[0])
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name).split("+")[0])
    except metadata.PackageNotFoundError:
        pass
"""


def pins(base: str) -> Iterator[Requirement]:
    """Yield the versions that `base` names: of constraints.txt, the lower bounds, or none."""
    if base == "pinned":
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                yield Requirement(line)
    elif base == "oldest":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        (all_of_users,) = extras["all"]
        lines = sum((extras[name] for name in sorted(Requirement(all_of_users).extras)), project["dependencies"])
        for one in map(Requirement, lines):
            if one.name != "mouse-data" and (one.marker is None or one.marker.evaluate()):
                yield Requirement(lowest(one))


def install(python: str, folder: Path, base: str, chosen: Sequence[str], extras: str) -> Path:
    """Return the Python of a new environment that has the chosen versions."""
    names = {Requirement(one).name for one in chosen}
    lines = [str(one) for one in pins(base) if one.name not in names]
    subprocess.run([python, "-m", "venv", folder], check=True)
    (folder / "pins.txt").write_text("\n".join(lines), encoding="utf-8")
    made = folder / "bin" / "python"
    pip = [made, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-c", folder / "pins.txt", "-e", f"{ROOT}[{extras}]", *chosen], check=True)
    return made


def main() -> None:
    """Install, run, and print the row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("base", choices=("pinned", "oldest", "newest"), help="the versions of all other packages")
    parser.add_argument("chosen", nargs="*", help="requirements that replace those of the base, or are added")
    parser.add_argument("--extras", default="test", help="extras of this project to install (test)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--folder", type=Path, help="where the environment is made, and stays; by default temporary")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    folder = options.folder or Path(tempfile.mkdtemp(prefix="downstream-"))
    try:
        python = folder / "bin" / "python"
        if not python.exists():
            install(options.python, folder, options.base, options.chosen, options.extras)
        asked = [python, "-c", VERSIONS, *NAMES]
        versions = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
        tests = words[end + 1 :] or [f"tests/{one}" for one in TESTS.split()]
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(pytest, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    print(done.stdout)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout.splitlines()[-1])
    row = (" ".join([options.base, *options.chosen]), ", ".join(versions), ", ".join(counts), datetime.date.today())
    print(f"| {' | '.join(map(str, row))} |")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
