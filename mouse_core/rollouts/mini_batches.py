"""Mini-batches of a rollout: which rows each mini-batch has, and the arrays of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mouse_core.digest import StreamDigest
from mouse_core.dtypes import namespace
from mouse_core.errors import ConfigError, MissingFieldError, SchemaError
from mouse_core.randomness import Key, Purpose
from mouse_core.rollouts import policy_states
from mouse_core.rollouts.fields import RolloutField
from mouse_core.rollouts.trajectories import episode_starts, history_rows, take_rows, trajectory_rows
from mouse_core.spec import check_count

Array = Any
Extractor = Callable[[Any], Any]

# Target fields, which training compares with the policy's output; the policy does not read them.
TARGETS = frozenset(
    ("actions", "privileged_actions", "dagger_actions", "rewards", "dones", "values", "actions_log_prob", "mu", "sigma",
     "returns", "advantages")
)  # fmt: skip
"""Fields that stay ``[T, n, ...]`` in recurrent mini-batches; all other fields are split into trajectories and
padded.
"""


class _FieldAttribute:
    """A descriptor of ``MiniBatch``: returns the first field, out of several names, that exists; None if none
    exists.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, batch: MiniBatch | None, owner: type) -> Any:
        if batch is None:
            return self
        return next((batch.fields[name] for name in self._names if name in batch.fields), None)


@dataclass(frozen=True, eq=False)
class MiniBatch(Mapping[str, Array]):
    """A mini-batch of a rollout's rows. The mini-batch is a mapping whose keys are the storage's field names, as in
    ``batch["observations"]``. The mini-batch also has attributes with the names that training code uses, as in
    ``batch.obs``.

    ``batch.keys()`` returns the names of the fields. As in rsl_rl, a mini-batch unpacks into 18 values:

        obs, (ref_obs, ref_mask) or None, critic_obs, (critic_ref_obs, critic_ref_mask) or None, actions,
        target_values, advantages, returns, old_actions_log_prob, old_mu, old_sigma, dagger_actions, hidden_states,
        masks, rnd_state, obs_prev_state, ref_obs_prev_state, ref_obs_prev_mask = batch

    A value is None if the rollout lacks its field.

    A mini-batch of rows has arrays ``[B, ...]``. In a recurrent mini-batch, the policy's inputs are padded trajectories
    ``[T, K, ...]``, with ``masks``. All other fields are arrays ``[T, n, ...]`` with the rows of the mini-batch's n
    environments.

    Args:
        fields: Arrays by the names of the storage's fields, including masks.
        hidden_states: ``(actor, critic)``: the hidden states at the rows or, in a recurrent mini-batch, at the starts
            of the trajectories; ``(None, None)`` if there are no hidden states.
        masks: Whether each trajectory has a row at each step, bool ``[T, K]``; None in mini-batches of rows.
        obs_prev_state: The AMP extractor's output for the previous observation; 0 without a previous observation.
        obs_prev_mask: Whether the episode has a previous observation in this rollout, bool.
        ref_obs_prev_state: The AMP extractor's output for the previous reference observation; 0 without a previous
            reference observation.
        ref_obs_prev_mask: Whether a previous reference observation exists and was available, bool.
        histories: For each requested field, the last H frames ``[B, H, ...]``, oldest first, and whether each frame
            exists, bool ``[B, H]``.
        rows: The flat indices ``step * N + env`` of the rows, ``[B]``; ``[T, n]`` in recurrent mini-batches.

    Fields are also attributes, which are None for missing fields: ``actions``, ``advantages``, ``returns``,
    ``rnd_state`` and ``dagger_actions`` by their names, ``obs`` (observations), ``ref_obs`` and ``ref_mask`` (reference
    observations), ``target_values`` (values: the critic's output during the rollout), ``old_actions_log_prob``,
    ``old_mu`` and ``old_sigma``. The critic's inputs are ``critic_obs``, ``critic_ref_obs`` and ``critic_ref_mask``:
    the privileged fields, or without privileged fields the policy's inputs.
    """

    fields: Mapping[str, Array]
    hidden_states: Any = (None, None)
    masks: Array | None = None
    obs_prev_state: Array | None = None
    obs_prev_mask: Array | None = None
    ref_obs_prev_state: Array | None = None
    ref_obs_prev_mask: Array | None = None
    histories: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    rows: Array | None = None

    def __getitem__(self, name: str) -> Array:
        """Return the values of a field of the storage.

        Raises:
            MissingFieldError: The field does not exist (the error is also a KeyError).
        """
        if name in self.fields:
            return self.fields[name]
        close = get_close_matches(str(name), list(self.fields), n=1)
        known = isinstance(name, str) and not name.startswith("_") and hasattr(type(self), name)
        hint = f"; batch.{name} is an attribute" if known else f"; did you mean {close[0]!r}?" if close else ""
        raise MissingFieldError(f"mini-batch: expected one of the fields {list(self.fields)}, found {name!r}{hint}")

    def __iter__(self) -> Iterator[Any]:  # the names are those of keys()
        """Yield the 18 values, in the order in which training code unpacks them."""
        parts = (
            self.obs,
            pair(self.ref_obs, self.ref_mask),
            self.critic_obs,
            pair(self.critic_ref_obs, self.critic_ref_mask),
            self.actions,
            self.target_values,
            self.advantages,
            self.returns,
            self.old_actions_log_prob,
            self.old_mu,
            self.old_sigma,
            self.dagger_actions,
            self.hidden_states,
            self.masks,
            self.rnd_state,
            self.obs_prev_state,
            self.ref_obs_prev_state,
            self.ref_obs_prev_mask,
        )
        return iter(parts)

    def __len__(self) -> int:
        """Return 18, the number of values into which a mini-batch unpacks."""
        return 18

    def keys(self) -> KeysView[str]:
        """Return the names of the existing fields."""
        return self.fields.keys()

    def values(self) -> ValuesView[Array]:
        """Return the values of the existing fields."""
        return self.fields.values()

    def items(self) -> ItemsView[str, Array]:
        """Return the names and values of the existing fields."""
        return self.fields.items()

    # Comparing arrays gives no single truth value, so a mini-batch equals only itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    obs = _FieldAttribute("observations")
    ref_obs = _FieldAttribute("reference_observations")
    ref_mask = _FieldAttribute("reference_observations_mask")
    critic_obs = _FieldAttribute("privileged_observations", "observations")
    critic_ref_obs = _FieldAttribute("privileged_reference_observations", "reference_observations")
    critic_ref_mask = _FieldAttribute("privileged_reference_observations_mask", "reference_observations_mask")
    actions = _FieldAttribute("actions")
    target_values = _FieldAttribute("values")
    advantages = _FieldAttribute("advantages")
    returns = _FieldAttribute("returns")
    old_actions_log_prob = _FieldAttribute("actions_log_prob")
    old_mu = _FieldAttribute("mu")
    old_sigma = _FieldAttribute("sigma")
    dagger_actions = _FieldAttribute("dagger_actions")
    rnd_state = _FieldAttribute("rnd_state")

    def digest(self, index: int) -> StreamDigest:
        """Return a 128-bit digest of all content except ``rows``; each row, or each step of a recurrent mini-batch,
        counts as one window of the digest.

        If the mini-batch consists only of fields, the digest equals ``StreamDigest.of(index, self)``. The digest
        includes masks, previous states, histories and hidden states. The digest is computed on the host.

        Args:
            index: The index of the mini-batch.
        """
        names = ("masks", "obs_prev_state", "obs_prev_mask", "ref_obs_prev_state", "ref_obs_prev_mask")
        beside: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        beside |= {f"histories of {name}": frames for name, frames in self.histories.items()}
        # Each hidden state counts as one value, because the policy determines the axis and the number of its rows.
        hidden: dict[str, Array] = {}
        policy_states.tree_map(lambda path, leaf: hidden.setdefault(path, leaf[None]), self.hidden_states)
        total = StreamDigest.of(index, (self.fields, *(parts for parts in (beside, hidden) if parts))).total
        return StreamDigest(total, len(next(iter(self.fields.values()))))


def pair(values: Array | None, mask: Array | None) -> tuple[Array, Array | None] | None:
    """Return ``(values, mask)``; None if ``values`` is None."""
    return None if values is None else (values, mask)


# ---------------------------------------------------------------------- which rows


def permutation(seed: int, epoch: int, n: int, *, call: int = 0) -> npt.NDArray[np.int64]:
    """Return a random order of ``n`` rows for an epoch.

    Args:
        seed: An integer in ``[0, 2**64)``.
        epoch: The index of the epoch, counted over all rollouts.
        n: Number of rows, below 2**32.
        call: A number that distinguishes several random orders in the same epoch.

    Returns:
        int64 ``[n]``.
    """
    # Sort random numbers whose last bits contain their position: faster than argsort, and without ties, so that every
    # sorting algorithm gives the same order. More than 32 bits remain random. For n = 3 the last 2 bits are
    # places: the words 1101, 0010 and 0111 become 11|00, 00|01 and 01|10; in order 00|01, 01|10, 11|00: rows 1, 2, 0.
    place_bits = np.uint64((1 << max(n - 1, 1).bit_length()) - 1)
    words = Key(seed, Purpose.ROLLOUTS, epoch, call).bits(n)
    words &= ~place_bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= place_bits
    return words.astype(np.int64)


def cut(n: int, num_mini_batches: int, *, drop_last: bool = False, what: str = "rows") -> list[slice]:
    """Divide ``n`` rows into mini-batches; return a slice of rows for each mini-batch.

    Args:
        n: Number of rows.
        num_mini_batches: Number of mini-batches.
        drop_last: Whether the remaining rows are dropped; otherwise the first mini-batches have one additional row.
        what: The noun for the rows in error messages.

    Raises:
        ConfigError: ``n`` is less than ``num_mini_batches``, or ``num_mini_batches`` is invalid.
    """
    check_count("num_mini_batches", num_mini_batches)
    if num_mini_batches > n:
        raise ConfigError(f"num_mini_batches: expected at most {n}, the number of {what}, found {num_mini_batches}")
    # 10 rows in 4 parts: 2 each and 2 over, so that the parts end at 3, 6, 8 and 10; at 2, 4, 6 and 8 if dropped.
    size, rest = divmod(n, num_mini_batches)
    longer = 0 if drop_last else rest
    ends = [number * size + min(number, longer) for number in range(num_mini_batches + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def check_histories(histories: Mapping[str, int] | None, fields: Mapping[str, Any]) -> dict[str, int]:
    """Check the argument ``histories``, and return H for each field; raise ConfigError for an unknown field or an H
    below 1.
    """
    for name, length in (histories or {}).items():
        if name not in fields:
            raise ConfigError(f"histories: expected fields among {list(fields)}, found {name!r}")
        check_count(f"histories[{name!r}]", length)
    return dict(histories or {})


# ---------------------------------------------------------------------- what they hold


def take_mini_batch(
    flat: Mapping[str, Array],
    rows: Array,
    starts: Array,
    *,
    amp: AmpStates | None = None,
    histories: Mapping[str, int] | None = None,
    hidden_states: Any = None,
) -> MiniBatch:
    """Return the mini-batch of the given rows.

    Args:
        flat: Fields ``[T * N, ...]``.
        rows: Flat row indices ``[B]``.
        starts: The result of ``episode_starts``, bool ``[T, N]``.
        amp: The AMP extractors' outputs, from which the previous states are taken.
        histories: The number of frames H for each field.
        hidden_states: The hidden states of all rows.
    """
    xp = namespace(rows)
    frames = {}
    for name, length in (histories or {}).items():
        before, there = history_rows(rows, starts, length)
        if f"{name}_mask" in flat:
            available = xp.take(flat[f"{name}_mask"], xp.reshape(before, (-1,)))
            there = there & xp.reshape(available, before.shape)
        frames[name] = take_rows(flat[name][:, None], before, there), there
    return MiniBatch(
        {name: xp.take(values, rows, axis=0) for name, values in flat.items()},
        (None, None) if hidden_states is None else policy_states.take(hidden_states, rows),
        histories=frames,
        rows=rows,
        **({} if amp is None else previous_states(amp, rows, starts)),
    )


def take_recurrent_mini_batch(
    arrays: Mapping[str, Array],
    envs: Array,
    *,
    num_trajectories: int | None = None,
    amp: AmpStates | None = None,
    hidden_states: Any = None,
) -> MiniBatch:
    """Return the recurrent mini-batch with the trajectories of the given environments.

    Args:
        arrays: Fields ``[T, N, ...]``, including ``dones``.
        envs: Indices of the environments, ``[n]``.
        num_trajectories: See ``trajectory_rows``; required under ``jax.jit``.
        amp: The AMP extractors' outputs, from which the previous states are taken.
        hidden_states: The hidden states of all rows.

    Returns:
        A mini-batch with fields ``[T, K, ...]``, split into trajectories; the fields in ``TARGETS`` are ``[T, n,
        ...]``.
    """
    xp = namespace(envs)
    dones = arrays["dones"]
    own = {name: xp.take(values, envs, axis=1) for name, values in arrays.items()}
    trajectories, masks = trajectory_rows(own["dones"], num_trajectories=num_trajectories)
    # Row t * n + e of these environments is row t * N + envs[e] of all environments.
    step = xp.ones_like(own["dones"][:, 0, 0], dtype=envs.dtype).cumsum(0) - 1
    rows = step[:, None] * dones.shape[1] + envs[None, :]
    starts = xp.take(xp.reshape(rows, (-1,)), trajectories[0])
    return MiniBatch(
        {
            name: values if _is_target(name, arrays) else take_rows(values, trajectories, masks)
            for name, values in own.items()
        },
        (None, None) if hidden_states is None else policy_states.take(hidden_states, starts),
        masks,
        rows=rows,
        **({} if amp is None else previous_states(amp, rows, episode_starts(dones))),
    )


def _is_target(name: str, arrays: Mapping[str, Array]) -> bool:
    data = name.removesuffix("_mask")
    return name in TARGETS or (data in TARGETS and data in arrays)


# ---------------------------------------------------------------------- previous states
#
# A discriminator of adversarial motion priors judges pairs of states that follow each other (Peng et al., "AMP:
# adversarial motion priors for stylized physics-based character control", SIGGRAPH 2021). A pair never crosses the end
# of an episode.


def find_extractors(amp_cfg: Any, fields: Mapping[str, RolloutField]) -> tuple[Extractor, Extractor] | None:
    """Return the two functions in the dict ``amp_cfg``.

    Raises:
        ConfigError: A function is missing, or the storage has no observations.
    """
    if amp_cfg is None:
        return None
    found = []
    for name in ("amp_obs_extractor", "amp_ref_obs_extractor"):
        call = amp_cfg.get(name) if isinstance(amp_cfg, Mapping) else getattr(amp_cfg, name, None)
        if not callable(call):
            raise ConfigError(f"amp_cfg: expected a function as {name}, found {call!r}")
        found.append(call)
    if "observations" not in fields or fields["observations"].optional:
        raise ConfigError(f"amp_cfg: expected a field 'observations', found {list(fields)}")
    if "reference_observations" in fields and not fields["reference_observations"].mask:
        raise ConfigError("amp_cfg: expected reference_observations with mask=True, found none")
    return found[0], found[1]


@dataclass(frozen=True)
class AmpStates:
    """The AMP extractors' outputs for every row.

    Args:
        obs: Outputs for observations, ``[T * N, ...]``.
        ref_obs: Outputs for reference observations, ``[T * N, ...]``; None if there are no reference observations.
        ref_mask: Whether the reference observation was available, bool ``[T * N]`` or ``[T * N, 1]``; None if there is
            no mask.
    """

    obs: Array
    ref_obs: Array | None = None
    ref_mask: Array | None = None


def amp_states(flat: Mapping[str, Array], obs_extractor: Extractor, ref_extractor: Extractor) -> AmpStates:
    """Return the AMP extractors' outputs for all rows.

    Args:
        flat: Fields ``[T * N, ...]``.
        obs_extractor: A function that is called with observations ``[T * N, ...]``.
        ref_extractor: A function that is called with ``(reference observations, mask)``; it returns a state, or
            ``(state, mask)``.

    Raises:
        SchemaError: An extractor returned another number of rows.
    """
    states = obs_extractor(flat["observations"])
    found: Any = (None, None)
    if "reference_observations" in flat:
        reference = flat["reference_observations"], flat["reference_observations_mask"]
        found = ref_extractor(reference)
        if not isinstance(found, tuple):
            found = found, reference[1]
    rows = flat["observations"].shape[0]
    for name, values in (("amp_obs_extractor", states), *(("amp_ref_obs_extractor", part) for part in found)):
        if values is not None and (values.ndim < 1 or values.shape[0] != rows):
            raise SchemaError(f"{name}: expected an array of {rows} rows, found shape {list(values.shape)}")
    return AmpStates(states, *found)


def previous_states(states: AmpStates, rows: Array, starts: Array) -> dict[str, Array]:
    """Return the ``*_prev_*`` fields of a ``MiniBatch``, such as ``obs_prev_state``: the extractors' outputs for each
    row's previous observation.

    Args:
        states: The AMP extractors' outputs for all rows.
        rows: Flat row indices, of any shape.
        starts: The result of ``episode_starts``.
    """
    xp = namespace(rows)
    before, there = history_rows(xp.reshape(rows, (-1,)), starts, 2)
    before, there = before[:, 0], there[:, 0]

    def taken(values: Array) -> Array:
        values = xp.take(values, before, axis=0)
        hidden = xp.reshape(there, (-1, *(1,) * (values.ndim - 1)))
        return xp.reshape(xp.where(hidden, values, xp.zeros_like(values[:1])), (*rows.shape, *values.shape[1:]))

    parts = {"obs_prev_state": taken(states.obs), "obs_prev_mask": xp.reshape(there, rows.shape)}
    if states.ref_obs is not None:
        parts["ref_obs_prev_state"] = taken(states.ref_obs)
        parts["ref_obs_prev_mask"] = taken(states.ref_mask != 0)
    return parts
