"""What a dataset says of itself arrives wherever rows do: in stores, files, other formats, the command line."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mouse_core import BatchSource, DataError, DatasetStore, Field, MouseError, SchemaError, cli, formats
from mouse_core.errors import AlignmentWarning
from mouse_core.formats.converting import convert
from mouse_core.formats.rlds import write_rlds
from mouse_core.formats.ted import write_ted
from mouse_core.hub import push_to_hub
from mouse_core.inspect import inspect
from mouse_core.metadata import DatasetMetadata, read_metadata, with_metadata
from mouse_core.replay import ReplayBuffer

OUTGOING = DatasetMetadata("outgoing", ["Hopper-v5"], {3: "hop"})


def columns(rows: int = 40, *, length: int = 20, reward_at_start: float = 0.0, **more: Any) -> dict[str, Any]:
    step = np.arange(rows) % length
    return {
        "observation": np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32),
        "action": np.arange(rows) % 4,
        "reward": np.where(step == 0, reward_at_start, 1.0).astype(np.float32),
        "done": (step == length - 1).astype(np.int64),
        "episode_step": step,
    } | more


def table(**options: Any) -> pa.Table:
    made = columns(**options)
    return pa.table(made | {"observation": list(made["observation"])})


def outgoing(**options: Any) -> datasets.Dataset:
    store = DatasetStore(alignment="outgoing", **options)
    store.extend(columns(reward_at_start=1.0))
    return store.to_dataset()


def refused(rows: Any) -> None:
    store = DatasetStore()
    with pytest.raises(SchemaError, match="expected rows of alignment 'arrived', found 'outgoing' in"):
        store.from_dataset(rows)
    assert len(store) == 0


def parquet(path: Path, cache: Path) -> datasets.Dataset:
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(cache))


@pytest.mark.parametrize("target", ["rows", "rows.parquet", "parts"])
def test_an_alignment_survives_convert_and_what_datasets_does(target: str, tmp_path: Path) -> None:
    outgoing().save_to_disk(str(tmp_path / "saved"))
    arguments = ["--to", "parquet"] if target == "parts" else []
    assert cli.main(["convert", str(tmp_path / "saved"), str(tmp_path / target), *arguments]) == 0
    read = formats.open(tmp_path / target)
    assert (read.alignment, read.metadata.alignment) == ("outgoing", "outgoing")
    path = tmp_path / target if target != "parts" else next((tmp_path / target).glob("*.parquet"))
    loaded = datasets.load_from_disk(str(path)) if target == "rows" else parquet(path, tmp_path / "cache")
    for rows in (loaded, loaded.map(lambda row: {"reward": 2.0}).select(range(5)), loaded.data.table):
        refused(rows)
    refused({"train": loaded, "test": loaded})
    refused(read.to_table())
    with pytest.raises(SchemaError, match="expected rows of alignment 'arrived'"):
        read.to_store(alignment="arrived")
    assert read.to_store().alignment == "outgoing"
    with pytest.raises(SchemaError, match="expected rows of alignment 'outgoing', found 'arrived'"):
        DatasetStore(alignment="outgoing").from_dataset(with_metadata(loaded, DatasetMetadata("arrived")))


def test_a_store_takes_over_what_it_was_not_told(tmp_path: Path) -> None:
    store = DatasetStore(5, 7, fields=[Field("log_prob", dtype="float32", shape=()), Field("action", dtype="int16")])
    store.extend(columns(log_prob=np.arange(40) / 8))
    stated = store.metadata.replace(environments=["Hopper-v5"], tasks={3: "hop"})
    with_metadata(store.to_dataset(), stated).to_parquet(tmp_path / "rows.parquet")
    loaded = parquet(tmp_path / "rows.parquet", tmp_path / "cache")
    again = DatasetStore().from_dataset(loaded)
    assert again.metadata == read_metadata(loaded) == stated
    assert BatchSource(again, 2, 4).spec == BatchSource(store, 2, 4).spec
    assert BatchSource(again, 2, 4)[0]["obs_continuous"].shape == (4, 2, 7)
    # What the caller says goes, where both can be true.
    wider = DatasetStore(9, fields=[Field("log_prob", dtype="float64", shape=())]).from_dataset(loaded)
    spec = BatchSource(wider, 2, 4).spec
    assert (spec["log_prob"].dtype, wider.metadata.max_action_dim) == (np.dtype("float64"), 9)
    for options, message in (
        ({"max_action_dim": 4}, r"max_action_dim: expected at least 5, as dataset \(Hopper-v5\) states, found 4"),
        ({"fields": [Field("log_prob", column="reward")]}, "'log_prob': expected column 'reward', found 'log_prob'"),
        ({"fields": [Field("log_prob", shape=(2,))]}, r"field 'log_prob': expected shape \(2,\), found \(\)"),
    ):
        empty = DatasetStore(**options)  # type: ignore[arg-type]
        with pytest.raises(SchemaError, match=message):
            empty.from_dataset(loaded)
        assert (len(empty), empty.metadata.environments, empty.columns) == (0, (), {})


def test_datasets_that_contradict_each_other(tmp_path: Path) -> None:
    rows = table()
    one = with_metadata(rows, DatasetMetadata(tasks={0: "pick"}, environments=["A"], max_action_dim=4))
    for other, message in (
        (DatasetMetadata(tasks={0: "place"}), r"task 0.*found 'pick' in the rows before \(A\) and 'place' in dataset"),
        (DatasetMetadata(max_action_dim=6), r"one value, found 4 in the rows before \(A\) and 6 in dataset"),
    ):
        store = DatasetStore().from_dataset(one)
        with pytest.raises(SchemaError, match=message):
            store.from_dataset(with_metadata(rows, other))
        with pytest.raises(SchemaError, match=r"in split 'a' \(A\) and .* in split 'b'"):
            DatasetStore().from_dataset({"a": one, "b": with_metadata(rows, other)})
        assert len(store) == 40
        assert store.metadata == DatasetMetadata(tasks={0: "pick"}, environments=["A"], max_action_dim=4)
    # Steps of several environments may stand in one store.
    other = with_metadata(rows, DatasetMetadata(tasks={1: "wait"}, environments=["B"]))
    store = DatasetStore().from_dataset(one).from_dataset(other)
    assert store.metadata == DatasetMetadata(tasks={0: "pick", 1: "wait"}, environments=["A", "B"], max_action_dim=4)
    exported = store.to_dataset()
    assert len(exported) == 80
    assert read_metadata(exported) == store.metadata


def test_what_is_taken_for_granted_is_not_stated() -> None:
    arrived, nothing = DatasetMetadata("arrived"), DatasetMetadata()
    silent = datasets.Dataset(table())
    store = DatasetStore().from_dataset(silent)
    assert store.metadata == read_metadata(store.to_dataset()) == DatasetStore().metadata == nothing
    assert DatasetStore(alignment="arrived").from_dataset(silent).metadata == arrived
    said = DatasetStore().from_dataset(with_metadata(silent, arrived))
    assert said.metadata == arrived
    assert said.from_dataset(silent).metadata == nothing
    for metadata in (nothing, arrived):
        appended = DatasetStore()
        appended.describe(metadata)
        appended.extend(columns())
        assert appended.metadata == metadata


def test_what_nobody_said_of_appended_rows_stays_unsaid(tmp_path: Path) -> None:
    for name, told in (("silent", {}), ("told", {"alignment": "arrived"})):
        stated = DatasetMetadata("arrived" if told else None)
        with DatasetStore.open(tmp_path / name, "a", **told) as store:
            store.extend(columns())
            store.append({column: values[0] for column, values in columns().items()})
            store.save(tmp_path / f"{name} saved")
        with DatasetStore.open(tmp_path / name, "a") as store:
            store.extend(columns())
            assert store.metadata == stated
        assert DatasetStore.open(tmp_path / name).metadata == stated
        assert read_metadata(datasets.load_from_disk(str(tmp_path / f"{name} saved"))) == stated
    assert DatasetStore.open(tmp_path / "silent", alignment="outgoing").metadata == DatasetMetadata("outgoing")
    with pytest.raises(SchemaError, match="expected rows of alignment 'outgoing', found 'arrived'"):
        DatasetStore.open(tmp_path / "told", alignment="outgoing")


@pytest.mark.parametrize("by", ["episode_step", "done"])
def test_rewards_where_episodes_begin_are_a_warning(by: str, tmp_path: Path) -> None:
    dropped = ["episode_step"] if by == "done" else []
    wrong, right = (table(reward_at_start=value).drop_columns(dropped) for value in (1.0, 0.0))
    seen = "1 of the 1" if by == "done" else "2 of the 2"
    message = f"dataset: the rewards of first rows contradict the alignment .* not 0 in {seen} rows"
    appended = columns(reward_at_start=1.0)
    appended = {name: values for name, values in appended.items() if name not in dropped}

    def extend(store: DatasetStore) -> None:
        store.extend(appended)
        store.snapshot()
        store.extend(appended)

    def append(store: DatasetStore) -> None:
        for row in range(40):
            store.append({name: values[row] for name, values in appended.items()})
        store.snapshot()

    of_appended = message.replace("dataset", "(store|the rows that)[^:]*")
    for kind in (extend, append):
        for store in (DatasetStore(), DatasetStore.open(tmp_path / kind.__name__, "a")):
            with pytest.warns(AlignmentWarning, match=of_appended) as caught:
                kind(store)
            assert [one.filename for one in caught] == [__file__]
            store.close()
    for rows in (wrong, datasets.Dataset(wrong), datasets.Dataset(wrong).select([0, 20, 1, 21])):
        if by == "done" and rows.num_rows == 4:
            continue  # nothing tells where episodes begin among rows in another order
        with pytest.warns(AlignmentWarning, match=message) as caught:
            store = DatasetStore().from_dataset(rows)
        assert caught[0].filename == __file__
        assert len(store) == rows.num_rows
    pq.write_table(wrong, tmp_path / "wrong.parquet")
    for write in (convert, formats.RowStream.save):
        with pytest.warns(AlignmentWarning, match="wrong.parquet: the rewards of first rows"):
            write(formats.open(tmp_path / "wrong.parquet"), tmp_path / write.__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DatasetStore().from_dataset(right)
        DatasetStore(alignment="outgoing").from_dataset(wrong)
        DatasetStore().from_dataset(wrong.slice(0, 0))
        DatasetStore().from_dataset(wrong.slice(3, 10))
        for alignment, at_start in (("outgoing", 1.0), ("arrived", 0.0)):
            store = DatasetStore(alignment=alignment)  # type: ignore[arg-type]
            store.extend(columns(reward_at_start=at_start))
            store.snapshot()
        pq.write_table(right, tmp_path / "right.parquet")
        convert(formats.open(tmp_path / "right.parquet"), tmp_path / "fine")
        formats.open(tmp_path / "right.parquet").save(tmp_path / "fine too")
        convert(formats.open(tmp_path / "wrong.parquet", alignment="outgoing"), tmp_path / "said")


def ended(names: Sequence[str], *, right: bool, rows: int = 5000) -> dict[str, Any]:
    """Rows that end an episode every 20, truncated in row 4999 alone, and flags that say so."""
    cut = np.arange(rows) == 4999
    over = (np.arange(rows) % 20 == 19) & ~cut
    return columns(rows) | {"done": over + (2 if right else 1) * cut, names[0]: over, names[1]: cut}


@pytest.mark.parametrize("names", [("terminated", "truncated"), ("terminals", "timeouts")])
@pytest.mark.parametrize("right", [False, True])
def test_done_codes_that_flags_contradict_are_refused(names: tuple[str, str], right: bool, tmp_path: Path) -> None:
    rows = ended(names, right=right)
    table = pa.table({name: values if values.ndim == 1 else values.tolist() for name, values in rows.items()})
    pq.write_table(table, tmp_path / "rows.parquet")
    last = [{name: values[row] for name, values in rows.items()} for row in range(4990, 5000)]
    store = DatasetStore()
    store.extend({name: values[:4990] for name, values in rows.items()})
    for take in (
        lambda: DatasetStore().extend(rows),
        lambda: [store.append(row) for row in last],
        lambda: DatasetStore().from_dataset(table),
        lambda: DatasetStore().from_dataset(datasets.Dataset(table)),
        lambda: formats.open(tmp_path / "rows.parquet").to_table(),
        lambda: convert(formats.open(tmp_path / "rows.parquet"), tmp_path / "made"),
    ):
        if right:
            take()
        else:
            said = rf"expected 2 where '{names[0]}' is False and '{names[1]}' True, found 1 at row 4999"
            with pytest.raises(DataError, match=f"column 'done': {said}"):
                take()
    assert len(store) == (5000 if right else 4999)
    found = [finding.code for finding in inspect(formats.open(tmp_path / "rows.parquet")).findings]
    assert ("done-against-flags" in found) == (not right)


def test_flags_that_say_nothing_contradict_nothing() -> None:
    store = DatasetStore()
    rows = columns(4) | {"done": np.array([0, 1, 2, 1]), "terminated": [0, 1, None, 1], "truncated": [0, 1, True, None]}
    store.extend(rows)
    for row in range(4):
        store.append({name: values[row] for name, values in rows.items()})
    assert len(store) == 8
    other = DatasetStore()
    other.extend(columns(4) | {"done": np.array([0, 1, 2, 1]), "truncated": [False, True, True, True]})


def test_convert_keeps_what_is_assumed_and_writes_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(table(reward_at_start=1.0), tmp_path / "rows.parquet")
    assert cli.main(["convert", str(tmp_path / "rows.parquet"), str(tmp_path / "assumed")]) == 0
    out, err = capsys.readouterr()
    assert "alignment: arrived (assumed; neither the source" in out
    assert err.count("mouse convert: warning: ") == 1
    assert "contradict the alignment 'arrived'" in err
    assert formats.open(tmp_path / "assumed").metadata == DatasetMetadata()
    assert cli.main(["inspect", str(tmp_path / "assumed")]) == 0
    assert "assumed, because the metadata do not state it" in capsys.readouterr().out
    arguments = ["convert", str(tmp_path / "rows.parquet"), str(tmp_path / "said"), "--alignment", "outgoing"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().err == ""
    assert formats.open(tmp_path / "said").metadata == DatasetMetadata("outgoing")
    refused(datasets.load_from_disk(str(tmp_path / "said")))
    assert cli.main(["inspect", str(tmp_path / "rows.parquet"), "--alignment", "outgoing"]) == 0
    assert "alignment: outgoing" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "said"), "--alignment", "arrived"]) == 2
    said = "alignment: expected 'outgoing', as declared in the data's metadata, found 'arrived'"
    assert said in capsys.readouterr().err


def test_inspect_shows_what_the_data_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = DatasetMetadata("arrived", ["Hopper-v5"], {3: "hop", 9: "<b>rest</b>"}, [Field("log_prob")], 4)
    pq.write_table(with_metadata(table(), metadata), tmp_path / "rows.parquet")
    assert cli.main(["inspect", str(tmp_path / "rows.parquet")]) == 0
    out = capsys.readouterr().out
    lines = ["environment: Hopper-v5", "tasks: 3: hop; 9: <b>rest</b>", "fields of its own: log_prob"]
    assert all(line in out for line in [*lines, "max_action_dim: 4"])
    assert cli.main(["inspect", str(tmp_path / "rows.parquet"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == metadata.to_json()


def test_files_of_one_folder_say_one_thing(tmp_path: Path) -> None:
    one, other = with_metadata(table(), DatasetMetadata("outgoing")), table()
    pq.write_table(one, tmp_path / "a.parquet")
    pq.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"found .outgoing. in .*a\.parquet and none, .* in .*b\.parquet"):
        formats.open(tmp_path)
    pq.write_table(with_metadata(table(), DatasetMetadata("arrived")), tmp_path / "b.parquet")
    with pytest.raises(SchemaError, match=r"'outgoing' in .*a\.parquet and 'arrived' in .*b\.parquet"):
        formats.open(tmp_path)
    pq.write_table(with_metadata(table(), DatasetMetadata("arrived")), tmp_path / "a.parquet")
    assert formats.open(tmp_path).metadata == DatasetMetadata("arrived")
    pq.write_table(table(), tmp_path / "b.parquet")
    assert formats.open(tmp_path).metadata == DatasetMetadata()


@pytest.mark.parametrize("how", ["write", "convert", "parquet"])
def test_all_of_it_survives_files(how: str, tmp_path: Path) -> None:
    pq.write_table(with_metadata(table(), OUTGOING), tmp_path / "rows.parquet")
    stream = formats.open(tmp_path / "rows.parquet")
    assert stream.metadata == OUTGOING
    target = tmp_path / ("out.parquet" if how == "parquet" else "out")
    if how == "write":
        stream.save(target)
    else:
        convert(stream, target)
    assert formats.open(target).metadata == OUTGOING
    loaded = parquet(target, tmp_path / "cache") if how == "parquet" else datasets.load_from_disk(str(target))
    assert read_metadata(loaded) == OUTGOING
    assert DatasetStore.open(target).metadata == OUTGOING


def test_a_stream_has_the_alignment_of_its_metadata() -> None:
    stream = formats.RowStream("x", "rows", table().schema, lambda: iter(table().to_batches()))
    assert stream.metadata == DatasetMetadata()
    said = stream.replace(metadata=DatasetMetadata("outgoing"))
    assert (stream.alignment, said.alignment) == ("arrived", "outgoing")
    assert read_metadata(said.to_table()) == DatasetMetadata("outgoing")


def test_writers_of_other_formats_refuse_rows_of_the_other_alignment(tmp_path: Path) -> None:
    rows = outgoing()
    for given in (rows, rows.data.table, DatasetStore(alignment="outgoing").from_dataset(rows)):
        with pytest.raises(SchemaError, match="expected rows of alignment 'arrived', found 'outgoing'"):
            list(write_rlds(given))
    rows.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(SchemaError, match="expected rows of alignment 'arrived', found 'outgoing'"):
        write_ted(formats.open(tmp_path / "saved"), tmp_path / "ted")


def test_buffers_over_datasets_have_their_alignment() -> None:
    assert ReplayBuffer(outgoing()).storage.alignment == "outgoing"
    assert ReplayBuffer({"train": outgoing()}).storage.alignment == "outgoing"
    assert ReplayBuffer(datasets.Dataset(table())).storage.alignment == "arrived"
    with pytest.raises(MouseError, match="found"):
        ReplayBuffer(42)


def test_a_push_says_only_what_is_known() -> None:
    silent = DatasetStore().from_dataset(datasets.Dataset(table()))
    said = DatasetStore().from_dataset(with_metadata(table(), OUTGOING.replace(alignment="arrived")))
    for stores, wanted in ((silent, "assumed"), (said, "in the rows"), ([said, silent], "assumed")):
        card = push_to_hub({"train": stores}, repo_id="you/rows", dry_run=True, progress=False).readme
        assert f'alignment "arrived", {wanted}' in card
        assert ("Hopper-v5" in card) == (stores is not silent)
