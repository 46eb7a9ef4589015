"""The contract of a framework's rollout storage, as tests that its author runs with pytest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from mouse_core import rollouts
from mouse_core.errors import ConfigError, DataError, RolloutError, RolloutFullError, SchemaError
from mouse_core.rollouts.fields import RolloutField
from mouse_core.testing._comparing import InArrays, refused

_ENVS, _STEPS = 4, 6
_GAMMA, _LAM = 0.95, 0.9
_FIELDS: Mapping[str, Any] = {
    "observations": (3,),
    "values": (),
    "goal": RolloutField((2,), mask=True, optional=True),
    "choice": RolloutField((), np.int64),
}


class RolloutAdapterConformance(InArrays):
    """Tests that a framework's ``RolloutStorage`` keeps, computes and delivers what the core's does.

    Subclass it in a test file, under a name that begins with ``Test``, and name the class to test. For an adapter of
    pure functions name a small class that keeps their state and has the methods of ``RolloutStorage``.

        class TestMyRollouts(RolloutAdapterConformance):
            storage_class = my_adapter.RolloutStorage

            def from_numpy(self, values):
                return my_framework.asarray(values)

    Attributes:
        storage_class: Called with ``num_envs``, ``num_transitions_per_env``, ``fields`` and ``seed``.
        replaced_dtypes: Dtypes that the framework cannot hold, and what the adapter delivers instead.
    """

    storage_class: Any = rollouts.RolloutStorage

    def test_rows_and_returns_are_those_of_the_core(self) -> None:
        """Rows and returns equal the core's, with and without truncated episodes and normalized advantages."""
        for truncated in (False, True):
            for normalize in (False, True):
                mine, core = self._filled(truncated=truncated, normalize_advantage=normalize)
                for name in ("observations", "values", "goal", "goal_mask", "choice", "rewards", "dones"):
                    self.same(mine[name], core[name], name)
                for name in ("returns", "advantages"):
                    self.same(mine[name], core[name], name, exact=False)
                found, expected = ([float(value) for value in storage.get_statistics()] for storage in (mine, core))
                assert np.allclose(found, expected), f"statistics: expected {expected}, found {found}"

    def test_mini_batches_are_those_of_the_core(self) -> None:
        """Every epoch has the core's rows in the core's order, for this rollout and the next, histories included."""
        mine, core = self._filled()
        for options in ({}, {"drop_last": True}, {"histories": {"observations": 3}}):
            self._alike(mine, core, "mini_batch_generator", 5, 2, **options)
        for storage in (mine, core):
            storage.clear()
        self._fill(mine, core, seed=1)
        self._alike(mine, core, "mini_batch_generator", 3, 2)

    def test_recurrent_mini_batches_are_those_of_the_core(self) -> None:
        """Trajectories that are cut where episodes end, padded, with their masks."""
        mine, core = self._filled()
        for shuffle in (False, True):
            self._alike(mine, core, "recurrent_mini_batch_generator", 2, 2, shuffle=shuffle)

    def test_what_comes_out_of_turn_is_refused(self) -> None:
        """Calls out of order raise RolloutError and change nothing."""
        mine, core = self._empty()
        refused(RolloutError, lambda: next(iter(mine.mini_batch_generator(1))))
        steps = _steps(0)
        for step in steps:
            mine.add_transitions(self.given(step))
            core.add_transitions(step)
        refused(RolloutError, lambda: next(iter(mine.mini_batch_generator(1))))
        refused(RolloutFullError, lambda: mine.add_transitions(self.given(steps[0])))
        last = np.zeros(_ENVS, np.float32)
        mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM)
        core.compute_returns(last, _GAMMA, _LAM)
        self._alike(mine, core, "mini_batch_generator", 2, 1)

    def test_rows_that_do_not_fit_are_refused(self) -> None:
        """Names, shapes, and values that are not finite, no codes or hidden by a mask; the row is not written."""
        mine, core = self._empty()
        good = _steps(0)[0]
        nan = good["rewards"] * np.float32("nan")
        for kind, bad in (
            (SchemaError, {**good, "surprise": good["rewards"]}),
            (SchemaError, {name: values for name, values in good.items() if name != "values"}),
            (SchemaError, {**good, "observations": good["observations"][:, :2]}),
            (DataError, {**good, "rewards": nan}),
            (DataError, {**good, "dones": good["dones"] + 7}),
        ):
            refused(kind, partial(mine.add_transitions, self.given(bad)))
        # What a mask of NumPy hides is no data.
        for name in ("rewards", "observations"):
            hidden = np.ma.masked_array(good[name], np.arange(good[name].size).reshape(good[name].shape) == 0)
            refused(DataError, partial(mine.add_transitions, {**self.given(good), name: hidden}))
        self._fill(mine, core, seed=0)
        self._alike(mine, core, "mini_batch_generator", 2, 1)

    def test_truncated_episodes_need_the_values_of_their_ends(self) -> None:
        """Code 2 in ``dones`` never counts as a termination: without its time-out and final value it is refused."""
        mine, _ = self._empty()
        for step in _steps(0):
            mine.add_transitions(self.given({**step, "dones": np.full_like(step["dones"], 2)}))
        last, rows = np.zeros(_ENVS, np.float32), np.zeros((_STEPS, _ENVS), np.float32)
        refused(ConfigError, lambda: mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM))
        ends = self.given({"time_outs": rows > 0, "final_values": rows})
        refused(ConfigError, lambda: mine.compute_returns(self.from_numpy(last), _GAMMA, _LAM, **ends))

    def _empty(self) -> tuple[Any, rollouts.RolloutStorage]:
        made = [kind(_ENVS, _STEPS, dict(_FIELDS), 3) for kind in (self.storage_class, rollouts.RolloutStorage)]
        return made[0], made[1]

    def _filled(self, **options: Any) -> tuple[Any, rollouts.RolloutStorage]:
        mine, core = self._empty()
        self._fill(mine, core, seed=0, **options)
        return mine, core

    def _fill(self, mine: Any, core: Any, *, seed: int, truncated: bool = False, **options: Any) -> None:
        steps = _steps(seed)
        for step in steps:
            mine.add_transitions(self.given(step))
            core.add_transitions(step)
        random = np.random.default_rng(seed)
        arrays: dict[str, Any] = {"last_values": random.normal(size=_ENVS).astype(np.float32)}
        if truncated:
            dones = np.stack([step["dones"] for step in steps]) > 0
            arrays["time_outs"] = dones & (random.random(dones.shape) < 0.5)
            arrays["final_values"] = np.where(arrays["time_outs"], 0.5, 0).astype(np.float32)
        core.compute_returns(**arrays, gamma=_GAMMA, lam=_LAM, **options)
        mine.compute_returns(**self.given(arrays), gamma=_GAMMA, lam=_LAM, **options)

    def _alike(self, mine: Any, core: Any, method: str, *arguments: Any, **options: Any) -> None:
        batches = (getattr(storage, method)(*arguments, **options) for storage in (mine, core))
        for number, (found, expected) in enumerate(zip(*batches, strict=True)):
            where = f"{method}, batch {number}"
            self.same(found.rows, expected.rows, where)
            self.same(found, expected, where, exact=False)


def _steps(seed: int) -> list[dict[str, Any]]:
    """The steps of a rollout."""
    random = np.random.default_rng(seed)

    def step() -> dict[str, Any]:
        return {
            "observations": random.normal(size=(_ENVS, 3)).astype(np.float32),
            "values": random.normal(size=_ENVS).astype(np.float32),
            "goal": random.normal(size=(_ENVS, 2)).astype(np.float32),
            "goal_mask": random.random(_ENVS) < 0.5,
            "choice": random.integers(0, 9, _ENVS),
            "rewards": random.normal(size=_ENVS).astype(np.float32),
            "dones": (random.random(_ENVS) < 0.3).astype(np.int64),
        }

    return [step() for _ in range(_STEPS)]
