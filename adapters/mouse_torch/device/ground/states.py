"""Hidden states of recurrent policies, in memory that is there from the beginning."""

from __future__ import annotations

from typing import Any

import torch

from mouse_core.errors import SchemaError
from mouse_core.nested import FieldKey
from mouse_core.rollouts import policy_states
from mouse_torch.device.ground.fields import Fields, Row
from mouse_torch.rollouts import TensorArrays


class States(torch.nn.Module):
    """The hidden states of actor and critic in each of some time steps.

    Args:
        example: ``(actor, critic)`` of one step, trees of tensors; None where there are none.
        steps: How many.
        num_envs: Of how many environments each is.
        axis: Where a state has its environments; see ``policy_states.env_axis``.
        arrays: The kind of arrays they are.

    Raises:
        SchemaError: No pair, or states of other environments.
    """

    def __init__(self, example: Any, steps: int, num_envs: int, axis: int | None, arrays: TensorArrays) -> None:
        super().__init__()
        rows: dict[FieldKey, Row] = {}
        self._arrays, self._names = arrays, None
        if not policy_states.is_empty(example):
            if not isinstance(example, tuple | list) or len(example) != 2:
                raise SchemaError(f"hidden_states: expected (actor, critic), found {type(example).__name__}")

            def named(path: str, leaf: Any) -> str:
                state = arrays.array(leaf)
                policy_states.check_envs(path, tuple(state.shape), num_envs, axis)
                rows[path] = Row(tuple(state.shape), state.dtype)
                return path

            self._names = policy_states.tree_map(named, example)
        self.memory = Fields(None, rows, steps, None, arrays.device)

    def tree(self, steps: int) -> Any:
        """Arrays ``[steps, ...]`` of the first time steps, nested as the example was; None where there are none."""
        if self._names is None:
            return None
        arrays = {path: memory[:steps] for path, memory in self.memory.each()}
        return policy_states.tree_map(lambda _, path: arrays[path], self._names)

    def checked(self, given: Any, step: int | None) -> dict[Any, torch.Tensor]:
        """The states of one step by their names.

        Before its first step a policy has no state, and says so by None: zeros.

        Args:
            given: ``(actor, critic)``, each a tree or None; or None.
            step: The row that they are for, where that is known.

        Raises:
            SchemaError: They are none, or of other structures or shapes than the example; none behind the first row.
        """
        pair = isinstance(given, tuple | list) and len(given) == 2
        if self._names is None or not pair:
            if self._names is not None or not policy_states.is_empty(given):
                raise SchemaError("hidden_states: expected them in every row, and when it was made, or nowhere")
            return {}
        found: dict[Any, torch.Tensor] = {}
        rows, device = self.memory.rows, self._arrays.device

        def zeros(path: str, name: str) -> None:
            found[name] = torch.zeros(rows[name].shape, dtype=rows[name].dtype, device=device)

        def check(path: str, name: str, leaf: Any) -> None:
            found[name] = self._arrays.array(leaf)
            if tuple(found[name].shape) != rows[name].shape:
                expected, shape = list(rows[name].shape), list(found[name].shape)
                raise SchemaError(f"{path}: expected shape {expected}, found {shape}")

        for place, (names, states) in enumerate(zip(self._names, given, strict=True)):
            path = f"hidden_states[{place}]"
            if policy_states.is_empty(states) and not policy_states.is_empty(names):
                if step:
                    raise SchemaError(f"{path}: expected it in every row, found none in row {step}")
                policy_states.tree_map(zeros, names, path=path)
            else:
                policy_states.tree_map(check, names, states, path=path)
        return found
