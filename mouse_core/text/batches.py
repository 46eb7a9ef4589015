"""What batches of prompts and of pairs become on the way to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from array_api_compat import array_namespace

from mouse_core.errors import MissingFieldError

_PAIR = ("chosen_data", "rejected_data")


def as_pairs(batch: Any) -> dict[str, Any]:
    """A batch of ``Pairs`` with its two answers as dicts of their own; nothing is copied.

    Args:
        batch: A dict of arrays or a TensorDict, of NumPy, torch or JAX, with ``chosen_data.input_ids`` and so on.

    Returns:
        ``chosen_data`` and ``rejected_data``, each a dict of ``input_ids`` and ``attention_mask``, and all others.

    Raises:
        MissingFieldError: It has no field of one of the two.
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
    """A batch of ``Prompts`` without the answers, as ``PromptData.mask_label`` of TorchRL makes it.

    What is kept are the tokens before ``prompt_rindex``, as there: the last one of the prompt is not among them.

    Args:
        batch: ``input_ids`` ``[B, L]`` and ``prompt_rindex`` ``[B]`` of NumPy, torch or JAX; also a TensorDict.
        pad_id: What stands in the place of all other tokens.

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
