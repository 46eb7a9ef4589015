"""Batches of transitions, of stores and buffers, against plain Python that knows every transition of every episode."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import (
    AugmentTokensConfig,
    BatchSource,
    DatasetStore,
    Field,
    ImageFields,
    PrefetchBatchifier,
    RandomShift,
)
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.mixtures import Mixture
from mouse_core.replay import ArrayStorage, NStep, ReplayBuffer, SliceSampler
from mouse_core.sampling import RandomWindows

ALIGNMENTS = ("arrived", "outgoing")
Transition = tuple[int, int, float, int, bool, bool]


def episodes(seed: int, count: int = 6, *, final: bool = True) -> list[dict[str, Any]]:
    """Episodes whose observations are numbered from 100 times the episode's number on."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        steps = int(rng.integers(1, 7))
        seen = 100 * number + np.arange(steps + final)
        end, pixels = rng.integers(3), np.arange(27) + seen[:, None]
        made.append(
            {
                "observations": {"place": seen, "camera": pixels.astype(np.uint8).reshape(-1, 3, 3, 3)},
                "actions": 10 * seen[:steps],
                "rewards": seen[:steps] + 0.5,
                "terminated": bool(end == 1),
                "truncated": bool(end == 2),
            }
        )
    return made


def transitions(made: list[dict[str, Any]], alignment: str) -> list[list[Transition]]:
    """The transitions of every episode: observation, action, reward, next observation, terminated, truncated."""
    found = []
    for episode in made:
        seen, steps = episode["observations"]["place"].tolist(), len(episode["rewards"])
        of_episode = []
        for step in range(steps):
            last = step == steps - 1
            ended = last and episode["terminated"]
            if not last or alignment == "arrived":
                following = seen[step + 1]
            elif ended:
                following = seen[step]  # nothing follows, and the observation stands for itself
            else:
                continue  # the observation that the episode broke off in is not kept
            row = (seen[step], 10 * seen[step], seen[step] + 0.5, following, ended, last and episode["truncated"])
            of_episode.append(row)
        found.append(of_episode)
    return found


NAMES = ("observation.place", "action", "reward", "next_observation.place", "terminated", "truncated")


def rows_of(batch: Any, names: tuple[str, ...] = NAMES) -> list[Transition]:
    """The transitions of a batch that are there, in its order."""
    there = np.asarray(batch["mask"])
    columns = [np.asarray(batch[name])[there].tolist() for name in names]
    return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Case:
    alignment: Any
    store: Any
    expected: list[list[Transition]]

    @property
    def flat(self) -> list[Transition]:
        return [row for rows in self.expected for row in rows]


def case_of(alignment: Any, seed: int) -> Case:
    made = episodes(seed, final=alignment == "arrived" or seed % 2 == 0)
    store = DatasetStore(alignment=alignment).add_episodes(made)
    return Case(alignment, store, transitions(made, alignment))


@pytest.fixture(params=ALIGNMENTS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param, 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_each_transition_there_is_comes_once_and_as_it_was(alignment: str, seed: int) -> None:
    case = case_of(alignment, seed)
    if not case.flat:
        with pytest.raises(ConfigError, match="transitions: expected at least one transition in"):
            BatchSource(case.store, batch_size=1, transitions=True)
        return
    source = BatchSource(case.store, None, len(case.flat), "last", transitions=True)
    batch = source[0]
    assert batch["mask"].all()
    assert rows_of(batch) == case.flat
    for following in ("", "next_"):
        camera = batch[f"{following}observation.camera"]
        assert np.array_equal(camera[:, 0, 0, 0], batch[f"{following}observation.place"].astype(np.uint8))
    assert {name: (one.dtype, one.shape[1:]) for name, one in batch.items()} == {
        name: (one.dtype, one.shape) for name, one in source.spec.items()
    }
    drawn = BatchSource(case.store, None, 40, transitions=True)
    assert {row for index in range(5) for row in rows_of(drawn[index])} <= {*case.flat}
    assert all(drawn[index]["mask"].all() for index in range(5))


@pytest.mark.parametrize("length", [1, 3, 10])
@pytest.mark.parametrize("pad", [None, False])
def test_windows_have_transitions_of_one_episode_one_after_the_other(case: Case, length: int, pad: bool | None) -> None:
    tiles = []
    for rows in case.expected:
        cut = [rows[at : at + length] for at in range(0, len(rows), length)]
        tiles += [one for one in cut if pad is None or len(one) == length]
    if not tiles:
        with pytest.raises(ConfigError):
            BatchSource(case.store, length, 1, "sequential", transitions=True, pad=pad)[0]
        return
    source = BatchSource(case.store, length, len(tiles), "sequential", transitions=True, pad=pad)
    batch = source[0]
    assert batch["observation.camera"].shape == (len(tiles), length, 3, 3, 3)
    found = [rows_of({name: values[window] for name, values in batch.items()}) for window in range(len(tiles))]
    assert sorted(found) == sorted(tiles)
    allowed = [rows[at : at + length] for rows in case.expected for at in range(len(rows))]
    drawn = BatchSource(case.store, length, 8, transitions=True, pad=pad, weighting="trajectory")[0]
    for window in range(8):
        rows = rows_of({name: values[window] for name, values in drawn.items()})
        assert rows in allowed
        assert not drawn["terminated"][window][~drawn["mask"][window]].any()


def sources(case: Case, tmp_path: Path) -> Iterator[Any]:
    store = case.store
    options: dict[str, Any] = {"transitions": True, "seed": 3}
    with DatasetStore.open(tmp_path / "grown", "a", alignment=case.alignment) as grown:
        for index in range(len(store)):
            grown.extend([store[index]]) if index else grown.describe(store.metadata)
        if len(grown) < len(store):
            grown.clear()
            grown.extend(store[:])
    yield BatchSource(DatasetStore.open(tmp_path / "grown"), None, 8, **options)
    yield BatchSource(store, None, 8, **options).with_options(seed=3)
    yield pickle.loads(pickle.dumps(BatchSource(store, None, 8, **options)))
    shorter = BatchSource(store.snapshot(rows=len(store) - 1), None, 8, **options)
    yield shorter.with_snapshot(store.snapshot(), epoch_start=0)


def test_sources_of_the_same_rows_are_the_same(case: Case, tmp_path: Path) -> None:
    expected = BatchSource(case.store, None, 8, transitions=True, seed=3)
    for source in sources(case, tmp_path):
        assert source.spec == expected.spec
        assert source.fingerprint == expected.fingerprint
        for index in (0, 3):
            assert {**map_lists(source[index])} == {**map_lists(expected[index])}
    plan = expected.plan(2)
    for stored in (False, True):
        arrays = expected.layout(8, stored=stored)
        out = arrays.arrays(np.full(arrays.nbytes, 7, np.uint8))
        gathered = expected.gather(plan, out, stored=stored)
        assert all(np.shares_memory(gathered[name], out[name]) for name in out)
        assert map_lists(out) == map_lists(expected[2])


def map_lists(batch: Any) -> dict[str, Any]:
    return {name: values.tolist() for name, values in batch.items()}


def test_shards_views_and_mixtures_have_their_transitions(case: Case) -> None:
    whole = BatchSource(case.store, 2, 6, transitions=True)
    parts = [BatchSource(case.store, 2, 6, shard=(rank, 2), transitions=True)[4] for rank in range(2)]
    assert [row for part in parts for row in rows_of(part)] == rows_of(whole[4])
    uneven = [BatchSource(case.store, 2, 3, shard=(rank, 2), uneven="pad", transitions=True)[4] for rank in range(2)]
    three = BatchSource(case.store, 2, 3, transitions=True)[4]
    assert [row for part in uneven for row in rows_of(part)] == rows_of(three)
    ended = BatchSource(case.store.where(done=[1]), None, 32, transitions=True)[0]
    assert {*rows_of(ended)} <= {row for rows in case.expected if rows and rows[-1][4] for row in rows}
    other = case_of(case.alignment, 3)
    mixture = BatchSource(Mixture({"a": case.store, "b": other.store}), None, 32, transitions=True)
    assert {*rows_of(mixture[0])} <= {*case.flat, *other.flat}
    assert "member" in mixture.spec


def test_the_layout_of_mouse_and_columns_of_datasets(case: Case) -> None:
    batch = BatchSource(case.store, None, 16, transitions=True, layout="mouse")[0]
    names = ("obs_discrete", "action", "reward", "next_obs_discrete", "terminated", "truncated")
    assert {*rows_of(batch, names)} <= {*case.flat}
    assert batch["next_obs_image"].shape == (16, 27)
    store = DatasetStore(alignment=case.alignment)
    rows = case.store[:]
    store.extend(
        {name: [row[name] for row in rows] for name in ("action", "reward", "done", "episode_step")}
        | {"observation_discrete": [row["observation.place"] for row in rows]}
    )
    names = ("obs_discrete", "action", "reward", "next_obs_discrete", "terminated", "truncated")
    batch = BatchSource(store, None, len(case.flat), "last", transitions=True)[0]
    assert rows_of(batch, names) == case.flat


def test_options_of_observations_hold_for_the_next_ones(case: Case) -> None:
    camera = ("observation.camera", "next_observation.camera")
    augment = AugmentTokensConfig(by_field=(ImageFields(camera, crop=RandomShift(1)),))
    options: dict[str, Any] = {"dtypes": {"observation.place": "float32"}, "augment": augment}
    options["normalize"] = {"observation.place": "mean_std"}
    source = BatchSource(case.store, None, 16, transitions=True, **options)
    batch = source[0]
    plain = BatchSource(case.store, None, 16, transitions=True)[0]
    scaling = source.normalizer["observation.place"]
    for name in ("observation.place", "next_observation.place"):
        assert batch[name].dtype == np.float32
        assert np.allclose(scaling.undo(batch[name]), plain[name], atol=1e-3)
    assert source.spec["next_observation.camera"].shape == (3, 3, 3)
    again = source.with_options(normalize=source.normalizer)
    assert np.array_equal(again[0]["next_observation.place"], batch["next_observation.place"])


def test_fields_are_chosen_by_name(case: Case) -> None:
    source = BatchSource(case.store, None, 8, transitions=True, fields=["action", "truncated", "done"])
    assert list(source.spec) == ["action", "done", "truncated", "mask"]
    chosen, whole = source[1], BatchSource(case.store, None, 8, transitions=True)[1]
    assert all(np.array_equal(chosen[name], whole[name]) for name in ("action", "truncated", "mask"))
    assert np.array_equal(chosen["done"] == 1, whole["terminated"])
    with pytest.raises(MissingFieldError, match="next_observation"):
        BatchSource(case.store, None, 8, transitions=True, fields=["next_observation"])
    BatchSource(case.store, None, 8, transitions=True, required_fields=["terminated", "next_observation.place"])
    # A custom sampler may draw rows without a transition.
    batch = BatchSource(case.store, None, 64, RandomWindows(1, 64), transitions=True)[0]
    assert not batch["mask"].all()
    assert {*rows_of(batch)} <= {*case.flat}


def test_a_next_observation_that_is_marked_as_missing_is_masked() -> None:
    store = DatasetStore()
    for code in (1, 2):
        rows = {"action": [0, 1, 2], "reward": [0.0, 1.0, 2.0], "done": [0, 0, code], "episode_step": [0, 1, 2]}
        store.extend(rows | {"observation_discrete": [5, 6, 0], "observation_missing": [0, 0, 1]})
    batch = BatchSource(store, None, 4, "last", transitions=True)[0]
    assert batch["mask"].tolist() == [True, True, True, False]
    assert batch["terminated"].tolist() == [False, True, False, False]
    assert "next_observation_missing" not in batch


def test_options_that_transitions_do_not_have(case: Case) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"windows": {"action": [0]}}, "transitions: expected windows=None"),
        ({"boundary": "task"}, "transitions: expected windows within episodes, found boundary='task'"),
        ({"pad": 0.0}, "pad: when transitions are read, expected True or False"),
        ({"lengths": range(1, 3)}, "lengths: cannot be combined with transitions=True"),
        ({"packed": True, "sequence_length": 4}, "packed: cannot be combined with transitions=True"),
    ]
    for options, match in wrong:
        with pytest.raises(ConfigError, match=match):
            BatchSource(case.store, transitions=True, **options)


def test_flags_of_agents_and_a_field_that_is_called_next_are_refused() -> None:
    store = DatasetStore()
    flags = np.zeros((4, 2), bool)
    store.extend({"action": [0] * 4, "reward": [0] * 4, "done": [0, 0, 0, 1], "terminated": flags, "truncated": flags})
    assert BatchSource(store, 2, 1, layout="stored")[0]["terminated"].shape == (1, 2, 2)
    with pytest.raises(SchemaError, match=r"one flag per step in 'terminated', found shape \[2\].*'agent_done'"):
        BatchSource(store, None, 1, layout="stored", transitions=True)
    store = DatasetStore(fields=[Field("next_obs_discrete", column="other")])
    store.extend({"action": [0], "reward": [0.0], "done": [0], "observation_discrete": [0], "other": [1]})
    with pytest.raises(ConfigError, match=r"expected a store without fields \['next_obs_discrete'\]"):
        BatchSource(store, transitions=True)


def test_loaders_deliver_transitions(case: Case) -> None:
    with PrefetchBatchifier(case.store, batch_size=8, transitions=True, seed=1) as loader:
        first = loader.next_batch()
        case.store.add_episodes(episodes(9))
        loader.refresh()
        assert loader.next_batch().keys() == first.keys()
    assert {*rows_of(first)} <= {*case.flat}


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("kind", ["rows", "slices", "store"])
def test_buffers_have_the_same_transitions(alignment: Any, kind: str) -> None:
    case = case_of(alignment, 2)
    sampler = SliceSampler(sequence_length=4) if kind == "slices" else None
    if kind == "store":
        buffer: Any = ReplayBuffer(case.store, transitions=True)
    else:
        buffer = ReplayBuffer(ArrayStorage(64, alignment=alignment), sampler, transitions=True)
        rows = case.store[:]
        names = {"observation.place": "place", "observation.camera": "camera"}
        buffer.extend(
            {
                "observation": {short: np.array([row[name] for row in rows]) for name, short in names.items()},
                **{name: np.array([row[name] for row in rows]) for name in ("action", "reward", "done")},
                # Of an episode that was broken off, ``done`` does not say where it ends.
                "traj_ids": np.cumsum([row["episode_step"] == 0 for row in rows]),
            }
        )
    batch = buffer.sample(64)
    if kind != "store":
        seen = {name: batch.pop(name) for name in ("observation", "next_observation")}
        batch |= {f"{name}.{short}": values for name, parts in seen.items() for short, values in parts.items()}
    assert batch["observation.camera"].shape[-3:] == (3, 3, 3)
    assert {*rows_of(batch)} <= {*case.flat}
    assert batch["mask"].any()
    assert "done" not in batch
    sums = buffer.with_parts(transform=[*buffer.transform.transforms, NStep(2, 0.5)]).sample(64)
    assert "discount" in sums
