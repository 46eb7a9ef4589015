"""Which columns hold pictures, and how each is to be kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._arrow.column_types import ColumnType, column_type, fixed_shape
from mouse_core._arrow.dense import plain, without_nulls
from mouse_core.about.dataset import About
from mouse_core.about.features import features_in
from mouse_core.errors import ConfigError, DataError, SchemaError
from mouse_core.images.pixels import image_shape
from mouse_core.spec import STANDARD_FIELDS, Field
from mouse_core.video.frames import VideoFiles
from mouse_core.video.writing import VideoCodec

_WAYS = ("raw", "png", "jpeg:QUALITY", "video", "video:CODEC:gop=N")
_COLUMN = re.compile(r"([^:=]+)=(.*)")


@dataclass(frozen=True)
class PictureEncoding:
    """How pictures are kept.

    Args:
        way: "raw", "png", "jpeg" or "video".
        quality: Of JPEG, 1 to 100.
        codec: Of videos. None: frames of videos stay what they are, and all else is encoded as ``VideoCodec()`` says.
    """

    way: str
    quality: int = 95
    codec: VideoCodec | None = None

    @classmethod
    def parse(cls, text: Any) -> PictureEncoding:
        """Made of a text: "raw", "png", "jpeg:95", "video", or "video:" and what ``VideoCodec.parse`` takes.

        Raises:
            ConfigError: Something else.
        """
        way, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if way == "video":
            return cls(way, codec=VideoCodec.parse(rest) if rest else None)
        if way == "jpeg" and re.fullmatch(r"\d{1,3}", rest or "95") and 1 <= int(rest or 95) <= 100:
            return cls(way, quality=int(rest or 95))
        if way in ("raw", "png") and text == way:
            return cls(way)
        raise ConfigError(f"images: expected one of {list(_WAYS)}, found {text!r}")


@dataclass(frozen=True)
class Pictures:
    """A column that holds pictures.

    Args:
        name: Its name.
        kind: "raw", "encoded" or "video".
        shape: ``(H, W, C)`` of the first.
        dtype: Of pixels, uint8 or uint16.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """What one takes as pixels."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def by_column(given: str | Sequence[str] | Mapping[str, str]) -> dict[str, PictureEncoding]:
    """What ``images`` says, by column; under "" what it says of all others.

    Args:
        given: A text for all columns, texts by column, or a list of texts, of which some begin with COLUMN=.

    Raises:
        ConfigError: Something else, or two things of one column.
    """
    texts: list[tuple[str, Any]] = list(given.items()) if isinstance(given, Mapping) else []
    for text in () if isinstance(given, Mapping) else (given,) if isinstance(given, str) else given:
        match = _COLUMN.fullmatch(text) if isinstance(text, str) else None
        texts.append((match[1], match[2]) if match else ("", text))
    found = {name: PictureEncoding.parse(text) for name, text in texts}
    if len(found) < len(texts):
        raise ConfigError(f"images: expected one way for each column, found {[name or 'all' for name, _ in texts]}")
    return found


def pictures_of(stream: Any, wanted: Mapping[str, PictureEncoding]) -> dict[str, tuple[Pictures, PictureEncoding]]:
    """The columns whose pictures are to be kept in another way than they are, with how.

    Args:
        stream: A ``RowStream``, of which rows are read until each such column had a picture.
        wanted: As ``by_column`` gives it.

    Raises:
        ConfigError: A column that is not there, or holds no pictures; no column of pictures at all.
        DataError: A first picture that cannot be read.
    """
    kinds = {one.name: _kind(one, stream) for one in stream.schema}
    for name in wanted:
        if name and not kinds.get(name):
            there = [column for column, kind in kinds.items() if kind]
            raise ConfigError(f"images: expected one of the columns of pictures, {there}, found {name!r}")
    chosen = {name: wanted.get(name, wanted.get("")) for name, kind in kinds.items() if kind}
    if not chosen:
        raise ConfigError(f"images: expected columns of pictures in {stream.path}, found {list(kinds)}")
    stays = {name for name, kept in chosen.items() if kept is None or _is_so(kinds[name], kept)}
    asked = {name: kinds[name] for name in chosen if name not in stays}
    found: dict[str, tuple[Pictures, PictureEncoding]] = {}
    for name, picture in _first_pictures(stream, asked).items():
        kept = chosen[name]
        assert kept is not None
        if kept.way == "video":
            codec = kept.codec or VideoCodec()
            codec.pixel_format(picture.shape, picture.dtype)
            kept = replace(kept, codec=codec)
        elif kept.way == "jpeg" and (picture.dtype != np.uint8 or picture.shape[2] not in (1, 3)):
            shown = f"{picture.dtype} {list(picture.shape)}"
            raise ConfigError(f"images: {name}: expected pixels of uint8 in 1 or 3 channels for jpeg, found {shown}")
        elif kept.way == "png" and picture.dtype != np.uint8 and picture.shape[2] != 1:
            raise ConfigError(
                f"images: {name}: expected one channel of {picture.dtype} for png, found {picture.shape[2]}"
            )
        found[name] = picture, kept
    return found


def _is_so(kind: str, kept: PictureEncoding) -> bool:
    """Whether pictures of a kind are kept in that way whatever they are."""
    return (kind, kept.way) == ("raw", "raw") or (kind == "video" and kept.way == "video" and kept.codec is None)


def _kind(column: pa.Field, stream: Any) -> str:
    """What pictures of a column are: "raw", "encoded" or "video"; empty where it holds none."""
    kind, name = column_type(column.type), column.name
    if kind.kind == "video":
        return "video"
    read = field_of(name, stream.about)
    if kind.kind == "image":
        said = features_in(stream.schema.metadata or {}).get(name, {}).get("_type", "Image")
        is_struct = pa.types.is_struct(getattr(column.type, "storage_type", column.type))
        return "encoded" if (is_struct and said == "Image") or (read is not None and read.image) else ""
    return "raw" if _is_raw(kind, column.type, name, read) else ""


def _is_raw(kind: ColumnType, data_type: pa.DataType, name: str, read: Field | None) -> bool:
    if kind.kind != "list" or kind.depth not in (2, 3) or kind.value_type not in ("uint8", "uint16"):
        return False
    shape = fixed_shape(data_type) or ()
    likely = name.startswith("observation") and (len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4))
    return (read is not None and read.image) or likely


def field_of(name: str, about: About) -> Field | None:
    """The field that reads a column: one that the rows say, or a standard one."""
    return next((one for one in (*about.fields, *STANDARD_FIELDS) if one.column == name), None)


def _first_pictures(stream: Any, kinds: Mapping[str, str]) -> dict[str, Pictures]:
    """Each column's first picture; columns that have none are not in it."""
    found: dict[str, Pictures] = {}
    videos, roots = VideoFiles(stream.about.videos), stream.image_folders()
    for batch in stream if kinds else ():
        for name in kinds.keys() - found.keys():
            values = without_nulls(plain(batch.column(name)))
            if not len(values):
                continue
            try:
                found[name] = _picture(name, kinds[name], values, videos, roots, field_of(name, stream.about))
            except ValueError as error:
                raise DataError(f"{stream.path}: column {name!r}: {error} in its first row") from error
        if len(found) == len(kinds):
            break
    return {name: found[name] for name in kinds if name in found}


def _picture(
    name: str, kind: str, values: pa.Array, videos: VideoFiles, roots: Sequence[str], read: Field | None
) -> Pictures:
    wide = read is not None and read.pixel_dtype != np.uint8
    if kind == "video":
        value = values[0].as_py()
        pixel_format = videos.index(-1 if value["video"] is None else value["video"], roots).pixel_format
        deep = re.match(r"gray(\d+)", pixel_format)
        shape = videos.shape_of(value, roots)
        if read is not None and read.shape is not None and read.shape[2:] == (1,):
            shape = (*shape[:2], 1)  # greys, which some decoders do not say
        wide = deep is not None and int(deep[1]) > 8
    elif kind == "encoded":
        shape = image_shape(values[0].as_py(), dtype=np.uint16 if wide else np.uint8, image_roots=roots)
    else:
        first = np.array(values[0].as_py())
        if first.ndim not in (2, 3) or not first.size:
            raise DataError(f"expected pixels [H, W] or [H, W, C], found shape {list(first.shape)}")
        height, width, channels = (*first.shape, 1)[:3]
        shape, wide = (height, width, channels), column_type(values.type).value_type == "uint16"
    return Pictures(name, kind, shape, np.dtype(np.uint16 if wide else np.uint8))


def said_after(about: About, changed: Mapping[str, tuple[Pictures, PictureEncoding]], *, frames_stay: bool) -> About:
    """What rows say of themselves whose pictures are kept in other ways: each column has a field that reads it.

    Args:
        about: What they say now.
        changed: What becomes of which columns.
        frames_stay: Whether other columns still have frames of the videos that are listed.

    Raises:
        SchemaError: A field that crops or resizes frames, where these are to be no frames.
    """
    fields = {one.name: one for one in about.fields}
    for name, (picture, kept) in changed.items():
        read = field_of(name, about)
        if read is not None and picture.kind == "video" and kept.way != "video":
            resized = read.shape is not None and read.shape[:2] != picture.shape[:2]
            if read.crop is not None or resized:
                raise SchemaError(
                    f"images: {name}: expected a field of whole frames for {kept.way}, found one with "
                    f"crop={read.crop}, shape={read.shape}"
                )
        made = _field_after(name, picture, kept, read)
        if made is not None:
            fields[made.name] = made
    return about.replace(fields=tuple(fields.values()), videos=about.videos if frames_stay else ())


def _field_after(name: str, picture: Pictures, kept: PictureEncoding, read: Field | None) -> Field | None:
    """The field of a column whose pictures are kept in that way; None where nothing has to be said."""
    greys = None
    if kept.way == "video" and picture.shape[2] == 1:
        greys = picture.shape  # of which a video may be in colours
    if read is None:
        if kept.way == "raw":
            return None
        return Field(name, image=True, dtype="uint16" if picture.dtype != np.uint8 else None, shape=greys)
    if kept.way != "raw" and not read.image:
        return replace(read, image=True, shape=picture.shape, max_ndim=None)
    return replace(read, shape=greys) if greys is not None and read.shape is None else None
