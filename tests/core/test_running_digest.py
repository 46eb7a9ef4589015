"""The digest that runs along: what it sees, and that it adds up."""

import dataclasses
import json
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mouse_core import BatchSource, ConfigError, DataError, DatasetStore, PrefetchBatchifier, StateError
from mouse_core.augment import AugmentMaskProbConfig, AugmentTokensConfig
from mouse_core.digest import StreamDigest, whole_state
from mouse_core.prefetch import Delivery, Loader
from mouse_core.ranks import Ranks
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.rollouts import RolloutStorage
from mouse_core.testing import example_columns, example_store, stream_digest

MASKED = AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(reward=0.5))
ROWS = hnp.array_shapes(min_dims=1, max_dims=3, min_side=2, max_side=4)
ARRAYS = st.sampled_from(["i1", "i4", "i8", "u1", "u8", "f2", "f4", "f8", "?"]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), ROWS)
)


def one(values: Any, index: int = 3) -> StreamDigest:
    return StreamDigest.of(index, {"x": values})


def of_stream(values: Any) -> str:
    return stream_digest([{"x": values}], 1)


def meaning(values: np.ndarray) -> tuple[Any, ...]:
    """What a field says, in Python's own values."""
    kind = {"u": "i"}.get(values.dtype.kind, values.dtype.kind)
    return kind, values.shape, tuple(repr(value) for value in values.reshape(-1).tolist())


def run(loader: Any, n: int) -> StreamDigest:
    with loader:
        for _ in range(n):
            loader.next_batch()
        return loader.digest


@given(ARRAYS, ARRAYS)
def test_the_same_digest_means_the_same_values(left: np.ndarray, right: np.ndarray) -> None:
    for digest in (one, of_stream):
        assert (digest(left) == digest(right)) == (meaning(left) == meaning(right))


@given(ARRAYS, st.data())
def test_what_is_cut_anywhere_adds_up_and_widths_do_not_count(values: np.ndarray, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    wide = values.astype({"i": "i8", "u": "u8", "f": "f8", "b": "?"}[values.dtype.kind])
    halves = StreamDigest.of(3, {"x": wide[:cut]}), StreamDigest.of(3, {"x": values[cut:]}, first_row=cut)
    assert halves[0] + halves[1] == halves[1] + halves[0] == one(values) == one(wide)
    assert of_stream(values) == of_stream(wide) == of_stream(values.astype(values.dtype.newbyteorder(">")))
    order = data.draw(st.permutations(range(len(values))))
    assert StreamDigest.of(3, {"x": values[order]}, first_row=order) == one(values)


@given(ARRAYS, st.data())
def test_one_bit_is_enough(values: np.ndarray, data: st.DataObject) -> None:
    changed = values.copy()
    raw = changed.reshape(-1).view(np.uint8)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 if values.dtype.kind == "b" else 1 << data.draw(st.integers(0, 7))
    for digest in (one, of_stream):
        assert (digest(changed) == digest(values)) == (meaning(changed) == meaning(values))


def test_places_names_shapes_kinds_and_views_count() -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.arange(4)
    batch = {"x": x, "y": y}
    others = [
        {"x": x[[1, 0, 2, 3]], "y": y[[1, 0, 2, 3]]},
        {"x": -x, "y": y},
        {"x": x, "z": y},
        {"x": x},
        {"x": x.reshape(4, 3, 1), "y": y},
        {"x": x, "y": y.astype(float)},
        {"x": x, "y": y.astype(bool)},
        {"x": x, "y": (y,)},
        (batch, batch),
    ]
    found = [StreamDigest.of(0, one) for one in (batch, *others)]
    found += [StreamDigest.of(1, batch), StreamDigest.of(0, batch, first_row=1), StreamDigest()]
    assert len(set(found)) == len(found)
    of_streams = [stream_digest([one], 1) for one in (batch, *others)]
    of_streams += [stream_digest(two, 2) for two in ([batch, others[0]], [others[0], batch])]
    assert len(set(of_streams)) == len(of_streams)
    backward = dict(reversed(batch.items()))
    assert (StreamDigest.of(0, backward), stream_digest([backward], 1)) == (found[0], of_streams[0])
    swapped = StreamDigest.of(0, others[1]) + StreamDigest.of(1, batch)
    assert swapped != found[0] + StreamDigest.of(1, others[1])


def test_rows_of_differing_length_texts_and_nested_fields_can_be_digested() -> None:
    def batch(last: Any = (3.0, 4.0), text: str = "b", deep: float = 2.0) -> Any:
        ragged = [np.arange(2), np.array(last)]
        return {"ragged": ragged, "text": np.array(["a", text]), "next": {"deep": (np.array([1, deep]), None)}}

    other = [batch((3.0,)), batch((3.0, 5.0)), batch(text="c"), batch(text="b "), batch(deep=7.0)]
    assert len({StreamDigest.of(0, one) for one in (batch(), *other)}) == 6
    assert StreamDigest.of(0, batch()) == StreamDigest.of(0, batch())
    objects = np.empty(2, object)
    objects[:] = batch()["ragged"]
    assert StreamDigest.of(0, batch() | {"ragged": objects}) == StreamDigest.of(0, batch())
    # Shapes of rows, and texts that are longer elsewhere in the batch.
    assert one(np.array(["a", "bcd"])) == one(np.array(["a"])) + StreamDigest.of(3, {"x": np.array(["bcd"])}, 1)


def test_what_cannot_be_digested_is_refused_with_its_place() -> None:
    @dataclasses.dataclass
    class Made:
        x: Any

    with pytest.raises(DataError, match="fields with equal numbers of rows"):
        StreamDigest.of(0, {"x": np.zeros(3), "y": np.zeros(4)})
    with pytest.raises(TypeError, match="array of numbers or texts"):
        StreamDigest.of(0, {"x": np.zeros(3, "M8[s]")})
    rows = np.empty(2, object)
    rows[:] = [Made(1), Made(2)]
    batches = (Made(np.ones(3)), "place of the batch"), ({"next": {"a": Made(1)}}, "next/a"), ({"a": rows}, "in a;")
    for batch, place in (*batches, ({"a": [Made(1)]}, "in a;"), ({"a": [[{}]]}, "row")):
        with pytest.raises(TypeError, match=rf"(?s)texts, found \w+ .*{place}.*vars"):
            StreamDigest.of(0, batch)
    assert StreamDigest.of(0, vars(Made(np.ones(3)))) == StreamDigest.of(0, {"x": np.ones(3)})


@pytest.mark.parametrize("value", [0.5, 3, True, "pick", np.float32(0.5), np.array(7)], ids=repr)
def test_one_value_is_that_of_every_window(value: Any) -> None:
    x = np.arange(6.0).reshape(3, 2)
    expected = StreamDigest.of(3, {"x": x, "z": np.array([value] * 3)})
    assert StreamDigest.of(3, {"x": x, "z": value}) == expected
    halves = [
        StreamDigest.of(3, {"x": x[part], "z": value}, first_row=part.start) for part in (slice(0, 1), slice(1, 3))
    ]
    assert halves[0] + halves[1] == expected
    assert StreamDigest.of(3, {"z": value}).windows == 1
    assert StreamDigest.of(3, {"x": x[:0], "z": value}) == StreamDigest()


def test_names_with_slashes_are_names_of_their_own() -> None:
    x, y = np.zeros(3), np.ones(3)
    names = [{"a/b": x}, {"a": {"b": x}}, {"a~1b": x}, {"a~b": x}, {"a": {"": {"b": x}}}, {"a//b": x}]
    assert len({StreamDigest.of(0, one) for one in names}) == len(names)
    assert StreamDigest.of(0, {"a/b": x, "a": {"b": y}}) != StreamDigest.of(0, {"a/b": y, "a": {"b": y}})
    with pytest.raises(DataError, match="found '1' twice"):
        StreamDigest.of(0, {1: x, "1": y})


def test_a_digest_is_saved_as_plain_values() -> None:
    digest = one(np.arange(5.0))
    assert StreamDigest.from_state(json.loads(json.dumps(digest.state_dict()))) == digest
    assert str(digest).startswith(digest.hexdigest())
    assert len(digest.hexdigest()) == 32
    good = digest.state_dict()
    for bad in (5, {}, good | {"total": 7}, good | {"total": "-1"}, good | {"total": "f" * 33}, good | {"windows": -1}):
        with pytest.raises(StateError):
            StreamDigest.from_state(bad)


@pytest.mark.parametrize("options", [{"views": 2}, {"boundary": "episode", "weighting": "trajectory"}], ids=str)
def test_a_loader_digests_what_it_delivers(options: dict[str, Any]) -> None:
    store = example_store()
    if "views" in options:
        options = options | {"augment": MASKED}
    source = BatchSource(store, 8, 12, **options)
    expected = sum((StreamDigest.of(index, source[index]) for index in range(9)), StreamDigest())
    for workers in (0, 2):
        made = PrefetchBatchifier(store, 8, 12, num_workers=workers, digest=True, **options)
        assert run(made, 9) == expected
    for count in (2, 3, 4):
        shards = [PrefetchBatchifier(store, 8, 12, shard=(r, count), digest=True, **options) for r in range(count)]
        assert sum((run(shard, 9) for shard in shards), StreamDigest()) == expected


AROUND: dict[str, Any] = {"windows": {"reward": [-1, 0, 1]}, "boundary": "episode"}


@pytest.mark.parametrize(
    "more", [{}, {"boundary": "episode"}, {"views": 2, "augment": MASKED}, AROUND, AROUND | {"sequence_length": None}]
)
def test_what_fills_up_uneven_shards_does_not_count(more: dict[str, Any]) -> None:
    store = example_store(8 * (12 + 6))
    options: dict[str, Any] = {"sequence_length": 8, "batch_size": 12, "sampling": "sequential", "digest": True}
    options |= {"drop_last": False} | more
    whole = run(PrefetchBatchifier(store, **options), 3)
    assert more or whole.windows == 12 + 6 + 12
    for count in (1, 2, 5):
        shards = [PrefetchBatchifier(store, shard=(rank, count), uneven="pad", **options) for rank in range(count)]
        assert sum((run(shard, 3) for shard in shards), StreamDigest()) == whole


def test_only_what_was_handed_out_counts_and_a_state_goes_on() -> None:
    store = example_store()

    def loader(**options: Any) -> Any:
        return PrefetchBatchifier(store, 8, 4, prefetch=6, digest=True, **options)

    whole = run(loader(), 10)
    with loader() as first:
        assert first.digest == StreamDigest()
        for _ in range(4):
            first.next_batch()
        state = json.loads(json.dumps(first.state_dict()))
        part = first.digest
    with loader(num_workers=0) as second:
        second.load_state_dict(state)
        assert second.digest == part
        assert run(second, 6) == whole
    # Without a digest in the state a new one begins, which is that of the rest; of several ranks the first goes on.
    rest = loader()
    rest.load_state_dict({name: value for name, value in state.items() if name != "digest"})
    assert part + run(rest, 6) == whole
    shards = [loader(shard=(rank, 2)) for rank in range(2)]
    for shard in shards:
        shard.load_state_dict(state)
    assert [shard.digest for shard in shards] == [part, StreamDigest()]
    assert sum((run(shard, 6) for shard in shards), StreamDigest()) == whole
    with loader() as unchanged:
        before = unchanged.state_dict()
        with pytest.raises(StateError, match="digest"):
            unchanged.load_state_dict(state | {"digest": {"total": "?", "windows": 1}})
        assert unchanged.state_dict() == before
    with PrefetchBatchifier(store, 8, 4) as plain:
        plain.load_state_dict(state)
        assert "digest" not in plain.state_dict()
        with pytest.raises(ConfigError, match="digest=True"):
            _ = plain.digest


def test_states_that_are_not_of_all_ranks_at_one_batch_make_no_whole() -> None:
    loaders = [PrefetchBatchifier(example_store(), 8, 4, shard=(rank, 2), digest=True) for rank in range(2)]
    begun, states = [loader.state_dict() for loader in loaders], []
    for loader in loaders:
        run(loader, 2)
        states.append(loader.state_dict())
    plain = {name: value for name, value in states[1].items() if name != "digest"}
    alone = PrefetchBatchifier(example_store(), 8, 4, digest=True)
    run(alone, 2)
    of_one = alone.state_dict()
    assert whole_state(states) == of_one == whole_state([of_one])
    bad: list[tuple[Any, str]] = [
        ([], "found none"),
        (states[:1], "rank 0 of 2"),
        ([states[0], states[0]], "rank 0 of 2, rank 0 of 2"),
        ([*states, states[1]], "each of 3 ranks once"),
        ([of_one, states[1]], "rank 0 of 1, rank 1 of 2"),
        ([states[0], begun[1]], "found states of different batches at 0 and at 1: {'next_index': \\(2, 0\\)}"),
        ([states[0], plain], "a digest at index 1"),
        ([states[0], 5], "a digest at index 1"),
        ([5, 5], "a digest at index 0"),
    ]
    for of_ranks, words in bad:
        with pytest.raises(StateError, match=words):
            whole_state(of_ranks)


def test_of_a_sharding_over_processes_the_ranks_say_whose_rows_are_digested() -> None:
    """There the source is that of the whole batch in every process, though each delivers other rows."""
    found = []
    for rank in range(2):
        source = BatchSource(example_store(), 8, 4)
        loader: Any = Loader(source, delivery=Delivery(partial(partial, getitem), ranks=Ranks(rank, 2)), digest=True)
        with loader:
            if found:
                loader.load_state_dict(found[0])
                assert loader.digest == StreamDigest()
            loader.next_batch()
            found.append(loader.state_dict())
            loader.load_state_dict(found[-1])
            assert loader.digest == StreamDigest()


def test_a_digest_goes_on_over_a_refresh() -> None:
    store = DatasetStore()
    store.extend(example_columns(60))
    with PrefetchBatchifier(store, 8, 4, digest=True) as loader:
        for _ in range(3):
            loader.next_batch()
        before, small = loader.digest, BatchSource(store.snapshot(), 8, 4)
        store.extend(example_columns(60))
        loader.refresh()
        loader.next_batch()
        large = BatchSource(store.snapshot(), 8, 4, epoch_start=3)
        assert before == sum((StreamDigest.of(index, small[index]) for index in range(3)), StreamDigest())
        assert loader.digest == before + StreamDigest.of(3, large[3])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_replay_buffer_drawn_ahead(workers: int) -> None:
    def make() -> Any:
        buffer = ReplayBuffer(ArrayStorage(50), batch_size=6, seed=3)
        buffer.extend({"reward": np.arange(40.0), "next": {"reward": np.arange(40.0) + 1}})
        return buffer, PrefetchBatchifier(buffer, num_workers=workers, digest=True)

    buffer, _ = make()
    expected = sum((StreamDigest.of(index, buffer.sample()) for index in range(7)), StreamDigest())
    buffer, loader = make()
    with loader:
        for _ in range(3):
            loader.next_batch()
        state, rows = loader.state_dict(), buffer.state_dict()
    buffer, loader = make()
    buffer.load_state_dict(rows)
    loader.load_state_dict(state)
    assert run(loader, 4) == expected


def rollout(*, hidden: float | None = None, **options: Any) -> RolloutStorage:
    storage = RolloutStorage(4, 5, {"observations": (3,), "values": ()}, seed=2, **options)
    for step in range(storage.num_transitions_per_env):
        number = np.arange(4) + 4 * step
        row = {"observations": number[:, None] / 2 + np.arange(3), "values": number / 8, "rewards": number / 4}
        states = {} if hidden is None else {"hidden_states": (np.full((2, 4, 3), hidden + step, np.float32), None)}
        storage.add_transitions({**row, "dones": number % 7 == 6, **states})
    storage.compute_returns(np.zeros(4), gamma=0.5, lam=0.5)
    return storage


def read(storage: RolloutStorage, recurrent: bool = False) -> list[StreamDigest]:
    """The digests of mini-batches, counted from 0."""
    make = storage.recurrent_mini_batch_generator if recurrent else storage.mini_batch_generator
    return [batch.digest(index) for index, batch in enumerate(make(2, 3))]


def test_what_is_beside_the_fields_of_a_mini_batch_counts() -> None:
    batches = list(rollout().mini_batch_generator(4, 2))  # a batch of fields only is digested as a mapping
    assert [one.digest(index) for index, one in enumerate(batches)] == list(map(StreamDigest.of, range(8), batches))
    amp = {"amp_obs_extractor": lambda obs: obs[..., :1], "amp_ref_obs_extractor": lambda ref: ref[0]}
    storages = [
        rollout(),
        rollout(hidden=1.0),
        rollout(hidden=2.0),
        rollout(amp_cfg=amp | {"amp_obs_extractor": lambda obs: 2 * obs[..., :1]}),
        rollout(amp_cfg=amp),
    ]
    rows = [read(storage)[0] for storage in storages]
    for length in (1, 2, 3):
        rows.append(next(iter(rollout().mini_batch_generator(2, histories={"observations": length}))).digest(0))
    assert len(set(rows)) == len(rows)
    assert {one.windows for one in rows} == {10}
    # The same fields with another mask: trajectories of one length, of which an end is the only difference.
    masked = read(rollout(), recurrent=True)[0]
    batch = next(iter(rollout().recurrent_mini_batch_generator(2)))
    assert dataclasses.replace(batch, masks=np.ones_like(batch.masks)).digest(0) != masked == batch.digest(0)
