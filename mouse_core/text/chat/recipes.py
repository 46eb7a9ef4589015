"""Recipes for chats on disk: padded rows with masks, one row per token, and pairs for DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mouse_core.errors import ConfigError, DataError
from mouse_core.spec import Field, check_choice
from mouse_core.text.chat.encoding import (
    STRADDLING,
    Ids,
    PairTexts,
    check_cut,
    kept_of,
    mask_of,
    preference_of,
    preference_texts,
    render_chat,
    tokens_of,
    tokens_of_pairs,
)
from mouse_core.text.chat.messages import Message, from_openai, from_sharegpt
from mouse_core.text.chat.template import ChatTemplate
from mouse_core.text.encoding import Encoder
from mouse_core.text.recipes import JSON, PaddedRecipe, batch_of, each, ended, flat_of, padded, values_of

_Side = Literal["right", "left"]
_Straddling = Literal["include", "exclude", "refuse"]
_ANSWERS = ("chosen", "rejected")


class _OfChats:
    """The common base of chat recipes."""

    template: ChatTemplate
    max_length: int | None
    messages: str
    tools: str | None
    end_of_turn: str | None
    truncation_side: _Side
    straddling: _Straddling

    def __post_init__(self) -> None:
        _check_template(self.template)
        check_cut(self.max_length, self.truncation_side)
        check_choice("straddling", self.straddling, STRADDLING)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        return {name: JSON for name in (self.messages, self.tools) if name is not None}

    def _encoded(self, texts: pa.RecordBatch, encode: Encoder) -> tuple[list[Ids], list[Ids], pa.BooleanArray]:
        """Ids and masks of chats, as long as they may be, and which these are: those of which a token is trained."""
        chats = zip(values_of(texts, self.messages), values_of(texts, self.tools, may_be_none=True), strict=True)
        rendered = each(
            lambda chat: render_chat(
                self.template, _messages(chat[0], self.messages), tools=chat[1], end_of_turn=self.end_of_turn
            ),
            chats,
        )
        tokens = tokens_of(encode, [one.text for one in rendered], False)
        both = zip(rendered, tokens, strict=True)
        cut = kept_of(self.max_length, self.truncation_side)
        masks = each(lambda one: mask_of(one[0], one[1][1], self.straddling)[cut], both)
        trained = [bool(mask.any()) for mask in masks]
        ids = [one[cut] for (one, _), is_left in zip(tokens, trained, strict=True) if is_left]
        return ids, [mask for mask in masks if mask.any()], pa.array(trained, pa.bool_())


@dataclass(frozen=True, kw_only=True)
class Chats(_OfChats, PaddedRecipe):
    """Every chat a row, filled up to one length, with the mask of what an assistant generated.

    A batch has ``input_ids``, ``attention_mask`` and ``assistant_masks``, int64 ``[B, L]``. They are those of
    ``encode_chat``; labels are the ids where ``assistant_masks`` is 1, and -100 elsewhere.

    A chat is a list of dicts as ``from_openai`` or ``from_sharegpt`` takes them, or the text of its JSON. Chats are
    left out of which an assistant generated no token, or none that is left when they are truncated.

    Args:
        template: The template. One that tells the time of day needs ``now``, as its texts differ from day to day.
        max_length: L, the tokens of a row; longer chats are truncated, ids and masks alike.
        messages: The column of the chats.
        tools: The column of the tools that may be called, a list of JSON schemas in each row, or nothing; None: there
            is no such column. One that no row has is refused.
        end_of_turn, truncation_side, straddling: As in ``encode_chat``.
        pad_id: What rows are filled up with; by default what the tokenizer pads with, else what ends its texts.
        padding_side: Where it stands.
        keep: Columns of numbers that rows keep, by name with their dtypes, as in ``{"rewards": "float32"}``.

    Raises:
        ConfigError: No length, a word or a dtype that is none, or a template that tells the time of day.
    """

    template: ChatTemplate
    max_length: int
    messages: str = "messages"
    tools: str | None = None
    end_of_turn: str | None = None
    truncation_side: _Side = "right"
    straddling: _Straddling = "include"
    pad_id: int | None = None
    padding_side: _Side = "right"
    keep: Mapping[str, str] = field(default_factory=dict)

    _lists = ("input_ids", "attention_mask", "assistant_masks")

    def __post_init__(self) -> None:
        _OfChats.__post_init__(self)
        PaddedRecipe.__post_init__(self)

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each chat of which a token is trained."""
        ids, masks, trained = self._encoded(texts, encode)
        made = padded(ids, self.max_length, self._padding(encode), self.padding_side)
        made.append(_masks(masks, self.max_length, self.padding_side))
        return self._batch(made, texts.filter(trained))


@dataclass(frozen=True, kw_only=True)
class ChatTokens(_OfChats):
    """Every token of chats a row, and every chat an episode: batches are windows ``[B, S]``, padded or packed chats.

    ``input_ids`` is the token, ``assistant_masks`` is 1 where an assistant generated it; ``done`` is 1 at the last one
    of a chat. Chats are left out as by ``Chats``.

    Args:
        template, messages, tools, end_of_turn, truncation_side, straddling: As in ``Chats``.
        max_length: Longer chats are truncated; None: none is.

    Raises:
        ConfigError: As ``Chats``.
    """

    template: ChatTemplate
    max_length: int | None = None
    messages: str = "messages"
    tools: str | None = None
    end_of_turn: str | None = None
    truncation_side: _Side = "right"
    straddling: _Straddling = "include"

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The chats, as JSON, and their tools where they have some."""
        return self._sources

    @property
    def schema(self) -> pa.Schema:
        """A token, whether it was generated, and whether it is the last one of its chat."""
        return pa.schema([("input_ids", pa.int32()), ("assistant_masks", pa.uint8()), ("done", pa.int8())])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids``, ``assistant_masks`` and ``done``, int64."""
        return [Field("input_ids", dtype="int64"), Field("assistant_masks", dtype="int64")]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each token of chats of which one is trained."""
        ids, masks, _ = self._encoded(texts, encode)
        flat, lengths = flat_of(ids)
        mask = np.concatenate([np.empty(0, np.uint8), *masks]).astype(np.uint8)
        return batch_of(self.schema, [pa.array(flat), pa.array(mask), pa.array(ended(lengths))])


@dataclass(frozen=True, kw_only=True)
class Preferences(PaddedRecipe):
    """Every prompt with a chosen and a rejected answer a row, for DPO and for reward models.

    A batch has ``chosen_data.input_ids``, ``chosen_data.attention_mask``, ``chosen_data.completion_mask`` and the same
    of ``rejected_data``, int64 ``[B, L]``; ``as_pairs`` of ``mouse_core.text`` nests them. Tokens and masks are those
    of ``encode_preference`` and ``collate_preferences``: the completion is all that follows the prompt.

    All three may be plain texts in place of chats, as in TRL's standard format: then no template is used, an answer
    ends in the template's variable ``eos_token``, where that is one, and the tokenizer adds its special tokens. A text
    is one unless it is the JSON of messages: of one or more dicts that have a ``role``, or ``from``, each, alone or as
    ``conversations``. Pairs of two equal
    answers are left out, and those that are equal when they are truncated, or of which one has no token.

    Args:
        template: The template. One that tells the time of day needs ``now``.
        max_length: L, the tokens of a row; longer ones are truncated.
        prompt: The column of the chats up to the answers; None: there is none, and the prompt is the messages with
            which both begin, but for the last one where a chat is the beginning of the other; of texts the tokens.
        chosen: The column of the messages that were preferred.
        rejected: The column of the others.
        tools, truncation_side, pad_id, padding_side, keep: As in ``Chats``.
        straddling: As in ``encode_preference``.

    Raises:
        ConfigError: As ``Chats``.
    """

    template: ChatTemplate
    max_length: int
    prompt: str | None = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    tools: str | None = None
    truncation_side: _Side = "right"
    straddling: Literal["include", "refuse"] = "include"
    pad_id: int | None = None
    padding_side: _Side = "right"
    keep: Mapping[str, str] = field(default_factory=dict)

    _sides = ("chosen_data.", "rejected_data.")
    _lists = ("input_ids", "attention_mask", "completion_mask")

    def __post_init__(self) -> None:
        _check_template(self.template)
        super().__post_init__()
        check_cut(self.max_length, self.truncation_side)
        check_choice("straddling", self.straddling, ("include", "refuse"))

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        names = (self.prompt, self.chosen, self.rejected, self.tools)
        return {name: JSON for name in names if name is not None}

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """A row for each pair that differs, and of which both answers have a token."""
        names = (self.prompt, self.chosen, self.rejected, self.tools)
        given = [values_of(texts, name, may_be_text=True) for name in names[:3]]
        given.append(values_of(texts, self.tools, may_be_none=True))
        said = each(self._texts, zip(*given, strict=True))
        pairs = each(self._pair, zip(said, tokens_of_pairs(encode, said), strict=True))
        pad_id, cut = self._padding(encode), kept_of(self.max_length, self.truncation_side)
        ids = [[np.concatenate([one["prompt_ids"], one[f"{side}_ids"]])[cut] for one in pairs] for side in _ANSWERS]
        differ = [not np.array_equal(chosen, rejected) for chosen, rejected in zip(*ids, strict=True)]
        said_both = [bool(len(one["chosen_ids"]) and len(one["rejected_ids"])) for one in pairs]
        wanted = pa.array(np.logical_and(differ, said_both), pa.bool_())
        made: list[pa.Array] = []
        for side, of_side in zip(_ANSWERS, ids, strict=True):
            lengths = [[len(one["prompt_ids"]), len(one[f"{side}_ids"])] for one in pairs]
            masks = [np.repeat(np.array([0, 1], np.int64), both)[cut] for both in lengths]
            made += padded(of_side, self.max_length, pad_id, self.padding_side)
            made.append(_masks(masks, self.max_length, self.padding_side))
        return self._batch(made, texts).filter(wanted)

    def _texts(self, row: tuple[Any, Any, Any, Any]) -> PairTexts:
        prompt, chosen, rejected, tools = row
        given = (chosen, rejected) if self.prompt is None else (prompt, chosen, rejected)
        are_texts = all(isinstance(one, str) for one in given)
        if not are_texts:
            chosen, rejected = _messages(chosen, self.chosen), _messages(rejected, self.rejected)
            prompt = None if self.prompt is None else _messages(prompt, self.prompt)
        if chosen == rejected:
            return PairTexts("", "", "", are_texts)  # left out as all that are equal
        if self.prompt is None:
            shorter = min(len(chosen), len(rejected)) - (not are_texts)  # a message is left of each answer
            both = zip(chosen, rejected, strict=False)
            same = next((at for at, (one, other) in enumerate(both) if one != other or at == shorter), shorter)
            if same < 1:
                names = f"columns {self.chosen!r} and {self.rejected!r}"
                raise DataError(f"{names}: expected chats that begin alike, found others")
            # Of texts it is the tokens that are compared, as one of them may be across the place where they part.
            same = 0 if are_texts else same
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        return preference_texts(self.template, prompt, chosen, rejected, tools)

    def _pair(self, pair: tuple[PairTexts, tuple[Ids, Ids, Ids]]) -> dict[str, Ids]:
        said, (prompt, chosen, rejected) = pair
        if self.prompt is None and said.are_plain:
            return preference_of((chosen, chosen, rejected), "include")
        return preference_of((prompt, chosen, rejected), self.straddling)


def _check_template(template: Any) -> None:
    if not isinstance(template, ChatTemplate):
        raise ConfigError(f"template: expected a ChatTemplate, found {template!r:.80}")
    if template.now is None and "strftime_now" in template.source:
        raise ConfigError(
            "template: expected one whose texts are the same tomorrow, found one that tells the time of day "
            "(strftime_now); say ChatTemplate(..., now=...)"
        )


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """The chat in a column, of either form."""
    is_sharegpt = isinstance(value, list) and value and isinstance(value[0], dict) and "role" not in value[0]
    if not isinstance(value, list) and not (isinstance(value, dict) and "conversations" in value):
        raise DataError(f"column {column!r}: expected a list of messages, found {value!r:.80}")
    return from_sharegpt(value) if is_sharegpt or isinstance(value, dict) else from_openai(value)


def _masks(masks: Sequence[npt.NDArray[np.int64]], length: int, side: str) -> pa.Array:
    """Masks as a column of lists, 0 where rows are filled up."""
    values = padded(masks, length, 0, side)[0].flatten()
    return pa.FixedSizeListArray.from_arrays(values.cast(pa.uint8()), length)
