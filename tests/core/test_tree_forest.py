"""Forests of rollouts, and their trees: TorchRL's cases of its forest, and random worlds against dicts of dicts."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError, DataError, MissingFieldError, SchemaError, StateError
from mouse_core.errors import MissingRowError
from mouse_core.files.checkpoint import read_checkpoint, write_checkpoint
from mouse_core.trees import Forest, Tree

ROOT = {"observation": 0}


def ted(states: Any, action: int, done: int = 0) -> dict[str, Any]:
    """A rollout in TED."""
    states = np.asarray(states)
    length = len(states) - 1
    ended = np.zeros((length, 1), bool)
    ended[-1] = done != 0
    return {
        "observation": states[:-1],
        "action": action + np.arange(length) / length,
        "done": ended & False,
        "next": {
            "observation": states[1:],
            "reward": np.full(length, float(action)),
            "terminated": ended & (done == 1),
            "truncated": ended & (done == 2),
        },
    }


ROLLOUTS = [
    ted(range(6), 0),
    ted([3, *range(6, 11)], 1),
    ted([4, *range(11, 16)], 2),
    ted([0, *range(16, 21)], 3),
    ted([13, *range(21, 26)], 4),
]


@pytest.fixture
def forest() -> Forest:
    made = Forest()
    for rollout in ROLLOUTS:
        made.extend(rollout)
    return made


@pytest.fixture
def rebranching(forest: Forest) -> Forest:
    forest.extend(ted([24, 19, 26], 5))
    return forest


def test_vertices(forest: Forest) -> None:
    tree = forest.get_tree({"observation": np.array(0), "action": "of no matter"})
    assert tree.num_vertices() == len(tree) == 9
    assert sorted(tree.observation(np.arange(9))["observation"]) == [0, 3, 4, 5, 10, 13, 15, 20, 25]
    assert forest.get_tree(ROOT, compact=False).num_vertices() == 26
    for vertex in range(9):
        assert tree.vertex_at(next(path for path in all_paths(tree) if tree.vertex_at(path) == vertex)) == vertex
    assert tree.nodes.tolist() == forest.index(tree.observation(np.arange(9))).tolist()


def test_rollouts_are_rebuilt(forest: Forest) -> None:
    tree = forest.get_tree(ROOT)
    for path, expected in [((0, 0, 0), 0), ((0, 1), 1), ((0, 0, 1, 0), 2), ((1,), 3), ((0, 0, 1, 1), 4)]:
        found = tree.rollout_from_path(path)
        assert_rows(found, ROLLOUTS[expected], slice(-5, None))
        assert found["next"]["done"].shape == found["count"].shape
    assert tree.rollout_from_path(())["action"].shape == (0,)
    assert tree.rows()["action"].shape == (25,)


def assert_rows(found: Any, expected: Any, part: slice) -> None:
    for name in ("observation", "action"):
        np.testing.assert_array_equal(found[name][part], expected[name])
    for name in ("observation", "reward"):
        np.testing.assert_array_equal(found["next"][name][part], expected["next"][name])


def test_observations_that_are_reached_twice_are_one_vertex(rebranching: Forest) -> None:
    tree, below = rebranching.get_tree(ROOT), rebranching.get_tree({"observation": 19})
    number = int(tree.index({"observation": np.array([19])})[0])
    assert [len(tree.leaving(v)) for v in (0, 1, 3, number)] == [2, 2, 2, 2]
    assert len(tree.entering(number)) == 2
    assert tree.observation(tree.parents(number))["observation"].tolist() == [0, 24]
    assert tree.contains(below.observation(np.arange(len(below)))).all()
    assert not tree.contains({"observation": np.array([16, 99])}).any()  # 16 lies within an edge
    assert tree.num_vertices(count_repeat=True) == len(list(all_paths(tree))) == 15 > len(tree) == 12
    lines = tree.to_string().splitlines()  # what lies below it is shown once
    assert (len(lines), lines[-2:]) == (13, ["(1,) {'observation': 19}", " ..."])


def test_a_chain() -> None:
    forest = Forest()
    forest.extend(ted(range(11), 0))
    tree = forest.get_tree(ROOT, compact=False)
    assert tree.max_length() == 10
    assert list(tree.valid_paths()) == [(0,) * 10]
    compact = forest.get_tree(ROOT)
    assert (compact.max_length(), len(compact)) == (1, 2)
    assert_rows(compact.rollout(0), ted(range(11), 0), slice(None))


@pytest.mark.parametrize("compact", [False, True])
def test_parents_of_children(rebranching: Forest, compact: bool) -> None:
    tree = rebranching.get_tree(ROOT, compact=compact)
    for vertex in range(len(tree)):
        for child in tree.children(vertex).tolist():
            assert vertex in tree.parents(child)
    assert tree.parents(0).size == 0


def test_lines_of_text() -> None:
    forest = Forest()
    rollouts = [
        [(3, 123), (1, 456)],
        [(2, 359), (2, 3094)],
        [(3, 123), (9, 392), (6, 989), (20, 809), (21, 847)],
        [(1, 75)],
        [(3, 123), (0, 948)],
        [(2, 359), (2, 3094), (10, 68)],
        [(2, 359), (2, 3094), (11, 9045)],
    ]
    for rollout in rollouts:
        before = 0
        for action, observation in rollout:
            forest.extend({"observation": before, "action": action, "next": {"observation": observation}}, batch_dims=0)
            before = observation
    tree = forest.get_tree(ROOT)
    assert tree.to_string().splitlines() == [
        "(0,) {'observation': 123}",
        " (0, 0) {'observation': 456}",
        " (0, 1) {'observation': 847}",
        " (0, 2) {'observation': 948}",
        "(1,) {'observation': 3094}",
        " (1, 0) {'observation': 68}",
        " (1, 1) {'observation': 9045}",
        "(2,) {'observation': 75}",
    ]
    assert tree.to_string(lambda tree, edge: tree.rollout(edge)["action"].tolist()).splitlines() == [
        "(0,) [3]",
        " (0, 0) [1]",
        " (0, 1) [9, 6, 20, 21]",
        " (0, 2) [0]",
        "(1,) [2, 2]",
        " (1, 0) [10]",
        " (1, 1) [11]",
        "(2,) [1]",
    ]
    assert tree.counts.tolist() == [3, 3, 1, 1, 1, 1, 1, 1]
    assert tree.select_by(tree.counts) == (0, 0)
    assert tree.select_by(lambda tree: -tree.counts) == (2,)


def test_layouts_give_the_same_forest() -> None:
    states, dones = np.array([0, 1, 2, 0, 3, 2]), np.array([0, 0, 1, 0, 0, 2])
    arrived = {
        "observation": states,
        "action": np.array([0, 5, 6, 0, 7, 6]),
        "reward": np.array([0.0, 1.0, 2.0, 0.0, 3.0, 4.0]),
        "done": dones,
    }
    first, second = slice(0, 3), slice(3, 6)
    steps = [0, 1, 3, 4]
    after = [1, 2, 4, 5]
    nested = {
        "observation": states[steps],
        "action": arrived["action"][after],
        "next": {"observation": states[after], "reward": arrived["reward"][after][:, None], "done": dones[after]},
    }
    windows = {name: values.reshape(2, 3) for name, values in arrived.items()}
    padded = {name: np.pad(values, [(0, 0), (0, 2)], mode="edge") for name, values in windows.items()}
    padded["mask"] = np.arange(5) < np.array([[3], [3]])
    timed = {name: values for name, values in arrived.items() if name != "done"} | {"time": np.array([0, 1, 2] * 2)}
    given: list[tuple[Any, dict[str, Any]]] = [
        (arrived, {}),
        (nested, {}),
        (windows, {"batch_dims": 2}),
        (padded, {}),
        ([{name: values[row] for name, values in arrived.items()} for row in range(6)], {}),
        ({name: values[None] for name, values in arrived.items()}, {"batch_dims": 2}),
    ]
    expected = {(0, 5, 1, 1, 1.0, 0), (1, 6, 2, 1, 2.0, 1), (0, 7, 3, 1, 3.0, 0), (3, 6, 2, 1, 4.0, 2)}
    for rows, options in given:
        forest = Forest()
        assert len(forest.extend(rows, **options)) == 4
        assert steps_of(forest.get_tree(ROOT)) == expected
    cut = {name: np.where(padded["mask"], values, 0) for name, values in padded.items()} | {"mask": padded["mask"]}
    cut["done"] = cut["done"] * 0
    unfinished = Forest()
    assert len(unfinished.extend(cut)) == 4  # what is padded leads nowhere
    apart = Forest()
    apart.extend({name: values[second] for name, values in arrived.items()})
    apart.extend({name: values[first] for name, values in arrived.items()})
    assert steps_of(apart.get_tree(ROOT)) == expected
    times = Forest()
    times.extend(timed)
    assert {step[:3] for step in steps_of(times.get_tree(ROOT))} == {step[:3] for step in expected}


def steps_of(tree: Tree) -> set[tuple[Any, ...]]:
    """All steps of a tree: observation, action, observation, count, reward, done."""
    rows = tree.rows()
    done = np.where(rows["next"]["terminated"], 1, 2 * rows["next"]["truncated"])
    columns = (rows["observation"], rows["action"], rows["next"]["observation"], rows["count"], rows["next"]["reward"])
    found = list(zip(*(column.tolist() for column in (*columns, done)), strict=True))
    assert len(found) == len(set(found))
    return set(found)


def test_fields_of_any_names_and_further_ones() -> None:
    forest = Forest(
        observation=[("camera", "pixels"), "place"], action=["move", ("hand", "grip")], reward="gain", extra=["policy"]
    )
    pixels = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    rows = {
        "camera": {"pixels": pixels},
        "place": np.array([[0.0], [1.0], [2.0]], np.float32),
        "move": np.array(["up", "up", "down"]),
        "hand": {"grip": np.zeros((3, 2))},
        "gain": np.array([0.0, 0.5, 2.0]),
        "done": np.array([0, 0, 1]),
        "policy": np.array([7, 8, 9]),
    }
    forest.extend(rows)
    root = {"camera": {"pixels": pixels[0]}, "place": rows["place"][0]}
    children = forest.get_children(root)
    assert children["move"].tolist() == ["up"]
    assert children["policy"].tolist() == [8]
    assert children["next"]["gain"].tolist() == [0.5]
    assert children["next"]["camera"]["pixels"].tolist() == [pixels[1].tolist()]
    forest.extend(rows | {"policy": np.array([1, 2, 3])})
    assert forest.get_tree(root).rows()["policy"].tolist() == [2, 3]
    assert forest.get_tree(root).rows()["count"].tolist() == [2, 2]


class PlainForest:
    """Dicts of dicts."""

    def __init__(self) -> None:
        self.out: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(dict)

    def add(self, state: int, action: int, reward: float, done: int, after: int) -> None:
        edge = self.out[state].setdefault((action, after), [0, 0.0, 0, 0])
        edge[0] += 1
        edge[1] += reward
        edge[2] += done == 1
        edge[3] += done == 2

    def followed(self, state: int) -> Iterator[int]:
        return (after for (_, after), edge in self.out[state].items() if edge[2] < edge[0])

    def reached(self, root: int) -> set[int]:
        found, waiting = {root}, [root]
        while waiting:
            for after in self.followed(waiting.pop()):
                if after not in found:
                    found.add(after)
                    waiting.append(after)
        return found

    def reached_from(self, state: int) -> set[int]:
        return set().union(*(self.reached(after) for after in self.followed(state)))

    def steps(self, root: int) -> set[tuple[Any, ...]]:
        return {
            (state, action, after, count, total / count, 1 if over == count else 2 if over + cut == count else 0)
            for state in self.reached(root)
            for (action, after), (count, total, over, cut) in self.out[state].items()
        }


def wander(seed: int, *, cycles: bool, steps: int = 40) -> tuple[dict[str, Any], PlainForest]:
    """Rows of alignment "arrived" of a random world whose actions have several outcomes, and the same as dicts."""
    random, plain = np.random.default_rng(seed), PlainForest()
    states = 7
    rows = []
    state, begins = 0, True
    for _ in range(steps):
        if begins or state == states - 1:
            state, begins = 0, False
            rows.append((state, 0, 0.0, 0))
        action = int(random.integers(2))
        low, high = (0, states) if cycles else (state + 1, min(state + 3, states - 1) + 1)
        after, reward = int(random.integers(low, high)), float(random.integers(4))
        # Whether it terminates is the world's, mostly; that it is truncated, nobody's.
        over = (state * 7 + action * 3 + after) % 5 == 0 and random.random() < 0.9
        done = 1 if over else 2 if random.random() < 0.1 else 0
        plain.add(state, action, reward, done, after)
        rows.append((after, action, reward, done))
        if done or after == states - 1:
            begins = True
            if not done:
                rows[-1] = (*rows[-1][:3], 2)
                plain.out[state][action, after][3] += 1
        state = after
    names = ("observation", "action", "reward", "done")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}, plain


@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 60))
def test_a_forest_is_dicts_of_dicts(seed: int, cycles: bool, cut: int) -> None:
    rows, plain = wander(seed, cycles=cycles)
    forest = Forest()
    # In two parts, where an episode ends.
    ends = np.flatnonzero(rows["done"])
    part = int(ends[min(cut, len(ends) - 1)]) + 1 if len(ends) else len(rows["done"])
    for piece in (slice(0, part), slice(part, None)):
        forest.extend({name: values[piece] for name, values in rows.items()})
    assert forest.num_nodes == len({state for (s, edges) in plain.out.items() for state in (s, *(a for _, a in edges))})
    assert len(forest) == sum(map(len, plain.out.values()))
    tree, compact = forest.get_tree(ROOT, compact=False), forest.get_tree(ROOT)
    expected = plain.steps(0)
    assert steps_of(tree) == expected
    assert steps_of(compact) == expected  # each step is in one edge
    for one in (tree, compact):
        check_tree(one, plain)
    inner = [v for v in range(1, len(compact)) if len(compact.leaving(v)) == len(compact.entering(v)) == 1]
    states = compact.observation(np.arange(len(compact)))["observation"].tolist()
    for vertex in inner:  # what a compact tree keeps has a reason: an episode ended there, or a cycle has to begin
        assert compact.ended[compact.entering(vertex)[0]] or states[vertex] in plain.reached_from(states[vertex])


def check_tree(tree: Tree, plain: PlainForest) -> None:
    states = tree.observation(np.arange(len(tree)))["observation"].tolist()
    assert states[0] == 0
    assert len(set(states)) == len(states)
    if tree.num_vertices(count_repeat=True) < 300:
        paths, ends = list(all_paths(tree)), list(tree.valid_paths())
        assert tree.num_vertices(count_repeat=True) == len(paths)
        assert len(ends) == len(set(ends))
        assert set(ends) == set(paths) - {path[:-1] for path in paths if path}
        assert tree.max_length() == max(map(len, ends))
    for edge, (parent, child) in enumerate(tree.edges.tolist()):
        rollout = tree.rollout(edge)
        assert (rollout["observation"][0], rollout["next"]["observation"][-1]) == (states[parent], states[child])
        assert (rollout["observation"][1:] == rollout["next"]["observation"][:-1]).all()
        assert tree.rewards[edge] == pytest.approx(rollout["next"]["reward"].sum())
        assert tree.counts[edge] == rollout["count"][0]
        last = plain.out[int(rollout["observation"][-1])][int(rollout["action"][-1]), states[child]]
        assert tree.ended[edge] == (last[2] == last[0])


def all_paths(tree: Tree, path: tuple[int, ...] = (), way: tuple[int, ...] = (0,)) -> Iterator[tuple[int, ...]]:
    """Paths, and what they begin with: one ends where an episode always does, and where it returns to itself."""
    yield path
    for number, edge in enumerate(tree.leaving(way[-1]).tolist()):
        child = int(tree.edges[edge, 1])
        if tree.ended[edge] or child in way:
            yield (*path, number)
        else:
            yield from all_paths(tree, (*path, number), (*way, child))


@pytest.mark.parametrize("compact", [False, True])
def test_depth(rebranching: Forest, compact: bool) -> None:
    whole = rebranching.get_tree(ROOT, compact=compact)
    for depth in range(5):
        tree = rebranching.get_tree(ROOT, max_depth=depth, compact=compact)
        near = {v for path in all_paths(whole) if len(path) <= depth for v in [whole.vertex_at(path)]}
        assert tree.nodes.tolist() == whole.nodes[: len(near)].tolist()
    assert rebranching.get_tree(ROOT, max_depth=0).to_string() == ""


def test_an_observation_that_comes_again_ends_its_path() -> None:
    forest = Forest()
    forest.extend(ted([0, 1, 2, 0], 0))
    tree = forest.get_tree(ROOT, compact=False)
    assert (tree.edges.tolist(), tree.ended.tolist()) == ([[0, 1], [1, 2], [2, 0]], [False, False, False])
    assert list(tree.valid_paths()) == [(0, 0, 0)]
    loop = forest.get_tree(ROOT)
    assert (loop.edges.tolist(), loop.ended.tolist(), loop.max_length()) == ([[0, 0]], [False], 1)
    assert forest.get_tree({"observation": 1}).to_string() == "(0,) {'observation': 1}"


def test_shorter_paths_come_first() -> None:
    forest = Forest()
    forest.extend(ted([0, 1, 0], 0))  # back to the root, by two edges
    forest.extend(ted([0, 2], 1))
    tree = forest.get_tree(ROOT, compact=False)
    assert list(tree.valid_paths()) == [(1,), (0, 0)]


def test_what_was_saved_is_there_again(rebranching: Forest, tmp_path: Path) -> None:
    rebranching.dumps(tmp_path / "forest")
    again = Forest.loads(tmp_path / "forest")
    more = ted([26, 30], 6)
    for one in (rebranching, again):
        one.extend(more)
    tree, found = rebranching.get_tree(ROOT), again.get_tree(ROOT)
    assert steps_of(found) == steps_of(tree)
    for name in ("nodes", "edges", "counts", "rewards", "dones", "ended", "bounds"):
        np.testing.assert_array_equal(getattr(found, name), getattr(tree, name))
        assert getattr(found, name).dtype == getattr(tree, name).dtype
    Forest(observation=[("a", "b")], extra=["c"]).dumps(tmp_path / "empty")
    empty = Forest.loads(tmp_path / "empty")
    assert len(empty) == 0
    with pytest.raises(MissingFieldError, match=r"\('a', 'b'\)"):
        empty.extend(more)
    write_checkpoint(tmp_path / "other", {"kind": "tree"})
    with pytest.raises(StateError, match="expected a saved forest, found tree"):
        Forest.loads(tmp_path / "other")
    saved = read_checkpoint(tmp_path / "forest")
    for name, other in (("columns", 3), ("columns", {"x": []}), ("names", None), ("nodes", [])):
        write_checkpoint(tmp_path / "other", {**saved, name: other})
        with pytest.raises(StateError, match="expected a"):
            Forest.loads(tmp_path / "other")
    damaged = bytearray((tmp_path / "forest").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "forest").write_bytes(damaged)
    with pytest.raises(StateError):
        Forest.loads(tmp_path / "forest")


def test_rows_that_are_refused_leave_nothing_behind() -> None:
    rows = ted([0, 1, 2], 7) | {"note": np.arange(2)}
    forest = Forest(extra=["note"])
    for unlike in ({"action": np.zeros(2, np.longdouble)}, {"note": np.zeros(2, np.longdouble)}):
        with pytest.raises(SchemaError, match="expected a dtype without padding bytes"):
            forest.extend(rows | unlike)
        assert forest.index(rows).tolist() == [-1, -1]
    forest.extend(rows)
    more = ted([5, 6, 7], 7)
    for note in (np.zeros(2), np.zeros((2, 2), int), ["a", "b"]):
        with pytest.raises(SchemaError, match="note"):
            forest.extend(more | {"note": note})
        assert (forest.num_nodes, len(forest)) == (3, 2)
        assert forest.index(more).tolist() == [-1, -1]


def test_a_picture(rebranching: Forest) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    tree = rebranching.get_tree(ROOT)
    axes = tree.plot(figures.Figure().add_subplot(), label=lambda tree, v: tree.observation(v)["observation"])
    written = [text.get_text() for text in axes.texts if text.get_text()]
    assert sorted(written) == sorted(str(v) for v in tree.observation(np.arange(len(tree)))["observation"].tolist())
    assert len(axes.texts) - len(written) == len(tree.edges)


def test_what_does_not_fit_is_told_and_changes_nothing(forest: Forest) -> None:
    rows = ted([0, 1, 2], 7)
    before = (len(forest), forest.num_nodes)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            {**rows, "observation": rows["observation"] * 1.0},
            SchemaError,
            r"\('next', 'observation'\): expected float64",
        ),
        (ted(np.arange(3.0), 0), SchemaError, "observation"),
        ({**rows, "action": np.zeros((2, 3))}, SchemaError, "action"),
        ({**rows, "action": np.zeros(3)}, SchemaError, r"'action': expected \(2,\), found shape \(3,\)"),
        ({name: rows[name] for name in ("observation", "next")}, MissingFieldError, "expected a field 'action'"),
        ({name: rows[name] for name in ("observation", "action")}, MissingFieldError, "marks the ends of episodes"),
        (
            rows | {"next": rows["next"] | {"reward": np.array([1, np.nan])}},
            DataError,
            "expected finite numbers, found nan",
        ),
        (rows | {"next": rows["next"] | {"reward": np.zeros((2, 3))}}, SchemaError, "expected a number in each row"),
        ({"observation": [5, 6], "action": [0, 0], "done": [0, 3]}, DataError, r"'done': expected 0 .*, found 3"),
    ]
    for unlike, error, message in wrong:
        with pytest.raises(error, match=message):
            forest.extend(unlike)
        assert (len(forest), forest.num_nodes) == before
    with pytest.raises(ConfigError, match="batch_dims: expected 0, 1 or 2, found 3"):
        forest.extend(rows, batch_dims=3)
    with pytest.raises(MissingRowError, match="root: expected an observation of the forest"):
        forest.get_tree({"observation": 77})
    with pytest.raises(MissingRowError, match=r"root: expected a node in 0\.\.25, found 26"):
        forest.get_tree(26)
    with pytest.raises(ConfigError, match="max_depth: expected at least 0, found -1"):
        forest.get_tree(0, max_depth=-1)
    tree = forest.get_tree(0)
    with pytest.raises(MissingRowError, match=r"path \(0, 5\): expected one of 2 edges at position 1, found 5"):
        tree.vertex_at((0, 5))
    with pytest.raises(SchemaError, match=r"scores: expected shape \(8,\), found \(3,\)"):
        tree.select_by([1, 2, 3])
    with pytest.raises(ConfigError, match="observation: expected a list of names, found 'place'"):
        Forest(observation="place")
    assert forest.extend({name: np.empty(0, int) for name in ("observation", "action", "done")}).size == 0
