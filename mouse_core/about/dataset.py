"""What a dataset says of itself: an object, a text, and the places that keep the text, which the room lists."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core._base.checks import is_text, is_whole
from mouse_core.about.features import HUGGINGFACE, feature_of, features_in
from mouse_core.about.recording import Recording, check_recordings, recording_from_json, recording_to_json
from mouse_core.errors import ConfigError, DataError, MouseError, SchemaError
from mouse_core.spec import DIMS, Alignment, Field, check_alignment

# What a dataset may say that a step of a field, or an image, holds: so much is made room for in every batch.
_MOST_VALUES, _MOST_IMAGE_VALUES = 1 << 24, 1 << 28
_MOST_TEXT = 64 << 20
# What decodes is for whoever reads to say.
_DECODER = "decoder"


def field_to_json(item: Field) -> dict[str, Any]:
    """The attributes that are not the default."""
    said: dict[str, Any] = {}
    for attribute in dataclasses.fields(item):
        if attribute.name == _DECODER:
            continue
        value = getattr(item, attribute.name)
        if value == attribute.default and type(value) is type(attribute.default):
            continue
        said[attribute.name] = [_plain(one) for one in value] if isinstance(value, tuple) else _plain(value)
    return said


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, np.dtype):
        return value.name
    value = value.item() if isinstance(value, np.generic) else value
    # JSON has no sign for these.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def field_from_json(said: Any) -> Field:
    """What ``field_to_json`` gave.

    Raises:
        DataError: Attributes that no field has, or a step of more values than anybody means.
        ConfigError, ValueError, TypeError: Values that a field cannot have.
    """
    known = {attribute.name for attribute in dataclasses.fields(Field)} - {_DECODER}
    if not isinstance(said, dict) or not said.keys() <= known:
        raise DataError(f"fields: expected attributes of a field, {sorted(known)}, found {said!r:.200}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    for name in ("fill", "pad"):
        values |= {name: _number(values[name])} if name in values else {}
    if isinstance(values.get("bounds"), tuple):
        values["bounds"] = tuple(map(_number, values["bounds"]))
    item = Field(**values)
    check_width(
        item.name, math.prod(item.shape or (item.dim or 1,)), _MOST_IMAGE_VALUES if item.image else _MOST_VALUES
    )
    return item


def check_width(name: str, found: Any, most: int = _MOST_VALUES) -> None:
    """Raise DataError where a dataset says that steps of a field are wider than ``most``."""
    if is_whole(found) and found > most:
        raise DataError(f"{name}: expected at most {most} values a step, found {found}")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def said_in(text: str, names: Set[str], newest: int, *, where: str) -> dict[str, Any]:
    """What a JSON object says, by name, if it says its version.

    Args:
        text: The object.
        names: What the newest version that is known can say.
        newest: That version.
        where: What to call its place in messages.

    Raises:
        DataError: Something else.
    """
    try:
        said: Any = json.loads(text) if len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON, found {text!r:.80} ({error})") from error
    said = said if isinstance(said, dict) else {}
    version = said.pop("version", None)
    if not is_whole(version):
        raise DataError(f"{where}: expected a JSON object with a version, found {text!r:.80}")
    if version > newest:
        raise DataError(
            f"{where}: expected version {newest} at most, found version {version}, which a newer mouse-data wrote"
        )
    unknown = sorted(said.keys() - names)
    if unknown:
        raise DataError(f"{where}: expected what version {version} can say, found also {unknown}")
    return dict(said)


def check_words(about: Any) -> None:
    """Raise ConfigError unless what an ``About`` is given of alignment, names, tasks, fields and widths are such."""
    if about.alignment is not None:
        check_alignment(about.alignment)
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
            raise ConfigError(f"{name}: expected a positive integer, found {dim!r:.200}")


def check_spec(given: Any) -> Any:
    """The specs of columns as a ``Composite``, None where there are none, or ConfigError."""
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    from mouse_core.spec import Composite, Stacked

    spec = given if isinstance(given, Composite) else Composite(given)
    nested = [name for name, one in spec.entries.items() if isinstance(one, Composite | Stacked)]
    if nested or spec.shape:
        what = f"{spec[nested[0]]!r:.80} of column {nested[0]!r}" if nested else f"the shape {spec.shape}"
        raise ConfigError(f"spec: expected the spec of an array for each column, found {what}")
    return spec.to(None)


def spec_from_json(said: Any) -> Any:
    """What ``to_json`` of a spec gave; DataError for anything else."""
    from mouse_core.spec import from_json

    return from_json(said)


def joined_specs(specs: Sequence[Any]) -> Any:
    """What several say together: of each column what all that speak of it say, or less where they differ.

    Where they differ, all numbers of the dtype and shape that they have in common are left, or any objects. Saying
    nothing would not last: what one of them says would stand for all as soon as it is said once more.
    """
    said = [spec for spec in specs if spec is not None]
    if not said or all(spec == said[0] for spec in said[1:]):
        return said[0] if said else None
    columns = dict.fromkeys(name for spec in said for name in spec.entries)
    found = {name: [spec[name] for spec in said if name in spec] for name in columns}
    return check_spec({name: _common(ones) for name, ones in found.items()})


def _common(specs: Sequence[Any]) -> Any:
    from mouse_core.spec import NonTensor, Unbounded

    first = specs[0]
    if all(one == first for one in specs):
        return first
    try:
        dtype = np.result_type(*(one.dtype for one in specs))
    except TypeError:  # of floats of 16 or 8 bits that have no dtype in common
        dtype = np.dtype("O")
    if dtype.kind == "O" or len({len(one.shape) for one in specs}) > 1:
        return NonTensor()
    sizes = zip(*(one.shape for one in specs), strict=True)
    return Unbounded(tuple(size[0] if len(set(size)) == 1 else -1 for size in sizes), dtype)


def check_dimensions(given: Any) -> Mapping[str, tuple[str, ...]]:
    """Names of dimensions by column, or ConfigError."""
    found = {}
    for column, names in dict(given if isinstance(given, Mapping) else {0: 0}).items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_text(column) or not is_list or not all(map(is_text, names)):
            raise ConfigError(f"dimensions: expected lists of names by column, found {given!r:.200}")
        found[column] = tuple(names)
    return MappingProxyType(found)


def joined_names(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The names that no two parts say differently."""
    found: dict[str, Any] = {}
    for names in said:
        found |= {column: some for column, some in names.items() if column not in found}
    return {column: some for column, some in found.items() if all(one.get(column, some) == some for one in said)}


_MOST = 1 << 20


def check_videos(given: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of a path and a digest, or ConfigError."""
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > _MOST:
        raise ConfigError(f"videos: expected a list of at most {_MOST} pairs (path, digest), found {given!r:.80}")
    for pair in given:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConfigError(f"videos: expected pairs (path, digest), found {pair!r:.200}")
        path = PurePosixPath(pair[0])
        if path.is_absolute() or not path.name or ".." in path.parts or "\\" in pair[0] or "\0" in pair[0]:
            raise ConfigError(f"videos: expected paths below the dataset's folder, with /, found {pair[0]!r:.200}")
    return tuple((path, digest) for path, digest in given)


def joined_videos(said: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> Sequence[tuple[str, str]]:
    """The list that all parts have which have one; rows name files by their place in it.

    Raises:
        SchemaError: There are several; names two parts.
    """
    lists = [(where, videos) for where, videos in said if videos]
    for where, videos in lists[1:]:
        first, known = lists[0]
        if videos != known:
            raise SchemaError(
                f"videos: expected one list of files, found {len(known)} in {first} and {len(videos)} others in "
                f"{where}; make a store of each, and mix them (mouse_core.mixtures)"
            )
    return lists[0][1] if lists else ()


__all__ = ["KEY", "About", "joined", "read_about", "with_about"]

KEY = "mouse_data"
"""Under which name the text stands in metadata, descriptions and features."""

_VERSION = 1
_MARK = f"{KEY}: "
# The columns whose features carry the text: the first all of it, the second the alignment, should the first be recast.
_CARRIERS = ("done", "reward")
_TASKS = "; give them other numbers, or let one say no tasks, with mouse_core.about.with_about"


@dataclass(frozen=True, eq=False)
class About:
    """What a dataset says of itself. What is None or empty is not said.

    Args:
        alignment: Which transition a row's action, reward and done belong to: "arrived" or "outgoing".
        environments: Names of the environments that the steps were recorded in.
        tasks: The texts of tasks, by the number that the rows call them by.
        fields: Fields beside the standard ones, and those that replace a standard one.
        max_action_dim: Number of actions A, or the width of action vectors.
        max_obs_continuous_dim: Width C of observations.
        recordings: How the steps were recorded, as recorders say it; each way once.
        spec: Which values columns may have: a ``mouse_core.spec.Composite``, or a dict, of the specs of arrays by name.
        videos: The files that frames are of, by number: the path of each below the dataset's folder, and the digest of
            its index (``mouse_core.video.VideoIndex``).
        dimensions: What the dimensions of columns are called, by column: ``{"action": ["elbow", "wrist"]}``.
        frames_per_second: How many steps a second were recorded; several numbers where parts differ.
        robots: Names of the robots that the steps were recorded with.
        keys: What columns were called in the format that they were read from, where another name is written by default:
            ``{"observation_image": "observation.images.top"}``.

    Raises:
        ConfigError: A value that is none of these.
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

    def __post_init__(self) -> None:
        check_words(self)
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
        object.__setattr__(self, "spec", check_spec(self.spec))
        object.__setattr__(self, "videos", check_videos(self.videos))
        object.__setattr__(self, "dimensions", check_dimensions(self.dimensions))

    def __bool__(self) -> bool:
        return self != About()

    def __eq__(self, other: object) -> bool:
        # As JSON, which has one sign for all NaN.
        return self.to_json() == other.to_json() if isinstance(other, About) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return About, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    def replace(self, **changes: Any) -> About:
        """The same with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """All that is said, as JSON in one line, with the version of the form."""
        said: dict[str, Any] = {"version": _VERSION}
        if self.alignment is not None:
            said["alignment"] = self.alignment
        if self.environments:
            said["environments"] = list(self.environments)
        if self.tasks:
            said["tasks"] = {str(number): text for number, text in self.tasks.items()}
        if self.fields:
            said["fields"] = [field_to_json(item) for item in self.fields]
        said |= {name: getattr(self, name) for name in DIMS if getattr(self, name) is not None}
        if self.recordings:
            said["recordings"] = [recording_to_json(item) for item in self.recordings]
        if self.spec is not None:
            said["spec"] = self.spec.to_json()
        if self.videos:
            said["videos"] = self.videos
        if self.dimensions:
            said["dimensions"] = dict(self.dimensions)
        said |= {name: getattr(self, name) for name in ("frames_per_second", "robots") if getattr(self, name)}
        if self.keys:
            said["keys"] = dict(self.keys)
        return json.dumps(said, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, where: str = "dataset") -> About:
        """What ``to_json`` gave.

        Args:
            text: The JSON.
            where: What to call its place in messages.

        Raises:
            DataError: Something else, or of a newer version.
        """
        names = {item.name for item in dataclasses.fields(cls)}
        said = said_in(text, names, _VERSION, where=f"{where}: {KEY}")
        try:
            if "tasks" in said:
                said["tasks"] = {int(number): text for number, text in said["tasks"].items()}
            if "fields" in said:
                said["fields"] = [field_from_json(item) for item in said["fields"]]
            if "recordings" in said:
                said["recordings"] = [recording_from_json(item) for item in said["recordings"]]
            if "spec" in said:
                said["spec"] = spec_from_json(said["spec"])
            for name in DIMS:
                check_width(name, said.get(name))
            return cls(**said)
        except (MouseError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: {KEY}: {error}") from error


def joined(parts: Iterable[tuple[str, About]]) -> About:
    """What several parts of one dataset say together.

    Of a column whose values they say differently, as recordings of two environments may, only the dtype and shape are
    said; what only some say stands for all.

    Args:
        parts: What each is called in messages, and what it says.

    Raises:
        SchemaError: Two of them contradict each other; names both.
    """
    first: dict[Any, tuple[str, Any]] = {}
    lists: dict[str, list[Any]] = {name: [] for name in ("environments", "robots", "frames_per_second", "recordings")}

    def agree(key: Any, what: str, value: Any, where: str, hint: str = "") -> None:
        known_where, known = first.setdefault(key, (where, value))
        if known != value:
            raise SchemaError(f"{what}, found {known!r} in {known_where} and {value!r} in {where}{hint}")

    parts = list(parts)
    for where, about in parts:
        if about.alignment is not None:
            agree("alignment", "alignment: expected one", about.alignment, where)
        for number, text in about.tasks.items():
            agree(("tasks", number), f"tasks: expected one text for task {number}", text, where, _TASKS)
        for item in about.fields:
            # As JSON, which has one sign for all NaN.
            agree(("fields", item.name), f"fields: expected one field {item.name!r}", field_to_json(item), where)
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
        fields=[field_from_json(value) for key, value in values.items() if key[0] == "fields"],
        **{name: values.get(name) for name in DIMS},
        recordings=lists["recordings"],
        spec=joined_specs([about.spec for _, about in parts]),
        videos=joined_videos([(where, about.videos) for where, about in parts]),
        dimensions=joined_names([about.dimensions for _, about in parts]),
        frames_per_second=lists["frames_per_second"],
        robots=lists["robots"],
        keys=joined_names([about.keys for _, about in parts]),
    )


def read_about(part: Any, *, where: str = "dataset") -> About:
    """What a dataset says of itself, wherever it says it.

    Args:
        part: A ``datasets.Dataset``, ``IterableDataset`` or ``Features``, a ``pyarrow`` table, record batch or schema,
            or the text of a description.
        where: What to call it in messages.

    Raises:
        SchemaError: It contradicts itself, as joined datasets do that say different things; names both places.
        DataError: What it says cannot be read, or a newer version wrote it.
    """
    return joined(_said(part, where))


def _said(part: Any, where: str) -> Iterator[tuple[str, About]]:
    schema = part.schema if isinstance(part, pa.Table | pa.RecordBatch) else part
    if isinstance(schema, pa.Schema):
        metadata = schema.metadata or {}
        place = f"the metadata of {where}"
        if KEY.encode() in metadata:
            yield place, About.from_json(metadata[KEY.encode()].decode(errors="replace"), where=place)
        ids = {name: item.get("id") for name, item in features_in(metadata).items()}
    else:
        description = part if isinstance(part, str) else getattr(getattr(part, "info", None), "description", None)
        place = f"the description of {where}"
        for number, line in enumerate(_lines(description)):
            # Joined datasets have the lines of all.
            yield f"{place}, line {number + 1}", _of_line(line, place)
        features = part if isinstance(part, dict) else getattr(part, "features", None)
        ids = {name: getattr(item, "id", None) for name, item in (features or {}).items()}
    for name, text in ids.items():
        place = f"the feature {name!r} of {where}"
        yield from ((place, _of_line(line, place)) for line in _lines(text))


def _lines(text: Any) -> list[str]:
    lines = text.splitlines() if isinstance(text, str) else []
    return [line for line in lines if line.startswith(_MARK)]


def _of_line(line: str, where: str) -> About:
    return About.from_json(line.removeprefix(_MARK), where=where)


# ---------------------------------------------------------------------- writing


def with_about(part: Any, about: About) -> Any:
    """A dataset, table, schema or set of features that says ``about`` of itself, and nothing else.

    Args:
        part: A ``datasets.Dataset``, ``datasets.Features`` or ``datasets.DatasetInfo``, or a ``pyarrow`` table or
            schema.
        about: What to say.

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
    # What datasets has cached for the rows as they were does not say the same.
    known = f"{part._fingerprint} {about.to_json()}"
    marked._fingerprint = hashlib.sha256(known.encode()).hexdigest()[:16]
    return marked


def _metadata(schema: pa.Schema, about: About) -> dict[bytes, bytes]:
    metadata = {name: text for name, text in (schema.metadata or {}).items() if name != KEY.encode()}
    features = features_in(metadata)
    if about and (features or HUGGINGFACE not in metadata):
        # All that datasets keeps of a table's metadata are features, which it takes one by one.
        made = {name: feature_of(schema.field(name).type) for name in _CARRIERS if schema.names.count(name) == 1}
        features = {name: made[name] for name in made if made[name]} | features
    if features:
        whole = json.loads(metadata.get(HUGGINGFACE, b'{"info": {}}'))
        whole["info"]["features"] = _features_saying(features, about)
        metadata[HUGGINGFACE] = json.dumps(whole).encode()
    return metadata | ({KEY.encode(): about.to_json().encode()} if about else {})


def _features_saying(features: Mapping[str, dict[str, Any]], about: About) -> dict[str, Any]:
    """Features as ``datasets`` writes them, of which some carry the text in their ids."""
    texts = _texts(about, (name for name, item in features.items() if item.get("_type") == "Value"))
    marked = {}
    for name, feature in features.items():
        text = _with_text(feature.pop("id", None), texts.get(name))
        marked[name] = feature | ({} if text is None else {"id": text})
    return marked


def _texts(about: About, names: Iterable[str]) -> dict[str, str]:
    """What the columns of these names are to carry."""
    names = list(names)
    carriers = [name for name in _CARRIERS if name in names] or names[:1]
    said = dict(zip(carriers, (about, About(about.alignment)), strict=False))
    return {name: _MARK + part.to_json() for name, part in said.items() if part}


def _marked(feature: Any, text: str | None) -> Any:
    known = getattr(feature, "id", None)
    new = _with_text(known, text)
    if new == known:
        return feature
    marked = copy.copy(feature)
    marked.id = new
    return marked


def _with_text(known: Any, text: str | None) -> str | None:
    """The id of a feature with our line after what else it says."""
    kept = [line for line in known.splitlines() if line not in _lines(known)] if isinstance(known, str) else []
    return "\n".join([*kept, *([text] if text else [])]) or None


def _with_line(description: str | None, about: About) -> str:
    return (_with_text(description, _MARK + about.to_json() if about else None) or "").strip()
