"""Build the distribution, install its wheel into an empty environment and look at what can be imported there.

The wheel is built from the sdist, in a folder of its own, so nothing that lies about in the checkout (an old
`build/`, an untracked file) can end up in it or hide that something is missing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of this repository that must never become import names.
PLACES = ("adapters", "docs", "examples", "scripts", "tests")
# What an adapter asks for when its framework is not there.
EXTRAS = {"mouse_torch": "torch", "mouse_jax": "jax", "mouse_ray": "ray"}

IMPORT_CORE = """
import sys
from importlib.util import find_spec
import mouse_core
assert mouse_core.__file__.startswith(sys.prefix), mouse_core.__file__
for name in mouse_core.__all__:
    getattr(mouse_core, name)
found = [name for name in {places!r} if find_spec(name) is not None]
assert not found, f"can be imported and must not: {{found}}"
"""

IMPORT_ADAPTER = """
try:
    import {package}
except ImportError as error:
    message = str(error)
    if "mouse-data[{extra}]" not in message or "\\n" in message:
        raise AssertionError("expected one line naming mouse-data[{extra}], found " + repr(message))
else:
    raise AssertionError("{package} can be imported without its framework")
"""


def packages() -> dict[str, Path]:
    """The import packages of this repository, by name."""
    folders = [ROOT / "mouse_core", *(ROOT / "adapters").iterdir()]
    return {folder.name: folder for folder in folders if (folder / "__init__.py").exists()}


def check_contents(wheel: Path) -> None:
    """The wheel holds every module and `py.typed` of the packages, the licence, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    stray = sorted(name for name in names if name.split("/")[0] not in {*packages(), info})
    if stray:
        raise SystemExit(f"{wheel.name}: holds files outside its packages: {stray}")
    expected = {f"{info}/licenses/LICENSE"}
    for package, folder in packages().items():
        expected.add(f"{package}/py.typed")
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
    if missing := sorted(expected - names):
        raise SystemExit(f"{wheel.name}: lacks {missing}")


def run(*command: str | Path, cwd: Path) -> None:
    """Run one command; end with what it printed if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def main() -> None:
    """Build, install, import."""
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name).resolve()
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        check_contents(wheel)
        print(f"{wheel.name}: holds {', '.join(sorted(packages()))} and nothing else")

        venv.create(folder / "empty", with_pip=True)
        python = folder / "empty" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=folder)
        # -I: neither the current folder nor the user's settings are on the path.
        run(python, "-I", "-c", IMPORT_CORE.format(places=PLACES), cwd=folder)
        print(f"in an empty environment mouse_core can be imported, and none of {', '.join(PLACES)}")
        for package in sorted(packages().keys() & EXTRAS.keys()):
            run(python, "-I", "-c", IMPORT_ADAPTER.format(package=package, extra=EXTRAS[package]), cwd=folder)
            print(f"{package} without its framework says what to install")


if __name__ == "__main__":
    main()
