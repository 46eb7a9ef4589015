"""Build the distribution, install its wheel into empty environments and look at what can be imported and done there.

One environment has the versions of `constraints.txt`, the other the oldest that `pyproject.toml` allows.

The wheel is built from the sdist, in a folder of its own, so nothing that lies about in the checkout (an old
`build/`, an untracked file) can end up in it or hide that something is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# Folders of this repository that must never become import names.
PLACES = ("adapters", "docs", "examples", "scripts", "tests")
# What an adapter asks for when its framework is not there.
EXTRAS = {"mouse_torch": "torch", "mouse_jax": "jax", "mouse_ray": "ray", "mouse_study": "study"}

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

# What the core is for, and a digest of what came out: the same with any versions.
USE_CORE = """
import hashlib
from importlib.metadata import version
import numpy as np
from datasets import load_from_disk
from mouse_core import BatchSource, DatasetStore, PrefetchBatchifier
from mouse_core.formats import rlds
from mouse_core.replay import ArrayStorage, PrioritizedSampler, ReplayBuffer
from mouse_core.rollouts import RolloutStorage
from mouse_core.groups import advantages
from mouse_core.testing import stream_digest

random = np.random.RandomState(0)
n = 500
rows = {
    "observation": random.rand(n, 3).astype(np.float32),
    "action": random.randint(0, 4, n),
    "reward": random.rand(n).astype(np.float32),
    "done": (np.arange(n) % 50 == 49).astype(np.int64),
    "episode_step": np.arange(n) % 50,
}
store = DatasetStore()
store.extend(rows)
store.to_dataset().save_to_disk("dataset")
digests = []
for kept in (store, DatasetStore().from_dataset(load_from_disk("dataset"))):
    for sampling in ("random", "sequential"):
        for boundary in ("stream", "episode"):
            source = BatchSource(kept, batch_size=4, sequence_length=8, seed=1, sampling=sampling, boundary=boundary)
            digests.append(stream_digest(source, 5))
with PrefetchBatchifier(store, batch_size=4, sequence_length=8, seed=1) as loader:
    digests.append(stream_digest(loader, 5))
back = rlds.read_rlds(lambda: rlds.write_rlds(store))
digests.append(back.digest())
digests.append(len(list(rlds.convert_rlds_to_trajectories(rlds.write_rlds(store)))))
buffer = ReplayBuffer(ArrayStorage(100), PrioritizedSampler(), batch_size=8, seed=3)
buffer.extend({"x": np.arange(60, dtype=np.float32)})
digests.append(buffer.sample()["x"].tolist())
storage = RolloutStorage(4, 5, {"values": ()}, seed=2)
for step in range(5):
    storage.add_transitions({"values": random.rand(4), "rewards": random.rand(4), "dones": np.zeros(4)})
storage.compute_returns(np.zeros(4), 0.9, 0.95)
digests.append([batch.rows.tolist() for batch in storage.mini_batch_generator(2, 2)])
digests.append(advantages([0, 1, 1], normalize_std=True).round(6).tolist())
print(hashlib.sha256(repr(digests).encode()).hexdigest())
print(", ".join(f"{name} {version(name)}" for name in NAMES))
"""


def packages() -> dict[str, Path]:
    """The import packages of this repository, by name."""
    folders = [ROOT / "mouse_core", *(ROOT / "adapters").iterdir()]
    return {folder.name: folder for folder in folders if (folder / "__init__.py").exists()}


def check_contents(wheel: Path) -> None:
    """The wheel holds all files of the packages, `py.typed` among them, and the licence, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    stray = sorted(name for name in names if name.split("/")[0] not in {*packages(), info})
    if stray:
        raise SystemExit(f"{wheel.name}: holds files outside its packages: {stray}")
    expected = {f"{info}/licenses/LICENSE"}
    for package, folder in packages().items():
        expected.add(f"{package}/py.typed")
        files = (path for kind in ("*.py", "*.css", "*.js") for path in folder.rglob(kind))
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}
    if missing := sorted(expected - names):
        raise SystemExit(f"{wheel.name}: lacks {missing}")


def run(*command: str | Path, cwd: Path) -> str:
    """What one command printed; end with that if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(folder: Path, *what: str | Path) -> Path:
    """The Python of a new environment, in which something is installed."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *what, cwd=folder)
    return python


def requirements() -> list[Requirement]:
    """What the core needs on this Python, as `pyproject.toml` says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def lowest(requirement: Requirement) -> str:
    """A requirement of the oldest version that a bound allows."""
    (bound,) = requirement.specifier
    if bound.operator != ">=":
        raise SystemExit(f"pyproject.toml: expected a bound '{requirement.name}>=', found '{requirement}'")
    return f"{requirement.name}=={bound.version}"


def use_core(python: Path, folder: Path) -> str:
    """Deliver batches, read and write with what is installed; a digest of all that came out."""
    (folder / "use").mkdir()
    names = [requirement.name for requirement in requirements()]
    digest, versions = run(python, "-I", "-c", f"NAMES = {names!r}\n{USE_CORE}", cwd=folder / "use").splitlines()
    print(f"the core works with {versions}")
    return digest


def main() -> None:
    """Build, install, import, use."""
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name).resolve()
        # From a copy, as others may be building where the checkout lies: pip does, when it installs.
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "out")
        source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
        run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        check_contents(wheel)
        print(f"{wheel.name}: holds {', '.join(sorted(packages()))} and nothing else")

        python = environment(folder / "empty", "-c", ROOT / "constraints.txt", wheel)
        # -I: neither the current folder nor the user's settings are on the path.
        run(python, "-I", "-c", IMPORT_CORE.format(places=PLACES), cwd=folder)
        print(f"in an empty environment mouse_core can be imported, and none of {', '.join(PLACES)}")
        for package in sorted(packages().keys() & EXTRAS.keys()):
            run(python, "-I", "-c", IMPORT_ADAPTER.format(package=package, extra=EXTRAS[package]), cwd=folder)
            print(f"{package} without its framework says what to install")

        oldest = environment(folder / "oldest", wheel, *map(lowest, requirements()))
        if use_core(python, folder / "empty") != use_core(oldest, folder / "oldest"):
            raise SystemExit("expected the same batches, rows and numbers with the oldest versions, found others")


if __name__ == "__main__":
    main()
