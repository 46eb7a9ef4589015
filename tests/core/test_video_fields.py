"""Frames of videos as fields of batches, beside those that decoding each file in turn gives."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mouse_core import BatchSource, DatasetStore, Field, PrefetchBatchifier
from mouse_core.errors import ConfigError, DataError, SchemaError, StateError
from mouse_core.metadata import DatasetMetadata, read_metadata, with_metadata
from mouse_core.mixtures import Mixture
from mouse_core.video import FrameDecoder, decoder_version
from tests.core.video_cases import SIDE, decoded, frames_of, video_rows, write_video

TOP, WRIST = "observation_images_top", "observation_images_wrist"
COUNT = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos of 20 frames."""
    made = tmp_path_factory.mktemp("videos")
    for k in range(3):
        write_video(made / f"{k}.mp4", options={"g": "6"}, count=COUNT, seed=k)
    return made


@pytest.fixture(scope="module")
def truth(folder: Path) -> np.ndarray:
    """Their frames in turn, ``[3, 20, H * W * 3]``."""
    return np.stack([decoded(folder / f"{k}.mp4")[0] for k in range(3)]).reshape(3, COUNT, -1)


@pytest.fixture(scope="module")
def rows(folder: Path) -> pa.Table:
    """An episode a video; the other camera is three frames behind."""
    return video_rows(folder, {TOP: np.arange(COUNT), WRIST: np.roll(np.arange(COUNT), 3)}, videos=3)


def store_of(rows: Any, folder: Path, **options: Any) -> DatasetStore:
    return DatasetStore(image_roots=[folder], **options).from_dataset(rows)


def test_windows_have_the_frames_that_their_rows_name(rows: pa.Table, folder: Path, truth: np.ndarray) -> None:
    source = BatchSource(store_of(rows, folder), 5, 4, seed=3)
    assert source.spec[TOP].image_shape == (*SIDE, 3)
    every = truth.reshape(3 * COUNT, -1)
    for index in range(3):
        batch, at = source[index], source.plan(index).starts[:, None] + np.arange(5)
        np.testing.assert_array_equal(batch[TOP], every[at])
        np.testing.assert_array_equal(batch[WRIST], every[at // COUNT * COUNT + (at % COUNT - 3) % COUNT])


def test_offsets_have_their_frames_and_masks(rows: pa.Table, folder: Path, truth: np.ndarray) -> None:
    windows = {TOP: [-2, 0], WRIST: [0], "action": range(4)}
    source = BatchSource(store_of(rows, folder), windows=windows, batch_size=6, seed=1)
    batch, steps = source[0], source[0]["time"]
    assert batch["action"].shape == (6, 4)
    videos = source.plan(0).starts // COUNT
    mask = batch[f"{TOP}_mask"]
    np.testing.assert_array_equal(mask, np.stack([steps >= 2, np.ones(6, bool)], 1))
    wanted = truth[videos[:, None], np.maximum(steps[:, None] + [-2, 0], 0)]
    np.testing.assert_array_equal(batch[TOP][mask], wanted[mask])
    np.testing.assert_array_equal(batch[WRIST][:, 0], truth[videos, (steps - 3) % COUNT])


def test_threads_views_files_and_pickles_give_the_same(rows: pa.Table, folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    store = store_of(rows, folder)
    options: dict[str, Any] = {"sequence_length": 3, "batch_size": 4, "seed": 5}
    with PrefetchBatchifier(store, **options, num_workers=0) as loader:
        wanted = [loader.next_batch() for _ in range(4)]
    store.save(tmp_path / "saved")
    again = store_of(datasets.load_from_disk(str(tmp_path / "saved")), folder)
    assert again.metadata.videos == store.metadata.videos == read_metadata(rows).videos
    view = store.where(length=(2, None))
    for one, workers in ((store, 2), (again, 1), (view, 0)):
        with PrefetchBatchifier(one, **options, num_workers=workers) as loader:
            for batch in wanted:
                np.testing.assert_equal(loader.next_batch(), batch)
    source = pickle.loads(pickle.dumps(BatchSource(store, **options)))
    np.testing.assert_equal(source[2], wanted[2])
    assert again.snapshot().fingerprint == store.snapshot().fingerprint


def test_frames_are_widened_and_nulls_filled(folder: Path, truth: np.ndarray) -> None:
    frames = [0, None, 7, 7]
    rows = video_rows(folder, {"observation_image": frames}, videos=1, fields=[])
    with pytest.raises(DataError, match=r"obs_image: expected a frame, found null at row 1"):
        BatchSource(store_of(rows, folder), 4, 1)[0]
    filled = Field("obs_image", "observation_image", dtype="int64", image=True, fill=9)
    batch = BatchSource(store_of(rows, folder, fields=[filled]), 4, 1)[0]
    assert batch["obs_image"].dtype == np.int64
    np.testing.assert_array_equal(batch["obs_image"][0, [0, 2, 3]], truth[0, [0, 7, 7]])
    assert (batch["obs_image"][0, 1] == 9).all()


def test_frames_are_cropped_and_resized_as_declared(rows: pa.Table, folder: Path, truth: np.ndarray) -> None:
    av = pytest.importorskip("av")
    every = truth.reshape(-1, *SIDE, 3)
    fields = {
        "part": Field(TOP, image=True, crop=(8, 16, 24, 32)),
        "small": Field(TOP, image=True, shape=(24, 32, 3)),
        "both": Field(TOP, image=True, crop=(0, 0, 32, 32), shape=(16, 16, 3)),
        "grey": Field(TOP, image=True, shape=(*SIDE, 1)),
    }
    found, prints = {}, set()
    for name, field in fields.items():
        source = BatchSource(store_of(rows, folder, fields=[field]), 4, 3, seed=1)
        at = source.plan(1).starts[:, None] + np.arange(4)
        found[name] = source[1][TOP].reshape(-1, *source.spec[TOP].image_shape)
        prints.add(source.fingerprint)
    frames = every[at].reshape(-1, *SIDE, 3)
    np.testing.assert_array_equal(found["part"], frames[:, 8:32, 16:48])
    corner = [np.ascontiguousarray(frame[:32, :32]) for frame in frames]
    wanted = [av.VideoFrame.from_ndarray(one, format="rgb24").reformat(16, 16) for one in corner]
    np.testing.assert_array_equal(found["both"], np.stack([one.to_ndarray(format="rgb24") for one in wanted]))
    small, grey = [], []
    for k in range(3):
        with av.open(str(folder / f"{k}.mp4")) as container:
            for frame in container.decode(video=0):
                small.append(frame.reformat(32, 24, "rgb24").to_ndarray())
                grey.append(frame.to_ndarray(format="gray"))
    np.testing.assert_array_equal(found["small"], np.stack(small)[at.reshape(-1)])
    np.testing.assert_array_equal(found["grey"][..., 0], np.stack(grey)[at.reshape(-1)])
    assert len(prints) == 4
    for crop, message in (((0, 0, 49, 8), r"expected a crop .* inside of 48x64"), ((1, 2), "expected crop as")):
        with pytest.raises((DataError, SchemaError), match=message):
            BatchSource(store_of(rows, folder, fields=[Field(TOP, image=True, crop=crop)]), 1, 1)[0]


def test_datasets_of_their_own_videos_are_mixed(rows: pa.Table, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "2.mp4", tmp_path / "0.mp4")
    other = video_rows(tmp_path, {TOP: np.arange(COUNT), WRIST: np.arange(COUNT)}, videos=1)
    stores = {"a": store_of(rows, folder), "b": store_of(other, tmp_path)}
    with pytest.raises(SchemaError, match=r"same list of files in all parts, found .* in dataset; .* mix the stor"):
        DatasetStore(image_roots=[folder]).from_dataset(rows).from_dataset(other)
    mixed = BatchSource(Mixture(stores), 2, 12, seed=0)
    batch = mixed[0]
    starts = mixed.plan(0).starts
    assert (starts < 3 * COUNT).any()
    assert (starts >= 3 * COUNT).any()
    wanted = np.concatenate([decoded(folder / f"{k}.mp4")[0] for k in (0, 1, 2, 2)]).reshape(4 * COUNT, -1)
    np.testing.assert_array_equal(batch[TOP], wanted[starts[:, None] + [0, 1]])


def test_the_fingerprint_goes_with_the_videos_and_not_with_their_place(
    rows: pa.Table, folder: Path, tmp_path: Path
) -> None:
    found = store_of(rows, folder).snapshot().fingerprint
    shutil.copytree(folder, tmp_path / "copy")
    assert store_of(rows, tmp_path / "copy").snapshot().fingerprint == found
    metadata = read_metadata(rows)
    others = (metadata.videos[1], metadata.videos[0], metadata.videos[2])
    assert store_of(with_metadata(rows, metadata.replace(videos=others)), folder).snapshot().fingerprint != found


def test_a_state_of_another_decoder_is_refused(rows: pa.Table, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(rows, folder)
    with PrefetchBatchifier(store, 2, 4) as loader:
        state = loader.state_dict()
        assert state["decoder"].startswith("libavcodec ")
        monkeypatch.setattr("mouse_core.video.decoder_version", lambda: "libavcodec 1.2.3")
        with pytest.raises(StateError, match=r"decoded by libavcodec 1.2.3, found 'libavcodec .*accept_decoder=True"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, accept_decoder=True)
        assert loader.state_dict() == {**state, "decoder": "libavcodec 1.2.3"}
    with PrefetchBatchifier(store, 2, 4, fields=["action"]) as loader:
        assert "decoder" not in loader.state_dict()


class Negative:
    """A decoder of another kind, which stands for one on a GPU: its pixels are the others turned around."""

    version = "negative 1"

    def __init__(self) -> None:
        self.inner = FrameDecoder()

    def decode(self, videos: Any, video: Any, frame: Any, out: Any, **asked: Any) -> None:
        self.inner.decode(videos, video, frame, out, **asked)
        rows = np.asarray(frame) >= 0
        out[rows] = 255 - out[rows]


def test_a_field_may_have_another_decoder(rows: pa.Table, folder: Path, truth: np.ndarray) -> None:
    fields = [Field(TOP, image=True, decoder=Negative(), shape=(24, 32, 3)), Field(WRIST, image=True)]
    plain = [Field(TOP, image=True, shape=(24, 32, 3)), Field(WRIST, image=True)]
    stores = [store_of(rows, folder, fields=some) for some in (fields, plain)]
    assert [one["decoder"] for one in map(state_of, stores)] == [f"negative 1, {decoder_version()}", decoder_version()]
    sources = [BatchSource(store, 3, 4, seed=3) for store in stores]
    assert sources[0].fingerprint == sources[1].fingerprint
    for source in (sources[0], pickle.loads(pickle.dumps(sources[0]))):
        batches = [source[1], sources[1][1]]
        np.testing.assert_array_equal(batches[0][TOP], 255 - batches[1][TOP])
        np.testing.assert_array_equal(batches[0][WRIST], batches[1][WRIST])
    # A dataset does not say what decodes it.
    assert "decoder" not in read_metadata(rows).replace(fields=fields).to_json()["fields"][0]
    said = read_metadata(rows).replace(fields=plain).to_json()
    said["fields"][0]["decoder"] = "x"
    with pytest.raises(DataError, match="fields: expected attributes among"):
        DatasetMetadata.from_json(said)


def state_of(store: DatasetStore) -> dict[str, Any]:
    with PrefetchBatchifier(store, 2, 4) as loader:
        return dict(loader.state_dict())


def test_videos_outside_of_the_folder_or_others_are_refused(rows: pa.Table, folder: Path, tmp_path: Path) -> None:
    metadata = read_metadata(rows)
    for path in ("../0.mp4", "/etc/passwd", "a\\b", ""):
        with pytest.raises(ConfigError, match="videos: expected paths below"):
            metadata.replace(videos=[(path, "")])
    for wrong in ("x", [("a",)], [(1, "")]):
        with pytest.raises(ConfigError, match="videos: expected"):
            DatasetMetadata(videos=wrong)  # type: ignore[arg-type]
    (tmp_path / "in").mkdir()
    for k in range(3):
        os.symlink(folder / f"{k}.mp4", tmp_path / "in" / f"{k}.mp4")
    with pytest.raises(DataError, match=rf"{TOP}: expected a video file inside .*which leads to"):
        BatchSource(store_of(rows, tmp_path / "in"), 2, 2)
    with pytest.raises(DataError, match=r"expected a readable video, found path '0.mp4', but no such file"):
        BatchSource(store_of(rows, tmp_path), 2, 2)
    for k in range(3):
        shutil.copy(folder / f"{2 - k}.mp4", tmp_path / f"{k}.mp4")
    with pytest.raises(DataError, match=r"0\.mp4: expected a video with the digest"):
        BatchSource(store_of(rows, tmp_path), 2, 2)


def test_a_video_that_was_encoded_anew_is_another(rows: pa.Table, folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(folder, tmp_path / "copy"))
    source = BatchSource(store_of(rows, place), 2, 2, seed=1)
    source[0]
    assert (place / "1.mp4.index.arrow").exists()
    for k in range(3):
        write_video(place / f"{k}.mp4", options={"g": "6", "crf": "40"}, count=COUNT, seed=k)
    with pytest.raises(DataError, match=r"\.mp4, frame \d+: expected the bytes that were indexed"):
        source[1]
    with pytest.raises(DataError, match=r"0\.mp4: expected a video with the digest \w+, found \w+"):
        BatchSource(store_of(rows, place), 2, 2)


def test_numbers_that_name_nothing_are_refused(rows: pa.Table, folder: Path) -> None:
    for frames, message in (
        ([0, 20], r"0\.mp4: expected frames 0 to 19, found frame 20"),
        ([0, -1], r"expected indices of 0 or more, found frame -1 of video 0 at row 1"),
    ):
        with pytest.raises(DataError, match=message):
            BatchSource(store_of(video_rows(folder, {TOP: frames}, videos=1), folder), 2, 1)[0]
    column = frames_of([0, 3], [0, 0])
    made = video_rows(folder, {TOP: [0, 1]}, videos=1)
    made = made.set_column(made.schema.get_field_index(TOP), TOP, column)
    with pytest.raises(DataError, match=r"expected a video index from 0 to 0, as listed in the dataset, found 3"):
        BatchSource(store_of(made, folder), 2, 1)[0]
    with pytest.raises(DataError, match=r"expected a list of videos in the metadata \(DatasetMetadata\(videos="):
        BatchSource(store_of(with_metadata(made, DatasetMetadata(fields=read_metadata(made).fields)), folder), 2, 1)
    with pytest.raises(SchemaError, match=r"expected numbers or lists of numbers, found video"):
        BatchSource(store_of(made, folder, fields=[Field("x", TOP)]), 2, 1)


def test_a_newer_list_is_kept_by_releases_that_know_it(rows: pa.Table) -> None:
    metadata = read_metadata(rows)
    assert DatasetMetadata.from_json(metadata.to_json()) == metadata
    assert metadata.replace(videos=()).to_json()["version"] == 1
