"""Metadata of a dataset: an object, its JSON text, and the places that keep the text, which ``about`` lists."""

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

from mouse_core._base.checks import is_text, is_whole
from mouse_core.errors import ConfigError, DataError, MouseError, SchemaError
from mouse_core.spec import DIMS, Alignment, Field, check_alignment

# Limit of the JSON text, which is in the metadata of every file.
_MOST_RECORDING = 1 << 20


@dataclass(frozen=True, eq=False)
class Recording:
    """The recording of steps. Attributes that are None or empty are not part of it.

    Args:
        environment: The environment's id, such as "LunarLander-v3".
        policy: Description of the policy.
        spec: JSON to create the environment again: for gymnasium, the content of ``EnvSpec.to_json``.
        observation_space, action_space: The specs of an observation and an action, as ``mouse_core.spec.from_json``
            takes them.
        versions: Versions of packages by name.

    Raises:
        ConfigError: A value that JSON cannot represent, or more than 1 MB of JSON.
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
            object.__setattr__(self, name, _frozen(name, getattr(self, name)))
        if len(self._text()) > _MOST_RECORDING:
            raise ConfigError(
                f"Recording: expected at most {_MOST_RECORDING} characters of JSON, found {len(self._text())}"
            )

    def __eq__(self, other: object) -> bool:
        return self._text() == other._text() if isinstance(other, Recording) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        return recording_from_json, (recording_to_json(self),)

    def _text(self) -> str:
        return json.dumps(recording_to_json(self), sort_keys=True)


def _frozen(name: str, value: Any) -> Mapping[str, Any]:
    """Return an immutable copy through JSON, which equals what a reader gets."""
    try:
        copied = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"Recording: {name}: expected what JSON can hold, found {value!r:.80} ({error})") from error
    return MappingProxyType(copied)


def recording_to_json(recording: Recording) -> dict[str, Any]:
    """Return the attributes that are not None or empty."""
    values = {item.name: getattr(recording, item.name) for item in dataclasses.fields(recording)}
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if value is not None and value != {}}


def recording_from_json(content: Any) -> Recording:
    """Return the recording in a JSON object of ``recording_to_json``.

    Raises:
        DataError: Another object.
        ConfigError: An invalid value of an attribute.
    """
    names = {item.name for item in dataclasses.fields(Recording)}
    if not isinstance(content, dict) or not content.keys() <= names:
        raise DataError(f"recordings: expected attributes of a recording, {sorted(names)}, found {content!r:.200}")
    return Recording(**content)


def check_recordings(given: Iterable[Any]) -> tuple[Recording, ...]:
    """Return recordings without duplicates; raises ConfigError for other objects."""
    recordings = () if isinstance(given, str | Mapping) else tuple(given)
    if not all(isinstance(item, Recording) for item in recordings) or (given and not recordings):
        raise ConfigError(f"recordings: expected mouse_core.about.Recording objects, found {given!r:.200}")
    return tuple(dict.fromkeys(recordings))


HUGGINGFACE = b"huggingface"
"""Key of the features in the metadata of a schema."""


def features_in(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the features of columns by name."""
    try:
        features = json.loads(metadata.get(HUGGINGFACE, b"{}"))["info"]["features"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # written by another program
    return {name: item for name, item in features if isinstance(item, dict)}


def feature_of(data_type: pa.DataType) -> dict[str, Any] | None:
    """Return the feature of a column of numbers or flags; None for others."""
    numbers = pa.types.is_integer(data_type) or pa.types.is_floating(data_type) or pa.types.is_boolean(data_type)
    return {"dtype": np.dtype(data_type.to_pandas_dtype()).name, "_type": "Value"} if numbers else None


__all__ = ["KEY", "About", "joined", "read_about", "with_about"]

KEY = "mouse_data"
"""Name of the text in the metadata of schemas, in descriptions and in features."""

_VERSION = 1
# Limits for untrusted metadata: batches allocate as many values as a step of a field, or an image, has.
_MOST_VALUES, _MOST_IMAGE_VALUES = 1 << 24, 1 << 28
_MOST_TEXT, _MOST_VIDEOS = 64 << 20, 1 << 20
_MARK = f"{KEY}: "
# Columns whose features carry the text: the first all of it, the second the alignment, in case the first is cast.
_CARRIERS = ("done", "reward")
_TASKS = "; give them other numbers, or let one say no tasks, with mouse_core.about.with_about"


@dataclass(frozen=True, eq=False)
class About:
    """Metadata of a dataset. Empty attributes and attributes that are None are not part of it.

    Args:
        alignment: The transition that a row's action, reward and done belong to: "arrived" or "outgoing".
        environments: Names of the environments that the steps were recorded in.
        tasks: Texts of tasks by their number in rows.
        fields: Additional fields, and fields that replace a standard one.
        max_action_dim: Number of actions A, or the width of action vectors.
        max_obs_continuous_dim: Width C of observations.
        recordings: How recorders recorded the steps; duplicates are removed.
        spec: Allowed values of columns: a ``mouse_core.spec.Composite`` or a dict with the spec of an array by column.
        videos: The video files that frames refer to by number: the path below the dataset's folder, and the digest of
            the file's index (``mouse_core.video.VideoIndex``).
        dimensions: Names of a column's dimensions, by column: ``{"action": ["elbow", "wrist"]}``.
        frames_per_second: Steps recorded per second; several numbers if parts differ.
        robots: Names of the robots that the steps were recorded with.
        keys: Names of columns in the format that they were read from, if a writer would choose another name:
            ``{"observation_image": "observation.images.top"}``.
        layout: How columns are delivered by default: "stored", or None for "mouse"; see ``mouse_core.BatchSource``.

    Raises:
        ConfigError: An invalid value.
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
    keys: Mapping[str, str] = field(default_factory=dict)
    layout: Literal["stored"] | None = None

    def __post_init__(self) -> None:
        _check_values(self)
        for name in DIMS:
            dim = getattr(self, name)
            object.__setattr__(self, name, None if dim is None else int(dim))
        for name in ("environments", "robots"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        object.__setattr__(self, "frames_per_second", tuple(dict.fromkeys(map(float, self.frames_per_second))))
        object.__setattr__(self, "keys", MappingProxyType(dict(self.keys)))
        tasks = {int(number): self.tasks[number] for number in sorted(self.tasks)}
        object.__setattr__(self, "tasks", MappingProxyType(tasks))
        object.__setattr__(self, "fields", tuple(self.fields))
        object.__setattr__(self, "recordings", check_recordings(self.recordings))
        object.__setattr__(self, "spec", _check_spec(self.spec))
        object.__setattr__(self, "videos", _check_videos(self.videos))
        object.__setattr__(self, "dimensions", _check_dimensions(self.dimensions))

    def __bool__(self) -> bool:
        return self != About()

    def __eq__(self, other: object) -> bool:
        # Compare JSON, where NaN equals NaN.
        return self.to_json() == other.to_json() if isinstance(other, About) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return About, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    def replace(self, **changes: Any) -> About:
        """Return the metadata with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Return all attributes that are not empty as JSON in one line, with a version."""
        content: dict[str, Any] = {"version": _VERSION}
        for item in dataclasses.fields(self):
            value: Any = getattr(self, item.name)
            if value:
                content[item.name] = dict(value) if isinstance(value, MappingProxyType) else value
        content |= {"fields": [_field_to_json(item) for item in self.fields]} if self.fields else {}
        content |= {"recordings": [recording_to_json(item) for item in self.recordings]} if self.recordings else {}
        content |= {"spec": self.spec.to_json()} if self.spec is not None else {}
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, label: str = "dataset") -> About:
        """Return the metadata in a text of ``to_json``.

        Args:
            text: The JSON.
            label: Prefix of messages.

        Raises:
            DataError: A text that ``to_json`` did not write, or a newer version of it.
        """
        label = f"{label}: {KEY}"
        content = _parsed(text, label)
        try:
            if "tasks" in content:
                content["tasks"] = {int(number): text for number, text in content["tasks"].items()}
            if "fields" in content:
                content["fields"] = [_field_from_json(item) for item in content["fields"]]
            if "recordings" in content:
                content["recordings"] = [recording_from_json(item) for item in content["recordings"]]
            if "spec" in content:
                from mouse_core.spec import from_json

                content["spec"] = from_json(content["spec"])
            for name in DIMS:
                _check_width(name, content.get(name))
            return cls(**content)
        except (MouseError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{label}: {error}") from error


def joined(parts: Iterable[tuple[str, About]]) -> About:
    """Return the metadata of a dataset from the metadata of its parts.

    An attribute of only some parts applies to the whole. Different specs of a column, as of two environments, join to a
    spec with only dtype and shape.

    Args:
        parts: The name of each part, for messages, and its metadata.

    Raises:
        SchemaError: Two parts that contradict each other.
    """
    first: dict[Any, tuple[str, Any]] = {}
    lists: dict[str, list[Any]] = {name: [] for name in ("environments", "robots", "frames_per_second", "recordings")}

    def agree(key: Any, what: str, value: Any, label: str, hint: str = "") -> None:
        first_where, first_value = first.setdefault(key, (label, value))
        if first_value != value:
            raise SchemaError(f"{what}, found {first_value!r} in {first_where} and {value!r} in {label}{hint}")

    parts = list(parts)
    for where, about in parts:
        if about.alignment is not None:
            agree("alignment", "alignment: expected one", about.alignment, where)
        for number, text in about.tasks.items():
            agree(("tasks", number), f"tasks: expected one text for task {number}", text, where, _TASKS)
        for item in about.fields:
            # Compare JSON, where NaN equals NaN.
            agree(("fields", item.name), f"fields: expected one field {item.name!r}", _field_to_json(item), where)
        for name in DIMS:
            if getattr(about, name) is not None:
                agree(name, f"{name}: expected one", getattr(about, name), where)
        for name, values_of_all in lists.items():
            values_of_all += getattr(about, name)
    values = {key: value for key, (_, value) in first.items()}
    return About(
        alignment=values.get("alignment"),
        environments=lists["environments"],
        tasks={key[1]: value for key, value in values.items() if key[0] == "tasks"},
        fields=[_field_from_json(value) for key, value in values.items() if key[0] == "fields"],
        **{name: values.get(name) for name in DIMS},
        recordings=lists["recordings"],
        spec=_joined_specs([about.spec for _, about in parts]),
        videos=_joined_videos(parts),
        dimensions=_joined_names([about.dimensions for _, about in parts]),
        frames_per_second=lists["frames_per_second"],
        robots=lists["robots"],
        keys=_joined_names([about.keys for _, about in parts]),
        layout=next((about.layout for _, about in parts if about.layout is not None), None),
    )


def read_about(part: Any, *, label: str = "dataset") -> About:
    """Return the metadata of a dataset, from all places that keep it.

    Args:
        part: A ``datasets.Dataset``, ``IterableDataset`` or ``Features``, a ``pyarrow`` table, record batch or schema,
            or the text of a description.
        label: Name of the dataset in messages.

    Raises:
        SchemaError: Places that contradict each other, as after joining datasets with different metadata.
        DataError: Metadata that cannot be read, or of a newer version.
    """
    return joined(_metadata_of(part, label))


def _metadata_of(part: Any, label: str) -> Iterator[tuple[str, About]]:
    schema = part.schema if isinstance(part, pa.Table | pa.RecordBatch) else part
    if isinstance(schema, pa.Schema):
        metadata = schema.metadata or {}
        place = f"the metadata of {label}"
        if KEY.encode() in metadata:
            yield place, About.from_json(metadata[KEY.encode()].decode(errors="replace"), label=place)
        ids = {name: item.get("id") for name, item in features_in(metadata).items()}
    else:
        description = part if isinstance(part, str) else getattr(getattr(part, "info", None), "description", None)
        place = f"the description of {label}"
        for number, line in enumerate(_lines(description)):
            # A joined dataset has the lines of all parts.
            yield f"{place}, line {number + 1}", _of_line(line, place)
        features = part if isinstance(part, dict) else getattr(part, "features", None)
        ids = {name: getattr(item, "id", None) for name, item in (features or {}).items()}
    for name, text in ids.items():
        place = f"the feature {name!r} of {label}"
        yield from ((place, _of_line(line, place)) for line in _lines(text))


def _lines(text: Any) -> list[str]:
    lines = text.splitlines() if isinstance(text, str) else []
    return [line for line in lines if line.startswith(_MARK)]


def _of_line(line: str, label: str) -> About:
    return About.from_json(line.removeprefix(_MARK), label=label)


# ---------------------------------------------------------------------- writing


def with_about(part: Any, about: About) -> Any:
    """Return a dataset, table, schema or set of features with this metadata, and no other.

    Args:
        part: A ``datasets.Dataset``, ``datasets.Features`` or ``datasets.DatasetInfo``, or a ``pyarrow`` table or
            schema.
        about: The metadata.

    Returns:
        A copy that shares the rows.
    """
    if isinstance(part, pa.Table):
        return part.replace_schema_metadata(with_about(part.schema, about).metadata)
    if isinstance(part, pa.Schema):
        return part.with_metadata(_metadata(part, about))
    if isinstance(part, dict):
        texts = _texts(about, (name for name, item in part.items() if type(item).__name__ == "Value"))
        return type(part)({name: _marked(item, texts.get(name)) for name, item in part.items()})
    marked = copy.copy(part)
    if not hasattr(part, "_info"):  # a DatasetInfo
        marked.description = _with_line(part.description, about)
        marked.features = None if part.features is None else with_about(part.features, about)
        return marked
    marked._info = with_about(part.info, about)
    marked._data = part.data.replace_schema_metadata(with_about(part.data.table.schema, about).metadata)
    # A new fingerprint, as results that datasets caches have the metadata of their source.
    fingerprint = f"{part._fingerprint} {about.to_json()}"
    marked._fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return marked


def _metadata(schema: pa.Schema, about: About) -> dict[bytes, bytes]:
    metadata = {name: text for name, text in (schema.metadata or {}).items() if name != KEY.encode()}
    features = features_in(metadata)
    if about and (features or HUGGINGFACE not in metadata):
        # Of a table's metadata, datasets keeps only the features.
        carriers = {name: feature_of(schema.field(name).type) for name in _CARRIERS if schema.names.count(name) == 1}
        features = {name: feature for name, feature in carriers.items() if feature} | features
    if features:
        whole = json.loads(metadata.get(HUGGINGFACE, b'{"info": {}}'))
        whole["info"]["features"] = _features_with_text(features, about)
        metadata[HUGGINGFACE] = json.dumps(whole).encode()
    return metadata | ({KEY.encode(): about.to_json().encode()} if about else {})


def _features_with_text(features: Mapping[str, dict[str, Any]], about: About) -> dict[str, Any]:
    """Return features in the form of ``datasets``; the ids of some carry the text."""
    texts = _texts(about, (name for name, item in features.items() if item.get("_type") == "Value"))
    marked = {}
    for name, feature in features.items():
        text = _with_text(feature.pop("id", None), texts.get(name))
        marked[name] = feature | ({} if text is None else {"id": text})
    return marked


def _texts(about: About, names: Iterable[str]) -> dict[str, str]:
    """Return the text for each column that carries one."""
    names = list(names)
    carriers = [name for name in _CARRIERS if name in names] or names[:1]
    parts = dict(zip(carriers, (about, About(about.alignment)), strict=False))
    return {name: _MARK + part.to_json() for name, part in parts.items() if part}


def _marked(feature: Any, text: str | None) -> Any:
    before = getattr(feature, "id", None)
    new = _with_text(before, text)
    if new == before:
        return feature
    marked = copy.copy(feature)
    marked.id = new
    return marked


def _with_text(before: Any, text: str | None) -> str | None:
    """Return the id of a feature, or a description, with our line behind its other lines."""
    kept = [line for line in before.splitlines() if line not in _lines(before)] if isinstance(before, str) else []
    return "\n".join([*kept, *([text] if text else [])]) or None


def _with_line(description: str | None, about: About) -> str:
    return (_with_text(description, _MARK + about.to_json() if about else None) or "").strip()


# ---------------------------------------------------------------------- attributes: checks and JSON


def _field_to_json(item: Field) -> dict[str, Any]:
    """Return the attributes of a field that differ from the default; ``decoder`` is the reader's choice."""
    content: dict[str, Any] = {}
    for attribute in dataclasses.fields(item):
        value = getattr(item, attribute.name)
        is_default = value == attribute.default and type(value) is type(attribute.default)
        if attribute.name != "decoder" and not is_default:
            content[attribute.name] = [_plain(one) for one in value] if isinstance(value, tuple) else _plain(value)
    return content


def _plain(value: Any) -> Any:
    """Return a value for JSON; NaN and infinities as texts."""
    if isinstance(value, np.dtype):
        return value.name
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _field_from_json(content: Any) -> Field:
    """Return the field of a JSON object.

    Raises:
        DataError: An unknown attribute, or a step that is too wide.
        ConfigError, ValueError, TypeError: An invalid value of an attribute.
    """
    names = {attribute.name for attribute in dataclasses.fields(Field)} - {"decoder"}
    if not isinstance(content, dict) or not content.keys() <= names:
        raise DataError(f"fields: expected attributes of a field, {sorted(names)}, found {content!r:.200}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    for name in ("fill", "pad"):
        values |= {name: _number(values[name])} if name in values else {}
    if isinstance(values.get("bounds"), tuple):
        values["bounds"] = tuple(map(_number, values["bounds"]))
    item = Field(**values)
    most = _MOST_IMAGE_VALUES if item.image else _MOST_VALUES
    _check_width(item.name, math.prod(item.shape or (item.dim or 1,)), most)
    return item


def _check_width(name: str, width: Any, most: int = _MOST_VALUES) -> None:
    """Raise DataError for a step of more than ``most`` values: batches would allocate as many."""
    if is_whole(width) and width > most:
        raise DataError(f"{name}: expected at most {most} values a step, found {width}")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _parsed(text: str, label: str) -> dict[str, Any]:
    """Return the attributes in a JSON object with a version, or raise DataError with the prefix ``label``."""
    try:
        content: Any = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{label}: expected JSON, found {text!r:.80} ({error})") from error
    content = content if isinstance(content, dict) else {}
    version = content.pop("version", None)
    if not is_whole(version):
        raise DataError(f"{label}: expected a JSON object with a version, found {text!r:.80}")
    if version > _VERSION:
        raise DataError(
            f"{label}: expected version {_VERSION} at most, found version {version}, which a newer mouse-data wrote"
        )
    unknown = sorted(content.keys() - {item.name for item in dataclasses.fields(About)})
    if unknown:
        raise DataError(f"{label}: expected attributes of version {version}, found also {unknown}")
    return dict(content)


def _check_values(about: About) -> None:
    """Raise ConfigError for an invalid alignment, name, rate, key, task, field or width."""
    if about.alignment is not None:
        check_alignment(about.alignment)
    if about.layout not in (None, "stored"):
        raise ConfigError(f"layout: expected 'stored' or None, found {about.layout!r:.80}")
    for name in ("environments", "robots"):
        names = getattr(about, name)
        if isinstance(names, str) or not all(is_text(one) for one in names):
            raise ConfigError(f"{name}: expected names of {name}, found {names!r:.200}")
    rates = about.frames_per_second
    listed = isinstance(rates, Iterable) and not isinstance(rates, str)
    if not listed or not all(isinstance(one, int | float) and 0 < one < math.inf for one in rates):
        raise ConfigError(f"frames_per_second: expected a list of positive numbers, found {rates!r:.200}")
    if not all(is_text(one) for pair in dict(about.keys).items() for one in pair):
        raise ConfigError(f"keys: expected names by column, found {about.keys!r:.200}")
    if not all(is_whole(number) and is_text(text) for number, text in dict(about.tasks).items()):
        raise ConfigError(f"tasks: expected texts by whole numbers, found {about.tasks!r:.200}")
    for item in about.fields:
        if not isinstance(item, Field):
            raise ConfigError(f"fields: expected mouse_core.Field objects, found {item!r:.200}")
    for name in DIMS:
        dim = getattr(about, name)
        if dim is not None and (not is_whole(dim) or dim < 1):
            raise ConfigError(f"{name}: expected a positive integer or None, found {dim!r:.200}")


def _check_spec(given: Any) -> Any:
    """Return the specs of columns as a ``Composite``, None without specs; raises ConfigError for others."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    from mouse_core.spec import Composite, Stacked

    spec = given if isinstance(given, Composite) else Composite(given)
    nested = [name for name, one in spec.entries.items() if isinstance(one, Composite | Stacked)]
    if nested or spec.shape:
        what = f"{spec[nested[0]]!r:.80} of column {nested[0]!r}" if nested else f"the shape {spec.shape}"
        raise ConfigError(f"spec: expected the spec of an array for each column, found {what}")
    return spec.to(None)


def _joined_specs(specs: Sequence[Any]) -> Any:
    """Return the specs of the columns of several parts together.

    A column that has different specs gets a wider one: all numbers of the common dtype and shape, or any objects. If it
    got none, a later join would take one part's spec for the whole.
    """
    columns: dict[str, list[Any]] = {}
    for spec in specs:
        for name, one in ({} if spec is None else spec.entries).items():
            columns.setdefault(name, []).append(one)
    return _check_spec({name: _common_spec(ones) for name, ones in columns.items()})


def _common_spec(specs: Sequence[Any]) -> Any:
    """Return a spec that holds the values of all specs."""
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
    """Return names of dimensions by column; raises ConfigError for others."""
    dimensions = {}
    for column, names in dict(given if isinstance(given, Mapping) else {0: 0}).items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_text(column) or not is_list or not all(map(is_text, names)):
            raise ConfigError(f"dimensions: expected lists of names by column, found {given!r:.200}")
        dimensions[column] = tuple(names)
    return MappingProxyType(dimensions)


def _joined_names(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the names by column of several parts, without columns whose names differ."""
    joint: dict[str, Any] = {}
    for names in parts:
        joint |= {column: name for column, name in names.items() if column not in joint}
    return {column: name for column, name in joint.items() if all(one.get(column, name) == name for one in parts)}


def _check_videos(given: Any) -> tuple[tuple[str, str], ...]:
    """Return pairs of a path and a digest; raises ConfigError for others."""
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


def _joined_videos(parts: Sequence[tuple[str, About]]) -> Sequence[tuple[str, str]]:
    """Return the list of video files of all parts that have one; rows refer to files by their position in it.

    Raises:
        SchemaError: Two parts with different lists.
    """
    lists = [(where, about.videos) for where, about in parts if about.videos]
    for where, videos in lists[1:]:
        first_where, first = lists[0]
        if videos != first:
            raise SchemaError(
                f"videos: expected one list of files, found {len(first)} in {first_where} and {len(videos)} others in "
                f"{where}; make a store of each, and mix them (mouse_core.mixtures)"
            )
    return lists[0][1] if lists else ()
