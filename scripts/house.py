"""The plan of the house: which room of `mouse_core` stands on which floor, and who imports whom.

Read from the syntax trees, so an import is found also where it stands inside a function. `tests/test_packaging.py`
holds the code to the plan, and `scripts/draw_house.py` draws it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What each adapter may import of frameworks.
ADAPTERS = {
    "mouse_torch": {"torch", "tensordict", "torchrl"},
    "mouse_jax": {"jax", "jaxlib", "grain"},
    "mouse_ray": {"ray"},
    "mouse_study": {"flax", "jax", "torch"},
}
# Studies compare what the two are given; no other adapter knows another one.
KNOWN_TO_STUDIES = {"mouse_jax", "mouse_torch"}

# The rooms of mouse_core, floor by floor from the ground up, as the design has them: a module imports from rooms of
# lower floors and of its own floor, where rooms form no circle. A folder stands for all modules in it.
FLOORS = [
    # logs, checksums, locks; words, metadata and numbers
    {"_base", "metadata", "digest", "dtypes", "errors", "files", "nested", "randomness", "ranks", "spec"},
    # memory, and what is decoded or fetched into it
    {"_arrow", "columns", "images", "readahead", "remote", "video"},
    # which rows there are
    {"episodes", "store"},
    # which rows are drawn, and what becomes of them
    {"augment", "sampling", "statistics"},
    # batches, and what is made of steps
    {"batches", "collect", "groups", "maps", "mixtures", "prefetch", "record", "replay", "rollouts", "trees"},
    # recordings and texts of others
    {"formats", "text"},
    # the world outside
    {"cli", "hub", "inspect", "testing", "view"},
]


# The arrows that point up: DatasetStore.open also opens recordings of other formats, by the readers of these, and
# Store.save writes them. The imports stand inside the functions, and are in no picture.
UPWARDS = {
    "mouse_core.store.dataset_store": {"mouse_core.formats"},
    "mouse_core.store.views": {"mouse_core.formats"},
}


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def modules(folder: Path) -> dict[str, Path]:
    """Every module below a package's folder, by its full name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


CORE = modules(ROOT / "mouse_core")
ALL = CORE | {name: path for package in ADAPTERS for name, path in modules(ROOT / "adapters" / package).items()}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, itself first; what they compute is not gone through."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, inner, ())


def imported(tree: ast.AST, known: dict[str, Path] | None = None) -> set[str]:
    """Full names of all that a tree imports; `from a import b` counts as `a.b` if that is a module."""
    names = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute in this project"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if known and full in known else node.module)
    return names


def room(module: str) -> str:
    """The room at the top of mouse_core that a module is in; of an adapter's module, the adapter."""
    package, *inside = module.split(".")
    return inside[0] if package == "mouse_core" and inside else package


@cache
def arrows() -> dict[str, set[str]]:
    """Which rooms each room, and each adapter, imports from."""
    found: dict[str, set[str]] = {}
    for module, path in ALL.items():
        if module == "mouse_core":
            continue
        own = room(module)
        names = imported(parse(path), CORE)
        names -= UPWARDS.get(module, set())
        used = {room(name) for name in names if name.split(".")[0] == "mouse_core"} - {own}
        if "mouse_core" in used:  # what adapters take from the package itself comes from the rooms that it names
            used = used - {"mouse_core"} | _offered(path)
        found.setdefault(own, set()).update(used)
    return found


def storeys(most: int = 4) -> list[list[str]]:
    """The rooms of mouse_core in storeys of at most ``most``, each room above all rooms that it imports from."""
    left, found = {name: used for name, used in arrows().items() if name not in ADAPTERS}, list[list[str]]()
    while left:
        free = sorted(name for name, used in left.items() if not used & left.keys())[:most]
        assert free, f"rooms import from each other in a circle: {sorted(left)}"
        found.append(free)
        left = {name: used for name, used in left.items() if name not in free}
    return found


def _offered(path: Path) -> set[str]:
    """The rooms behind the names that a module takes from `mouse_core` itself."""
    home = {
        alias.asname or alias.name: room(node.module or "")
        for node in statements(parse(CORE["mouse_core"]))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    taken = [
        alias.name
        for node in statements(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module == "mouse_core"
        for alias in node.names
    ]
    return {home[name] for name in taken if name in home}


def necessary(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no detour replaces: where a imports b and c, and b imports c, that from a to c is left out."""

    @cache
    def below(name: str) -> frozenset[str]:
        direct = arrows.get(name, set())
        return frozenset(direct).union(*map(below, direct))

    return {
        name: {other for other in direct if not any(other in below(between) for between in direct - {other})}
        for name, direct in arrows.items()
    }
