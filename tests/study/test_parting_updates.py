"""Where two optimizers part: each setting is planted, found, and named; and those that are the same name nothing."""

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np
import optax
import pytest
import torch

from mouse_core import ConfigError
from mouse_study.divergence import Comparison, transfer, where_they_part
from tests.study.implementations import squares

# Every optimizer is compiled in float64.
pytestmark = pytest.mark.slow

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 4)
        self.norm = torch.nn.LayerNorm(4, eps=1e-6)
        self.down = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class FlaxModel(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.down = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.tanh(self.norm(self.up(x))))


def beside(ours: Make, theirs: Any, *, size: float = 1.0, torch_model: Any = None, **options: Any) -> Comparison:
    torch.manual_seed(0)
    one, other = torch_model or TorchModel(), FlaxModel()
    transfer(one, other)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3))}

    def loss(model: Any, batch: Any) -> Any:
        return size * squares(model, batch)

    return where_they_part(
        one, other, batch, torch_loss=loss, flax_loss=loss, torch_optimizer=ours, flax_optimizer=theirs, **options
    )


def some(names: Any) -> list[Any]:
    """All of them, of which every third is not long."""
    return [pytest.param(name, marks=[pytest.mark.long] if number % 3 else []) for number, name in enumerate(names)]


def adam(rate: float = 1e-3, **options: Any) -> Make:
    return lambda parameters: torch.optim.Adam(parameters, rate, **options)


def adamw(rate: float = 1e-3, **options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, rate, **options)


def sgd(rate: float = 1e-2, **options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, rate, **options)


def rmsprop(rate: float = 1e-3, **options: Any) -> Make:
    return lambda parameters: torch.optim.RMSprop(parameters, rate, **options)


def clipped(make: Make, at: float, clip: Any = torch.nn.utils.clip_grad_norm_) -> Make:
    def made(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        def before(*_: Any) -> None:
            clip(parameters, at)

        optimizer = make(parameters)
        optimizer.register_step_pre_hook(before)
        return optimizer

    return made


def by_value(make: Make, at: float) -> Make:
    return clipped(make, at, torch.nn.utils.clip_grad_value_)


def scheduled(make: Make, factor: Callable[[int], float]) -> Make:
    def made(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    return made


def warm_up(number: int) -> float:
    return min(1.0, (number + 1) / 4)


def traced_warm_up(rate: float) -> Callable[[Any], Any]:
    return lambda number: rate * jax.numpy.minimum(1.0, (number + 1) / 4)


def matrices_decay(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in parameters if one.ndim > 1]},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, 1e-3)


def decayed(decay: float, then: Any) -> Any:
    return optax.chain(optax.add_decayed_weights(decay), then)


def by_norm(at: float, then: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(at), then)


SAME: dict[str, tuple[Make, Any]] = {
    "Adam": (adam(), optax.adam(1e-3)),
    "other moments": (adam(betas=(0.8, 0.95), eps=1e-5), optax.adam(1e-3, 0.8, 0.95, 1e-5)),
    "AdamW": (adamw(), optax.adamw(1e-3, weight_decay=1e-2)),
    "Adam with L2": (adam(weight_decay=1e-2), decayed(1e-2, optax.adam(1e-3))),
    "decay of matrices": (
        matrices_decay,
        optax.adamw(1e-3, weight_decay=1e-2, mask=lambda tree: jax.tree.map(lambda one: one.ndim > 1, tree)),
    ),
    "SGD": (sgd(), optax.sgd(1e-2)),
    "momentum": (sgd(momentum=0.9), optax.sgd(1e-2, 0.9)),
    "nesterov": (sgd(momentum=0.9, nesterov=True), optax.sgd(1e-2, 0.9, nesterov=True)),
    "momentum with L2": (sgd(momentum=0.9, weight_decay=1e-3), decayed(1e-3, optax.sgd(1e-2, 0.9))),
    "momentum of a mean": (sgd(momentum=0.9), optax.chain(optax.ema(0.9, debias=False), optax.scale(-0.1))),
    "RMSprop": (rmsprop(), optax.rmsprop(1e-3, 0.99, eps_in_sqrt=False)),
    "RMSprop with momentum": (rmsprop(momentum=0.9), optax.rmsprop(1e-3, 0.99, eps_in_sqrt=False, momentum=0.9)),
    "clipping by norm": (clipped(adam(), 1.0), by_norm(1.0, optax.adam(1e-3))),
    "clipping by value": (by_value(adam(), 0.1), optax.chain(optax.clip(0.1), optax.adam(1e-3))),
    "schedule": (scheduled(adam(), warm_up), optax.adam(traced_warm_up(1e-3))),
    "schedule of optax": (
        scheduled(adam(), lambda n: min(1.0, 0.1 + 0.9 * n / 7)),
        optax.adam(optax.linear_schedule(1e-4, 1e-3, 7)),
    ),
    "schedule from 0": (scheduled(sgd(momentum=0.9), lambda n: n / 4), optax.sgd(lambda n: 1e-2 * n / 4, 0.9)),
}


@pytest.mark.parametrize("name", some(SAME))
def test_two_that_are_the_same_name_nothing(name: str) -> None:
    found = beside(*SAME[name])
    assert found.first is None
    assert not found.causes
    assert len(found.of("update")) == len(found.of("later updates")) == 6


# What differs, what it is called, and what is said of both.
PLANTED: dict[str, tuple[Make, Any, str, str, str]] = {
    "learning rate": (adam(1e-3), optax.adam(2e-3), "learning rate", "0.001", "0.002"),
    "learning rate of decaying weights": (
        adamw(),
        optax.adamw(2e-3, weight_decay=1e-2),
        "learning rate",
        "0.001",
        "0.002",
    ),
    "the other way": (adam(maximize=True), optax.adam(1e-3), "learning rate", "-0.001", "0.001"),
    "first moment": (adam(), optax.adam(1e-3, b1=0.95), "decay of the first moment", "0.9", "0.95"),
    "second moment": (adam(), optax.adam(1e-3, b2=0.99), "decay of the second moment", "0.999", "0.99"),
    "alpha": (rmsprop(), optax.rmsprop(1e-3, eps_in_sqrt=False), "decay of the second moment", "0.99", "0.9"),
    "momentum": (sgd(momentum=0.9), optax.sgd(1e-2, 0.95), "momentum", "0.9", "0.95"),
    "no momentum": (sgd(momentum=0.9), optax.sgd(1e-2), "momentum", "0.9", "0"),
    "momentum of RMSprop": (
        *(rmsprop(), optax.rmsprop(1e-3, 0.99, eps_in_sqrt=False, momentum=0.5)),
        *("momentum", "0", "0.5"),
    ),
    "nesterov": (sgd(momentum=0.9, nesterov=True), optax.sgd(1e-2, 0.9), "nesterov", "one step ahead", "not so"),
    "dampening": (sgd(momentum=0.9, dampening=0.5), optax.sgd(1e-2, 0.9), "dampening", "0.5", "0"),
    "bias correction": (
        *(rmsprop(), optax.rmsprop(1e-3, 0.99, eps_in_sqrt=False, bias_correction=True)),
        *("bias correction", "not so", "corrected"),
    ),
    "bias correction of momentum": (
        *(sgd(momentum=0.9), optax.chain(optax.ema(0.9), optax.scale(-1e-2))),
        *("bias correction", "not so", "corrected"),
    ),
    "AMSGrad": (adam(amsgrad=True), optax.adam(1e-3), "AMSGrad", "largest", "not so"),
    "epsilon": (adam(), optax.adam(1e-3, eps=1e-5), "epsilon of the optimizer", "1e-08 beside", "1e-05 beside"),
    "epsilon within the root": (
        *(rmsprop(), optax.rmsprop(1e-3, 0.99)),
        *("epsilon of the optimizer", "1e-08 beside", "1e-08 within"),
    ),
    "warm-up": (
        *(scheduled(adam(), warm_up), optax.adam(1e-3)),
        *("schedule of the learning rate", "0.00025, 0.0005, 0.00075, 0.001 and so on", "0.001 in all of 10"),
    ),
    "warm-up of RMSprop": (
        *(rmsprop(), optax.rmsprop(traced_warm_up(1e-3), 0.99, eps_in_sqrt=False)),
        *("schedule of the learning rate", "0.001 in all of 10", "0.00025, 0.0005"),
    ),
    "warm-up from 0": (
        *(scheduled(adamw(), warm_up), optax.adamw(lambda n: 1e-3 * n / 4, weight_decay=1e-2)),
        *("schedule of the learning rate", "0.00025, 0.0005", "0, 0.00025, 0.0005"),
    ),
    "a schedule of 100,000 updates": (
        *(sgd(momentum=0.9), optax.sgd(optax.cosine_decay_schedule(1e-2, 100_000), 0.9)),
        *("schedule of the learning rate", "0.01 in all of 10", "0.01, 0.0099999"),
    ),
    "clipping": (clipped(adam(), 1.0), optax.adam(1e-3), "clipping", "by norm of all, at 1", "no clipping"),
    "clipping by value": (
        *(sgd(momentum=0.9), optax.chain(optax.clip(0.1), optax.sgd(1e-2, 0.9))),
        *("clipping", "no clipping", "by value, at 0.1"),
    ),
    "clipping at another norm": (
        *(clipped(adamw(), 0.5), by_norm(1.0, optax.adamw(1e-3, weight_decay=1e-2))),
        *("clipping", "by norm of all, at 0.5", "by norm of all, at 1"),
    ),
    "clipping by other means": (
        *(by_value(adam(), 0.5), by_norm(0.5, optax.adam(1e-3))),
        *("clipping", "by value, at 0.5", "by norm of all, at 0.5"),
    ),
    "weight decay": (
        *(adamw(), optax.adamw(1e-3)),
        *(
            "weight decay",
            "1e-05 of a weight taken in a step without gradient (weight_decay=0.01)",
            "1e-07 of a weight",
        ),
    ),
    "decay by way of the gradient": (
        *(adam(weight_decay=1e-2), optax.adamw(1e-3, weight_decay=1e-2)),
        *("weight decay", "0.01 of a weight added to its gradient, as L2", "1e-05 of a weight taken"),
    ),
    "decay of Adam with L2": (
        *(adam(weight_decay=1e-2), decayed(1e-3, optax.adam(1e-3))),
        *("weight decay", "0.01 of a weight added", "0.001 of a weight added"),
    ),
    "no decay of momentum": (
        *(sgd(momentum=0.9, weight_decay=1e-3), optax.sgd(1e-2, 0.9)),
        *("weight decay", "0.001 of a weight added", "none"),
    ),
    "decay behind momentum": (
        sgd(momentum=0.9, weight_decay=1e-3),
        optax.chain(optax.trace(0.9), optax.add_decayed_weights(1e-3), optax.scale(-1e-2)),
        *("weight decay", "0.001 of a weight added", "1e-05 of a weight taken"),
    ),
    "another rule": (sgd(), optax.adam(1e-3), "rule of the update", "as in SGD", "as in Adam"),
    "a rule that is not known": (adam(), optax.lion(1e-3), "rule of the update", "as in Adam", "none that is known"),
    "a rule that looks at weights": (adam(eps=1e-6), optax.lamb(1e-3), "rule of the update", "as in Adam", "none that"),
}


@pytest.mark.parametrize("name", some(PLANTED))
def test_what_is_planted_is_found_by_name_and_nothing_else_is(name: str) -> None:
    ours, theirs, cause, one, other = PLANTED[name]
    found = beside(ours, theirs)
    assert found.first is not None
    assert found.first.stage in ("update", "later updates")
    assert [said.name for said in found.causes] == [cause]
    assert (one in found.causes[0].torch, other in found.causes[0].flax) == (True, True), found.causes


def test_what_shows_only_later_is_a_stage_of_its_own() -> None:
    found = beside(adam(), optax.adam(1e-3, b1=0.95))
    assert not any(one.beyond for one in found.of("update"))
    assert found.first is not None
    assert (found.first.stage, found.first.tensor) == ("later updates", "up.kernel, update 3")
    assert "later updates: 6 of 6 tensors part, from up.kernel, update 3 on" in str(found)


def test_several_at_once_are_all_named() -> None:
    ours = clipped(scheduled(adamw(betas=(0.9, 0.95)), warm_up), 1.0)
    found = beside(ours, optax.adamw(3e-4, eps=1e-5, nesterov=False))
    assert {cause.name for cause in found.causes} == {
        *("clipping", "schedule of the learning rate", "decay of the second moment"),
        *("epsilon of the optimizer", "weight decay"),
    }


def test_what_a_norm_is_divided_by_is_seen_where_it_clips() -> None:
    """PyTorch adds 1e-6 to a norm before it divides by it, which is beyond rounding where norms are near the limit."""
    found = beside(clipped(sgd(), 1.0), by_norm(1.0, optax.sgd(1e-2)), size=30.0)
    assert [cause.name for cause in found.causes] == ["clipping"]
    assert (found.causes[0].torch, found.causes[0].flax) == (
        "by norm of all, at 1 (1e-06 added to the norm)",
        "by norm of all, at 1",
    )


def test_tensors_of_which_settings_differ_are_counted() -> None:
    found = beside(matrices_decay, optax.adamw(1e-3, weight_decay=1e-2))
    assert [(cause.name, cause.where) for cause in found.causes] == [("weight decay", "4 tensors, up.bias first")]
    found = beside(lambda parameters: torch.optim.Adam(parameters[:-2], 1e-3), optax.adam(1e-3))
    assert [(cause.name, cause.where) for cause in found.causes] == [
        ("rule of the update", "2 tensors, down.kernel first")
    ]
    assert found.causes[0].torch == "weights stay as they are"


def test_a_schedule_shows_within_the_updates_that_are_asked_for() -> None:
    ours = scheduled(adam(), lambda number: 0.1 if number >= 12 else 1.0)
    assert beside(ours, optax.adam(1e-3)).first is None
    found = beside(ours, optax.adam(1e-3), updates=15)
    assert [cause.name for cause in found.causes] == ["schedule of the learning rate"]
    assert "0.0001 in update 15" in found.causes[0].torch
    with pytest.raises(ConfigError, match="updates: expected 1 or more, found 0"):
        beside(ours, optax.adam(1e-3), updates=0)


def test_what_does_not_learn_is_named() -> None:
    ours = TorchModel()
    ours.up.weight.requires_grad_(False)
    found = beside(adam(), optax.adam(1e-3), torch_model=ours)
    assert [(cause.name, cause.where) for cause in found.causes] == [("requires_grad", "up.weight")]
    assert {one.tensor for one in found.differences} == {"up.kernel"}
