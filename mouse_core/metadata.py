"""Metadata of datasets, and the places where Arrow files, Parquet files and ``datasets`` store the metadata.

The metadata is a text, ``mouse_data: {"version": 1, ...}``. The text is stored in several places, because each place
survives different operations:

- the schema's metadata under the key ``mouse_data``, which Arrow and Parquet files and tables keep;
- a line of a dataset's description, which saving, ``map``, ``select`` and ``cast`` keep;
- the ``id`` of a column's feature, preferably of ``done``: ``datasets`` writes no other metadata to Parquet and the
  Hub.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from mouse_core._base.checks import UNREADABLE, as_json, is_text, is_whole, without_version
from mouse_core.errors import ConfigError, DataError, MouseError, SchemaError
from mouse_core.spec import DIMS, Alignment, Field, check_alignment

__all__ = ["KEY", "DatasetMetadata", "Recording", "joined", "joined_schemas", "read_metadata", "with_metadata"]

KEY = "mouse_data"
"""Name of the text in the metadata of schemas, in descriptions and in features."""

_VERSION = 1
_MARK = f"{KEY}: "
# Columns whose features carry the text: the first has all of it; the second has the alignment, in case the first is
# cast.
_CARRIERS = ("done", "reward")
# Limits for untrusted metadata, because batches allocate as many values as the metadata state for a step or an image.
_MOST_VALUES, _MOST_IMAGE_VALUES = 1 << 24, 1 << 28
# The metadata of every file contains the text.
_MOST_RECORDING, _MOST_VIDEOS = 1 << 20, 1 << 20


class _Described:
    """Base class of immutable metadata. Two objects are equal if their JSON is equal; in this comparison, NaN equals
    NaN.
    """

    def __eq__(self, other: object) -> bool:
        return _text(self) == _text(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_text(self))

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, item.name) for item in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(dict(value) if isinstance(value, Mapping) else value for value in values)


@dataclass(frozen=True, eq=False)
class Recording(_Described):
    """Information about how steps were recorded. Attributes that are None or empty are not stored.

    Args:
        environment: The environment's id, such as "LunarLander-v3".
        policy: Description of the policy.
        spec: JSON from which the environment can be created again; for gymnasium, the content of ``EnvSpec.to_json``.
        observation_space, action_space: The specs of an observation and of an action, in the form that
            ``mouse_core.spec.from_json`` accepts.
        versions: Versions of packages by name.

    Raises:
        ConfigError: JSON cannot represent a value, or the JSON is larger than 1 MB.
    """

    environment: str | None = None
    policy: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    observation_space: Mapping[str, Any] = field(default_factory=dict)
    action_space: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("environment", "policy"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"Recording: {name}: expected a text or None, found {getattr(self, name)!r:.80}")
        for name in ("spec", "observation_space", "action_space", "versions"):
            value = getattr(self, name)
            try:  # copied through JSON, so that it equals the metadata that a reader gets
                copied = json.loads(json.dumps(dict(value), allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                found = f"found {value!r:.80} ({error})"
                raise ConfigError(f"Recording: {name}: expected a value that JSON can represent, {found}") from error
            object.__setattr__(self, name, MappingProxyType(copied))
        if len(_text(self)) > _MOST_RECORDING:
            raise ConfigError(
                f"Recording: expected at most {_MOST_RECORDING} characters of JSON, found {len(_text(self))}"
            )


@dataclass(frozen=True, eq=False)
class DatasetMetadata(_Described):
    """Metadata of a dataset. Attributes that are None or empty are not stored.

    Args:
        alignment: The transition that a row's action, reward and done belong to: "arrived" or "outgoing".
        environments: Names of the environments in which the steps were recorded.
        tasks: A dict from the task index that rows contain to the text of the task.
        fields: Additional fields, and fields that replace standard fields.
        max_action_dim: Number of actions A, or the width of action vectors.
        max_obs_continuous_dim: Width C of observation vectors.
        recordings: A ``Recording`` for each way in which the steps were recorded; duplicates are removed.
        spec: Allowed values of columns: a ``mouse_core.spec.Composite``, or a dict from column to array spec.
        videos: The video files, to which frames refer by position in this list. Each item is a pair: the path below the
            dataset's folder, and the digest of the file's index (``mouse_core.video.VideoIndex``).
        dimensions: Names of a column's dimensions, by column: ``{"action": ["elbow", "wrist"]}``.
        frames_per_second: How many steps per second were recorded; several numbers if parts of the dataset have
            different rates.
        robots: Names of the robots with which the steps were recorded.
        layout: How columns are delivered by default: "stored", or None for "mouse"; see ``mouse_core.BatchSource``.

    Raises:
        ConfigError: A value is invalid.
    """

    alignment: Alignment | None = None
    environments: Sequence[str] = ()
    tasks: Mapping[int, str] = field(default_factory=dict)
    fields: Sequence[Field] = ()
    max_action_dim: int | None = None
    max_obs_continuous_dim: int | None = None
    recordings: Sequence[Recording] = ()
    spec: Any = None
    videos: Sequence[tuple[str, str]] = ()
    dimensions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    frames_per_second: Sequence[float] = ()
    robots: Sequence[str] = ()
    layout: Literal["stored"] | None = None

    def __post_init__(self) -> None:
        _check_values(self)
        dims = {name: getattr(self, name) for name in DIMS}
        values = {
            **{name: None if dim is None else int(dim) for name, dim in dims.items()},
            **{name: tuple(dict.fromkeys(getattr(self, name))) for name in ("environments", "robots", "recordings")},
            "frames_per_second": tuple(dict.fromkeys(map(float, self.frames_per_second))),
            "tasks": MappingProxyType({int(number): self.tasks[number] for number in sorted(self.tasks)}),
            "fields": tuple(self.fields),
            "spec": _check_spec(self.spec),
            "videos": _check_videos(self.videos),
            "dimensions": _check_dimensions(self.dimensions),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return self != DatasetMetadata()

    def replace(self, **changes: Any) -> DatasetMetadata:
        """Return the metadata with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all attributes that are not empty, and a version, as a JSON object for ``from_json``."""
        return {"version": _VERSION, **_content(self)}

    @classmethod
    def from_json(cls, content: Any, *, label: str = "dataset") -> DatasetMetadata:
        """Return the metadata that ``to_json`` wrote.

        Args:
            content: The JSON object, or its text.
            label: Prefix of messages.

        Raises:
            DataError: The content was not written by ``to_json``, or was written by a newer version of ``to_json``.
        """
        label = f"{label}: {KEY}"
        content = without_version(content, _VERSION, label)
        try:
            values = _attributes(cls, content, "metadata")
            if "tasks" in values:
                values["tasks"] = {int(number): text for number, text in values["tasks"].items()}
            if "fields" in values:
                values["fields"] = [_field_from_json(item) for item in values["fields"]]
            if "recordings" in values:
                recordings = (_attributes(Recording, item, "recordings") for item in values["recordings"])
                values["recordings"] = [Recording(**item) for item in recordings]
            if "spec" in values:
                from mouse_core.spec import from_json

                values["spec"] = from_json(values["spec"])
            for name in DIMS:
                _check_width(name, values.get(name))
            return cls(**values)
        except (MouseError, *UNREADABLE) as error:
            raise DataError(f"{label}: {error}") from error


def joined(parts: Iterable[tuple[str, DatasetMetadata]], *, have_rows: bool = False) -> DatasetMetadata:
    """Return the metadata of a dataset from the metadata of its parts.

    If at least one part has an attribute, the joined dataset has the attribute. If parts have different specs of a
    column, for example from two environments, the joined spec has only dtype and shape.

    Args:
        parts: The name of each part, for messages, and its metadata.
        have_rows: Whether each part has rows. If a part states no alignment, its rows are assumed to be "arrived". If
            such a part has rows and another part is "outgoing", SchemaError is raised; otherwise, the joined dataset
            states no alignment.

    Raises:
        SchemaError: Two parts contradict each other.
    """
    first: dict[Any, tuple[str, Any]] = {}
    parts = list(parts)

    def agree(key: Any, what: str, value: Any, label: str, hint: str = "") -> None:
        first_label, first_value = first.setdefault(key, (label, value))
        if first_value != value:
            found = f"found {first_value!r:.200} in {first_label} and {value!r:.200} in {label}"
            raise SchemaError(f"{what}, {found}{hint}")

    for label, part in parts:
        for name in ("alignment", *DIMS):
            if getattr(part, name) is not None:
                agree(name, f"{name}: expected one value", getattr(part, name), label)
        for number, text in part.tasks.items():
            hint = "; renumber the tasks of one part, or remove its tasks with mouse_core.metadata.with_metadata"
            agree(("tasks", number), f"tasks: expected one text for task {number}", text, label, hint)
        for item in part.fields:
            # Compare JSON, where NaN equals NaN.
            agree(("fields", item.name), f"fields: expected one field {item.name!r}", _content(item), label)
        if part.videos:  # rows refer to files by their position in the list
            hint = "; create a store of each part, and mix the stores with mouse_core.mixtures.Mixture"
            agree("videos", "videos: expected the same list of files in all parts", part.videos, label, hint)
    silent = [label for label, part in parts if part.alignment is None] if have_rows else []
    if silent and first.pop("alignment", ("", ""))[1] == "outgoing":
        stated = next(label for label, part in parts if part.alignment is not None)
        raise SchemaError(
            f"alignment: expected one value, found 'outgoing' in {stated} and none, which means "
            f"'arrived', in {silent[0]}"
        )
    values = {key: value for key, (_, value) in first.items()}
    of_all = ("environments", "robots", "frames_per_second", "recordings")
    lists: dict[str, Any] = {name: [item for _, part in parts for item in getattr(part, name)] for name in of_all}
    return DatasetMetadata(
        **{key: value for key, value in values.items() if isinstance(key, str)},
        **lists,
        tasks={key[1]: value for key, value in values.items() if key[0] == "tasks"},
        fields=[_field_from_json(value) for key, value in values.items() if key[0] == "fields"],
        spec=_joined_specs([part.spec for _, part in parts]),
        dimensions=_joined_names([part.dimensions for _, part in parts]),
        layout=next((part.layout for _, part in parts if part.layout is not None), None),
    )


def joined_schemas(files: Iterable[tuple[str, pa.Schema, DatasetMetadata]]) -> tuple[pa.Schema, DatasetMetadata]:
    """Return the schema of a dataset of several files, and their joined metadata.

    Args:
        files: For each file: the name, the schema with metadata, and further metadata.

    Raises:
        SchemaError: Files have different columns or contradicting metadata.
    """
    (first_file, first, _), *_ = files = list(files)
    for file, schema, _ in files:
        if schema.names != first.names:
            raise SchemaError(f"{file}: expected the columns of {first_file}, {first.names}, found {schema.names}")
        for ours, theirs in zip(first, schema, strict=True):
            if ours.type != theirs.type:
                wanted = f"column {ours.name!r}: expected {ours.type} as in {first_file}"
                raise SchemaError(f"{file}: {wanted}, found {theirs.type}")
    parts = [(file, joined([*_places(schema, file), (file, more)])) for file, schema, more in files]
    return first, joined(parts, have_rows=True)


# ---------------------------------------------------------------------- reading


def read_metadata(part: Any, *, label: str = "dataset") -> DatasetMetadata:
    """Return the metadata of a dataset, from all places in which metadata are stored.

    Args:
        part: A ``datasets.Dataset``, ``IterableDataset`` or ``Features``, a ``pyarrow`` table, record batch or schema,
            or the text of a description.
        label: Name of the dataset in messages.

    Raises:
        SchemaError: Two places have contradicting metadata, for example after datasets with different metadata were
            joined.
        DataError: The metadata cannot be read, or have a newer version.
    """
    return joined(_places(part, label))


def _places(part: Any, label: str) -> Iterator[tuple[str, DatasetMetadata]]:
    """Yield, for each place in which a dataset stores metadata, the name of the place and the metadata."""
    schema = part.schema if isinstance(part, pa.Table | pa.RecordBatch) else part
    texts = []
    if isinstance(schema, pa.Schema):
        metadata = schema.metadata or {}
        if KEY.encode() in metadata:
            texts.append((f"the metadata of {label}", metadata[KEY.encode()].decode(errors="replace")))
        ids = {name: item.get("id") for name, item in features_in(metadata).items()}
    else:
        description = part if isinstance(part, str) else getattr(getattr(part, "info", None), "description", None)
        # A joined dataset has the lines of all parts.
        for number, line in enumerate(_lines(description), start=1):
            texts.append((f"the description of {label}, line {number}", line.removeprefix(_MARK)))
        features = part if isinstance(part, dict) else getattr(part, "features", None)
        ids = {name: getattr(item, "id", None) for name, item in (features or {}).items()}
    for name, lines in ids.items():
        texts += [(f"the feature {name!r} of {label}", line.removeprefix(_MARK)) for line in _lines(lines)]
    for place, text in texts:
        yield place, DatasetMetadata.from_json(text, label=place)


def _lines(text: Any) -> list[str]:
    lines = text.splitlines() if isinstance(text, str) else []
    return [line for line in lines if line.startswith(_MARK)]


HUGGINGFACE = b"huggingface"
"""Key of the features in the metadata of a schema."""


def features_in(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the ``datasets`` features of columns by name, from the metadata of a schema."""
    try:
        features = json.loads(metadata.get(HUGGINGFACE, b"{}"))["info"]["features"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # written by another program
    return {name: item for name, item in features if isinstance(item, dict)}


# ---------------------------------------------------------------------- writing


def with_metadata(part: Any, metadata: DatasetMetadata) -> Any:
    """Return a dataset, table, schema or set of features with ``metadata`` in place of any earlier metadata.

    Args:
        part: A ``datasets.Dataset``, ``datasets.Features`` or ``datasets.DatasetInfo``, or a ``pyarrow`` table or
            schema.
        metadata: The metadata.

    Returns:
        A copy that shares the rows.
    """
    if isinstance(part, pa.Table):
        return part.replace_schema_metadata(with_metadata(part.schema, metadata).metadata)
    if isinstance(part, pa.Schema):
        return part.with_metadata(_schema_metadata(part, metadata))
    if isinstance(part, dict):
        texts = _texts(metadata, (name for name, item in part.items() if type(item).__name__ == "Value"))
        return type(part)({name: _marked(item, texts.get(name)) for name, item in part.items()})
    marked = copy.copy(part)
    if not hasattr(part, "_info"):  # a DatasetInfo
        marked.description = _with_text(part.description, _line(metadata)) or ""
        marked.features = None if part.features is None else with_metadata(part.features, metadata)
        return marked
    marked._info = with_metadata(part.info, metadata)
    marked._data = part.data.replace_schema_metadata(with_metadata(part.data.table.schema, metadata).metadata)
    # A new fingerprint, as results that datasets caches have the metadata of their source.
    fingerprint = f"{part._fingerprint} {json.dumps(metadata.to_json())}"
    marked._fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return marked


def _schema_metadata(schema: pa.Schema, metadata: DatasetMetadata) -> dict[bytes, bytes]:
    entries = {name: text for name, text in (schema.metadata or {}).items() if name != KEY.encode()}
    features = features_in(entries)
    if metadata and (features or HUGGINGFACE not in entries):
        # Of a table's metadata, datasets keeps only the features.
        carriers = {name: _feature_of(schema.field(name).type) for name in _CARRIERS if schema.names.count(name) == 1}
        features = {name: feature for name, feature in carriers.items() if feature} | features
    if features:
        texts = _texts(metadata, (name for name, item in features.items() if item.get("_type") == "Value"))
        for name, feature in features.items():
            text = _with_text(feature.pop("id", None), texts.get(name))
            feature |= {} if text is None else {"id": text}
        whole = json.loads(entries.get(HUGGINGFACE, b'{"info": {}}'))
        whole["info"]["features"] = features
        entries[HUGGINGFACE] = json.dumps(whole).encode()
    return entries | ({KEY.encode(): json.dumps(metadata.to_json()).encode()} if metadata else {})


def _feature_of(data_type: pa.DataType) -> dict[str, Any] | None:
    """Return the feature of a column of numbers or booleans; None for other columns."""
    numbers = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_boolean(data_type)
    return {"dtype": np.dtype(data_type.to_pandas_dtype()).name, "_type": "Value"} if numbers else None


def _texts(metadata: DatasetMetadata, names: Iterable[str]) -> dict[str, str | None]:
    """Return, for each column whose feature stores metadata, the text of the metadata."""
    names = list(names)
    carriers = [name for name in _CARRIERS if name in names] or names[:1]
    parts = (metadata, DatasetMetadata(metadata.alignment))
    return dict(zip(carriers, map(_line, parts), strict=False))


def _line(metadata: DatasetMetadata) -> str | None:
    return _MARK + json.dumps(metadata.to_json()) if metadata else None


def _marked(feature: Any, text: str | None) -> Any:
    before = getattr(feature, "id", None)
    new = _with_text(before, text)
    if new == before:
        return feature
    marked = copy.copy(feature)
    marked.id = new
    return marked


def _with_text(before: Any, text: str | None) -> str | None:
    """Return the id of a feature, or a description, with the line of the metadata appended."""
    kept = [line for line in before.splitlines() if line not in _lines(before)] if isinstance(before, str) else []
    return "\n".join([*kept, *([text] if text else [])]) or None


# ---------------------------------------------------------------------- JSON


def _content(item: Any) -> dict[str, Any]:
    """Return the attributes of metadata, a recording or a field that differ from their defaults, as JSON values.

    A field's decoder is not included, because each reader chooses a decoder.
    """
    values = {attribute.name: getattr(item, attribute.name) for attribute in dataclasses.fields(item)}
    # Defaults that are mappings are not attributes of the class.
    return {
        name: as_json(value, _own)
        for name, value in values.items()
        if name != "decoder" and value != getattr(type(item), name, {})
    }


def _own(value: Any) -> Any:
    """Return the JSON of a field, a recording or a spec; None for other values."""
    if isinstance(value, Field | Recording):
        return _content(value)
    return value.to_json() if hasattr(value, "to_json") else None


def _text(item: Any) -> str:
    return json.dumps(_content(item), sort_keys=True)


def _attributes(kind: type[Any], content: Any, label: str) -> dict[str, Any]:
    """Return the attributes in a JSON object that ``_content`` returned; raise DataError for unknown attributes."""
    names = {item.name for item in dataclasses.fields(kind)} - {"decoder"}
    if not isinstance(content, Mapping) or not content.keys() <= names:
        raise DataError(f"{label}: expected attributes among {sorted(names)}, found {content!r:.200}")
    return dict(content)


def _field_from_json(content: Any) -> Field:
    """Return the field that a JSON object describes.

    Raises:
        DataError: An attribute is unknown, or a step is too wide.
        ConfigError, ValueError, TypeError: The value of an attribute is invalid.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in _attributes(Field, content, "fields").items()
    }
    for name in values.keys() & {"fill", "pad"}:
        values[name] = _number(values[name])
    if isinstance(values.get("bounds"), tuple):
        values["bounds"] = tuple(map(_number, values["bounds"]))
    item = Field(**values)
    most = _MOST_IMAGE_VALUES if item.image else _MOST_VALUES
    _check_width(item.name, math.prod(item.shape or (item.dim or 1,)), most)
    return item


def _check_width(name: str, width: Any, most: int = _MOST_VALUES) -> None:
    """Raise DataError for a step of more than ``most`` values, because batches would allocate memory for all of
    them."""
    if is_whole(width) and width > most:
        raise DataError(f"{name}: expected at most {most} values per step, found {width}")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


# ---------------------------------------------------------------------- attributes


def _check_values(metadata: DatasetMetadata) -> None:
    """Raise ConfigError for an invalid alignment, name, rate, key, task, field, recording or width."""
    if metadata.alignment is not None:
        check_alignment(metadata.alignment)
    if metadata.layout not in (None, "stored"):
        raise ConfigError(f"layout: expected 'stored' or None, found {metadata.layout!r:.80}")
    for name in ("environments", "robots"):
        names = getattr(metadata, name)
        if isinstance(names, str) or not all(is_text(one) for one in names):
            raise ConfigError(f"{name}: expected a list of names of {name}, found {names!r:.200}")
    rates = metadata.frames_per_second
    listed = isinstance(rates, Iterable) and not isinstance(rates, str)
    if not listed or not all(isinstance(one, int | float) and 0 < one < math.inf for one in rates):
        raise ConfigError(f"frames_per_second: expected a list of positive numbers, found {rates!r:.200}")
    if not all(is_whole(number) and is_text(text) for number, text in dict(metadata.tasks).items()):
        raise ConfigError(
            f"tasks: expected a dict from integer to text, such as {{0: 'pick'}}, found {metadata.tasks!r:.200}"
        )
    for name, kind, called in (("fields", Field, "mouse_core.Field"), ("recordings", Recording, "Recording")):
        for item in getattr(metadata, name):
            if not isinstance(item, kind):
                raise ConfigError(f"{name}: expected {called} objects, found {item!r:.200}")
    for name in DIMS:
        dim = getattr(metadata, name)
        if dim is not None and (not is_whole(dim) or dim < 1):
            raise ConfigError(f"{name}: expected a positive integer or None, found {dim!r:.200}")


def _check_spec(given: Any) -> Any:
    """Return the specs of columns as a ``Composite``, or None if there are no specs; raise ConfigError for other
    values."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    from mouse_core.spec import Composite, Stacked

    spec = given if isinstance(given, Composite) else Composite(given)
    nested = [name for name, one in spec.entries.items() if isinstance(one, Composite | Stacked)]
    if nested or spec.shape:
        what = f"{spec[nested[0]]!r:.80} of column {nested[0]!r}" if nested else f"the shape {spec.shape}"
        raise ConfigError(f"spec: expected an array spec for each column, found {what}")
    return spec.to(None)


def _joined_specs(specs: Sequence[Any]) -> Any:
    """Return the joined specs of the columns of several parts.

    If the specs of a column differ, the column gets a wider spec: all numbers of the common dtype and shape, or any
    objects. If the column got no spec, a later join would apply the spec of one part to all rows.
    """
    columns: dict[str, list[Any]] = {}
    for spec in specs:
        for name, one in ({} if spec is None else spec.entries).items():
            columns.setdefault(name, []).append(one)
    return {name: _common_spec(ones) for name, ones in columns.items()}


def _common_spec(specs: Sequence[Any]) -> Any:
    """Return a spec that contains the values of all ``specs``."""
    from mouse_core.spec import NonTensor, Unbounded

    first = specs[0]
    if all(one == first for one in specs):
        return first
    try:
        dtype = np.result_type(*(one.dtype for one in specs))
    except TypeError:  # 8-bit and 16-bit floats may have no common dtype
        dtype = np.dtype("O")
    if dtype.kind == "O" or len({len(one.shape) for one in specs}) > 1:
        return NonTensor()
    sizes = zip(*(one.shape for one in specs), strict=True)
    return Unbounded(tuple(size[0] if len(set(size)) == 1 else -1 for size in sizes), dtype)


def _check_dimensions(given: Any) -> Mapping[str, tuple[str, ...]]:
    """Return names of dimensions by column; raise ConfigError for invalid names."""
    dimensions = {}
    for column, names in dict(given if isinstance(given, Mapping) else {0: 0}).items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_text(column) or not is_list or not all(map(is_text, names)):
            raise ConfigError(f"dimensions: expected a dict from column to a list of names, found {given!r:.200}")
        dimensions[column] = tuple(names)
    return MappingProxyType(dimensions)


def _joined_names(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the names of dimensions of several parts, by column; columns whose names differ between parts are left
    out."""
    joint: dict[str, Any] = {}
    for names in parts:
        joint |= {column: name for column, name in names.items() if column not in joint}
    return {column: name for column, name in joint.items() if all(one.get(column, name) == name for one in parts)}


def _check_videos(given: Any) -> tuple[tuple[str, str], ...]:
    """Return pairs of a path and a digest; raise ConfigError for other values."""
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > _MOST_VIDEOS:
        raise ConfigError(
            f"videos: expected a list of at most {_MOST_VIDEOS} pairs (path, digest), found {given!r:.80}"
        )
    for pair in given:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"videos: expected pairs (path, digest), found {pair!r:.200}")
        path = PurePosixPath(pair[0])
        if path.is_absolute() or not path.name or ".." in path.parts or "\\" in pair[0] or "\0" in pair[0]:
            raise ConfigError(f"videos: expected paths below the dataset's folder, with /, found {pair[0]!r:.200}")
    return tuple((path, digest) for path, digest in given)
