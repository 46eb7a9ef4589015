"""Images that rows name by path go with the rows that are written, or nothing is."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mouse_core import BatchSource, DataError, DatasetStore, formats
from mouse_core.cli import main
from mouse_core.formats.converting import convert
from mouse_core.formats.verifying import verify

ROWS = 40


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((2, 3), number, np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved dataset whose images lie inside of its folder; every third is in its row."""
    return save(tmp_path / "saved", tmp_path / "saved" / "img", "img/{:03d}.png")


def save(root: Path, images: Path, named: str, feature: Any = None) -> Path:
    values = [
        {"bytes": picture(row), "path": None} if row % 3 == 0 else {"bytes": None, "path": named.format(row)}
        for row in range(ROWS)
    ]
    columns: dict[str, Any] = {"action": [0] * ROWS, "reward": [0.0] * ROWS, "done": [0] * ROWS}
    columns["observation_image"] = pa.array(values, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    types = {"action": "int64", "reward": "float64", "done": "int64"}
    features = datasets.Features({name: datasets.Value(dtype) for name, dtype in types.items()})
    features["observation_image"] = feature or datasets.Image()
    table = pa.table(columns).replace_schema_metadata(features.arrow_schema.metadata)
    # save_to_disk would embed them.
    info = datasets.DatasetInfo(features=features)
    root.mkdir()
    with pa.OSFile(str(root / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    info.write_to_directory(str(root))
    (root / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "x"}')
    images.mkdir(exist_ok=True)
    for row in range(ROWS):
        (images / f"{row:03d}.png").write_bytes(picture(row))
    return root


def pixels(path: Path, **options: Any) -> list[int]:
    store = DatasetStore.open(path, **options)
    return [int(value) for value in BatchSource(store, ROWS, 1, sampling="last")[0]["obs_image"][0, :, 0]]


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("name", ["out", "out.parquet", "written"])
def test_images_go_with_the_rows(name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "elsewhere" / name
    out.parent.mkdir()
    if name == "written":
        formats.open(saved).save(out)
        digest = formats.open(out).digest()
    else:
        digest = convert(formats.open(saved), out).digest
    assert verify(saved, digest=digest).compared == "the rows have the digest that was given"
    assert verify(out, digest=digest).rows == ROWS
    for file in (saved / "img").iterdir():
        file.unlink()
    assert pixels(out) == list(range(ROWS))
    assert formats.open(out).to_table()["observation_image"][1].as_py() == {"bytes": picture(1), "path": "001.png"}
    assert formats.open(out).digest() == digest
    assert run("verify", saved, "--digest", digest) == 2
    assert "column 'observation_image', row 1: expected a readable image" in capsys.readouterr().err


def test_images_elsewhere_are_refused_until_their_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = save(tmp_path / "saved", tmp_path / "pictures", str(tmp_path / "pictures" / "{:03d}.png"))
    refused = (
        lambda: convert(formats.open(root), tmp_path / "out"),
        lambda: formats.open(root).save(tmp_path / "out"),
        lambda: verify(root),
    )
    for call in refused:
        with pytest.raises(DataError, match=r"row 1: .*--image-root.*pictures/001\.png"):
            call()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["pictures", "saved"]
    named = ("--image-root", tmp_path / "pictures")
    commands: list[tuple[object, ...]] = [("convert", root, tmp_path / "out"), ("push", root, "me/it", "--dry-run")]
    for words in commands:
        assert run(*words) == 2
        assert "--image-root" in capsys.readouterr().err
        assert run(*words, *named) == 0
    assert pixels(tmp_path / "out") == list(range(ROWS))
    assert run("verify", root, *named) == 0
    assert run("inspect", root, "--image-root", tmp_path / "nowhere") == 2
    assert "--image-root" in capsys.readouterr().err


def test_what_is_no_image_is_not_written(saved: Path, tmp_path: Path) -> None:
    (saved / "img" / "007.png").write_text("a private text")
    with pytest.raises(DataError, match=r"row 7: path 'img/007.png': .*found 14 bytes that are not an i") as refused:
        convert(formats.open(saved), tmp_path / "out")
    assert "private" not in str(refused.value)
    with pytest.raises(DataError, match=r"path 'img/007.png', 14 bytes that are not an image"):
        pixels(saved)
    sounds = save(tmp_path / "sounds", tmp_path / "sounds" / "img", "img/{:03d}.png", datasets.Audio())
    with pytest.raises(DataError, match="row 1: expected bytes, found only a path"):
        convert(formats.open(sounds), tmp_path / "out")
    assert verify(sounds).rows == ROWS


def test_a_link_out_is_named_with_where_it_leads(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "private.png").write_bytes(picture(99))
    link = saved / "img" / "001.png"
    link.unlink()
    link.symlink_to(tmp_path / "private.png")
    for call in (lambda: convert(formats.open(saved), tmp_path / "out"), lambda: pixels(saved)):
        with pytest.raises(DataError, match=r"found path 'img/001.png', which leads to .*private\.png"):
            call()
    link.unlink()
    with pytest.raises(DataError, match="no such file") as refused:
        pixels(saved, image_roots=[saved])
    assert str(refused.value).count(str(saved)) == 1
