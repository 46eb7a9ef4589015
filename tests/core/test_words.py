"""What the guides count and list is what there is."""

import inspect
import re
import tomllib
from pathlib import Path

from mouse_core import DatasetStore, PrefetchBatchifier
from mouse_core.replay.device import Arrays

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_extras_are_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (whole,) = extras["all"]
    listed = re.search(r"The extras are (.*?)\. The extra `all`", text("docs/getting-started.md"))
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(whole.split("[")[1].rstrip("]").split(","))


def test_a_state_is_what_the_guide_says() -> None:
    store = DatasetStore()
    store.extend({"action": [0] * 9, "reward": [0.0] * 9, "done": [0] * 9})
    with PrefetchBatchifier(store, sequence_length=2, batch_size=2) as loader:
        state = loader.state_dict()
    first = text("docs/guides/resuming.md").split("Loading a state")[0]
    assert set(re.findall(r"`(\w+)`", first)) == set(state)
    assert [type(value) for value in state.values()].count(int) == 4
    assert len(state) == 6


def test_fields_that_tell_trajectories_are_the_same_in_both_guides() -> None:
    names = ('"episode"', '"traj_id"', '"traj_ids"', '"traj"', '("collector", "traj_ids")')
    row = next(line for line in text("docs/reference/coming-from.md").split("| T") if line.startswith("37"))
    assert all(f"`{name}`" in row and f"`{name}`" in text("docs/guides/replay.md") for name in names)


def test_functions_over_arrays_are_listed_with_their_arguments() -> None:
    rows = [line for line in (ROOT / "docs/guides/device-sampler.md").read_text().split("\n") if line.startswith("| `")]
    listed = dict(re.findall(r"`(\w+)\(([^)`]+)\)`", " ".join(row.split(" | ")[0] for row in rows)))
    assert {"words", "integers", "where", "maximum"} <= listed.keys()
    for name, arguments in listed.items():
        function = getattr(Arrays(), name)
        if inspect.ismethod(function):  # the others are functions of NumPy
            assert [*inspect.signature(function).parameters] == arguments.split(", "), name
