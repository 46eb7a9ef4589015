"""What becomes of texts: prompts, pairs and texts as padded rows, or every token a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from mouse_core.errors import ConfigError
from mouse_core.spec import STANDARD_FIELDS, Field, check_count
from mouse_core.text._rows import (
    batch_of,
    check_id,
    check_length,
    checked_keep,
    ended,
    flat_of,
    kept,
    kept_fields,
    kept_types,
    padded,
    padded_columns,
    padded_fields,
    padding_of,
)
from mouse_core.text.encoding import Encoder


@runtime_checkable
class Recipe(Protocol):
    """From texts to rows of tokens. Its ``repr`` says all that decides about the rows, as that of a dataclass does.

    Those of this module are recipes, and so is a frozen dataclass of yours with these four.
    """

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """Names and types of the columns that it reads.

        ``pa.json_()`` is for values of any shape: ``rows`` is given the JSON of each, which of a text is a text of JSON
        (``'"hi"'``), and null where a row has nothing.
        """
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
        ConfigError: A length below 1, an id that is none of a token, a side or a dtype that is none, or a name that is
            taken.
    """

    max_length: int
    text: str = "text"
    pad_id: int | None = None
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    keep: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_length(self.max_length)
        if self.padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side: expected 'right' or 'left', found {self.padding_side!r}")
        check_id("pad_id", self.pad_id)
        object.__setattr__(self, "keep", checked_keep(self.keep, ("input_ids", "attention_mask", self.text)))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The text, and what is kept."""
        return {self.text: pa.string(), **kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Two columns of lists of one length, and what is kept."""
        return pa.schema([*padded_columns("", self.max_length), *kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``attention_mask``, int64 ``[L]``, and what is kept."""
        return [*padded_fields(""), *kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each text."""
        ids = encode(
            texts[self.text].to_pylist(), max_length=self.max_length, add_special_tokens=self.add_special_tokens
        )
        made = padded(ids, self.max_length, padding_of(self.pad_id, encode), self.padding_side)
        return batch_of(self.schema, [*made, *kept(texts, self.keep)])


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Every prompt with its answer a row, as ``PromptData`` of TorchRL: ``prompt_rindex`` is where the prompt ends.

    A row is the tokens of ``prompt + separator + label``; ``prompt_rindex``, int64 ``[B]``, is the index of the last
    token of the prompt tokenised alone, without what the tokenizer puts behind every text; ``labels`` are ``input_ids``
    by another name, and take no room.

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
        ConfigError: A length below 1, an id that is none of a token, a dtype that is none, or a name that is taken.
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
        check_length(self.max_length)
        check_id("pad_id", self.pad_id)
        check_id("eos_id", self.eos_id)
        taken = ("input_ids", "attention_mask", "prompt_rindex", "labels", self.prompt, self.label)
        object.__setattr__(self, "keep", checked_keep(self.keep, taken))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The prompt, its answer, and what is kept."""
        return {self.prompt: pa.string(), self.label: pa.string(), **kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Two columns of lists of one length, a number, and what is kept."""
        columns = [*padded_columns("", self.max_length), ("prompt_rindex", pa.int32())]
        return pa.schema([*columns, *kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids``, ``attention_mask`` and ``labels``, int64 ``[L]``, ``prompt_rindex`` and what is kept."""
        more = [Field("prompt_rindex", dtype="int64"), Field("labels", column="input_ids", dtype="int64")]
        return [*padded_fields(""), *more, *kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each prompt whose answer ends within it."""
        prompts, labels = texts[self.prompt].to_pylist(), texts[self.label].to_pylist()
        options: dict[str, Any] = {"max_length": self.max_length, "add_special_tokens": self.add_special_tokens}
        both = [f"{prompt}{self.separator}{label}" for prompt, label in zip(prompts, labels, strict=True)]
        ids = encode(both, **options)
        last = np.array([*map(_last_of_prompt, encode(prompts, **options), ids, encode([""], **options) * len(ids))])
        eos_id = encode.eos_id if self.eos_id is None else self.eos_id
        made = [*padded(ids, self.max_length, padding_of(self.pad_id, encode), "right"), pa.array(last, pa.int32())]
        found = batch_of(self.schema, [*made, *kept(texts, self.keep)])
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
        ConfigError: A length below 1, an id that is none of a token, a dtype that is none, or a name that is taken.
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
        check_length(self.max_length)
        check_count("min_words", self.min_words, 0)
        check_id("pad_id", self.pad_id)
        fields = [f"{side}{name}" for side in _SIDES for name in ("input_ids", "attention_mask")]
        taken = (*fields, self.prompt, self.chosen, self.rejected)
        object.__setattr__(self, "keep", checked_keep(self.keep, taken))

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The prompt, its answers, and what is kept."""
        names = (self.prompt, self.chosen, self.rejected)
        return {**dict.fromkeys(names, pa.string()), **kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """Four columns of lists of one length, and what is kept."""
        lists = [column for side in _SIDES for column in padded_columns(side, self.max_length)]
        return pa.schema([*lists, *kept_types(self.keep).items()])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``attention_mask`` of both answers, int64 ``[L]``, and what is kept."""
        return [*(one for side in _SIDES for one in padded_fields(side)), *kept_fields(self.keep)]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each pair of answers that are two, and long enough."""
        sides = texts[self.chosen].to_pylist(), texts[self.rejected].to_pylist()
        differ = [
            one != other and min(len(one.split()), len(other.split())) >= self.min_words
            for one, other in zip(*sides, strict=True)
        ]
        texts = texts.filter(pa.array(differ, pa.bool_()))
        prompts, pad_id = texts[self.prompt].to_pylist(), padding_of(self.pad_id, encode)
        made: list[pa.Array] = []
        for name in (self.chosen, self.rejected):
            both = [
                f"{prompt}{self.separator}{one}" for prompt, one in zip(prompts, texts[name].to_pylist(), strict=True)
            ]
            ids = encode(both, max_length=self.max_length, add_special_tokens=self.add_special_tokens)
            made += padded(ids, self.max_length, pad_id, "right")
        return batch_of(self.schema, [*made, *kept(texts, self.keep)])


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Every token a row, and every text an episode, so that batches are windows ``[B, S]`` or packed texts.

    ``input_ids`` is the token; ``done`` is 1 at the last one of a text. A text without tokens has no rows.

    Args:
        text: The column of the texts.
        max_length: Longer texts are truncated, as the tokenizer does it; None: none is.
        eos_id: What is added behind every text that does not end in it already; by default nothing.
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
            check_length(self.max_length)
        check_id("eos_id", self.eos_id)

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
            found = [ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id] for ids in found]
        flat, lengths = flat_of(found)
        return batch_of(self.schema, [pa.array(flat), pa.array(ended(lengths))])


_SIDES = ("chosen_data.", "rejected_data.")


def _last_of_prompt(alone: Sequence[int], whole: Sequence[int], empty: Sequence[int]) -> int:
    """Where a prompt ends in a text: where it ends alone, but for what the tokenizer puts behind every text.

    Of a prompt alone ``[bos, 3, eos]``, a text ``[bos, 3, 4, eos]`` and an empty one ``[bos, eos]``: 1.
    """
    end = len(alone) - 1
    is_added = end > 0 and empty[-1:] == [alone[end]] and (len(whole) <= end + 1 or whole[end] != alone[end])
    return end - is_added


def fields_of(recipe: Recipe) -> list[Field]:
    """The fields of a recipe, and the standard ones, which texts may do without."""
    own = list(recipe.fields)
    named = {one.name for one in own}
    return [*own, *(replace(one, required=False) for one in STANDARD_FIELDS if one.required and one.name not in named)]
