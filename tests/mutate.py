"""Plant faults in copies of the core, one at a time, and count how many the default lane finds.

``python -m tests.mutate --seed 1 --count 60`` draws statements of the modules in ``TARGETS`` by a seed, changes one
expression of each (a comparison, a sign, a number, a condition, a call that is left out), and runs the tests of the
default lane on a copy of the checkout: first the files near the module, then all others, until one fails. A
mutation that survives is printed with its line; either a test is missing, or the change alters no behaviour.

``python -m tests.mutate --planted`` instead plants each fault of ``PLANTED`` in durable code, and counts how many of
them the worlds of ``tests.simulate`` find within ten minutes. The faults take turns, and each turn of a fault runs
twice as many worlds as the turn before, until a world has found the fault.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Modules and rooms for log, checksum, episode index, columns, pipeline and sampler, and the tests that are run first.
TARGETS = {
    "mouse_core/files": (
        "log",
        "checkpoint",
        "power_cut",
        "disk",
        "save",
        "store_repair",
        "groups_restart",
        "replay_memmap",
        "verify",
        "convert",
    ),
    "mouse_core/columns": (
        "appends",
        "bad_input",
        "spec_stored",
        "store",
        "tail_file",
        "replay_kinds",
        "replay_storages",
        "record",
    ),
    "mouse_core/episodes.py": (
        "replay_episodes",
        "replay_slices",
        "sampling_episodes",
        "boundaries",
        "replay_query",
        "statistics",
    ),
    "mouse_core/store/disk": ("tail_file", "disk", "store_upkeep", "store_repair", "disk_many", "power_cut", "save"),
    "mouse_core/replay/storages": (
        "replay_storages",
        "replay_memmap",
        "replay_kinds",
        "replay_recorded",
        "replay_sync",
        "conformance",
    ),
    "mouse_core/batches": (
        "batches",
        "transitions",
        "boundaries",
        "windows_by_field",
        "orders",
        "map",
        "ragged",
        "prefetch",
        "resume",
    ),
    "mouse_core/sampling": (
        "sampling",
        "sampling_blocks",
        "windows_by_time",
        "boundaries",
        "orders",
        "mixtures",
        "transitions",
        "ranks",
    ),
}
# Faults of durable code, as programmers make them: the module, the first text that is replaced, and what replaces it.
PLANTED = [
    ("files/log", "self._sync()\n                    self._sync_name()", "self._sync_name()"),
    ("files/log", "self._sync()\n                    self._sync_name()", "self._sync()"),
    ("files/log", "                self.cut(self.size)\n", ""),
    ("files/log", "                os.fsync(file)\n", ""),
    ("files/log", "                self._acknowledge(0, 0)\n", ""),
    ("files/log", "_sum_at(record, position, seed) == record_sum", "True"),
    ("files/log", "_frame(record, self.size, self._synced)", "_frame(record, self.size, self.size + 1)"),
    ("files/writing", "    while rest:\n        written", "    if rest:\n        written"),
    ("files/writing", "        sync_tree(partial)\n", "        pass\n"),
    ("files/writing", "        sync_folders([Path(path).parent])\n", "        pass\n"),
    (
        "files/locking",
        "    except BlockingIOError:\n        return False\n    return True",
        "    except BlockingIOError:\n        pass\n    return True",
    ),
    ("store/disk/tail", "write_commit(self._places[self._next]", "write_commit(self._places[0]"),
    ("store/disk/tail", "            self._objects.sync()\n", "            pass\n"),
    ("store/disk/tail", "                sync_folders([path.parent])\n", ""),
    ("store/disk/tail", "if is_same or commit.rows <= promised:", "if True:"),
    ("store/disk/tail", "            self.count = begin\n            for", "            for"),
    (
        "store/disk/folder",
        "write_file(folder / NAME, content, only_writer=True)",
        "write_file(folder / NAME, content, sync=False, only_writer=True)",
    ),
    ("store/disk/folder", "            self._put_back(before)\n", ""),
    (
        "store/disk/rows",
        "            self.commit()\n            self._replace(replace(after",
        "            self._replace(replace(after",
    ),
    (
        "groups/stored",
        "write_file(path, content, sync=sync, only_writer=True)",
        "write_file(path, content, sync=False, only_writer=True)",
    ),
    ("groups/waiting", "                    sync_files(list(map(beside, paths)))\n", "                    pass\n"),
    ("groups/waiting", "            self._log.cut(begin)\n", "            pass\n"),
    ("groups/waiting", "self._declared), sync=self._sync)", "self._declared), sync=False)"),
    ("collect/shared", "if again and number == count:", "if False:"),
    ("collect/shared", "                    self._owed.append(settled)\n", ""),
    ("replay/storages/memmap", "other = 1 - self.words[_WHICH]", "other = self.words[_WHICH]"),
    (
        "replay/storages/memmap",
        "            self._sync_rows(now)\n            self._commit(now)",
        "            self._commit(now)",
    ),
    ("replay/storages/memmap", "    return held + steps * schema.num_envs", "    return held"),
    ("replay/storages/memmap", "            self._head.journal = True\n", ""),
    ("remote/mirror/table", "        self.check[blocks] = np.where(came, checks[mine], self.check[blocks])\n", ""),
]
FOLDERS = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where the copies with planted faults and the folders of their worlds are; None: the folder for temporary files."""
FIRST_WORLDS = 40
"""Worlds of the first turn of a planted fault."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutation:
    """One changed expression: the file, the line, the source before and after."""

    path: str
    line: int
    before: str
    after: str
    source: str


def mutated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the changed forms of one expression or statement; none if it has none."""
    changed: ast.AST
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed = copy.deepcopy(node)
        changed.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()  # a call for its effect, left out


def mutations(path: Path) -> list[Mutation]:
    """Return every mutation of a module, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in _evaluated(ast.parse(source)):
        for changed in mutated(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before, after = source.encode()[begin:end].decode(), ast.unparse(changed)
            after = after if isinstance(changed, ast.Pass) else f"({after})"
            new = (source.encode()[:begin] + after.encode() + source.encode()[end:]).decode()
            try:
                compile(new, str(path), "exec")
            except SyntaxError:
                continue
            found.append(Mutation(str(path.relative_to(ROOT)), node.lineno, before, after, new))
    return found


def _evaluated(tree: ast.AST) -> Iterator[ast.expr | ast.Expr]:
    """Yield the expressions of a tree that are evaluated, and calls for their effect; no annotation, no decorator."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr | ast.Expr):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr | ast.Raise):
                continue
            waiting += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]


def drawn(seed: int, count: int) -> list[Mutation]:
    """Return ``count`` mutations on different lines, each line as likely."""
    places = [ROOT / target for target in TARGETS]
    paths = sorted(path for place in places for path in ([place] if place.suffix else place.rglob("*.py")))
    by_line: dict[tuple[str, int], list[Mutation]] = {}
    for path in paths:
        for one in mutations(path):
            by_line.setdefault((one.path, one.line), []).append(one)
    chance = random.Random(seed)
    return [chance.choice(by_line[place]) for place in chance.sample(sorted(by_line), min(count, len(by_line)))]


def planted() -> list[Mutation]:
    """Return the faults of ``PLANTED``."""
    found = []
    for module, before, after in PLANTED:
        path = f"mouse_core/{module}.py"
        source = (ROOT / path).read_text(encoding="utf-8")
        assert before in source, f"{path}: {before!r}"
        line = source[: source.index(before)].count("\n") + 1
        found.append(Mutation(path, line, before, after, source.replace(before, after, 1)))
    return found


def _tests_of(path: str) -> list[str]:
    """Return the test files that are run first, nearest first."""
    names = next(names for target, names in TARGETS.items() if path.startswith(target))
    return [f"tests/core/test_{name}.py" for name in names]


@contextmanager
def _planted_in_copy(one: Mutation) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Yield a function that runs Python in a copy of the checkout with a mutation."""
    with tempfile.TemporaryDirectory(prefix="mouse-mutation-") as folder:
        copy_of = Path(folder) / "checkout"
        kept_out = shutil.ignore_patterns(".git", ".venv*", "out", "site", ".*_cache", "__pycache__", ".hypothesis")
        shutil.copytree(ROOT, copy_of, ignore=kept_out)
        (copy_of / one.path).write_text(one.source, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": f"{copy_of}{os.pathsep}{copy_of / 'adapters'}", "CI": "true"}
        options: Any = {"cwd": copy_of, "env": environment, "capture_output": True, "text": True, "check": False}
        yield lambda *arguments: subprocess.run([sys.executable, "-m", *arguments], timeout=1200, **options)


def killer_of(one: Mutation, *, near: bool) -> str | None:
    """Return the test that fails with a mutation, ``"import"`` or ``"time"``; None if all pass."""
    lane = ["pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    with _planted_in_copy(one) as run:
        for files in (_tests_of(one.path), ["tests"])[: 1 if near else 2]:
            try:
                ran = run(*lane, *files)
            except subprocess.TimeoutExpired:
                return "time"
            if ran.returncode not in (0, 5):
                failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].partition(" - ")[0] if failed else "import"
    return None


class PlantedFault:
    """A fault of ``PLANTED`` in a copy of the core, and how far simulated worlds have searched for the fault.

    Args:
        number: The index in ``PLANTED``.
        one: The fault.
        folder: An empty folder for the copy; beside it is a copy of the tests.
        seed: The seed of the first world.
    """

    def __init__(self, number: int, one: Mutation, folder: Path, seed: int) -> None:
        self.number, self.one, self.found_by = number, one, ""
        self.worlds, self.seconds = 0, 0.0
        self._folder, self._seed, self._next_worlds = folder, seed, FIRST_WORLDS
        # The compiled modules are copied, too; only the changed module is compiled again.
        shutil.copytree(ROOT / "mouse_core", folder / "mouse_core")
        (folder / "tests").symlink_to(folder.parent / "tests")
        (folder / one.path).write_text(one.source, encoding="utf-8")

    def __str__(self) -> str:
        place = f"{self.one.path.removeprefix('mouse_core/')}:{self.one.line}"
        verdict = self.found_by or "NOT FOUND"
        return f"{self.number:3} {place:32} {self.worlds:5} worlds {self.seconds:4.0f} s  {verdict:.110}"

    def run(self, seconds: float) -> None:
        """Run the worlds of one turn, for at most ``seconds`` seconds."""
        began, words = time.monotonic(), ["--seed", str(self._seed + self.worlds), "--worlds", str(self._next_worlds)]
        environment = os.environ | {"PYTHONPATH": str(self._folder), "TMPDIR": str(self._folder)}
        with subprocess.Popen(
            [sys.executable, "-m", "tests.simulate", *words, "--first"],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            else:
                # The first worlds are those of ``simulate.warm``; where one breaks a promise, no other world is run.
                lines = [line for line in errors.splitlines() if "Error: " in line] or ["a call hangs"]
                found = json.loads(out.splitlines()[-1]) if out else {"worlds": 0, "first": f"warm: {lines[0]}"}
                self.worlds += found["worlds"]
                self.found_by = found["first"].replace("the process ended with 1, see above", lines[-1])
                self._next_worlds *= 2
        self.seconds += time.monotonic() - began


def search(mutants: Sequence[Mutation], *, jobs: int, seconds: float, seed: int) -> list[PlantedFault]:
    """Run simulated worlds with each planted fault in turn until all are found or the time is over."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="mouse-planted-", dir=FOLDERS) as folder:
        shutil.copytree(ROOT / "tests", Path(folder) / "tests")
        faults = [PlantedFault(number, one, Path(folder) / str(number), seed) for number, one in enumerate(mutants)]
        turns = deque(faults)

        def work() -> None:
            while turns and (left := end - time.monotonic()) > 0:
                with suppress(IndexError):  # another thread took the last fault
                    fault = turns.popleft()
                    fault.run(left)
                    if not fault.found_by:
                        turns.append(fault)
                    print(fault, file=sys.stderr, flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(work) for _ in range(jobs)]:
                future.result()
    return faults


def main() -> int:
    """Run the command; the exit status is the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="from which the statements are drawn")
    parser.add_argument("--count", type=int, default=60, help="number of mutations")
    parser.add_argument("--jobs", type=int, default=2, help="mutations that are tried at the same time")
    parser.add_argument("--only", help="try mutations of paths with this text alone")
    parser.add_argument("--near", action="store_true", help="run only the test files near the module")
    parser.add_argument("--planted", action="store_true", help="run simulated worlds with the faults of PLANTED")
    parser.add_argument("--seconds", type=float, default=600.0, help="with --planted: time for all faults")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args()
    drawn_ones = planted() if options.planted else drawn(options.seed, options.count)
    chosen = [one for one in drawn_ones if options.only is None or options.only in one.path]
    if options.planted and not options.list:
        faults = search(chosen, jobs=options.jobs, seconds=options.seconds, seed=options.seed)
        for fault in faults:
            print(fault)
        found = sum(bool(fault.found_by) for fault in faults)
        print(f"{found} of {len(faults)} found")
        return len(faults) - found
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        killers = [None] * len(chosen) if options.list else pool.map(partial(killer_of, near=options.near), chosen)
        for number, (one, by) in enumerate(zip(chosen, killers, strict=True)):
            verdict = "" if options.list else f"killed by {by}" if by else "SURVIVED"
            print(f"{number:3} {one.path}:{one.line}: {one.before!r:.70} -> {one.after!r:.70} {verdict}", flush=True)
            survivors += not options.list and by is None
    if not options.list:
        print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
