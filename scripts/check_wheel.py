"""Builds the distribution twice, installs its wheel into empty environments, and uses what is installed there.

Both builds must have the same bytes. The sdist is built from a copy of the checkout and the wheel from the sdist, so no
untracked file of the checkout can be part of the wheel, and no file that is missing from the sdist can be overlooked.

Without options, there are two environments: one with the versions of `constraints.txt`, and one with the oldest
versions that `pyproject.toml` allows. With `--extras`, every extra is also installed by itself and used, and the lines
of the README and the notebooks run with the wheel alone (some minutes, 6 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# Folders of this repository that must never become import names.
PLACES = ("adapters", "docs", "examples", "scripts", "tests")
# What each extra is for, in code that raises an ImportError of one line where the extra is missing. The current
# folder is empty, and `store` holds five short episodes.
USES = {
    "images": """
from mouse_core.images import decode_image, encode_png
pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
assert (decode_image(encode_png(pixels)) == pixels).all()
""",
    "torch": """
import mouse_torch
with mouse_torch.PrefetchBatchifier(store, sequence_length=4, batch_size=2, seed=0) as loader:
    assert loader.next_batch()["observation.state"].shape == (2, 4, 8)
""",
    "jax": """
import mouse_jax
with mouse_jax.PrefetchBatchifier(store, sequence_length=4, batch_size=2, seed=0) as loader:
    assert loader.next_batch()["observation.state"].shape == (2, 4, 8)
""",
    "formats": """
from mouse_core import DataError
Path("damaged.hdf5").write_bytes(b"\\x89HDF\\r\\n\\x1a\\n" + bytes(100))
try:
    DatasetStore.open("damaged.hdf5")
except DataError:
    pass
import h5py
with h5py.File("steps.hdf5", "w") as file:
    file["observations"], file["actions"] = np.zeros((20, 3), np.float32), np.zeros((20, 1), np.float32)
    file["rewards"], file["terminals"], file["timeouts"] = np.ones(20), np.arange(20) == 19, np.zeros(20, bool)
assert len(DatasetStore.open("steps.hdf5", final="drop")) == 20
""",
    "video": """
from mouse_core import DataError
from mouse_core.video import index_video
Path("clip.mp4").write_bytes(bytes(100))
try:
    index_video("clip.mp4")
except DataError:
    pass
""",
    "encode": """
from mouse_core.video import VideoCodec, VideoWriter, index_video
writer = VideoWriter("clip.mp4", VideoCodec.parse("h264"), (64, 64, 3), frames_per_second=10)
writer.write(np.zeros((5, 64, 64, 3), np.uint8))
writer.close()
index_video("clip.mp4")
""",
    "ray": "import mouse_ray",
    "record": """
from mouse_core.spec import Bounded, to_gymnasium
assert to_gymnasium(Bounded(-1.0, 1.0, shape=(3,))).shape == (3,)
""",
    "robots": """
from mouse_core import DataError
from mouse_core.formats.robot_logs import mcap_messages
Path("log.mcap").write_bytes(bytes(100))
try:
    list(mcap_messages("log.mcap"))
except DataError:
    pass
""",
    "remote": """
store.save("rows", "store")
assert len(DatasetStore.open((Path.cwd() / "rows").as_uri())) == len(store)
""",
    "text": """
from mouse_core.text.chat import ChatTemplate
ChatTemplate("{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}")
""",
    "view": """
from mouse_core.view import view
view(store).close()
""",
    "study": "import mouse_study",
}

PREPARE = """
from pathlib import Path
import numpy as np
from mouse_core import DatasetStore
store = DatasetStore()
for _ in range(5):
    store.add_episode(
        observations={"state": np.zeros((21, 8), np.float32)},
        actions=np.zeros(20, np.int64),
        rewards=np.ones(20, np.float32),
        terminated=True,
    )
"""

MISSING = """
try:
    exec({use!r})
except ImportError as error:
    message = str(error)
    if "mouse-data[{extra}]" not in message or "\\n" in message:
        raise AssertionError("expected one line naming mouse-data[{extra}], found " + repr(message))
else:
    raise AssertionError("what needs mouse-data[{extra}] works without it")
"""

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
from mouse_core.groups import Grpo
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
digests.append(Grpo()([0, 1, 1], [0, 0, 0]).round(6).tolist())
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


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What one command printed; end with that if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def built(folder: Path, since: int) -> list[Path]:
    """Build the wheel and the sdist in a new folder; `since` becomes the time of their files, in seconds since 1970."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "out")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    made = folder / "made"
    environ = os.environ | {"SOURCE_DATE_EPOCH": str(since)}
    run(sys.executable, "-m", "build", "--outdir", made, source, cwd=folder, env=environ)
    return sorted(made.iterdir())


def reproducible(folder: Path, since: int) -> list[Path]:
    """Build twice, in folders of different names and at different times; return the files of the first build.

    Raises:
        SystemExit: A file of the second build has other bytes.
    """
    builds = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        builds.append(built(folder / name, since))
    for one, other in zip(*builds, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise SystemExit(f"{one.name}: expected the same bytes from a second build, found others in {other.name}")
    return builds[0]


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


def check_extra(extra: str, wheel: Path, folder: Path) -> None:
    """Install the wheel with one extra alone, and use the extra."""
    python = environment(
        folder / f"with-{extra}", "-c", ROOT / "constraints.txt", f"mouse-data[{extra}] @ {wheel.as_uri()}"
    )
    (folder / f"use-{extra}").mkdir()
    run(python, "-I", "-c", PREPARE + USES[extra], cwd=folder / f"use-{extra}")
    print(f"mouse-data[{extra}] by itself does what it is for", flush=True)
    if extra == "torch":
        (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        run(python, "-I", "-c", lines, cwd=folder / f"use-{extra}")
        print("the lines of the README run with the wheel alone", flush=True)


def as_script(cell: str) -> str:
    """Return a cell as plain Python: one with `%%writefile NAME` writes a file, or with `-a` more of it."""
    written = re.match(r"%%writefile (-a )?(.*)\n", cell)
    if written is None:
        return cell
    return f"open({written[2]!r}, {'a' if written[1] else 'w'!r}).write({cell[written.end() :]!r})"


def check_notebook(notebook: Path, wheel: Path, folder: Path) -> None:
    """Run the code of a notebook with the wheel and the extras that the notebook names."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (extras,) = re.findall(r"pip install 'mouse-data\[(.*?)\]'", "".join(texts))
    code = [text for text, cell in zip(texts, cells, strict=True) if cell["cell_type"] == "code"]
    asked = f"mouse-data[{extras}] @ {wheel.as_uri()}"
    python = environment(folder / f"notebook-{notebook.stem}", "-c", ROOT / "constraints.txt", asked)
    (folder / f"run-{notebook.stem}").mkdir()
    # Processes that the notebook starts do not run its cells again, as the cells are no module.
    run(python, "-c", "\n".join(map(as_script, code)), cwd=folder / f"run-{notebook.stem}")
    print(f"{notebook.name} runs with the wheel and [{extras}] alone", flush=True)


def main() -> None:
    """Build, install, import, use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--extras", action="store_true", help="install and use every extra by itself, and run the notebooks"
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        folder = Path(name).resolve()
        wheel, _ = sorted(reproducible(folder, since=1_700_000_000), key=lambda path: path.suffix != ".whl")
        check_contents(wheel)
        print(f"{wheel.name}: two builds have the same bytes; holds {', '.join(sorted(packages()))} and nothing else")

        python = environment(folder / "empty", "-c", ROOT / "constraints.txt", wheel)
        # -I: neither the current folder nor the user's settings are on the path.
        run(python, "-I", "-c", IMPORT_CORE.format(places=PLACES), cwd=folder)
        print(f"in an empty environment mouse_core can be imported, and none of {', '.join(PLACES)}")
        run(python.with_name("mouse"), "--help", cwd=folder)
        for extra, use in USES.items():
            (folder / f"without-{extra}").mkdir()
            run(python, "-I", "-c", PREPARE + MISSING.format(use=use, extra=extra), cwd=folder / f"without-{extra}")
        print(f"without them, what needs an extra says so in one line: {', '.join(USES)}")

        oldest = environment(folder / "oldest", wheel, *map(lowest, requirements()))
        if use_core(python, folder / "empty") != use_core(oldest, folder / "oldest"):
            raise SystemExit("expected the same batches, rows and numbers with the oldest versions, found others")
        if chosen.extras:
            for extra in USES:
                check_extra(extra, wheel, folder)
                shutil.rmtree(folder / f"with-{extra}")
            for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
                check_notebook(notebook, wheel, folder)
                shutil.rmtree(folder / f"notebook-{notebook.stem}")


if __name__ == "__main__":
    main()
