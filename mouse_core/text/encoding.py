"""Tokenizers of several makes, called in one way, and what says whether one is the same as before."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mouse_core.errors import ConfigError, DataError
from mouse_core.files.reading import read_json_object
from mouse_core.formats.function_identity import digest_of, in_words

# What a tokenizer of the package tokenizers was told about truncation and padding stands before this in its JSON. A
# recipe says how long rows are, and tokenizers of transformers change it whenever they are called.
_BEHIND_SETTINGS = '"added_tokens"'


@runtime_checkable
class Encoder(Protocol):
    """From texts to token ids: what a recipe is given, whatever the tokenizer is.

    ``pad_id`` and ``eos_id`` are the tokenizer's ids of padding and of the end of a text, None where it has none.
    """

    @property
    def pad_id(self) -> int | None:
        """The id of padding."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text."""
        ...

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The ids of each text, at most ``max_length``, never padded."""
        ...

    def with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tuple[Any, Any]]:
        """Return the ids of each text, and each token's begin and end in the text, as rows of two."""
        ...


class _OfTokenizers:
    """A tokenizer of the package ``tokenizers``: a copy, as truncation is one of its settings."""

    def __init__(self, tokenizer: Any, said: Mapping[str, Any] | None = None) -> None:
        made = _copied(tokenizer)
        padding, truncation = made.padding, made.truncation
        self._tokenizer = made
        self._direction = truncation["direction"] if truncation else "right"
        self._length: int | None = None
        self.pad_id: int | None = padding["pad_id"] if padding else None
        self.eos_id: int | None = None
        if said is not None:
            self.pad_id, self.eos_id = (_id_of(made, said.get(name)) for name in ("pad_token", "eos_token"))
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

    def with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tuple[Any, Any]]:
        if self._length is not None:
            self._tokenizer.no_truncation()
            self._length = None
        return with_offsets(self._tokenizer, texts, add_special_tokens)


class _OfTransformers:
    """A tokenizer that is called as those of ``transformers`` are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_id: int | None = getattr(tokenizer, "pad_token_id", None)
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)

    def __call__(
        self, texts: Sequence[str], *, max_length: int | None = None, add_special_tokens: bool = True
    ) -> list[list[int]]:
        options = {} if add_special_tokens else {"add_special_tokens": False}
        # Without a length it is not said what was left at 512, as a tokenizer of transformers would.
        made = self._tokenizer(list(texts), truncation=max_length is not None, max_length=max_length, **options)
        try:
            found: list[list[int]] = made["input_ids"]
        except (TypeError, KeyError, IndexError):
            raise DataError(f"tokenizer: expected a dict with 'input_ids', found {made!r:.80}") from None
        if len(found) != len(texts):
            raise DataError(f"tokenizer: expected ids of {len(texts)} texts, found those of {len(found)}")
        return found

    def with_offsets(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tuple[Any, Any]]:
        return with_offsets(self._tokenizer, texts, add_special_tokens)


def _copied(tokenizer: Any) -> Any:
    """A tokenizer of the package ``tokenizers`` once more, with what its JSON leaves out."""
    made = type(tokenizer).from_str(tokenizer.to_str())
    if _splits_special(tokenizer):
        made.encode_special_tokens = True
    return made


def _splits_special(tokenizer: Any) -> bool:
    """Whether special tokens that stand in texts are texts as any others."""
    return bool(getattr(tokenizer, "encode_special_tokens", False))


def with_offsets(tokenizer: Any, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[Any, Any]]:
    """Ids and offsets of each text, by any tokenizer that tells offsets, or by an encoder.

    Raises:
        ConfigError: It tells none.
        DataError: A text that is none of Unicode's.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"chat: expected characters of Unicode, found half of one at {error.start}: {error}"
            ) from error
    if hasattr(tokenizer, "with_offsets"):
        told: list[tuple[Any, Any]] = tokenizer.with_offsets(texts, add_special_tokens=add_special_tokens)
        return told
    if hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "to_str"):
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            tokenizer = _copied(tokenizer)
            tokenizer.no_truncation()
            tokenizer.no_padding()
        made = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [(one.ids, one.offsets) for one in made]
    options = {"add_special_tokens": add_special_tokens, "truncation": False, "padding": False}
    try:
        said = tokenizer(list(texts), return_offsets_mapping=True, **options)
        return list(zip(said["input_ids"], said["offset_mapping"], strict=True))
    except (TypeError, KeyError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            "tokenizer: expected a tokenizers.Tokenizer or a fast tokenizer of transformers, which tell offsets, "
            f"found {type(tokenizer).__name__}: {error}"
        ) from error


def known(tokenizer: Any, version: str) -> tuple[str, Callable[[], Encoder]]:
    """Return the identity of a tokenizer, and a function that loads it.

    The identity needs no loading: a tokenizer's file is read, and no more.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``; the path of its JSON file, or of a folder with a ``tokenizer.json``; or
            what is called as tokenizers of ``transformers`` are.
        version: The user's version of the tokenizer.

    Raises:
        ConfigError: The tokenizer has none of these types, its file is missing, or it has no identity and no version.
    """
    if isinstance(tokenizer, str | os.PathLike):
        return _known_file(Path(tokenizer))
    if hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "to_str"):
        return f"tokenizers {_of_json(tokenizer.to_str())}{_used(tokenizer)}", lambda: _OfTokenizers(tokenizer)
    if not callable(tokenizer):
        raise ConfigError(
            "tokenizer: expected a tokenizers.Tokenizer, the path of its JSON file, or what is called as tokenizers of "
            f"transformers are, found {tokenizer!r:.80}"
        )
    return f"{_kind(tokenizer)} {_of_object(tokenizer, version)}", lambda: _OfTransformers(tokenizer)


def _known_file(path: Path) -> tuple[str, Callable[[], Encoder]]:
    file, beside = (path / "tokenizer.json", path / "tokenizer_config.json") if path.is_dir() else (path, None)
    said: Mapping[str, Any] | None = None
    try:
        read = file.read_bytes()
        if beside is not None and beside.is_file():
            said = {name: read_json_object(beside).get(name) for name in ("pad_token", "eos_token")}
    except OSError as error:
        raise ConfigError(
            f"tokenizer: expected the JSON file of a tokenizers.Tokenizer, or a folder with a tokenizer.json, found "
            f"{str(path)!r}: {error.strerror}"
        ) from error

    def load() -> Encoder:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("files of tokenizers need tokenizers: pip install 'mouse-data[text]'") from error
        try:
            return _OfTokenizers(Tokenizer.from_str(read.decode()), said)
        except Exception as error:  # of no class of its own
            raise ConfigError(
                f"tokenizer: expected the JSON of a tokenizer in {str(file)!r}, found: {error}"
            ) from error

    return f"file {hashlib.sha256(read).hexdigest()}" + (f" {json.dumps(said)}" if said else ""), load


def _id_of(tokenizer: Any, said: Any) -> int | None:
    """The id of a token that ``transformers`` wrote down, as a text or with what it is like."""
    token = said.get("content") if isinstance(said, Mapping) else said
    found: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return found


def _of_json(text: str) -> str:
    return hashlib.sha256(text[max(text.find(_BEHIND_SETTINGS), 0) :].encode()).hexdigest()


def _used(tokenizer: Any) -> str:
    """Return the truncation and padding options of a tokenizer that matter and are not the defaults."""
    padding, truncation = tokenizer.padding, tokenizer.truncation
    pad_id, side = padding and padding["pad_id"], truncation["direction"] if truncation else "right"
    said = "" if pad_id is None and side == "right" else f" {pad_id} {side}"
    return f"{said} splits special tokens" if _splits_special(tokenizer) else said


def _of_object(tokenizer: Any, version: str) -> str:
    """A digest of what decides about ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        names = ("truncation_side", "pad_token_id", "eos_token_id", "split_special_tokens")
        said = repr([getattr(tokenizer, name, None) for name in names])
        said += in_words(type(tokenizer)) if not version else ""
        return _of_json(backend.to_str()) + hashlib.sha256(said.encode()).hexdigest()[:16]
    return digest_of(tokenizer, version, "tokenizer")


def _kind(tokenizer: Any) -> str:
    kind = type(tokenizer)
    return f"{kind.__module__}.{kind.__qualname__}"
