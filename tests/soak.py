"""Run loaders on a growing store, services and remote data for long: memory, descriptors and threads are flat.

Each role is a process, which samples itself once a second. The rule compares the smallest sample in the last fifth of
the time with the smallest sample in the second fifth: a leak raises both, idle sockets and uncollected garbage do not.
The program exits with 1 if a value grew by more than ``ALLOWED``, or if a role ended with an error.

    python -m tests.soak --seconds 3600
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from mouse_core import DatasetStore, PrefetchBatchifier
from mouse_core.collect import StoreClient, StoreServer
from mouse_core.view import view
from tests.core import groups_crash
from tests.core.disk_cases import rows_of
from tests.core.object_server import ObjectServer
from tests.waiting import wait_until

# A client keeps some idle connections.
ALLOWED = {"megabytes": 8, "descriptors": 8, "threads": 1, "maps": 20}
MAX_ROWS = 20_000
# Seconds between the steps of a role: the program uses little of the processor.
PAUSE_S = 0.25
# Steps until a role closes everything, and opens everything again.
STEPS = 60


def own() -> dict[str, int]:
    """Return the private memory, descriptors, threads and mapped store files of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return {
        "megabytes": int(anonymous.split()[1]) >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": Path("/proc/self/maps").read_text(encoding="utf-8").count("/store/"),
    }


def server(root: Path) -> Iterator[None]:
    """Write rows to a store of the newest ``MAX_ROWS`` rows, and receive those of clients."""
    with DatasetStore.open(root / "store", "a", max_rows=MAX_ROWS) as store:
        store.extend(rows_of("numbers", 0, MAX_ROWS))
        while True:
            with StoreServer(store):
                for number in range(STEPS):
                    store.extend(rows_of("numbers", number * 70, 70))
                    store.flush()
                    yield


def client(root: Path) -> Iterator[None]:
    """Send rows to the server, with a new connection after some steps."""
    while True:
        with StoreClient(root / "store", "client") as sender:
            for number in range(STEPS):
                sender.extend(rows_of("numbers", number * 70, 70))
                yield


def drawn(loader_of: Any, opened: Callable[[], DatasetStore]) -> Iterator[None]:
    """Draw batches with a loader, with a new store and loader after some steps."""
    while True:
        with loader_of(opened(), 8, 16) as loader:
            for _ in range(STEPS):
                for _ in islice(loader, 3):
                    pass
                loader.refresh()
                yield


def draws(module: str) -> Callable[[Path], Iterator[None]]:
    """Return the role that draws batches of the growing store with the loader of a module."""
    return lambda root: drawn(import_module(module).PrefetchBatchifier, lambda: DatasetStore.open(root / "store"))


def viewer(root: Path) -> Iterator[None]:
    """Show the growing store, and request the page's data."""
    while True:
        with view(DatasetStore.open(root / "store")) as shown:
            for _ in range(STEPS):
                for asked in ("", "sources", "episodes", "curves?begin=0&end=700&column=reward"):
                    with urlopen(shown.url + asked) as answer:
                        answer.read()
                yield


def objects(root: Path) -> Iterator[None]:
    """Serve a store as objects, which grow by four segments in the first minute; a reader maps each of them."""
    with ObjectServer() as server:
        for step in count():
            if not step % STEPS and step <= 4 * STEPS:
                with DatasetStore.open(root / "source", "a", layout="windows") as store:
                    store.extend(rows_of("numbers", len(store), 7 * (20 if step else 15_000)))
                server.put_folder("data/runs", root / "source")
                (root / "port").write_text(str(server.port))
            server.asked.clear()
            yield


def remote(root: Path) -> Iterator[None]:
    """Draw batches of the objects, through a cache that is smaller than the objects."""
    assert wait_until((root / "port").exists)
    options = ObjectServer(port=int((root / "port").read_text())).options
    how = {"storage_options": options, "cache": root / "cache", "cache_bytes": 4 << 20}
    return drawn(PrefetchBatchifier, lambda: DatasetStore.open("s3://data/runs", **how))


def groups(root: Path) -> Iterator[None]:
    """Add rollouts to buffers and draw batches. A buffer keeps an index of all its rollouts, so it serves one step."""
    for number in count():
        folder = root / f"groups-{number}"
        groups_crash.run(folder, lambda *values: None)
        subprocess.run(["rm", "-r", str(folder)], check=True)
        yield


ROLES: dict[str, Callable[[Path], Iterator[None]]] = {
    "server": server,
    "client": client,
    "NumPy": draws("mouse_core"),
    "PyTorch": draws("mouse_torch"),
    "JAX": draws("mouse_jax"),
    "view": viewer,
    "objects": objects,
    "remote": remote,
    "groups": groups,
}


def run(role: str, root: Path, until: float) -> None:
    """Run the steps of a role until a moment, and sample this process every second."""
    warnings.simplefilter("ignore")
    if role != "server":
        assert wait_until((root / "store" / "server.socket").exists)
    if role in ("server", "objects"):
        until += 5  # after the roles that need them
    last = 0.0
    with (root / role).open("w", encoding="utf-8", buffering=1) as lines:
        for step, _ in enumerate(ROLES[role](root)):
            if time.time() > until:
                return
            if time.time() - last > 1:
                last = time.time()
                lines.write(json.dumps({"step": step, **own()}) + "\n")
            time.sleep(PAUSE_S)


def grown(samples: list[dict[str, float]]) -> tuple[list[str], list[str]]:
    """Return the cells of a role's row in the table, and the values that grew."""
    fifth = len(samples) // 5
    cells, wrong = [str(int(samples[-1]["step"]))], []
    for name, allowed in ALLOWED.items():
        before, after = (min(one[name] for one in part) for part in (samples[fifth : 2 * fifth], samples[-fifth:]))
        cells.append(f"{before:g} → {after:g}")
        wrong += [name] if after > before + allowed else []
    return cells, wrong


def main(seconds: float) -> int:
    """Run all roles, print the table, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root, until = Path(folder), time.time() + seconds
        command = [sys.executable, "-m", "tests.soak", "--root", folder, "--until", str(until), "--role"]
        # With an arena for each thread, glibc keeps more memory the more threads came and went: 10 MB in an hour.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        started = {role: subprocess.Popen([*command, role], env=environment) for role in ROLES}
        ended = {role: process.wait() for role, process in started.items()}
        print("\t".join(("role", "steps", *ALLOWED, "result")))
        all_wrong = []
        for role, status in ended.items():
            samples = [json.loads(line) for line in (root / role).read_text(encoding="utf-8").splitlines()]
            cells, wrong = grown(samples)
            wrong += [f"exit status {status}"] if status else []
            print("\t".join((role, *cells, ", ".join(wrong) or "flat")), flush=True)
            all_wrong += wrong
    return bool(all_wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.role is None:
        sys.exit(main(chosen.seconds))
    run(chosen.role, chosen.root, chosen.until)
