"""Creates and validates states of loaders, and writes error messages that list differences between states."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mouse_core._base.checks import state_number
from mouse_core.batches.source import BatchSource
from mouse_core.errors import StateError
from mouse_core.sampling import SAMPLERS, EpisodeWindows
from mouse_core.sampling.plan import MASK

_CONFIGURATION = "configuration"
# The key of the decoder version, which affects the last bits of pixels; only streams with videos have it.
_DECODER = "decoder"
_LONGEST_TEXT, _MOST_ENTRIES = 60, 32
# Options that are compared for every sampling.
_WHEREVER = ("sampling", "boundary", "normalize", "augment", "map", "lengths", "packed")
# The largest depth of nested mixtures.
_DEEPEST = 16


def state_of(source: BatchSource, next_index: int) -> dict[str, Any]:
    """Return the state of a loader whose next batch is ``next_index``."""
    return {
        "seed": source.seed,
        "next_index": next_index,
        "rows": source.snapshot.store_rows,
        "epoch_start": source.epoch_start,
        "fingerprint": source.fingerprint,
        _CONFIGURATION: json.dumps(_configuration(source), separators=(",", ":")),
        **_decoder_of(source),
    }


def _decoder_of(source: BatchSource) -> dict[str, str]:
    known = source.snapshot.readers
    readings = (known[name].column.reading for name in source.spec if name in known)
    decoders = [reading.decoder for reading in readings if reading.kind.kind == "video"]
    if not decoders:
        return {}
    from mouse_core.video import decoder_version  # loaded on demand

    versions = [decoder_version() if decoder is None else decoder.version for decoder in decoders]
    return {_DECODER: ", ".join(dict.fromkeys(versions))}


def check_decoder(source: BatchSource, state: Mapping[str, Any]) -> None:
    """Raise StateError if the decoder version in the state differs from the installed version."""
    here = _decoder_of(source).get(_DECODER)
    if here is not None and state.get(_DECODER, here) != here:
        raise StateError(
            f"state: expected batches decoded by {here}, found {state[_DECODER]!r:.80}; pixels may differ in their "
            "last bits; load_state_dict(state, accept_decoder=True) continues with the same frames"
        )


def numbers_of(state: Any, *names: str, others: Sequence[str] = ()) -> dict[str, int]:
    """Return the numbers of a state by name.

    Raises:
        StateError: The state is not a dict with exactly the expected names, or a number is not an integer.
    """
    keys = {*names, *others, "fingerprint"}
    if not isinstance(state, Mapping) or state.keys() - {_CONFIGURATION, _DECODER} != keys:
        raise StateError(f"state: expected a dict with the keys {sorted(keys)}, found {state!r:.200}")
    return {name: state_number(name, state[name]) for name in names}


def rows_of(rows: Any, levels: int = _DEEPEST) -> Any:
    """Return the saved number of rows of a store. For a mixture, return the number of rows of each member by name;
    mixtures can be nested up to ``levels`` deep.

    Raises:
        StateError: A number is not an integer of at least 0, or mixtures are nested more than ``levels`` deep.
    """
    if isinstance(rows, Mapping):
        if not levels:
            raise StateError(f"state: expected mixtures nested in at most {_DEEPEST} levels, found more")
        return {name: rows_of(some, levels - 1) for name, some in rows.items()}
    return state_number("rows", rows)


def dropped_of(store: Any) -> str:
    """Return a hint for an error message if the store has dropped rows; otherwise ""."""
    from mouse_core.store import DatasetStore

    gone = store.written - len(store) if isinstance(store, DatasetStore) else 0
    if not gone:
        return ""
    return (
        f"; the store has dropped its {gone:,} oldest rows (max_rows, max_bytes or clear), so an earlier state "
        "cannot be loaded: keep a snapshot with these rows, or start again"
    )


def check_source(source: BatchSource, state: Mapping[str, Any], remark: str = "") -> None:
    """Raise StateError with a list of differences if ``state`` does not belong to the source; the message ends with
    ``remark``.
    """
    if state["fingerprint"] == source.fingerprint:
        return
    try:
        found = json.loads(state.get(_CONFIGURATION, "{}"))
        differing = _differing(_configuration(source), found) if found else []
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        differing = []
    if differing:
        raise StateError(f"state: expected a state of this dataset and configuration; {'; '.join(differing)}{remark}")
    raise StateError(
        f"state: expected the fingerprint {source.fingerprint} of this dataset and configuration (rows, "
        f"fields, sampling, sequence_length, batch_size, augmentation), found {state['fingerprint']!r:.80}{remark}"
    )


def _configuration(source: BatchSource) -> dict[str, Any]:
    """Return the values that determine the fingerprint, by name; long texts are replaced by digests."""
    data, sampler, fields, *stages = source.identity
    snapshot = source.snapshot
    kinds = {reader.spec.column: str(reader.column.kind) for reader in snapshot.readers.values()}
    said: dict[str, Any] = {
        "windows": {name: rest[5] for name, *rest in fields if len(rest) > 5 and rest[5]},
        "derived": dict(snapshot.config.made),
        **_sampler_in_words(source.sampler, sampler),
        "data": data[:12],
        "alignment": snapshot.alignment,
        "columns": kinds,
        "fields": {name: _field_in_words(*rest[:5]) for name, *rest in fields},
        **_stages_in_words(stages),
    }
    return {name: _shortened(value) for name, value in said.items()}


def _sampler_in_words(made: Any, identity: str) -> dict[str, Any]:
    """If the sampler's identity consists of its options, return the sampling and the boundary as the caller would pass
    them.
    """
    said: dict[str, Any] = {}
    is_shown = dataclasses.is_dataclass(made) and identity == repr(made)
    if hasattr(made, "cut_many"):
        said["lengths"], made = json.dumps(made.choices), made.sampler
    if not is_shown or not dataclasses.is_dataclass(made):
        return {**said, "sampling": identity}
    options = [item.name for item in dataclasses.fields(made) if item.repr and not item.name.startswith("_")]
    said |= {"sampling": type(made).__name__, **{name: repr(getattr(made, name)) for name in options}}
    if type(made) in SAMPLERS.values():
        return {"boundary": "'stream'", **said, "sampling": repr(made.name)}  # type: ignore[union-attr]
    if "column" in said:
        column = said.pop("column")
        return {"boundary": "'task'" if column == "''" else f"Column({column})", **said}
    if "behind" in said:  # anchors of `windows=` with pad=False; "before" and "behind" follow from the offsets
        return {name: value for name, value in said.items() if name not in ("before", "behind")}
    return {"boundary": "'episode'", **said} if isinstance(made, EpisodeWindows) else said


def _stages_in_words(stages: Sequence[list[Any]]) -> dict[str, Any]:
    """Return descriptions of the stages: the normalisation and augmentation of fields, the user's functions, and
    packing.
    """
    said: dict[str, Any] = {}
    for _, scalings in (stage for stage in stages if stage[0] == "normalize"):
        numbers = {name: f"{kind} by numbers {digest}" for name, (kind, digest) in scalings.items()}
        said["normalize"] = {**said.get("normalize", {}), **numbers}
    augment = [stage for stage in stages if stage[0] not in ("map", "normalize", "packed")]
    if augment:
        said["augment"] = json.dumps(augment)
    for _, version, per, shapes, dropped in (stage for stage in stages if stage[0] == "map"):
        said["map"] = {"version": version, "per": per, "fields": json.dumps(shapes), "drop": json.dumps(dropped)}
    if ["packed"] in stages:
        said["packed"] = "True"
    return said


def _field_in_words(
    column: str = "", shape: Any = (), image_shape: Any = None, fill: str = "None", pad: str = "None"
) -> str:
    """Return a description of a field's identity that does not mention the offsets of rows."""
    said = [f"column {column!r} as {list(image_shape or shape)}"]
    said += [f"{name} {value}" for name, value in (("fill", fill), ("pad", pad)) if value != "None"]
    return ", ".join(said)


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return (
            {name: _shortened(one) for name, one in value.items()}
            if len(value) <= _MOST_ENTRIES
            else _shortened(json.dumps(value))
        )
    return value if len(value) <= _LONGEST_TEXT else f"#{hashlib.sha256(value.encode()).hexdigest()[:12]}"


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference between two configurations."""
    said: list[str] = []
    if any(expected.get(name) != found.get(name) for name in ("boundary", "lengths", "packed")):
        # Within episodes, and with random lengths without packing, batches have a mask.
        expected, found = ({**one, "fields": _without_mask(one["fields"])} for one in (expected, found))
    boundaries = expected.get("boundary"), found.get("boundary")
    same_sampling = expected["sampling"] == found["sampling"] and boundaries[0] == boundaries[1]
    for name in dict.fromkeys([*expected, *found]):
        # Options of different samplings are not compared, and the boundary of anchors is unknown.
        is_of_both = (name in expected and name in found) or name in _WHEREVER
        if name == "data" or not (same_sampling or is_of_both) or (name == "boundary" and None in boundaries):
            continue
        wanted, has = expected.get(name), found.get(name)
        if wanted != has:
            parts = isinstance(wanted, Mapping) and isinstance(has, Mapping)
            said += _differing_parts(name, wanted, has) if parts else [_expected_and_found(name, wanted, has)]
    # Other columns, another alignment or other derived fields also change the digest of the data.
    explained = any(line.startswith(("columns", "alignment", "derived")) for line in said)
    if expected["data"] != found.get("data") and not explained:
        said.append(
            "data: expected a state of these rows, found a state of other rows, other values or other selected episodes"
        )
    return said


def _without_mask(fields: Any) -> Any:
    return {name: value for name, value in fields.items() if name != MASK} if isinstance(fields, Mapping) else fields


def _differing_parts(name: str, wanted: Any, has: Any) -> list[str]:
    """Return descriptions of the differences between the fields, or the columns, of two configurations."""
    said = [f"{name}: expected {part!r}, found none" for part in wanted if part not in has]
    said += [f"{name}: expected no {part!r}, found one" for part in has if part not in wanted]
    both = [part for part in wanted if part in has and has[part] != wanted[part]]
    said += [_expected_and_found(f"{name}: {part}", wanted[part], has[part]) for part in both]
    if list(wanted) != list(has) and wanted.keys() == has.keys():
        said.append(f"{name}: expected the order {list(wanted)}, found {list(has)}")
    return said


def _expected_and_found(name: str, wanted: Any, found: Any) -> str:
    if any(isinstance(value, str) and value.startswith("#") for value in (wanted, found)):
        return f"{name} differs"
    return f"{name}: expected {'none' if wanted is None else wanted}, found {'none' if found is None else found}"
