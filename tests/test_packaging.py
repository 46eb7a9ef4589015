"""The shape of the code base: which floor may import which, what an import costs, how long a module may be.

`scripts/house.py` holds the floors and reads the imports from the syntax trees, so a forbidden import is found also
where it stands inside a function.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from mouse_core import DatasetStore
from scripts.downstream import TESTS
from scripts.house import (
    ADAPTERS,
    ALL,
    CORE,
    FLOORS,
    KNOWN_TO_STUDIES,
    ROOT,
    UPWARDS,
    arrows,
    imported,
    modules,
    necessary,
    parse,
    room,
    statements,
    storeys,
)
from scripts.release import FILES, blanks, version

FRAMEWORKS = {"torch", "tensordict", "torchrl", "jax", "jaxlib", "flax", "optax", "grain", "ray"}
# Heavy or optional: the core imports these where they are used, never on import.
DEFERRED = {"datasets", "pandas", "huggingface_hub", "PIL", "matplotlib", "gymnasium"}


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: without the bodies of functions and of `if TYPE_CHECKING`."""

    class Outer(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                return node.orelse
            return node

    return ast.fix_missing_locations(Outer().visit(deepcopy(tree)))


def is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split(".")[1:])


@cache
def imports_of(module: str) -> frozenset[str]:
    """What a module of mouse_core imports, as ``imported`` names it."""
    return frozenset(imported(parse(CORE[module]), CORE))


def floor(module: str) -> int:
    """The floor that a module's room is on."""
    assert module != "mouse_core", "import from the module itself, not from the package above it"
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    raise AssertionError(f"{module}: its room has no floor yet; give it one in FLOORS")


# All modules in one test of each rule, as a test for each module took more than the rules do.
@cache
def out_of_rooms() -> list[tuple[str, str]]:
    """What modules of one room import from modules of another."""
    return [
        (module, name)
        for module in sorted(CORE.keys() - {"mouse_core"})
        for name in sorted(imports_of(module))
        if name.split(".")[0] == "mouse_core" and room(name) != room(module)
    ]


def test_arrows_point_down() -> None:
    found = {(module, name) for module, name in out_of_rooms() if floor(name) > floor(module)}
    known = {(module, name) for module, names in UPWARDS.items() for name in names}
    assert found == known, "the first stands below the second, and must not import it"
    for module, names in UPWARDS.items():
        assert not names & imported(at_import(parse(CORE[module])), CORE), "only where it is needed"
    assert set().union(*storeys()) == set().union(*FLOORS), "rooms of one floor import from each other in a circle"


def test_private_modules_stay_in_their_room() -> None:
    found = [
        f"{module}: {name}"
        for module, name in out_of_rooms()
        if any(part.startswith("_") for part in name.split(".")[2:])
    ]
    assert not found, "it is nobody else's business"


# Of a framework's own, the same thing as in the core.
TWINS = {
    "add_pending",
    "backup",
    "descend",
    "remove_pending",
    "PrefetchBatchifier",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RolloutBuffer",
    "RolloutStorage",
    "RolloutStream",
    "RowMap",
    "Slices",
    "TokenAugmenter",
    "discounted_returns",
    "gae",
    "groups",
    "lambda_returns",
    "n_step_returns",
    "normalized",
    "permutation",
    "vtrace",
}


def exported(path: Path) -> list[str]:
    """What a module's ``__all__`` names."""
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_a_public_name_means_one_thing() -> None:
    found: dict[str, tuple[str, object]] = {}
    for module, path in CORE.items():
        for name in () if is_private(module) else exported(path):
            value = getattr(importlib.import_module(module), name)
            other, before = found.setdefault(name, (module, value))
            assert value is before, f"{name} is one thing in {other} and another in {module}"
    for module, path in ALL.items():
        shared = set() if module in CORE or is_private(module) else found.keys() & exported(path)
        shared = {name for name in shared if getattr(importlib.import_module(module), name) is not found[name][1]}
        assert shared <= TWINS, f"{module}: {sorted(shared - TWINS)} are other things in mouse_core"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    known = CORE.keys() - {"mouse_core"}
    # What points up closes one, and is followed when both modules have long been there.
    needed = {name: imports_of(name) - UPWARDS.get(name, set()) - {name} for name in known}
    left = {name: {other for other in needs if other in known} for name, needs in needed.items()}
    while True:
        free = {name for name, needs in left.items() if not needs & left.keys()}
        if not free:
            break
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left


def arrows_between_folders(name: str) -> set[tuple[str, str]]:
    """Which folders of a room import from which, each with the modules directly in it; `__init__.py` is not one."""

    def folder(module: str) -> str:
        return CORE[module].parent.relative_to(ROOT).as_posix()

    return {
        (folder(module), folder(other))
        for module, path in CORE.items()
        if room(module) == name and path.name != "__init__.py"
        for other in imports_of(module) & CORE.keys()
        if room(other) == name and folder(other) != folder(module)
    }


def test_folders_within_a_room_do_not_import_each_other_both_ways() -> None:
    found = set().union(*(arrows_between_folders(name) for name in set().union(*FLOORS)))
    both = sorted(f"{one} and {other}" for one, other in found if (other, one) in found and one < other)
    assert not both


def test_trainers_are_where_make_looks_for_them() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    marked = {path.relative_to(ROOT).parts[1] for path, text in texts.items() if re.search(r"\bmark\.trainers", text)}
    assert marked == {"trainers", "test_docs.py"}


def test_the_tests_of_other_versions_exist() -> None:
    assert [one for one in TESTS.split() if not (ROOT / "tests" / one).exists()] == []


def test_the_core_knows_no_framework() -> None:
    for module, path in CORE.items():
        tree = parse(path)
        names = roots(imported(tree))
        assert not names & FRAMEWORKS, module
        assert not names & ADAPTERS.keys(), module
        assert not names & {"adapters", "tests", "examples", "docs", "scripts"}, module
        assert not names & DEFERRED or not roots(imported(at_import(tree))) & DEFERRED, (
            f"{module}: import it inside the function that needs it"
        )


def test_no_adapter_is_left_out() -> None:
    folders = {path.parent.name for path in (ROOT / "adapters").glob("mouse_*/__init__.py")}
    assert folders == ADAPTERS.keys(), "list it in scripts/house.py, with what it may import"


@pytest.mark.parametrize("package", ADAPTERS)
def test_adapters_do_not_know_each_other(package: str) -> None:
    for module, path in modules(ROOT / "adapters" / package).items():
        names = roots(imported(parse(path)))
        known = KNOWN_TO_STUDIES if package == "mouse_study" else set()
        assert not names & (ADAPTERS.keys() - {package} - known), module
        assert not names & (FRAMEWORKS - ADAPTERS[package]), module
        assert not names & {"adapters", "tests", "examples", "docs", "scripts"}, module


def private_imports(tree: ast.AST) -> set[str]:
    """What a tree imports from mouse_core that is nobody else's business: modules and names that begin with ``_``."""
    names = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    private = {name for name in names if any(part[0] == "_" and part[:2] != "__" for part in name.split(".")[1:])}
    return {name for name in private if name.split(".")[0] == "mouse_core"}


def test_adapters_use_what_a_third_party_may_use() -> None:
    found = {module: private_imports(parse(path)) for module, path in ALL.items() if module not in CORE}
    assert not any(found.values()), "what an adapter needs is public, with a docstring and a line in docs/reference"


# Tests that import private modules, and why nothing public would do.
KNOW_PRIVATE = {
    "bench/floor.py": "the floor copies the very bytes that a batch is gathered from",
    "core/test_disk_many.py": "how often the addresses of a column are computed is not seen in a batch",
    "core/test_orders.py": "limits of what is kept are made small, so that they are met",
    "core/test_where_rows_lie.py": "how often a chunk is looked up is not seen in a batch",
}


def test_tests_use_public_names() -> None:
    tests = ROOT / "tests"
    # Only what may name something private is parsed, as that takes its time.
    taken = re.compile(r"^ *(?:from|import) mouse_core[^\n(]*(?:\([^)]*\))?", flags=re.MULTILINE)
    texts = {path: " ".join(taken.findall(path.read_text(encoding="utf-8"))) for path in tests.rglob("*.py")}
    named = [path for path, text in texts.items() if re.search(r"\b_[a-z]", text)]
    found = {path.relative_to(tests).as_posix() for path in named if private_imports(parse(path))}
    assert found <= KNOW_PRIVATE.keys(), "test it through public names, or say here why that cannot be"
    assert found == KNOW_PRIVATE.keys(), "a test that no longer knows what is private loses its line"


def test_packages_say_that_they_are_typed() -> None:
    packages = {name.split(".")[0] for name in ALL}
    assert not [package for package in packages if not (ALL[package].parent / "py.typed").exists()]


def test_the_files_of_a_release_state_one_version() -> None:
    assert version() == tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {blank.split(":")[0] for blank in blanks()} == set(FILES), "a publisher's blanks are in these files only"


# What is asked of a fresh interpreter: first what `import mouse_core` costs and loads, then what is loaded later.
IMPORT_REPORT = """
import json, sys, time
began = time.process_time()
import mouse_core
cost = time.process_time() - began
print(json.dumps({"cost": cost, "modules": sorted(sys.modules)}))
assert len(mouse_core.DatasetStore.open(sys.argv[1])) == 1
assert "pandas" not in sys.modules  # Arrow imports it to look at lists of Python's, for 0.3 s
assert {"TokenAugmenter", "DatasetStore"} <= set(dir(mouse_core))
assert mouse_core.metadata.KEY and mouse_core.images.is_encoded and mouse_core.augment.draw
assert all(hasattr(mouse_core, name) for name in mouse_core.__all__)
assert not hasattr(mouse_core, "TokenAugmentor")
from mouse_core import *
assert TokenAugmenter is mouse_core.augment.TokenAugmenter
import mouse_core.hub, mouse_core.replay, mouse_core.rollouts
assert not set(json.loads(sys.argv[2])) & {*sys.modules}
"""


def import_report(store: Path) -> tuple[float, set[str]]:
    """Processor seconds that `import mouse_core` takes in a fresh interpreter, and the modules that it loads."""
    # With bytecode that is kept, as where it is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    heavy = json.dumps([*DEFERRED, "ml_dtypes", "tqdm", "yaml"])
    command = [sys.executable, "-c", IMPORT_REPORT, str(store), heavy]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    return report["cost"], set(report["modules"])


# What `import mouse_core` leaves out: rooms that are loaded where somebody asks for them, and modules of the others
# that only some stores and batches need.
LEFT_OUT = {
    *("metadata", "augment", "cli", "formats", "groups", "hub", "images", "inspect", "replay", "columns", "rollouts"),
    *("text", "trees", "files", "nested", "remote", "testing"),
}
LEFT_OUT_MODULES = {"mouse_core.store.export"}
MOST_LOADED = 45


def test_importing_the_core_costs_and_loads_little(record_property: pytest.RecordProperty, tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "store", "a") as store:
        store.extend({"observation": [[1.0]], "action": [0], "reward": [0.0], "done": [0]})
    cost, loaded = import_report(tmp_path / "store")
    assert not roots(loaded) & (FRAMEWORKS | DEFERRED | {"array_api_compat", "subprocess", "tempfile"})
    own = {name for name in loaded if name.startswith("mouse_core.")}
    assert not {room(name) for name in own} & LEFT_OUT
    assert not own & LEFT_OUT_MODULES
    assert len(own) < MOST_LOADED, own
    # It is 0.19 s on an idle machine. The limit is far above it, and in processor time, so that a busy
    # machine does not fail; importing any framework or pandas would.
    costs = [cost]
    while min(costs) >= 0.4 and len(costs) < 5:
        costs.append(import_report(tmp_path / "store")[0])
    record_property("seconds", min(costs))
    assert min(costs) < 0.4, f"import mouse_core took {min(costs):.2f} s of processor time"


def test_the_checks_can_fail() -> None:
    tree = ast.parse(
        "import os\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    import datasets.table\n    from jax import numpy\n"
        "class A:\n    import PIL.Image\n    def g(self):\n        import pandas\n"
    )
    assert roots(imported(tree)) == {"os", "torch", "datasets", "jax", "PIL", "pandas"}
    assert roots(imported(at_import(tree))) == {"os", "PIL"}
    private = (
        "from mouse_core._base import trees\nfrom mouse_core.store import _intake\nimport mouse_core.spec as _spec\n"
    )
    own = "from mouse_jax import _philox\nfrom mouse_core import __distribution__\n"
    assert private_imports(ast.parse(private + own)) == {"mouse_core._base.trees", "mouse_core.store._intake"}
    assert imported(ast.parse("from mouse_core import store, Field"), {"mouse_core.store": ROOT}) == {
        "mouse_core.store",
        "mouse_core",
    }


def test_the_map_leaves_out_only_what_a_detour_says() -> None:
    assert necessary({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
    drawn, every = necessary(arrows()), arrows()
    assert all(drawn[name] <= every[name] for name in every)
    assert "batches" in every["mouse_torch"] - drawn["mouse_torch"]


def test_every_room_has_its_line_in_the_table() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("## The rooms of the core")[1].split("\n## ")[0]
    named = " ".join(line for line in section.splitlines() if line.startswith("|"))
    for name in set().union(*FLOORS):
        assert f"mouse_core.{name}" in CORE, f"{name} is no room"
        assert f"`{name}`" in named, f"{name}: CONTRIBUTING has no line for this room"
    for name in re.findall(r"`(\w+\.[\w.]+)`", section.split("### Two paths through the code")[1]):
        assert f"mouse_core.{name}" in CORE, f"{name}: CONTRIBUTING walks through a module that is not there"


@pytest.mark.parametrize("theirs", ["from mouse_core.models import Model\n", None])
def test_a_package_of_the_same_name_is_told_in_one_line(theirs: str | None, tmp_path: Path) -> None:
    """What is left when the distribution mouse-core is installed over this one, and when it is removed again."""
    shutil.copytree(ROOT / "mouse_core", tmp_path / "mouse_core", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mouse_core" / "__init__.py").unlink()
    if theirs is not None:
        (tmp_path / "mouse_core" / "__init__.py").write_text(theirs)
        (tmp_path / "mouse_core" / "models").mkdir()
        (tmp_path / "mouse_core" / "models" / "__init__.py").write_text("class Model: ...\n")
    code = "import sys; sys.path = sys.argv[1:]\nfrom mouse_core.cli import main"
    others = [path for path in sys.path if not (Path(path) / "mouse_core").exists()]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path), *others],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mouse_core: expected the package of mouse-data, found another at ")
    assert "pip uninstall mouse-core mouse-data" in last


# Where a package is imported by another name than it is installed by.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "flax": "flax",
    "orbax": "orbax-checkpoint",
    "reverb": "dm-reverb",
    "tf_agents": "tf-agents",
    "yaml": "pyyaml",
}
# Peers that benchmarks leave out where they are not installed.
LEFT_OUT_PEERS = {"lance", "litdata", "streaming"}


def installed_by(*requirements: str) -> set[str]:
    """The names of distributions that pip is asked for, through the extras of this one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, pending = set(), [*requirements, *project["dependencies"]]
    while pending:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", pending.pop()).groups()  # type: ignore[union-attr]
        if name == "mouse-data":
            pending += [one for extra in extras.split(",") for one in project["optional-dependencies"][extra]]
        found.add(name.lower().replace("_", "-"))
    return found


def third_party(tree: ast.AST) -> set[str]:
    """The packages of others that are imported, also within functions."""
    ours = {"tests", "scripts", "mouse_core", *ADAPTERS, *(path.stem for path in (ROOT / "examples").glob("*.py"))}
    return roots(imported(tree)) - ours - sys.stdlib_module_names


def missing_from(packages: set[str], known: set[str]) -> set[str]:
    return {name for name in packages if DISTRIBUTIONS.get(name, name.replace("_", "-")).lower() not in known}


def test_the_extra_of_benchmarks_has_what_they_import() -> None:
    known, seen = installed_by("mouse-data[bench]"), set[Path]()
    pending = [*(ROOT / "tests" / "bench").rglob("*.py")]
    while pending:
        file = pending.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        tree = parse(file)
        missing = missing_from(third_party(tree) - LEFT_OUT_PEERS, known)
        assert not missing, f"{file}: the extra 'bench' lacks {sorted(missing)}"
        pending += [ROOT / f"{name.replace('.', '/')}.py" for name in imported(tree) if name.startswith("tests.")]
    assert ROOT / "tests" / "core" / "text_cases.py" in seen


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.stem)
def test_examples_say_in_one_line_what_to_install(file: Path) -> None:
    tree, guarded = parse(file), set[str]()
    for guard in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        for text in (
            node for handler in guard.handlers for node in ast.walk(handler) if isinstance(node, ast.JoinedStr)
        ):
            said = "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in text.values)
            way = said.removeprefix(f"{file.name} needs NAME: ")
            if way != said and "SystemExit" in ast.unparse(guard):
                packages = third_party(ast.Module(guard.body, []))
                asked = way.removeprefix("pip install ").replace("'", "").split()
                missing = set() if way.startswith("make ") else missing_from(packages, installed_by(*asked))
                assert not missing, f"{file.name}: {way} lacks {sorted(missing)}"
                guarded |= packages
    bare = missing_from(third_party(tree) - guarded, installed_by())
    assert not bare, f"{file.name}: {sorted(bare)} are imported without a line that says what to install"
