"""Episodes as a simulator gives them, against plain Python that knows which row a transition stands in."""

from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from mouse_core import AugmentTokensConfig, BatchSource, DatasetStore, Field, ImageFields, RandomCrop
from mouse_core.errors import ConfigError, DataError, MissingFieldError, MouseError, SchemaError
from mouse_core.mixtures import Mixture
from tests.raising import assert_raises

ENDS = {"terminated": (1, 0), "truncated": (2, 0), "both": (1, 1), "unfinished": (0, 0)}
SHAPE = (6, 5, 3)


def episode(seed: int, steps: int = 4, *, final: bool = True, end: str = "terminated", **more: Any) -> dict[str, Any]:
    rng, rows = np.random.default_rng(seed), steps + final
    return {
        "observations": {
            "image": rng.integers(0, 256, (rows, *SHAPE), dtype=np.uint8),
            "arm": {"state": rng.normal(size=(rows, 12)).astype(np.float32)},
            "mode": rng.integers(0, 9, rows).astype(np.int16),
        },
        "actions": rng.normal(size=(steps, 2)).astype(np.float32),
        "rewards": rng.normal(size=steps),
        "terminated": end in ("terminated", "both"),
        "truncated": end in ("truncated", "both"),
        **more,
    }


def store_of(count: int = 3, **options: Any) -> DatasetStore:
    return DatasetStore().add_episodes(episode(seed, 3 + seed, **options) for seed in range(count))


def rows_of(given: dict[str, Any], alignment: str) -> list[dict[str, Any]]:
    steps, seen = len(given["rewards"]), given["observations"]
    count = steps + 1 if alignment == "arrived" else steps
    code = 1 if given["terminated"] else 2 if given["truncated"] else 0
    rows = []
    for row in range(count):
        transition = row - 1 if alignment == "arrived" else row
        rows.append(
            {
                "action": [0.0, 0.0] if transition < 0 else given["actions"][transition].tolist(),
                "reward": 0.0 if transition < 0 else float(given["rewards"][transition]),
                "done": code if transition == steps - 1 else 0,
                "episode_step": row,
                "observation.image": seen["image"][row].tolist(),
                "observation.arm.state": seen["arm"]["state"][row].tolist(),
                "observation.mode": int(seen["mode"][row]),
            }
        )
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first", ["T", "T+1", "arrived", "outgoing"])
def test_rows_stand_where_an_oracle_has_them(first: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stated = first if first in ("arrived", "outgoing") else None
    alignment = {"T": "outgoing", "T+1": "arrived"}.get(first, first)
    store = DatasetStore(alignment=stated)  # type: ignore[arg-type]
    expected: list[dict[str, Any]] = []
    begins: list[int] = []
    for number in range(5):
        final = alignment == "arrived" or bool(rng.integers(2))
        final = final and not (first == "T" and number == 0)
        end = str(rng.choice([*ENDS]))
        given = episode(seed * 10 + number, int(rng.integers(1, 6)), final=final, end=end)
        store.add_episode(given)
        begins.append(len(expected))
        expected += rows_of(given, alignment)
    assert store.alignment == store.metadata.alignment == alignment
    assert [{name: row[name] for name in expected[0]} for row in store[:]] == expected
    assert store.episodes["start"].to_pylist() == begins
    ends = [
        rows["done"]
        for rows, after in zip(expected, [*expected[1:], {"episode_step": 0}], strict=True)
        if after["episode_step"] == 0
    ]
    assert store.episodes["done"].to_pylist() == ends


def described(source: BatchSource) -> dict[str, str]:
    batch = source[0]
    assert {name: (one.dtype, one.shape[2:]) for name, one in batch.items()} == {
        name: (one.dtype, one.shape) for name, one in source.spec.items()
    }
    return {name: f"{one.dtype} {list(one.shape)}" for name, one in batch.items()}


STORED = {
    "action": "float32 [2, 3, 2]",
    "reward": "float64 [2, 3]",
    "done": "int64 [2, 3]",
    "time": "int64 [2, 3]",
    "observation.image": "uint8 [2, 3, 6, 5, 3]",
    "observation.arm.state": "float32 [2, 3, 12]",
    "observation.mode": "int16 [2, 3]",
}
MOUSE = {
    "action": "float32 [2, 3, 2]",
    "reward": "float32 [2, 3]",
    "done": "int64 [2, 3]",
    "time": "int64 [2, 3]",
    "obs_continuous": "float64 [2, 3, 12]",
    "obs_discrete": "int64 [2, 3]",
    "obs_image": "int64 [2, 3, 90]",
}


def test_batches_have_the_names_dtypes_and_shapes_that_came_in(tmp_path: Path) -> None:
    with DatasetStore.open(tmp_path / "grown", "a") as grown:
        grown.add_episodes(episode(seed, 3 + seed) for seed in range(3))
    store = store_of()
    store.save(tmp_path / "saved")
    loaded = DatasetStore().from_dataset(datasets.load_from_disk(str(tmp_path / "saved")))
    best = store.where(done=1)
    for one in (store, loaded, DatasetStore.open(tmp_path / "grown"), best, Mixture({"a": store}, field=None)):
        stored, mouse = (BatchSource(one, 3, 2, layout=layout) for layout in ("stored", "mouse"))
        assert described(BatchSource(one, 3, 2)) == described(stored) == STORED
        assert described(mouse) == MOUSE
        image = stored[0]["observation.image"]
        assert np.array_equal(mouse[0]["obs_image"].reshape(image.shape), image)
        assert np.array_equal(mouse[0]["obs_continuous"], stored[0]["observation.arm.state"].astype(float))


def test_layouts_are_kept_and_crop_images() -> None:
    store = store_of(1)
    source = BatchSource(store, 3, 2, layout="mouse")
    store.add_episode(episode(7))
    later = source.with_snapshot(store.snapshot(), epoch_start=0)
    assert list(later.spec) == [*MOUSE]
    assert later.snapshot.num_rows == len(store)
    assert_raises(ConfigError, r"layout: expected one of .*found 'flat'", BatchSource, store, 3, 2, layout="flat")
    store = store_of()
    images = ImageFields(("observation.image",), crop=RandomCrop(4, 4))
    source = BatchSource(store, 3, 2, augment=AugmentTokensConfig(by_field=(images,)))
    assert described(source)["observation.image"] == "uint8 [2, 3, 4, 4, 3]"


@pytest.mark.parametrize(
    ("observations", "field", "delivered"),
    [
        (np.zeros((5, *SHAPE), np.uint8), "obs_image", "int64 [2, 3, 90]"),
        (np.zeros((5, 4), np.float32), "obs_continuous", "float64 [2, 3, 4]"),
        (np.zeros(5, np.int32), "obs_discrete", "int64 [2, 3]"),
        (np.zeros((5, 4, 6), np.float32), None, ""),
    ],
)
def test_a_single_observation_is_called_observation(
    observations: np.ndarray[Any, Any], field: str | None, delivered: str
) -> None:
    store = DatasetStore().add_episode(observations=observations, actions=[0, 1, 2, 3], rewards=[0, 0, 0, 1])
    stored = described(BatchSource(store, 3, 2))
    assert stored["observation"] == f"{observations.dtype} {[2, 3, *observations.shape[1:]]}"
    mouse = described(BatchSource(store, 3, 2, layout="mouse"))
    assert mouse.get(str(field), "") == delivered
    assert stored["action"] == "int64 [2, 3]"
    assert stored["reward"] == "float32 [2, 3]"
    assert store.episodes["done"].to_pylist() == [0]


def test_columns_of_datasets_come_as_stored_where_that_is_asked_for() -> None:
    rows = 12
    store = DatasetStore(fields=[Field("speed", column="velocity", dtype="float16")])
    store.extend(
        {
            "action": np.arange(rows, dtype=np.uint8) % 3,
            "reward": np.zeros(rows),
            "done": np.zeros(rows, np.int8),
            "episode_step": np.arange(rows),
            "observation": np.zeros((rows, 4), np.float32),
            "observation_image": np.zeros((rows, *SHAPE), np.uint8),
            "velocity": np.zeros(rows),
            "note": ["text"] * rows,
        }
    )
    assert described(BatchSource(store, 3, 2, layout="stored")) == {
        "action": "uint8 [2, 3]",
        "reward": "float64 [2, 3]",
        "done": "int64 [2, 3]",
        "time": "int64 [2, 3]",
        "observation": "float32 [2, 3, 4]",
        "observation_image": "uint8 [2, 3, 6, 5, 3]",
        "speed": "float16 [2, 3]",
    }
    # The first rows decide, so a store of MOUSE's columns keeps its layout when an episode comes.
    other = DatasetStore()
    other.append({"action": 0, "reward": 0.0, "done": 0, "episode_step": 0, "observation": np.zeros(4)})
    other.add_episode(observations=np.ones((3, 4)), actions=[1, 1], rewards=[0.0, 1.0])
    assert described(BatchSource(other, 3, 1))["obs_continuous"] == "float64 [1, 3, 4]"


def test_forms_of_one_episode_are_the_same_rows() -> None:
    given = episode(0, 4, task="pick", success=True)
    seen = given["observations"]
    by_step = [
        {"image": seen["image"][row], "arm": {"state": seen["arm"]["state"][row]}, "mode": seen["mode"][row]}
        for row in range(5)
    ]
    flags = {"terminated": np.array([0, 0, 0, 1]), "truncated": [False] * 4}
    parts = {name: given[name] for name in ("observations", "actions", "rewards")}
    minari = SimpleNamespace(id=3, **parts, terminations=flags["terminated"], truncations=flags["truncated"], infos={})
    said = {"task": "pick", "success": True}
    expected = DatasetStore().add_episode(given)
    for made in (
        DatasetStore().add_episode(**given),
        DatasetStore().add_episode(given | flags | {"infos": [{}] * 4}),
        DatasetStore().add_episode(given | {"observations": by_step, "actions": [*given["actions"]]}),
        DatasetStore().add_episode(minari, **said),
        DatasetStore().add_episode({**parts, "terminations": True, "rewards": given["rewards"][:, None]}, **said),
    ):
        assert made[:] == expected[:]
        assert made.metadata == expected.metadata
    assert expected.episodes["task"].to_pylist() == ["pick"]
    assert len(expected.where(success=True).episodes) == 1


def test_infos_and_parts_of_actions_belong_to_their_transition() -> None:
    store = DatasetStore().add_episode(
        observations=(np.arange(4.0), np.arange(4)),
        actions={"arm": np.arange(3.0), "grip": [True, False, True]},
        rewards=[1, 2, 3],
        infos={"force": np.array([5.0, 6.0, 7.0]), "place": np.arange(4), "said": ["a", "b", "c"]},
    )
    assert [row["info.force"] for row in store[:]] == [0, 5, 6, 7]
    assert [row["info.place"] for row in store[:]] == [0, 1, 2, 3]
    assert [row["info.said"] for row in store[:]] == ["", "a", "b", "c"]
    assert [row["observation.1"] for row in store[:]] == [0, 1, 2, 3]
    windows = {name: [0] for name in ("action.arm", "action.grip", "info.force", "info.place", "observation.0")}
    batch = BatchSource(store, None, 3, "sequential", windows=windows, pad=False)[0]
    order = np.argsort(batch["observation.0"][:, 0])
    assert {name: batch[name][order, 0].tolist() for name in windows} == {
        "action.arm": [0, 1, 2],
        "action.grip": [True, False, True],
        "info.force": [5, 6, 7],
        "info.place": [0, 1, 2],
        "observation.0": [0, 1, 2],
    }


def agents_of(seed: int, steps: int, agents: int, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, steps, agents)
    ends[rng.integers(agents)] = steps - 1
    flags = np.arange(steps)[:, None] == ends
    flags |= (np.arange(steps)[:, None] > ends) & (rng.random(agents) < 0.5)
    cut = rng.random(agents) < 0.4
    return {
        "observations": rng.normal(size=(steps + 1, agents, 2)),
        "actions": rng.integers(0, 5, (steps, agents)),
        "rewards": rng.normal(size=(steps, agents)),
        "terminated": flags & ~cut,
        "truncated": flags & cut,
        **more,
    }


def agent_rows(given: dict[str, Any], alignment: str) -> list[dict[str, Any]]:
    steps, agents = given["rewards"].shape[:2]
    codes = np.zeros((steps, agents), int).tolist()
    for agent in range(agents):
        ended = False
        for step in range(steps):
            code = 1 if given["terminated"][step, agent] else 2 if given["truncated"][step, agent] else 0
            codes[step][agent] = 3 if ended else code
            ended = ended or code != 0
    done = 2 if any(2 in row for row in codes) else 1
    rows = [
        {"reward": reward.tolist(), "agent_done": code, "done": 0}
        for reward, code in zip(given["rewards"], codes, strict=True)
    ]
    rows[-1]["done"] = done if all(rows[-1]["agent_done"]) else 0
    nothing = {"reward": np.zeros(given["rewards"].shape[1:]).tolist(), "agent_done": [0] * agents, "done": 0}
    return [nothing, *rows] if alignment == "arrived" else rows


@pytest.mark.parametrize(
    ("where", "alignment"),
    [
        *product(["memory", "disk"], ["arrived", "outgoing"]),
        ("saved", "arrived"),
        ("view", "outgoing"),
        ("datasets", "arrived"),
    ],
)
def test_agents_that_end_one_by_one(alignment: Any, where: str, tmp_path: Path) -> None:
    given = [agents_of(seed, 4 + seed, 3) for seed in range(6)]
    given.append(
        {**given[0], "terminated": given[0]["terminated"] & [True, True, False], "truncated": np.zeros((4, 3))}
    )
    expected = [row for one in given for row in agent_rows(one, alignment)]
    grown = tmp_path / "grown"
    store = DatasetStore.open(grown, "a", alignment=alignment) if where == "disk" else DatasetStore(alignment=alignment)
    store.add_episodes(given)
    if where == "disk":
        store.close()
        store = DatasetStore.open(tmp_path / "grown")
    if where in ("saved", "datasets"):
        store.save(tmp_path / "saved")
        loaded = datasets.load_from_disk(str(tmp_path / "saved"))
        store = DatasetStore.open(tmp_path / "saved") if where == "saved" else DatasetStore().from_dataset(loaded)
    view: Any = store.where(lambda episode: True) if where == "view" else store
    assert [{name: row[name] for name in expected[0]} for row in view[:]] == expected
    batch = BatchSource(view, 4, 3, "sequential", boundary="episode", pad=False)[0]
    assert (batch["reward"].shape, batch["agent_done"].shape, batch["done"].shape) == ((3, 4, 3), (3, 4, 3), (3, 4))
    assert (batch["agent_done"].dtype, batch["reward"].dtype) == (np.int64, np.float64)
    lookup = {tuple(row["reward"]): row for row in expected if any(row["reward"])}
    for reward, agents, done in zip(
        *(batch[name].reshape(12, -1) for name in ("reward", "agent_done", "done")), strict=True
    ):
        if reward.any():
            row = lookup[tuple(reward.tolist())]
            assert (agents.tolist(), done.tolist()) == (row["agent_done"], [row["done"]])
    flat = BatchSource(view, None, 12, transitions=True)[0]
    for reward, agents, terminated, truncated in zip(
        *(flat[name] for name in ("reward", "agent_done", "terminated", "truncated")), strict=True
    ):
        row = lookup[tuple(reward.tolist())]
        assert (agents.tolist(), terminated, truncated) == (row["agent_done"], row["done"] == 1, row["done"] == 2)
    returns = [one["rewards"].sum(0) for one in given]
    np.testing.assert_allclose(view.episodes["return"].to_pylist(), returns)
    mouse = BatchSource(view, 4, 3, "sequential", boundary="episode", pad=False, layout="mouse")[0]
    for name in ("reward", "agent_done"):
        np.testing.assert_allclose(mouse[name], batch[name], rtol=1e-6)
    assert_raises(ConfigError, "best: expected a column of numbers, found 'return'", len, view.best(0.5))


def test_flags_of_agents_and_of_the_episode_go_together() -> None:
    given = agents_of(0, 3, 2, terminated=[[False, True], [False, False], [False, False]], truncated=True)
    store = DatasetStore().add_episode(given)
    assert [row["agent_done"] for row in store[1:]] == [[0, 1], [0, 3], [2, 3]]
    assert store[-1]["done"] == 2
    assert_raises(MissingFieldError, "agent_done", store.add_episode, {**given, "terminated": True})
    with pytest.raises(DataError, match=r"'agent_done': expected one of 0 .alive., .*3 .gone.*found 4"):
        store.extend({name: [store[-1][name]] for name in store.columns} | {"agent_done": [[4, 0]]})


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("shape", [(2,), (3, 2)])
def test_vector_rewards(shape: tuple[int, ...], final: bool, tmp_path: Path) -> None:
    rewards = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    with DatasetStore.open(tmp_path / "grown", "a", alignment="arrived" if final else "outgoing") as store:
        store.add_episode(episode(0, final=final, rewards=rewards))
        store.add_episode(episode(1, final=final, rewards=-rewards))
        with pytest.raises(DataError, match="'reward': expected"):
            store.add_episode(episode(1, final=final, rewards=rewards[..., 0].reshape(4, -1)[:, :1]))
        flat = BatchSource(store, None, 64, transitions=True)[0]
    assert flat["reward"].shape == (64, *shape)
    assert flat["reward"].dtype == np.float32
    assert {tuple(one.reshape(-1)) for one in flat["reward"]} <= {
        tuple(one.reshape(-1)) for one in [*rewards, *-rewards]
    }
    row = store[1 if final else 0]
    assert row["reward"] == rewards[0].tolist()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": ({"rewards": np.zeros(7)}, DataError, "observations and rewards: .*found .*'image'.*: 5.* and 7 rewards"),
    "parts": (
        {"observations": {"a": np.zeros(5), "b": np.zeros(4)}},
        DataError,
        r"equally many in all parts, found {\"observations\['a'\]\": 5, \"observations\['b'\]\": 4}",
    ),
    "actions": ({"actions": np.zeros((5, 2), np.float32)}, DataError, "actions: expected 4 rows .*found 5"),
    "infos": ({"infos": {"x": np.zeros(3)}}, DataError, r"infos\['x'\]: expected 4 or 5 rows .*found 3"),
    "flags": ({"truncated": [False]}, DataError, "truncated: expected one flag, or 4 flags .*found 1"),
    "early": ({"terminated": [0, 1, 0, 0]}, DataError, "terminated: expected True only at the last of 4 .*step 1"),
    "no flags": ({"terminated": 0.5}, DataError, "terminated: expected flags: .*found 0.5"),
    "objects": ({"actions": [object()] * 4}, DataError, "actions: expected an array of numbers or texts"),
    "complex": ({"actions": np.zeros(4, complex)}, DataError, "actions: expected an array of numbers or texts"),
    "single": ({"actions": 3}, DataError, "actions: expected an array"),
    "rewards": ({"rewards": ["a"] * 4}, DataError, r"rewards: expected numbers \[T\], \[T, K\] or \[T, A, K\], found"),
    "agents": (
        {"rewards": np.zeros((4, 3)), "terminated": np.zeros((4, 2), bool)},
        DataError,
        "expected the same number of agents in rewards and flags, found {'terminated': 2, 'rewards': 3}",
    ),
    "early agents": (
        {"terminated": [[0, 1], [1, 0], [0, 0], [0, 0]]},
        DataError,
        "terminated, truncated: expected True only at the last of 4 .*step 1",
    ),
    "none": (
        {"rewards": [], "actions": [], "observations": [[0.0]]},
        DataError,
        "expected at least one transition, found none",
    ),
    "missing": ({"actions": None}, MissingFieldError, r"add_episode: .*\['actions'\] missing"),
    "steps": ({"task": np.zeros(4)}, DataError, r"task: expected one number or text .*found ndarray \[4\]"),
    "reserved": ({"observation": 3}, SchemaError, "add_episode: expected parts .*found 'observation'"),
    "twice": ({"terminations": True}, ConfigError, "add_episode: expected each part once"),
    "names": (
        {"observations": {"a.b": np.zeros(5), "a": {"b": np.zeros(5)}}},
        SchemaError,
        "the column 'observation.a.b'",
    ),
    "keys": ({"observations": {3: np.zeros(5)}}, SchemaError, "observations: .*names of fields as Unicode text"),
    "ragged": (
        {"observations": [[0.0], [0.0, 1.0], [0.0], [0.0], [0.0]]},
        DataError,
        "observations: expected an array",
    ),
    "empty": ({"observations": np.zeros((5, 0))}, MouseError, "'observation'"),
}


@pytest.mark.parametrize(("case", "before"), [*zip(BAD, cycle(["nothing", "episode", "disk", "episode"]))])
def test_what_is_refused_changes_nothing(case: str, before: str, tmp_path: Path) -> None:
    change, error, match = BAD[case]
    store = DatasetStore.open(tmp_path / "store", "a") if before == "disk" else DatasetStore()
    if before == "episode":
        store.add_episode(episode(0))
    rows, columns, metadata = store[:], store.columns, store.metadata
    assert_raises(error, match, store.add_episode, episode(1) | change)
    assert (store[:], store.columns, store.metadata) == (rows, columns, metadata)
    store.add_episode(episode(1))
    assert len(store) == len(rows) + 5
    store.close()


def test_later_episodes_must_be_like_the_first() -> None:
    store = store_of(1, task="pick")
    for change, error, match in (
        ({}, MissingFieldError, "'task'.*missing"),
        ({"task": "pick", "success": True}, SchemaError, "found also .'success'"),
        ({"task": "pick", "actions": np.zeros((4, 3), np.float32)}, DataError, "column 'action': expected at most 2"),
    ):
        assert_raises(error, match, store.add_episode, episode(1) | change)
    with pytest.raises(DataError, match="expected 5 rows for 4 rewards in a store of alignment 'arrived', found 4"):
        store.add_episode(episode(1, final=False, task="pick"))
    with pytest.raises(DataError) as refused:
        store.add_episodes([episode(1, task="pick"), episode(2, task="pick") | {"rewards": [0.0]}])
    assert refused.value.__notes__ == ["add_episodes: episode 1"]
    assert len(store.episodes) == 2  # the episodes before stay
    assert_raises(ConfigError, r"expected a mapping or an object.*found int$", store.add_episode, 3)
    assert_raises(ConfigError, "found list; add_episodes takes several", store.add_episode, [episode(0)])
    with pytest.raises(ConfigError, match=r"add_episodes: expected a list of episodes, found one .*; call add_episode"):
        store.add_episodes(episode(0))
    assert_raises(MouseError, "spec", DatasetStore, spec={"missing": SimpleNamespace()})
