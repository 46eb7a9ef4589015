"""Mixtures of sources: whole windows of each, in its own order, as many as its share says."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import BatchSource, ConfigError, FieldSpec, PrefetchBatchifier, SchemaError, Spec
from mouse_core.augment import AugmentTokensConfig
from mouse_core.mixtures import Mixture, MixtureSource, Schedule, Shares
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.testing import SourceConformance, example_store
from tests.raising import assert_raises

SPEC = Spec({"window": FieldSpec("window", np.dtype(np.int64), ()), "b": FieldSpec("b", np.dtype(np.float32), (2,))})


class Numbered:
    """A source whose windows are numbered: window j of member m is 1000 * m + j, in batches of a size of its own."""

    spec = SPEC

    def __init__(self, member: int, size: int) -> None:
        self.member, self.size = member, size

    @property
    def fingerprint(self) -> str:
        return f"{self.member} {self.size}"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        number = 1000 * self.member + np.arange(index * self.size, (index + 1) * self.size)
        window = np.repeat(number[:, None], 4, 1)
        return {"window": window, "b": np.stack([window, -window], -1).astype(np.float32)}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=4).filter(lambda all: any(all[0])),
    st.integers(1, 12),
)
def test_every_window_of_a_member_comes_once_in_its_order(members: list[tuple[int, int]], size: int) -> None:
    weights = [weight for weight, _ in members]
    if not any(weights):
        return
    source = MixtureSource([Numbered(m, some) for m, (_, some) in enumerate(members)], weights, batch_size=size)
    found = np.concatenate([source[index]["window"] for index in range(9)])[:, 0]
    codes = np.concatenate([source[index]["member"] for index in range(9)])[:, 0]
    np.testing.assert_array_equal(codes, found // 1000)
    whose = Shares(tuple(weights)).members(0, 9 * size)
    np.testing.assert_array_equal(codes, whose)
    for member in range(len(members)):
        mine = found[codes == member] - 1000 * member
        assert mine.tolist() == list(range(len(mine)))
    for index in (8, 0, 5):
        np.testing.assert_array_equal(source[index]["window"][:, 0], found[index * size : (index + 1) * size])


class TestMixtureSource(SourceConformance):
    def make(self) -> Any:
        return MixtureSource({"a": Numbered(0, 5), "b": Numbered(1, 3)}, {"a": 2, "b": 1}, batch_size=7)


class TestOfBatchSourcesInViews(SourceConformance):
    def make(self) -> Any:
        config = AugmentTokensConfig(permute_action="both")
        options: dict[str, Any] = {"augment": config, "views": 2, "seed": 3}
        first = BatchSource(example_store(), 8, 4, "batch", **options)
        return MixtureSource({"whole": first, "random": BatchSource(example_store(90), 8, 6, **options)}, [1, 2])


def test_stores_are_drawn_from_in_different_ways() -> None:
    episodes = BatchSource(example_store(200), 8, 8, boundary="episode")
    last = BatchSource(example_store(100), 8, 4, "last", uneven="pad")
    source = MixtureSource({"episodes": episodes, "last": last}, [3, 1])
    assert list(source.spec)[-2:] == ["mask", "member"]
    batch = source[3]
    assert batch["member"].shape == (8, 8)
    np.testing.assert_array_equal(batch["reward"][batch["member"][:, 0] == 1][:2], last[1]["reward"][2:4])
    assert len(source) == -(-(len(episodes) * 8 + len(last) * 4) // 8)
    one = BatchSource(example_store(100), batch_size=4, windows={"action": range(2)})
    assert MixtureSource([one, one])[0]["member"].tolist() == [0, 1, 0, 1]
    assert BatchSource(Mixture([example_store(40)] * 2), batch_size=4, windows={"action": [0]})[0]["member"].shape == (
        4,
    )


def test_a_loader_resumes_and_a_schedule_holds() -> None:
    def make() -> MixtureSource:
        schedule = Schedule({0: [1, 0], 2: [1, 1], 4: [0, 1]})
        return MixtureSource({"a": Numbered(0, 4), "b": Numbered(1, 4)}, schedule, batch_size=6)

    source = make()
    assert [int((source[index]["member"][:, 0] == 1).sum()) for index in range(6)] == [0, 0, 3, 3, 6, 6]
    with PrefetchBatchifier(make()) as loader:
        loader.next_batch()
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = [loader.next_batch() for _ in range(4)]
    with PrefetchBatchifier(pickle.loads(pickle.dumps(make())), num_workers=0) as loader:
        loader.load_state_dict(state)
        for batch in wanted:
            np.testing.assert_array_equal(loader.next_batch()["window"], batch["window"])


def test_what_does_not_fit_together_is_refused() -> None:
    class Other(Numbered):
        spec = Spec({"window": FieldSpec("window", np.dtype(np.int32), ()), "b": SPEC["b"]})

    class Fewer(Numbered):
        spec = Spec({"window": SPEC["window"]})

    class Outgoing(Numbered):
        spec = Spec(dict(SPEC), "outgoing")

    class Short(Numbered):
        def __getitem__(self, index: int) -> Any:
            return {name: values[: 2 + index % 2] for name, values in super().__getitem__(index).items()}

    one = Numbered(0, 4)
    for other, message in (
        (Other(1, 4), r"field 'window': expected int64 .* found int32"),
        (Fewer(1, 4), "expected fields"),
        (Outgoing(1, 4), "member 'b' to have the spec of 'a'"),
    ):
        assert_raises(SchemaError, message, MixtureSource, {"a": one, "b": other})
    assert_raises(SchemaError, "without a field 'b'", MixtureSource, [one], field="b")
    for wrong, message in (
        ([], "at least one source"),
        ([example_store()], "member '0'"),
        ([ReplayBuffer(ArrayStorage(10), batch_size=2)], "ReplayBufferEnsemble"),
        (one, "several"),
    ):
        assert_raises(ConfigError, message, MixtureSource, wrong)
    with pytest.raises(ConfigError, match="batches of 2 windows of member '0', found batches of 3"):
        MixtureSource([Short(0, 4)])[1]
    with pytest.raises(IndexError):
        MixtureSource([one])[-1]
