"""Recipes that convert texts to padded rows of tokens, or to a row for each token; and interfaces of tokenizers."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from array_api_compat import array_namespace

from mouse_core.errors import ConfigError, DataError, MissingFieldError
from mouse_core.formats.jobs import digest_of, in_words
from mouse_core.spec import STANDARD_FIELDS, Field, check_choice, check_count, check_dtype

# In the JSON of a tokenizer of the package tokenizers, the options of truncation and padding come before this key. The
# digest of the JSON leaves them out: a recipe determines the length of rows, and transformers changes the options in
# every call.
_BEHIND_SETTINGS = '"added_tokens"'


@runtime_checkable
class Encoder(Protocol):
    """Common interface of all tokenizers, which converts texts to token ids.

    ``pad_id`` is the tokenizer's id for padding, and ``eos_id`` its end-of-text id; each is None if the tokenizer has
    no such id.
    """

    @property
    def pad_id(self) -> int | None:
        """The token id for padding."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The end-of-text id."""
        ...

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return at most ``max_length`` ids for each text, without padding."""
        ...

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[Any, Any]]:
        """Return the ids of each text without special tokens, and the begin and end of each token in the text,
        ``[L, 2]``.
        """
        ...


class _OfTokenizers:
    """An ``Encoder`` for a tokenizer of the package ``tokenizers``.

    The tokenizer is copied, because truncation is a setting of the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        made = _copied(tokenizer)
        padding, truncation = made.padding, made.truncation
        self._tokenizer = made
        self._direction = truncation["direction"] if truncation else "right"
        self._length: int | None = None
        self.pad_id: int | None = padding["pad_id"] if padding else None
        self.eos_id: int | None = None
        made.no_padding()
        made.no_truncation()

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        if max_length != self._length:
            if max_length is None:
                self._tokenizer.no_truncation()
            else:
                self._tokenizer.enable_truncation(max_length, direction=self._direction)
            self._length = max_length
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in found]

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[Any, Any]]:
        if self._length is not None:
            self._tokenizer.no_truncation()
            self._length = None
        return with_offsets(self._tokenizer, texts)


class _OfTransformers:
    """An ``Encoder`` for a callable with the interface of the tokenizers of ``transformers``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_id: int | None = getattr(tokenizer, "pad_token_id", None)
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        options = {} if add_special_tokens else {"add_special_tokens": False}
        # Without a length, truncation is off; otherwise tokenizers of transformers would truncate at their own limit.
        made = self._tokenizer(list(texts), truncation=max_length is not None, max_length=max_length, **options)
        try:
            found: list[list[int]] = made["input_ids"]
        except (TypeError, KeyError, IndexError):
            raise DataError(f"tokenizer: expected a dict with 'input_ids', found {made!r:.80}") from None
        if len(found) != len(texts):
            raise DataError(f"tokenizer: expected ids of {len(texts)} texts, found ids of {len(found)}")
        return found

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[Any, Any]]:
        return with_offsets(self._tokenizer, texts)


def _copied(tokenizer: Any) -> Any:
    """Copy a tokenizer of the package ``tokenizers``, including settings that its JSON does not contain."""
    made = type(tokenizer).from_str(tokenizer.to_str())
    if _splits_special(tokenizer):
        made.encode_special_tokens = True
    return made


def _splits_special(tokenizer: Any) -> bool:
    """Whether special tokens that occur inside of texts are tokenised like any other text."""
    return bool(getattr(tokenizer, "encode_special_tokens", False))


def with_offsets(tokenizer: Any, texts: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return ids and offsets of each text, without special tokens; the tokenizer may be an ``Encoder``.

    Raises:
        ConfigError: The tokenizer returns no offsets.
        DataError: A text is not valid Unicode.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"chat: expected Unicode characters, found half a surrogate pair at {error.start}: {error}"
            ) from error
    if hasattr(tokenizer, "with_offsets"):
        told: list[tuple[Any, Any]] = tokenizer.with_offsets(texts)
        return told
    if _is_of_tokenizers(tokenizer):
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            tokenizer = _copied(tokenizer)
            tokenizer.no_truncation()
            tokenizer.no_padding()
        made = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, one.offsets) for one in made]
    options = {"add_special_tokens": False, "truncation": False, "padding": False}
    try:
        said = tokenizer(list(texts), return_offsets_mapping=True, **options)
        return list(zip(said["input_ids"], said["offset_mapping"], strict=True))
    except (TypeError, KeyError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            "tokenizer: expected a tokenizers.Tokenizer or a fast tokenizer of transformers, which return offsets, "
            f"found {type(tokenizer).__name__}: {error}"
        ) from error


def encoder_of(tokenizer: Any) -> Encoder:
    """Return the ``Encoder`` of a tokenizer that ``identity_of`` accepts."""
    return _OfTokenizers(tokenizer) if _is_of_tokenizers(tokenizer) else _OfTransformers(tokenizer)


def _is_of_tokenizers(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "to_str")


def identity_of(tokenizer: Any, version: str) -> str:
    """Return a text that differs for tokenizers that can return different ids.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``, or a callable like the tokenizers of ``transformers``.
        version: The user's version of the tokenizer.

    Raises:
        ConfigError: The tokenizer has another type, or it cannot be identified and ``version`` is empty.
    """
    if _is_of_tokenizers(tokenizer):
        return f"tokenizers {_of_json(tokenizer.to_str())}{_used(tokenizer)}"
    if not callable(tokenizer):
        raise ConfigError(
            "tokenizer: expected a tokenizers.Tokenizer, such as Tokenizer.from_file('tokenizer.json'), or a callable "
            f"like tokenizers of transformers, found {tokenizer!r:.80}"
        )
    kind = type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__} {_of_object(tokenizer, version)}"


def _of_json(text: str) -> str:
    return hashlib.sha256(text[max(text.find(_BEHIND_SETTINGS), 0) :].encode()).hexdigest()


def _used(tokenizer: Any) -> str:
    """Return the truncation and padding options of a tokenizer that affect the ids and differ from the defaults."""
    padding, truncation = tokenizer.padding, tokenizer.truncation
    pad_id, side = padding and padding["pad_id"], truncation["direction"] if truncation else "right"
    said = "" if pad_id is None and side == "right" else f" {pad_id} {side}"
    return f"{said} splits special tokens" if _splits_special(tokenizer) else said


def _of_object(tokenizer: Any, version: str) -> str:
    """Return a digest of all parts of a tokenizer object that determine the ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        names = ("truncation_side", "pad_token_id", "eos_token_id", "split_special_tokens")
        said = repr([getattr(tokenizer, name, None) for name in names])
        said += in_words(type(tokenizer)) if not version else ""
        return _of_json(backend.to_str()) + hashlib.sha256(said.encode()).hexdigest()[:16]
    return digest_of(tokenizer, version, "tokenizer")


_Made = TypeVar("_Made")
_LARGEST_ID = 2**31 - 1
Ids = Sequence[int] | npt.NDArray[np.int64]
JSON = pa.json_()
"""Type of columns with values of any form, such as chats. Each value is stored as JSON, so texts are in quotes."""


class InRow(DataError):
    """An error in an input row of a recipe.

    Args:
        row: The index of the row.
        message: The error message.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(row, message)
        self.row, self.message = row, message

    def __str__(self) -> str:
        return f"row {self.row}: {self.message}"


def each(call: Callable[[Any], _Made], values: Iterable[Any]) -> list[_Made]:
    """Apply a function to each row.

    Raises:
        InRow: The function raised an error; the message names the first row with an error.
    """
    made = []
    for row, value in enumerate(values):
        try:
            made.append(call(value))
        except (DataError, RecursionError) as error:
            raise InRow(row, str(error)) from error
    return made


def values_of(texts: pa.RecordBatch, column: str | None, *, may_be_none: bool = False) -> list[Any]:
    """Parse the value of each row in a column of JSON; return None for each row if the column does not exist.

    Args:
        texts: The rows. If the parsed value is a text, the text is also parsed as JSON.
        column: Name of the column; None if there is no column.
        may_be_none: Whether missing values are allowed.

    Raises:
        InRow: A row lacks a required value, or its text is not JSON; the first such row is named in the error.
    """
    if column is None:
        return [None] * texts.num_rows

    def value(said: str | None) -> Any:
        read = None if said is None else _read(said, column)
        read = _read(read, column) if isinstance(read, str) else read
        if read is None and not may_be_none:
            raise DataError(f"column {column!r}: expected a list of messages, found None")
        return read

    return each(value, texts[column].to_pylist())


def _read(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"column {column!r}: expected messages as JSON, found {text!r:.80}: {error}") from error


def check_id(name: str, token: Any) -> None:
    """Raise ConfigError unless ``token`` is None or can be the id of a token."""
    if token is not None:
        check_count(name, token, 0)
        if token > _LARGEST_ID:
            raise ConfigError(f"{name}: expected an id of at most {_LARGEST_ID}, found {token}")


def checked_keep(keep: Any, taken: Sequence[str | None]) -> dict[str, str]:
    """Return the columns to keep; raise ConfigError for a name that is already used."""
    if not isinstance(keep, Mapping):
        raise ConfigError(f"keep: expected dtypes by column, as in {{'rewards': 'float32'}}, found {keep!r:.80}")
    for name in keep:
        if name in taken or not isinstance(name, str):
            others = [one for one in taken if one is not None]
            raise ConfigError(f"keep: expected names of columns other than {others}, found {name!r}")
    return {name: str(check_dtype(dtype, where=f"keep[{name!r}]")) for name, dtype in sorted(keep.items())}


def _kept_types(keep: Mapping[str, str]) -> dict[str, pa.DataType]:
    return {name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in keep.items()}


class PaddedRecipe:
    """Base class of recipes for padded rows, which checks arguments and defines the columns and fields of rows.

    For each prefix in ``_sides``, a row has the lists in ``_lists``, each of length ``max_length``. After the lists, a
    row has the numbers in ``_numbers`` and the columns in ``keep``.
    """

    _sides: ClassVar[tuple[str, ...]] = ("",)
    _lists: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    _numbers: ClassVar[Mapping[str, pa.DataType]] = {}
    _more_fields: ClassVar[tuple[Field, ...]] = ()

    max_length: int
    pad_id: int | None
    padding_side: Literal["right", "left"] = "right"
    keep: Mapping[str, str]

    def __post_init__(self) -> None:
        check_count("max_length", self.max_length)
        check_choice("padding_side", self.padding_side, ("right", "left"))
        check_id("pad_id", self.pad_id)
        taken = (*self._names, *self._numbers, *(one.name for one in self._more_fields), *self._sources)
        object.__setattr__(self, "keep", checked_keep(self.keep, taken))

    @property
    def _names(self) -> list[str]:
        return [f"{side}{name}" for side in self._sides for name in self._lists]

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        """Names of the columns from which tokens are created."""
        raise NotImplementedError

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """Names and types of the columns of texts, and of the kept columns."""
        return {**self._sources, **_kept_types(self.keep)}

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row: lists of fixed length, numbers, and the kept columns."""
        kinds = [pa.int32() if name.endswith("input_ids") else pa.uint8() for name in self._names]
        lists = {name: pa.list_(kind, self.max_length) for name, kind in zip(self._names, kinds, strict=True)}
        return pa.schema({**lists, **self._numbers, **_kept_types(self.keep)})

    @property
    def fields(self) -> Sequence[Field]:
        """The fields of a batch: the lists as int64 ``[L]``, the numbers as int64, and the kept columns."""
        own = [Field(name, dtype="int64") for name in (*self._names, *self._numbers)]
        return [*own, *self._more_fields, *(Field(name, dtype=dtype) for name, dtype in self.keep.items())]

    def _padding(self, encode: Encoder) -> int:
        found = next((one for one in (self.pad_id, encode.pad_id, encode.eos_id) if one is not None), None)
        if found is None:
            raise ConfigError("pad_id: expected an id, because the tokenizer has no id for padding, found None")
        return found

    def _batch(self, columns: Sequence[pa.Array], texts: pa.RecordBatch) -> pa.RecordBatch:
        """Return a record batch of rows with ``columns`` and the columns in ``keep``."""
        return batch_of(self.schema, [*columns, *(texts[name] for name in self.keep)])


def flat_of(ids: Sequence[Ids]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return two arrays: the concatenated ids of all texts, and the number of ids of each text."""
    try:
        wide = _joined(ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"tokenizer: expected integers [n] for each text, found other values: {error}") from error
    narrow = wide.astype(np.int32)
    if (bad := (narrow != wide) | (narrow < 0)).any():
        raise DataError(f"tokenizer: expected ids of 0 or more that fit in 32 bits, found {wide[bad][0]}")
    lengths = np.array([len(one) for one in ids], np.int64)
    return narrow, lengths


def _joined(ids: Sequence[Ids]) -> npt.NDArray[np.int64]:
    if all(isinstance(one, list) for one in ids):
        flat = array("q")
        for one in ids:
            flat.fromlist(one)  # type: ignore[arg-type]  # which takes integers only
        return np.array(flat, np.int64)
    arrays = [np.asarray(one) for one in ids]
    for one in arrays:
        if one.ndim != 1 or (one.size and one.dtype.kind not in "iu"):
            raise TypeError(f"{one.dtype} {list(one.shape)}")
    return np.concatenate([np.zeros(0, np.int64), *(one.astype(np.int64, copy=False) for one in arrays)])


def ended(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Return, for concatenated texts, an array with 1 at the last token of each text, and 0 at all other tokens."""
    done = np.zeros(int(lengths.sum()), np.int8)
    done[lengths.cumsum()[lengths > 0] - 1] = 1
    return done


def padded(ids: Sequence[Ids], length: int, pad_id: int, side: str) -> list[pa.Array]:
    """Return padded ids ``[n, length]`` and their mask, as columns of lists."""
    flat, lengths = flat_of(ids)
    if lengths.size and lengths.max() > length:
        raise DataError(f"tokenizer: expected at most max_length={length} ids of a text, found {lengths.max()}")
    # For 2 tokens in 5 places they are 0 and 1 with padding on the right, 3 and 4 with padding on the left.
    step = np.arange(length)
    there = step < lengths[:, None] if side == "right" else step >= length - lengths[:, None]
    made = np.full((len(ids), length), pad_id, np.int32)
    made[there] = flat
    values = pa.array(made.reshape(-1)), pa.array(there.reshape(-1).view(np.uint8))
    return [pa.FixedSizeListArray.from_arrays(one, length) for one in values]


def batch_of(schema: pa.Schema, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return columns as a record batch."""
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)


@runtime_checkable
class Recipe(Protocol):
    """Converts texts to rows of tokens.

    The ``repr`` of a recipe must contain all settings that affect the rows, like the ``repr`` of a dataclass.

    ``Texts``, ``Prompts``, ``Pairs`` and ``Tokens`` are recipes. A custom recipe is a frozen dataclass with these four
    methods.
    """

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """Return names and types of the columns that the recipe reads.

        The type ``pa.json_()`` is for values of any form. For such a column, ``rows`` receives the JSON of each value
        (a text is a JSON string, ``'"hi"'``), and null for a missing value.
        """
        ...

    @property
    def schema(self) -> pa.Schema:
        """The schema of the recipe's rows."""
        ...

    @property
    def fields(self) -> Sequence[Field]:
        """The fields of batches of these rows."""
        ...

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """Convert texts to rows. The method must be a pure function, and may leave out texts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Texts(PaddedRecipe):
    """Converts every text to a row of fixed length. A batch has ``input_ids`` and ``attention_mask``, both ``[B, L]``.

    Args:
        max_length: Number of tokens in a row, L; the tokenizer truncates longer texts.
        text: The column of the texts.
        pad_id: The token id for padding; by default the tokenizer's id for padding or, without one, its end-of-text id.
        padding_side: The side of a row that is padded, "left" or "right". Text generation needs "left".
        add_special_tokens: Whether the tokenizer adds its special tokens around texts.
        keep: Numeric columns that are copied to the rows, with their dtypes, such as ``{"rewards": "float32"}``.

    Raises:
        ConfigError: The length is below 1; an id, side or dtype is invalid; or a name is already used.
    """

    max_length: int
    text: str = "text"
    pad_id: int | None = None
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    keep: Mapping[str, str] = field(default_factory=dict)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        return {self.text: pa.string()}

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """Return a row for each text."""
        ids = encode(
            texts[self.text].to_pylist(), max_length=self.max_length, add_special_tokens=self.add_special_tokens
        )
        return self._batch(padded(ids, self.max_length, self._padding(encode), self.padding_side), texts)


@dataclass(frozen=True, kw_only=True)
class Prompts(PaddedRecipe):
    """Converts every prompt and its answer to a row, like ``PromptData`` of TorchRL.

    A row has the tokens of ``prompt + separator + label``. ``prompt_rindex``, int64 ``[B]``, is the index of the last
    token of the prompt. To find this index, the prompt is tokenised separately, and tokens that the tokenizer appends
    to every text are ignored. ``labels`` is the same array as ``input_ids``.

    Args:
        max_length: Number of tokens in a row, L.
        prompt: The column of the prompts.
        label: The column of the answers.
        separator: The text between prompt and answer.
        pad_id: The token id for padding; by default the tokenizer's id for padding or, without one, its end-of-text id.
        eos_id: The id that ends an answer; by default the tokenizer's end-of-text id, if the tokenizer has one.
        only_whole: Whether to leave out full rows that do not end with ``eos_id``, because their texts may be
            truncated.
        add_special_tokens: Whether the tokenizer adds its special tokens around texts.
        keep: Numeric columns that are copied to the rows, with their dtypes.

    Raises:
        ConfigError: The length is below 1; an id or dtype is invalid; or a name is already used.
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

    _numbers: ClassVar[Mapping[str, pa.DataType]] = {"prompt_rindex": pa.int32()}
    _more_fields = (Field("labels", column="input_ids", dtype="int64"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_id("eos_id", self.eos_id)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        return {self.prompt: pa.string(), self.label: pa.string()}

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """Return a row for each prompt.

        With ``only_whole``, prompts whose answers do not end within the row are left out.
        """
        prompts, labels = texts[self.prompt].to_pylist(), texts[self.label].to_pylist()
        options: dict[str, Any] = {"max_length": self.max_length, "add_special_tokens": self.add_special_tokens}
        both = [f"{prompt}{self.separator}{label}" for prompt, label in zip(prompts, labels, strict=True)]
        ids = encode(both, **options)
        last = np.array([*map(_last_of_prompt, encode(prompts, **options), ids, encode([""], **options) * len(ids))])
        eos_id = encode.eos_id if self.eos_id is None else self.eos_id
        made = [*padded(ids, self.max_length, self._padding(encode), "right"), pa.array(last, pa.int32())]
        found = self._batch(made, texts)
        if not self.only_whole:
            return found
        whole = [len(one) < self.max_length or one[-1] == eos_id for one in ids]
        return found.filter(pa.array(whole, pa.bool_()))


@dataclass(frozen=True, kw_only=True)
class Pairs(PaddedRecipe):
    """Converts every prompt with a chosen and a rejected answer to a row, like ``PairwiseDataset`` of TorchRL.

    A batch has ``chosen_data.input_ids``, ``chosen_data.attention_mask`` and the same fields of ``rejected_data``, each
    ``[B, L]``; ``as_pairs`` nests these fields. The tokens come from the text ``prompt + separator + answer``.

    Args:
        max_length: Number of tokens in a row, L; the tokenizer truncates longer texts.
        prompt: The column of the prompts.
        chosen: The column of the preferred answers.
        rejected: The column of the other answers.
        separator: The text between prompt and answer.
        min_words: Smallest number of words in an answer. Pairs with a shorter answer, and pairs with equal answers, are
            left out.
        pad_id: The token id for padding; by default the tokenizer's id for padding or, without one, its end-of-text id.
        add_special_tokens: Whether the tokenizer adds its special tokens around texts.
        keep: Numeric columns that are copied to the rows, with their dtypes.

    Raises:
        ConfigError: The length is below 1; an id or dtype is invalid; or a name is already used.
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

    _sides = ("chosen_data.", "rejected_data.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("min_words", self.min_words, 0)

    @property
    def _sources(self) -> dict[str, pa.DataType]:
        return dict.fromkeys((self.prompt, self.chosen, self.rejected), pa.string())

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """Return a row for each pair whose answers differ and are long enough."""
        sides = texts[self.chosen].to_pylist(), texts[self.rejected].to_pylist()
        differ = [
            one != other and min(len(one.split()), len(other.split())) >= self.min_words
            for one, other in zip(*sides, strict=True)
        ]
        texts = texts.filter(pa.array(differ, pa.bool_()))
        prompts, pad_id = texts[self.prompt].to_pylist(), self._padding(encode)
        made: list[pa.Array] = []
        for name in (self.chosen, self.rejected):
            both = [
                f"{prompt}{self.separator}{one}" for prompt, one in zip(prompts, texts[name].to_pylist(), strict=True)
            ]
            ids = encode(both, max_length=self.max_length, add_special_tokens=self.add_special_tokens)
            made += padded(ids, self.max_length, pad_id, "right")
        return self._batch(made, texts)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Converts each token to a row, and each text to an episode, for batches of windows ``[B, S]`` or of packed texts.

    ``input_ids`` is the token; ``done`` is 1 at the last token of a text. A text without tokens has no rows.

    Args:
        text: The column of the texts.
        max_length: Largest number of tokens of a text; the tokenizer truncates longer texts. None for no limit.
        eos_id: The id that is appended to every text that does not end with this id; None to append no id.
        add_special_tokens: Whether the tokenizer adds its special tokens around texts.

    Raises:
        ConfigError: The length is below 1.
    """

    text: str = "text"
    max_length: int | None = None
    eos_id: int | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_count("max_length", self.max_length)
        check_id("eos_id", self.eos_id)

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The column of the texts."""
        return {self.text: pa.string()}

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row: a token, and whether it is the last token of its text."""
        return pa.schema([("input_ids", pa.int32()), ("done", pa.int8())])

    @property
    def fields(self) -> Sequence[Field]:
        """``input_ids`` and ``done``, int64."""
        return [Field("input_ids", dtype="int64")]

    def rows(self, texts: pa.RecordBatch, encode: Encoder) -> pa.RecordBatch:
        """Return a row for each token."""
        found = encode(
            texts[self.text].to_pylist(), max_length=self.max_length, add_special_tokens=self.add_special_tokens
        )
        if self.eos_id is not None:
            found = [ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id] for ids in found]
        flat, lengths = flat_of(found)
        return batch_of(self.schema, [pa.array(flat), pa.array(ended(lengths))])


def _last_of_prompt(alone: Sequence[int], whole: Sequence[int], empty: Sequence[int]) -> int:
    """Return the index of a prompt's last token, without the tokens that the tokenizer appends to every text.

    For the prompt ``[bos, 3, eos]``, the text ``[bos, 3, 4, eos]`` and the empty text ``[bos, eos]``, the index is 1.
    """
    end = len(alone) - 1
    is_added = end > 0 and empty[-1:] == [alone[end]] and (len(whole) <= end + 1 or whole[end] != alone[end])
    return end - is_added


def fields_of(recipe: Recipe) -> list[Field]:
    """Return the fields of a recipe together with the standard fields, which are optional for texts."""
    own = list(recipe.fields)
    named = {one.name for one in own}
    return [*own, *(replace(one, required=False) for one in STANDARD_FIELDS if one.required and one.name not in named)]


_PAIR = ("chosen_data", "rejected_data")


def as_pairs(batch: Any) -> dict[str, Any]:
    """Convert a batch of ``Pairs`` to nested dicts, one for each of the two answers; no array is copied.

    Args:
        batch: A dict of arrays or a TensorDict, of NumPy, torch or JAX, with ``chosen_data.input_ids`` and so on.

    Returns:
        A dict with ``chosen_data`` and ``rejected_data``, each a dict of ``input_ids`` and ``attention_mask``, and with
            all other fields.

    Raises:
        MissingFieldError: The batch lacks the fields of an answer.
    """
    made: dict[str, Any] = {name: {} for name in _PAIR}
    for name in batch.keys():  # noqa: SIM118, a TensorDict iterates over its rows
        side, _, rest = str(name).partition(".")
        if side in _PAIR and rest:
            made[side][rest] = batch[name]
        else:
            made[name] = batch[name]
    for side in _PAIR:
        if not made[side]:
            raise MissingFieldError(f"as_pairs: expected fields {side}.*, found {[str(name) for name in batch.keys()]}")  # noqa: SIM118
    return made


def mask_label(batch: Mapping[str, Any], *, pad_id: int) -> dict[str, Any]:
    """Replace the answers in a batch of ``Prompts`` by padding, like ``PromptData.mask_label`` of TorchRL.

    Only the tokens before ``prompt_rindex`` are kept, as in TorchRL. The last token of the prompt is at
    ``prompt_rindex``, so this token is also replaced.

    Args:
        batch: A dict or TensorDict with ``input_ids`` ``[B, L]`` and ``prompt_rindex`` ``[B]``, of NumPy, torch or JAX.
        pad_id: The token id for padding.

    Returns:
        ``input_ids`` and ``attention_mask`` ``[B, L]``, in the dtype of the ids, and ``prompt_rindex``.

    Raises:
        MissingFieldError: A field is missing.
    """
    names = [str(name) for name in batch.keys()]  # noqa: SIM118
    for name in ("input_ids", "prompt_rindex"):
        if name not in names:
            raise MissingFieldError(f"mask_label: expected a field {name!r}, found {names}")
    ids, last = batch["input_ids"], batch["prompt_rindex"]
    xp: Any = array_namespace(ids, last)
    step = xp.arange(ids.shape[1], dtype=last.dtype, device=getattr(last, "device", None))
    is_prompt = step[None, :] < last[:, None]
    pads = xp.full_like(ids, pad_id)
    return {
        "input_ids": xp.where(is_prompt, ids, pads),
        "attention_mask": xp.astype(is_prompt, ids.dtype),
        "prompt_rindex": last,
    }
