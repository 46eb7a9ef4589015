"""The settings of two optimizers, read from what they make of small tensors that stand for those of the models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mouse_study.divergence.layers import Arrays
from mouse_study.divergence.optimizers import (
    LARGE,
    Clipping,
    ProbeState,
    Rule,
    after_loud,
    clipping,
    differing,
    probes,
    read,
    threshold,
)
from mouse_study.divergence.report import Cause, Difference, Stage
from mouse_study.divergence.running import Run
from mouse_study.divergence.stepping import Stepping, with_wide_counts

_STAGES: tuple[Stage, ...] = ("update", "later updates")


def of_update(stepping: Stepping, found: Sequence[Difference]) -> list[Cause]:
    """Find the settings that differ between two optimizers whose updates differ."""
    parted = [one.tensor.partition(", update ")[0] for one in found if one.stage in _STAGES and one.beyond]
    causes = _two_biases(stepping.run, dict.fromkeys(parted))
    if set(parted) <= {cause.where for cause in causes} or not stepping.owners():
        return causes
    ours, theirs = readings(StandIns(stepping))
    exact = 1e-10 + 10 * max(ours.blur, theirs.blur)
    if ours.known and theirs.known and ours.clipping.parts_from(theirs.clipping):
        causes.append(Cause("clipping", "all gradients", f"{ours.clipping}", f"{theirs.clipping}"))
    places: dict[tuple[str, str, str], list[str]] = {}
    for tensor, rule in ours.rules.items():
        for said in differing(rule, theirs.rules[tensor], exact):
            places.setdefault(said, []).append(tensor)
    for (name, one, other), tensors in places.items():
        causes.append(Cause(name, f"{len(tensors)} tensors, {tensors[0]} first", one, other))
    return causes


def _two_biases(run: Run, parted: Iterable[str]) -> list[Cause]:
    """Recurrent layers of PyTorch's have two biases that are added: one step moves their sum twice as far."""
    recurrent = {pair.torch.path for pair in run.pairs if pair.torch.kind.name in ("GRU", "LSTM")}
    found = []
    for tensor in parted:
        path, _, _ = tensor.partition(".dense_") if ".dense_" in tensor else tensor.rpartition(".h")
        if path in recurrent and tensor.endswith(".bias"):
            found.append(Cause("two biases", tensor, "two that are added, and learn twice as fast", "one"))
    return found


@dataclass(frozen=True)
class Read:
    """The inferred properties of one optimizer: the rule of each tensor, and the gradient clipping."""

    rules: dict[str, Rule]
    clipping: Clipping

    @property
    def known(self) -> bool:
        """Whether every rule is a known one."""
        return any(rule.explained for rule in self.rules.values())

    @property
    def blur(self) -> float:
        """The largest error that epsilon causes in the inferred settings, for gradients as large as clipping allows."""
        roots = [float(np.sqrt(rule.epsilon)) if rule.within else rule.epsilon for rule in self.rules.values()]
        return max(roots, default=0.0) * float(np.sqrt(len(self.rules))) / min(LARGE, self.clipping.at)


def readings(small: StandIns) -> tuple[Read, Read]:
    """PyTorch's optimizer and Flax's."""
    seen = {name: small.respond(given) for name, given in probes(small.updates).items()}
    other = next((tensor for tensor in small.owners if small.owners[tensor] != small.owners[small.loud]), "")
    found = []
    for side in (0, 1):
        first, last = (
            {tensor: {name: one[side][tensor][:, at] for name, one in seen.items()} for tensor in small.owners}
            for at in (0, 1)
        )
        rules = {tensor: read(given) for tensor, given in first.items()}
        rule = rules[small.loud]
        own = clipping(rule, first[small.loud], last[small.loud], first.get(other))
        if own.by.startswith("norm"):
            again = small.respond(after_loud(2 * own.at))[side][small.loud][:, 0]
            own = replace(own, slack=2 * own.at * (own.at / threshold(rule, again) - 1))
        found.append(Read(rules, own))
    return found[0], found[1]


class StandIns:
    """Both optimizers on tensors of at most 2 values along each axis, in the places of those of the models.

    An optimizer may look at how many axes a tensor has, and where it is. How long it is, only few do, and a model of
    millions of weights would take minutes.

    Args:
        stepping: Both optimizers and models.

    Attributes:
        owners: As ``Stepping.owners``.
        loud: The tensor that is given a gradient of its own: the first of two values that both optimizers change.
    """

    def __init__(self, stepping: Stepping) -> None:
        self.updates = stepping.updates
        self.owners = stepping.owners()
        self._make = stepping.torch_optimizer
        self._ours = [
            torch.nn.Parameter(torch.zeros(_small(tensor), dtype=torch.float64), requires_grad=tensor.requires_grad)
            for tensor in stepping.module.parameters()
        ]
        self._tree = stepping.tree
        self._theirs = [np.zeros(_small(leaf)) for leaf in stepping.leaves]
        places = {tensor: place for place, tensor in enumerate(stepping.places)}
        self._leaf = {tensor: places[tensor] for tensor in self.owners}
        self._state = with_wide_counts(stepping.flax_optimizer, self._flax(self._theirs))
        self._update = jax.jit(stepping.flax_optimizer.update)
        self.loud = ""
        moved = zip(*(self.respond([ProbeState(0), ProbeState(LARGE)])[side].items() for side in (0, 1)), strict=True)
        both = [tensor for (tensor, ours), (_, theirs) in moved if ours[1, 0] and theirs[1, 0]]
        self.loud = next((one for one in both if self._theirs[self._leaf[one]].size > 1), (both or [*self.owners])[0])

    def respond(self, given: Sequence[ProbeState]) -> tuple[Arrays, Arrays]:
        """Return the updates of new optimizers to the first and the last weight of each tensor, ``[updates, 2]``."""
        optimizer, state = self._make(self._ours), self._state
        loud, other = self.owners.get(self.loud), self._leaf.get(self.loud)
        owned, leaves = set(self.owners.values()), set(self._leaf.values())
        ours: list[Any] = []
        theirs: list[Any] = []
        for one in given:
            own = [
                _filled(_small(tensor), one, number == loud, number in owned)
                for number, tensor in enumerate(self._ours)
            ]
            for tensor, (weight, gradient) in zip(self._ours, own, strict=True):
                tensor.data = torch.from_numpy(weight.copy())
                tensor.grad = torch.from_numpy(gradient) if tensor.requires_grad else None
            optimizer.step()
            ours.append([tensor.detach().numpy() - weight for tensor, (weight, _) in zip(self._ours, own, strict=True)])
            flax = [
                _filled(leaf.shape, one, place == other, place in leaves) for place, leaf in enumerate(self._theirs)
            ]
            weights, gradients = (self._flax([both[at] for both in flax]) for at in (0, 1))
            updates, state = self._update(gradients, state, weights)
            theirs.append([np.asarray(leaf) for leaf in jax.tree.leaves(updates)])
        return _ends(ours, self.owners), _ends(theirs, self._leaf)

    def _flax(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._tree, [jnp.asarray(values) for values in arrays])


def _ends(steps: Sequence[Any], places: Mapping[str, int]) -> Arrays:
    return {tensor: np.array([step[place].flat[[0, -1]] for step in steps]) for tensor, place in places.items()}


def _small(tensor: Any) -> tuple[int, ...]:
    return tuple(min(size, 2) for size in tensor.shape)


def _filled(shape: tuple[int, ...], given: ProbeState, loud: bool, used: bool) -> tuple[Any, Any]:
    """A weight and its gradient."""
    weight, gradient = np.zeros(shape), np.zeros(shape)
    if used:
        weight.flat[0], gradient.flat[0] = given.weight, given.gradient
    if loud and given.loud is not None:
        gradient.flat[-1] = given.gradient
        gradient.flat[0] = given.loud
    return weight, gradient
