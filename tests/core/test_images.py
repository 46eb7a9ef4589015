"""Images in every form they are recorded in, and those that are refused."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mouse_core import BatchSource, DataError, DatasetStore, Field, PrefetchBatchifier, SchemaError
from mouse_core.dtypes import RowError
from mouse_core.images import decode_image, encode_png
from mouse_core.images.pixels import fill_images

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
COLOUR = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
PIXELS = {
    "grey": GREY,
    "colour": COLOUR,
    "grey with alpha": COLOUR[:, :, :2],
    "colour with alpha": np.concatenate([COLOUR, COLOUR[:, :, :1]], axis=2),
}
MODES = {"grey": "L", "colour": "RGB", "grey with alpha": "LA", "colour with alpha": "RGBA"}


def row(image: Any, **changes: Any) -> dict[str, Any]:
    return {"action": 0, "reward": 0.5, "done": 0, "observation_image": image} | changes


def png(pixels: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG", **options)
    return stream.getvalue()


def palette_image() -> Image.Image:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8))
    image = image.convert("P")
    image.putdata([0, 1, 2, 1])
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90] + [0] * 759)
    return image


PALETTE_PIXELS = [10, 20, 30, 40, 50, 60, 70, 80, 90, 40, 50, 60]


def table_of(images: Any) -> pa.Table:
    n = len(images)
    return pa.table({"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "observation_image": images})


def dataset_of(images: list[Any], feature: Any) -> datasets.Dataset:
    plain = {"action": datasets.Value("int64"), "reward": datasets.Value("float64"), "done": datasets.Value("int64")}
    features = datasets.Features({**plain, "observation_image": feature})
    return datasets.Dataset.from_list([row(image) for image in images], features=features)


def images_of(store: DatasetStore) -> np.ndarray:
    return BatchSource(store, len(store), 1, sampling="last")[0]["obs_image"][0]


# Each way with two kinds of pixels, appended row by row and together.
WAYS = ("PIL", "bytes", "bytes and path", "path", "array", "nested lists", "array of int64")
RECORDED = [([*PIXELS][(number + many) % 4], way, many) for number, way in enumerate(WAYS) for many in (False, True)]


@pytest.mark.parametrize(("kind", "way", "many"), RECORDED)
def test_what_is_recorded_is_read(kind: str, way: str, many: bool, tmp_path: Path) -> None:
    frames = [PIXELS[kind], PIXELS[kind][::-1], 255 - PIXELS[kind]]

    def recorded(number: int, pixels: np.ndarray) -> Any:
        path, pixels = tmp_path / f"{number}.png", np.ascontiguousarray(pixels)
        path.write_bytes(png(pixels))
        return {
            "PIL": Image.fromarray(pixels),
            "bytes": {"bytes": path.read_bytes(), "path": None},
            "bytes and path": {"bytes": path.read_bytes(), "path": "somewhere.png"},
            "path": {"bytes": None, "path": str(path)},
            "array": pixels,
            "nested lists": pixels.tolist(),
            "array of int64": pixels.astype(np.int64),
        }[way]

    rows = [row(recorded(number, pixels)) for number, pixels in enumerate(frames)]
    store = DatasetStore(image_roots=[tmp_path])
    if many:
        store.extend({name: [one[name] for one in rows] for name in rows[0]})
    else:
        for one in rows:
            store.append(one)
    found = images_of(store)
    assert found.dtype == np.int64
    assert found.tolist() == [pixels.reshape(-1).tolist() for pixels in frames]
    spec, shape = BatchSource(store, 2, 2).spec["obs_image"], (*frames[0].shape[:2], len(MODES[kind]))
    assert (spec.image_shape, spec.shape, spec.stored_dtype) == (shape, (frames[0].size,), np.uint8)
    narrow = BatchSource(store, 3, 1, sampling="last", dtypes={"obs_image": "uint8"})[0]["obs_image"]
    assert narrow.dtype == np.uint8
    assert narrow[0].tolist() == found.tolist()
    # And back again, through files.
    store.to_dataset().save_to_disk(str(tmp_path / "data"))
    again = DatasetStore(image_roots=[tmp_path]).from_dataset(datasets.load_from_disk(str(tmp_path / "data")))
    assert images_of(again).tolist() == found.tolist()
    assert BatchSource(again, 2, 2).spec["obs_image"].image_shape == shape


@pytest.mark.parametrize("kind", PIXELS)
def test_the_image_feature_of_datasets(kind: str) -> None:
    frames = [PIXELS[kind], 255 - PIXELS[kind], PIXELS[kind] // 2]
    dataset = dataset_of([*map(Image.fromarray, frames)], datasets.Image())
    for made in (dataset, dataset.shuffle(seed=1), datasets.concatenate_datasets([dataset])):
        store = DatasetStore().from_dataset(made)
        wanted = [np.asarray(one["observation_image"]).reshape(-1).tolist() for one in made]
        assert images_of(store).tolist() == wanted
        encoded = store.encode_hf_rows(made[:])
        assert encoded["obs_image"].tolist() == wanted
    store.append(row(Image.fromarray(frames[1])))
    store.append(row(frames[2]))
    assert images_of(store).tolist()[-2:] == [frames[1].reshape(-1).tolist(), frames[2].reshape(-1).tolist()]
    assert isinstance(store.to_dataset()[4]["observation_image"], Image.Image)


@pytest.mark.parametrize(("kind", "dtype"), [("grey", "uint8"), ("colour", "int64"), ("colour", "int32")])
def test_arrays_of_datasets(kind: str, dtype: str) -> None:
    pixels = PIXELS[kind]
    feature = datasets.Array2D(pixels.shape, dtype) if pixels.ndim == 2 else datasets.Array3D(pixels.shape, dtype)
    frames = [pixels, 255 - pixels, pixels // 2, pixels // 3]
    dataset = dataset_of([frame.astype(dtype) for frame in frames], feature)
    for made, wanted in ((dataset, frames), (dataset.select([3, 0, 2]), [frames[k] for k in (3, 0, 2)])):
        store = DatasetStore().from_dataset(made)
        assert images_of(store).tolist() == [frame.reshape(-1).tolist() for frame in wanted]
        shape = pixels.shape if pixels.ndim == 3 else (*pixels.shape, 1)
        assert BatchSource(store, 1, 1).spec["obs_image"].image_shape == shape
    store.append(row(frames[0].astype(dtype)))
    assert images_of(store)[-1].tolist() == frames[0].reshape(-1).tolist()


def test_palette_images_become_colours_and_bilevel_ones_grey() -> None:
    store = DatasetStore()
    store.append(row(palette_image()))
    assert images_of(store).tolist() == [PALETTE_PIXELS]
    store.append(row(np.array(PALETTE_PIXELS, np.uint8).reshape(2, 2, 3)))
    assert images_of(store).tolist() == [PALETTE_PIXELS] * 2
    stream = io.BytesIO()
    palette_image().save(stream, format="PNG")
    store.append(row({"bytes": stream.getvalue(), "path": None}))
    assert images_of(store).tolist() == [PALETTE_PIXELS] * 3
    bilevel = DatasetStore()
    bilevel.append(row(Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")))
    assert images_of(bilevel).tolist() == [[0, 255, 255, 0]]


def test_pil_images_after_arrays_are_images() -> None:
    store = DatasetStore()
    store.append(row(np.zeros((2, 2), np.uint8)))
    store.append(row(Image.fromarray(np.array([[1, 2], [3, 4]], np.uint8))))
    store.append(row(Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1")))
    with pytest.raises(DataError, match="observation_image"):
        store.append(row(palette_image()))
    assert images_of(store).tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [0, 255, 255, 0]]


def test_jpeg_bytes_are_decoded_as_pillow_does_and_a_binary_column_holds_images() -> None:
    stream = io.BytesIO()
    Image.fromarray(COLOUR).save(stream, format="JPEG")
    wanted = np.asarray(Image.open(io.BytesIO(stream.getvalue()))).reshape(-1).tolist()
    store = DatasetStore()
    store.append(row({"bytes": stream.getvalue(), "path": None}))
    assert images_of(store).tolist() == [wanted]
    assert store.to_dataset().data.table["observation_image"][0].as_py()["bytes"] == stream.getvalue()
    assert images_of(DatasetStore().from_dataset(table_of([stream.getvalue()] * 2))).tolist() == [wanted] * 2


@given(height=st.integers(1, 6), width=st.integers(1, 6), channels=st.integers(1, 4), seed=st.integers(0, 99))
def test_encoding_loses_nothing(height: int, width: int, channels: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    assert np.array_equal(decode_image(encode_png(pixels)), pixels)
    assert np.array_equal(decode_image(pixels.astype(np.int32)), pixels)
    assert np.array_equal(decode_image({"bytes": encode_png(pixels), "path": None}), pixels)


def test_an_image_field_of_ones_own() -> None:
    fields = [Field("wrist", column="observation.images.wrist", dtype="uint8", image=True)]
    store = DatasetStore(fields=fields)
    one = {"action": 0, "reward": 0.0, "done": 0, "observation.images.wrist": Image.fromarray(COLOUR)}
    store.extend([one, one])
    source = BatchSource(store, 2, 1)
    assert source.spec["wrist"].image_shape == (2, 4, 3)
    assert source[0]["wrist"].dtype == np.uint8
    assert source[0]["wrist"].tolist() == [[COLOUR.reshape(-1).tolist()] * 2]


SIXTEEN_BIT = Image.fromarray(np.array([[0, 65_535]], np.uint16))
REFUSED: dict[str, tuple[Any, str]] = {
    "16 bits": (SIXTEEN_BIT, r"expected pixels 0\.\.255, found 0\.\.65535|shape"),
    "16 bits as bytes": ({"bytes": png(np.array([[0, 65_535]], np.uint16))}, r"found 0\.\.65535|shape"),
    "CMYK": (Image.new("CMYK", (4, 3)), "mode 'CMYK'"),
    "floats": (np.zeros((2, 2), np.float32), "expected an image as integers"),
    "300": (np.full((2, 2), 300), r"pixels 0\.\.255, found"),
    "negative": (np.full((2, 2), -1), r"pixels 0\.\.255, found"),
    "one dimension": (np.zeros(4, np.uint8), "expected"),
    "five channels": (np.zeros((2, 2, 5), np.uint8), "expected"),
    "four dimensions": (np.zeros((1, 2, 2, 3), np.uint8), "expected"),
    "bytes that are none": ({"bytes": b"no image", "path": None}, "expected a readable image, found 8 bytes"),
    "no bytes": ({"bytes": b"", "path": None}, "expected a readable image"),
    "neither bytes nor path": ({"bytes": None, "path": None}, "expected"),
    "no such file": ({"bytes": None, "path": "/nowhere/at/all.png"}, "expected an image file inside.*nowhere"),
    "a number": (5, "expected"),
    "text": ("a cat", "expected"),
    "null": (None, "expected"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first row", "later row"])
@pytest.mark.parametrize("case", REFUSED)
def test_append_refuses_what_is_no_image(case: str, first: bool) -> None:
    value, pattern = REFUSED[case]
    store = DatasetStore()
    if not first:
        store.append(row(Image.fromarray(GREY)))
    at = len(store)
    with pytest.raises(DataError, match=rf"column 'observation_image': .*{pattern}") as caught:
        store.append(row(value))
    assert f"at row {at}" in str(caught.value)
    with pytest.raises(DataError, match="observation_image"):
        store.extend({name: [item] * 2 for name, item in row(value).items()})
    assert len(store) == at
    store.append(row(Image.fromarray(GREY)))
    assert images_of(store).tolist() == [GREY.reshape(-1).tolist()] * (at + 1)


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (png(np.zeros((5, 4), np.uint8)), r"expected shape \[3, 4, 1\], found \[5, 4, 1\]"),
        (png(np.zeros((3, 4, 3), np.uint8)), r"expected shape \[3, 4, 1\], found \[3, 4, 3\]"),
        (png(np.full((3, 4), 256, np.uint16)), r"expected pixels 0\.\.255, found 256\.\.256"),
        (b"broken", "expected a readable image"),
        (png(GREY)[:45], "expected a readable image"),
        (None, "expected a value, found null"),
    ],
    ids=["size", "mode", "16 bits", "broken", "cut off", "null"],
)
def test_stored_images_that_are_bad_name_their_row(value: bytes | None, pattern: str) -> None:
    images: list[Any] = [{"bytes": png(GREY), "path": None}] * 6
    images[4] = value and {"bytes": value, "path": None}
    table = table_of(pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    source = BatchSource(DatasetStore().from_dataset(table), 1, 1, sampling="sequential")
    for index in range(6):
        if source.plan(index).starts.tolist() == [4]:
            with pytest.raises(DataError, match=rf"obs_image: .*{pattern}.* at row 4 \(column 'observation_image'\)"):
                source[index]
        else:
            assert source[index]["obs_image"].tolist() == [[GREY.reshape(-1).tolist()]]


def test_stored_arrays_of_differing_sizes_name_their_row() -> None:
    for bad, message in (([[1, 2], [3, 4]], "expected .*found "), ([[300] * 4] * 3, r"expected .*0\.\.255, found 300")):
        images = [GREY.tolist()] * 3 + [bad] + [GREY.tolist()]
        source = BatchSource(DatasetStore().from_dataset(table_of(images)), 5, 1, sampling="last")
        with pytest.raises(DataError, match=rf"obs_image: {message}.* at row 3 "):
            source[0]
    store = DatasetStore().from_dataset(table_of([{"bytes": b"none", "path": None}] * 3))
    with pytest.raises(DataError, match=r"obs_image: expected a readable image.* at row 0 .*'observation_image'"):
        BatchSource(store, 1, 1)


@pytest.mark.parametrize("size", [(5, 4), (3, 4, 3)])
def test_append_refuses_another_size_or_mode(size: tuple[int, ...]) -> None:
    for first in (GREY, Image.fromarray(GREY)):
        for form in (np.asarray, Image.fromarray):
            store = DatasetStore()
            store.append(row(first))
            with pytest.raises(DataError, match=r"column 'observation_image': expected .*shape .*found .* at row 1"):
                store.append(row(form(np.zeros(size, np.uint8))))
            store.append(row(first))
            assert images_of(store).tolist() == [GREY.reshape(-1).tolist()] * 2


def test_columns_that_cannot_be_images() -> None:
    for values in ([[1.0, 2.0]] * 2, [[[[[1]]]]] * 2, [3, 4]):
        with pytest.raises(SchemaError, match="column 'observation_image': expected images"):
            DatasetStore().from_dataset(table_of(values))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_tensors_are_arrays(framework: str, dtype: str) -> None:
    if framework == "torch":
        make = pytest.importorskip("torch").tensor
        with pytest.raises(DataError, match=r"column 'observation_image': .*found Tensor: .*requires grad"):
            DatasetStore().append(row(make([[1.0]], requires_grad=True)))
    else:
        make = pytest.importorskip("jax.numpy").asarray
    for pixels in (GREY, COLOUR):
        image = make(pixels.astype(dtype))
        assert np.array_equal(decode_image(image), pixels.reshape(*pixels.shape[:2], -1))
        store = DatasetStore()
        store.append(row(image) | {"seen": make(np.arange(3, dtype=np.float32))})
        store.append(row(pixels.tolist()) | {"seen": np.ones(3, np.float32)})
        columns = {"seen": make(np.ones((2, 3), np.float32)), "observation_image": make(np.stack([pixels] * 2))}
        store.extend({name: columns.get(name, [value] * 2) for name, value in (row(None) | columns).items()})
        assert images_of(store).tolist() == [pixels.ravel().tolist()] * 4
        encoded = DatasetStore()
        encoded.append(row(Image.fromarray(pixels)))
        encoded.append(row(image))
        assert images_of(encoded).tolist() == [pixels.ravel().tolist()] * 2


@pytest.mark.parametrize("many", [False, True])
def test_pixels_of_another_dtype_are_converted_or_refused(many: bool) -> None:
    store = DatasetStore(fields=[Field("depth", image=True, dtype="uint16")])
    first = {"action": 0, "reward": 0.5, "done": 0, "depth": np.full((2, 3), 40_000, np.uint16)}
    store.append(first)

    def add(pixels: Any) -> None:
        other = first | {"depth": pixels}
        store.extend([other]) if many else store.append(other)

    add(np.full((2, 3), 7, np.int64))
    for wrong in (np.full((2, 3), 0.5), np.full((2, 3), 70_000), np.full((2, 3), -1)):
        with pytest.raises(DataError, match="depth"):
            add(wrong)
    depth = np.array(store.snapshot().rows([0, 1])["depth"])
    assert depth[:, 0, 0].reshape(-1).tolist() == [40_000, 7]


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_many_images_in_rows_of_any_dtype(dtype: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 128, (30, 5, 4, 3)).astype(np.uint8)
    encoded = [png(image) for image in pixels]
    runs = [(pa.array(encoded[20:]), 20, ()), (pa.array(encoded[:20]), 0, ())]
    out = np.zeros((30, 60), dtype)
    fill_images(runs, (5, 4, 3), out, fill=None, pixel=np.dtype(np.uint8))
    assert np.array_equal(out, pixels.reshape(30, -1))
    pixels[23, 3, 2, 1] = 128
    runs[0] = (pa.array([png(image) for image in pixels[20:]]), 20, ())
    with pytest.raises(RowError) as raised:
        fill_images(runs, (5, 4, 3), out.astype(np.int8), fill=None, pixel=np.dtype(np.uint8))
    assert raised.value.row == 23


def test_threads_of_a_loader_decode_the_batches_of_its_source() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (60, 9, 7, 3)).astype(np.uint8)
    store = DatasetStore().from_dataset(table_of([png(frame) for frame in frames]))
    source = BatchSource(store, 6, 8, seed=3)
    with PrefetchBatchifier(store, 6, 8, seed=3, num_workers=2, prefetch=2) as loader:
        for index in range(6):
            batch = loader.next_batch()
            assert all(np.array_equal(batch[name], values) for name, values in source[index].items())
