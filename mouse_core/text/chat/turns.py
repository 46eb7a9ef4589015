"""Chats as turns of rollouts, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest.values import host_array
from mouse_core.dtypes import widened
from mouse_core.errors import DataError
from mouse_core.groups import Turn
from mouse_core.text.chat.dicts import from_openai, to_openai
from mouse_core.text.chat.encoding import EncodedChat
from mouse_core.text.chat.messages import Message
from mouse_core.text.chat.spans import is_learned

# The role of turns that are no message: tokens that the template wrote behind an answer, or before the first message.
_TEMPLATE = "template"


def to_turns(chat: EncodedChat, *, logprobs: npt.ArrayLike | None = None) -> tuple[Turn, ...]:
    """A chat as the turns of a ``RolloutRecord``: all of its tokens, each once and in order.

    A turn of an assistant has the tokens that it generated, and no others. What stands between answers belongs to the
    last message between them, generation prompt included; the other messages there have no tokens. Where no message
    stands there, as behind the last answer, it is a turn of role "template". What a turn has no place for, as calls of
    tools, is kept in its metadata. An answer of ``weight`` 0 has no log-probabilities, and so is not trained.

    Args:
        chat: As ``encode_chat`` makes it. Of one that was truncated all turns are there, with the tokens that are left.
        logprobs: Log-probabilities of all tokens under the policy, float32 ``[L]``, of which those of the generated
            ones are kept: then these turns are trained on. None: there are none.

    Returns:
        At least one turn for each message.

    Raises:
        DataError: Another number of log-probabilities; a chat in which answers and what was generated are not as many.
    """
    messages = chat.rendered.messages
    values = None if logprobs is None else host_array(widened(logprobs))
    if values is not None and values.shape != chat.input_ids.shape:
        raise DataError(f"to_turns: expected logprobs {chat.input_ids.shape}, found {values.shape}")
    answers = [place for place, message in enumerate(messages) if is_learned(message)]
    runs = _runs(chat)
    if len(runs) != len(answers):
        raise DataError(
            f"to_turns: expected what was generated of each of {len(answers)} messages of an assistant, found "
            f"{len(runs)} stretches of text"
        )
    turns: list[Turn] = []
    done, reached = 0, 0
    for place, (start, end) in zip(answers, runs, strict=True):
        turns += _between(messages[done:place], chat.input_ids[reached:start])
        own = None if values is None else values[start:end]
        turns.append(_turn(messages[place], chat.input_ids[start:end], own))
        done, reached = place + 1, end
    return (*turns, *_between(messages[done:], chat.input_ids[reached:]))


def from_turns(turns: Iterable[Turn]) -> tuple[Message, ...]:
    """The messages of turns: those that ``to_turns`` was given, or role and text of others.

    Raises:
        DataError: No turns, or something else among them.
    """
    found: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not isinstance(turn, Turn):
            raise DataError(f"from_turns: expected a Turn at place {place}, found {turn!r:.80}")
        if turn.role != _TEMPLATE:
            kept = turn.metadata.get("chat")
            found.append(dict(kept) if isinstance(kept, dict) else {"role": turn.role, "content": turn.message})
    return from_openai(found)


def _runs(chat: EncodedChat) -> list[tuple[int, int]]:
    """From where to where the tokens of each span go; where none are left, where they would be."""
    spans = np.array(chat.rendered.spans, np.int64).reshape(-1, 2)
    if not len(spans):
        return []
    generated = np.flatnonzero(chat.assistant_masks)
    starts, ends = chat.offsets[generated].T
    # A token belongs to the last span that begins where it begins, or before; one that straddles, to the one it enters.
    own = np.maximum(np.searchsorted(spans[:, 0], starts, side="right") - 1, 0)
    entered = np.minimum(own + 1, len(spans) - 1)
    own = np.where((starts >= spans[own, 1]) & (ends > spans[entered, 0]), entered, own)
    runs, reached = [], 0
    for number, (begin, _) in enumerate(spans.tolist()):
        group = generated[own == number]
        if len(group):
            run = int(group[0]), int(group[-1]) + 1
        else:
            behind = np.flatnonzero((chat.offsets[:, 0] >= begin) & (chat.offsets[:, 1] > begin))
            run = (max(reached, int(behind[0]) if len(behind) else len(chat.input_ids)),) * 2
        runs.append(run)
        reached = run[1]
    return runs


def _between(messages: tuple[Message, ...], tokens: npt.NDArray[np.int64]) -> list[Turn]:
    if not messages:
        return [Turn("", _TEMPLATE, tokens)] if len(tokens) else []  # type: ignore[arg-type]
    return [*(_turn(message, tokens[:0], None) for message in messages[:-1]), _turn(messages[-1], tokens, None)]


def _turn(message: Message, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[Any] | None) -> Turn:
    said = to_openai([message])[0]
    simple = said == {"role": message.role, "content": message.text} and isinstance(message.content, str)
    metadata = {} if simple and message.role != _TEMPLATE else {"chat": said}
    return Turn(message.text, message.role, tokens, logprobs, metadata=metadata)  # type: ignore[arg-type]
