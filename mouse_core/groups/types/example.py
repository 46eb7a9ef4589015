"""A sequence to train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.errors import DataError
from mouse_core.groups.types.arrays import floats_of, logprobs_of, own_array, tokens_of
from mouse_core.groups.types.columns import NO_COLUMNS, Columns, checked_columns
from mouse_core.groups.types.records import ByValue


@dataclass(frozen=True, eq=False, slots=True)
class RLExample(ByValue):
    """One sequence to train on, L tokens long.

    Args:
        tokens: int32 ``[L]``.
        loss_mask: Which tokens belong into the loss, bool ``[L]``: those that the policy wrote, never the prompt.
        advantage: float32 ``[L]``, 0 outside of the loss mask.
        generator_log_probs: Log-probabilities under the policy that sampled the tokens, float32 ``[L]``, 0 outside of
            the loss mask.
        rollout_uid, environment, policy_version: The rollout that it was made of, where it was made of one.
        columns: By name what a ``RolloutColumn`` declares: ``[L, *shape]`` with a value for each token, ``[T, *shape]``
            for each of T turns, ``shape`` for the example.

    Raises:
        DataError: Arrays of another type or of differing lengths, NaN, or log-probabilities above 0.
    """

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    advantage: npt.NDArray[np.float32]
    generator_log_probs: npt.NDArray[np.float32]
    rollout_uid: str = ""
    environment: str = ""
    policy_version: str = ""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    turn_ids: npt.NDArray[np.int32] | None = None
    declared: Columns = field(default=NO_COLUMNS, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens = tokens_of(self.tokens)
        mask = np.asarray(self.loss_mask)
        if mask.dtype != bool or mask.shape != tokens.shape:
            raise DataError(
                f"example {self.rollout_uid!r}: expected loss_mask as bool {list(tokens.shape)}, "
                f"found {mask.dtype} {list(mask.shape)}"
            )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_mask", own_array(mask, np.bool_, self.loss_mask))
        for name, of in (("advantage", floats_of), ("generator_log_probs", logprobs_of)):
            values = of(getattr(self, name), len(tokens), f"example {self.rollout_uid!r}: expected {name}")
            object.__setattr__(self, name, values)
        self._check_columns(f"example {self.rollout_uid!r}")

    def _check_columns(self, where: str) -> None:
        declared: Any = self.declared
        object.__setattr__(self, "declared", declared if isinstance(declared, Columns) else Columns(declared))
        columns = checked_columns(self.columns, where)
        if columns.keys() != self.declared.keys():
            raise DataError(
                f"{where}: expected the columns that were declared, {list(self.declared)}, found {list(columns)}"
            )
        turns = None
        if self.turn_ids is not None:
            ids = np.asarray(self.turn_ids)
            if ids.shape != self.tokens.shape or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
                raise DataError(f"{where}: expected turn_ids from 0 for each of {len(self.tokens)} tokens")
            object.__setattr__(self, "turn_ids", own_array(ids, np.int32, self.turn_ids))
        for name, column in self.declared.items():
            count = {"token": len(self.tokens), "example": None, "turn": turns}[column.per]
            if column.per == "turn":
                turns = count = len(columns[name]) if turns is None else turns
                if self.turn_ids is None or (len(self.tokens) and int(self.turn_ids.max()) >= turns):
                    raise DataError(f"{where}: expected turn_ids below {turns}, as {name!r} has so many turns")
            columns[name] = column.values(columns[name], count, where)
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.tokens)
