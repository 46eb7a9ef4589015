"""What becomes of texts: prompts, pairs and texts as padded rows, or every token a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.spec import STANDARD_FIELDS, Field, check_count, check_dtype
from mouse_core.text.encoding import Encoder

_Ids = npt.NDArray[np.int32]


@runtime_checkable
class Recipe(Protocol):
    """From texts to rows of tokens. Its ``repr`` says all that decides about the rows, as that of a dataclass does.

    Those of this module are recipes, and so is a frozen dataclass of yours with these four.
    """

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """Names and types of the columns that it reads."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Of the rows that it makes."""
        ...

    @property
    def fields(self) -> Sequence[Field]:
        """The fields that batches of these rows have."""
        ...

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """The rows that some texts become; a pure function, which may leave out some."""
        ...


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Every text a row, filled up to one length: ``input_ids`` and ``attention_mask``, ``[B, L]`` in a batch.

    Args:
        max_length: L, the tokens of a row; longer texts are truncated, as the tokenizer does it.
        text: The column of the texts.
        pad_id: What rows are filled up with; by default what the tokenizer pads with, else what ends its texts.
        padding_side: Where it stands. "left" is what generation wants.
        add_special_tokens: Whether the tokenizer adds those that it puts around texts.
        keep: Columns of numbers that rows keep, by name with their dtypes, as in ``{"rewards": "float32"}``.

    Raises:
        ConfigError: A length below 1, a side or a dtype that is none.
    """

    max_length: int
    text: str = "text"
    pad_id: int | None = None
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    keep: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_length(self.max_length)
        if self.padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side: expected 'right' or 'left', found {self.padding_side!r}")
        object.__setattr__(self, "keep", _checked_keep(self.keep, ("input_ids", "attention_mask")))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The text, and what is kept."""
        return {self.text: pa.string(), **_kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Two columns of lists of one length, and what is kept."""
        return pa.schema([*_padded_columns("", self.max_length), *_kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``attention_mask``, int64 ``[L]``, and what is kept."""
        return [*_padded_fields(""), *_kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each text."""
        ids = encode(
            texts[self.text].to_pylist(), max_length=self.max_length, add_special_tokens=self.add_special_tokens
        )
        made = _padded(ids, self.max_length, _pad_id(self.pad_id, encode), self.padding_side)
        return _batch(self.schema, [*made, *_kept(texts, self.keep)])


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Every prompt with its answer a row, as ``PromptData`` of TorchRL: ``prompt_rindex`` is where the prompt ends.

    A row is the tokens of ``prompt + separator + label``; ``prompt_rindex``, int64 ``[B]``, is the index of the last
    token of the prompt tokenised alone; ``labels`` are ``input_ids`` by another name, and take no room.

    Args:
        max_length: L, the tokens of a row.
        prompt: The column of the prompts.
        label: The column of the answers.
        separator: What stands between the two.
        pad_id: What rows are filled up with; by default what the tokenizer pads with, else what ends its texts.
        eos_id: What ends an answer; by default what the tokenizer says, where it says one.
        only_whole: Whether rows are left out that are full and do not end in ``eos_id``: they may have been cut.
        add_special_tokens: Whether the tokenizer adds those that it puts around texts.
        keep: Columns of numbers that rows keep, by name with their dtypes.

    Raises:
        ConfigError: A length below 1, or a dtype that is none.
    """

    max_length: int
    prompt: str = "prompt"
    label: str = "label"
    separator: str = ""
    pad_id: int | None = None
    eos_id: int | None = None
    only_whole: bool = True
    add_special_tokens: bool = True
    keep: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_length(self.max_length)
        taken = ("input_ids", "attention_mask", "prompt_rindex", "labels")
        object.__setattr__(self, "keep", _checked_keep(self.keep, taken))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The prompt, its answer, and what is kept."""
        return {self.prompt: pa.string(), self.label: pa.string(), **_kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Two columns of lists of one length, a number, and what is kept."""
        columns = [*_padded_columns("", self.max_length), ("prompt_rindex", pa.int32())]
        return pa.schema([*columns, *_kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids``, ``attention_mask`` and ``labels``, int64 ``[L]``, ``prompt_rindex`` and what is kept."""
        more = [Field("prompt_rindex", dtype="int64"), Field("labels", column="input_ids", dtype="int64")]
        return [*_padded_fields(""), *more, *_kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each prompt whose answer ends within it."""
        prompts, labels = texts[self.prompt].to_pylist(), texts[self.label].to_pylist()
        options: dict[str, Any] = {"max_length": self.max_length, "add_special_tokens": self.add_special_tokens}
        last = np.array([len(ids) - 1 for ids in encode(prompts, **options)], np.int32)
        both = [f"{prompt}{self.separator}{label}" for prompt, label in zip(prompts, labels, strict=True)]
        ids = encode(both, **options)
        eos_id = encode.eos_id if self.eos_id is None else self.eos_id
        made = [*_padded(ids, self.max_length, _pad_id(self.pad_id, encode), "right"), pa.array(last)]
        found = _batch(self.schema, [*made, *_kept(texts, self.keep)])
        if not self.only_whole:
            return found
        whole = [len(one) < self.max_length or one[-1] == eos_id for one in ids]
        return found.filter(pa.array(whole, pa.bool_()))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Every prompt with a chosen and a rejected answer a row, as ``PairwiseDataset`` of TorchRL.

    A batch has ``chosen_data.input_ids``, ``chosen_data.attention_mask`` and the same of ``rejected_data``, each
    ``[B, L]``; ``as_pairs`` nests them. Tokens are those of ``prompt + separator + answer``.

    Args:
        max_length: L, the tokens of a row; longer texts are truncated, as the tokenizer does it.
        prompt: The column of the prompts.
        chosen: The column of the answers that were preferred.
        rejected: The column of the others.
        separator: What stands between prompt and answer.
        min_words: Pairs are left out with an answer of fewer words, and those of two equal answers.
        pad_id: What rows are filled up with; by default what the tokenizer pads with, else what ends its texts.
        add_special_tokens: Whether the tokenizer adds those that it puts around texts.
        keep: Columns of numbers that rows keep, by name with their dtypes.

    Raises:
        ConfigError: A length below 1, or a dtype that is none.
    """

    max_length: int
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    separator: str = "\n"
    min_words: int = 5
    pad_id: int | None = None
    add_special_tokens: bool = True
    keep: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_length(self.max_length)
        check_count("min_words", self.min_words, 0)
        object.__setattr__(self, "keep", _checked_keep(self.keep, ()))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The prompt, its answers, and what is kept."""
        names = (self.prompt, self.chosen, self.rejected)
        return {**dict.fromkeys(names, pa.string()), **_kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Four columns of lists of one length, and what is kept."""
        lists = [column for side in _SIDES for column in _padded_columns(side, self.max_length)]
        return pa.schema([*lists, *_kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``attention_mask`` of both answers, int64 ``[L]``, and what is kept."""
        return [*(one for side in _SIDES for one in _padded_fields(side)), *_kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each pair of answers that are two, and long enough."""
        sides = texts[self.chosen].to_pylist(), texts[self.rejected].to_pylist()
        differ = [
            one != other and min(len(one.split()), len(other.split())) >= self.min_words
            for one, other in zip(*sides, strict=True)
        ]
        texts = texts.filter(pa.array(differ, pa.bool_()))
        prompts, pad_id = texts[self.prompt].to_pylist(), _pad_id(self.pad_id, encode)
        made: list[pa.Array] = []
        for name in (self.chosen, self.rejected):
            both = [
                f"{prompt}{self.separator}{one}" for prompt, one in zip(prompts, texts[name].to_pylist(), strict=True)
            ]
            ids = encode(both, max_length=self.max_length, add_special_tokens=self.add_special_tokens)
            made += _padded(ids, self.max_length, pad_id, "right")
        return _batch(self.schema, [*made, *_kept(texts, self.keep)])


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Every token a row, and every text an episode, so that batches are windows ``[B, S]`` or packed texts.

    ``input_ids`` is the token; ``done`` is 1 at the last one of a text. A text without tokens has no rows.

    Args:
        text: The column of the texts.
        max_length: Longer texts are truncated, as the tokenizer does it; None: none is.
        eos_id: What is added behind every text; by default nothing.
        add_special_tokens: Whether the tokenizer adds those that it puts around texts.

    Raises:
        ConfigError: A length below 1.
    """

    text: str = "text"
    max_length: int | None = None
    eos_id: int | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_length is not None:
            _check_length(self.max_length)

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The text."""
        return {self.text: pa.string()}

    @property
    def schema(self) -> pa.Schema:
        """A token, and whether it is the last one of its text."""
        return pa.schema([("input_ids", pa.int32()), ("done", pa.int8())])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``done``, int64."""
        return [Field("input_ids", dtype="int64")]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each token."""
        found = encode(
            texts[self.text].to_pylist(), max_length=self.max_length, add_special_tokens=self.add_special_tokens
        )
        if self.eos_id is not None:
            found = [[*ids, self.eos_id] for ids in found]
        flat, lengths = _flat(found)
        done = np.zeros(len(flat), np.int8)
        done[lengths.cumsum()[lengths > 0] - 1] = 1
        return _batch(self.schema, [pa.array(flat), pa.array(done)])


_SIDES = ("chosen_data.", "rejected_data.")


def fields_of(recipe: Recipe) -> list[Field]:
    """The fields of a recipe, and the standard ones, which texts may do without."""
    own = list(recipe.fields)
    named = {one.name for one in own}
    return [*own, *(replace(one, required=False) for one in STANDARD_FIELDS if one.required and one.name not in named)]


def _check_length(max_length: Any) -> None:
    check_count("max_length", max_length)


def _checked_keep(keep: Any, taken: Sequence[str]) -> dict[str, str]:
    if not isinstance(keep, Mapping):
        raise ConfigError(f"keep: expected dtypes by column, as in {{'rewards': 'float32'}}, found {keep!r:.80}")
    for name in keep:
        if name in taken or not isinstance(name, str):
            raise ConfigError(f"keep: expected names of columns other than {list(taken)}, found {name!r}")
    return {name: str(check_dtype(dtype, where=f"keep[{name!r}]")) for name, dtype in sorted(keep.items())}


def _kept_types(keep: Mapping[str, str]) -> dict[str, pa.DataType]:
    return {name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in keep.items()}


def _kept_fields(keep: Mapping[str, str]) -> list[Field]:
    return [Field(name, dtype=dtype) for name, dtype in keep.items()]


def _kept(texts: pa.RecordBatch, keep: Mapping[str, str]) -> list[pa.Array]:
    return [texts[name] for name in keep]


def _padded_columns(before: str, length: int) -> list[tuple[str, pa.DataType]]:
    lists = pa.list_(pa.int32(), length), pa.list_(pa.uint8(), length)
    return [(f"{before}input_ids", lists[0]), (f"{before}attention_mask", lists[1])]


def _padded_fields(before: str) -> list[Field]:
    return [Field(f"{before}{name}", dtype="int64") for name in ("input_ids", "attention_mask")]


def _pad_id(told: int | None, encode: Encoder) -> int:
    found = next((one for one in (told, encode.pad_id, encode.eos_id) if one is not None), None)
    if found is None:
        raise ConfigError("pad_id: expected the id of padding, as the tokenizer says none, found None")
    return found


def _flat(ids: Sequence[Sequence[int]]) -> tuple[_Ids, npt.NDArray[np.int64]]:
    """All ids one behind the other, and how many each text has."""
    lengths = np.array([len(one) for one in ids], np.int64)
    flat = np.empty(int(lengths.sum()), np.int32)
    begin = 0
    for one in ids:
        flat[begin : begin + len(one)] = one
        begin += len(one)
    return flat, lengths


def _padded(ids: Sequence[Sequence[int]], length: int, pad_id: int, side: str) -> list[pa.Array]:
    """Ids ``[n, length]`` and their mask, as columns of lists."""
    flat, lengths = _flat(ids)
    step = np.arange(length)
    # Of 2 ids in 5 places: steps 0 and 1 on the right side's rows, 3 and 4 on the left one's.
    there = step < lengths[:, None] if side == "right" else step >= length - lengths[:, None]
    made = np.full((len(ids), length), pad_id, np.int32)
    made[there] = flat
    values = pa.array(made.reshape(-1)), pa.array(there.reshape(-1).view(np.uint8))
    return [pa.FixedSizeListArray.from_arrays(one, length) for one in values]


def _batch(schema: pa.Schema, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)
