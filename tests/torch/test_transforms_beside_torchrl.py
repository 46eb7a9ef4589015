"""Transforms give what TorchRL's do, where theirs is installed (the bench extra)."""

from typing import Any

import numpy as np
import pytest
import torch

from mouse_core.nested import map_tree
from mouse_core.replay import Apply, BurnIn, CatFrames, Concatenate, ReturnsToGo
from mouse_core.statistics import Scaling

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.data import postprocs
from torchrl.envs import transforms


def slices() -> dict[str, Any]:
    random = np.random.default_rng(4)
    done = np.zeros((3, 9, 1), bool)
    done[0, 3] = done[1, 0] = done[1, 5] = done[2, 8] = True
    first = np.concatenate([np.ones((3, 1, 1), bool), done[:, :-1]], axis=1)
    obs = random.normal(size=(3, 9, 2)).astype(np.float32)
    return {
        "obs": obs,
        "more": random.normal(size=(3, 9, 1)).astype(np.float32),
        "is_init": first,
        "next": {"reward": random.normal(size=(3, 9, 1)).astype(np.float32), "done": done, "obs": obs + 1},
    }


def theirs(transform: Any) -> TensorDict:
    return transform(TensorDict(map_tree(torch.from_numpy, slices()), batch_size=[3, 9]))


@pytest.mark.parametrize("pad", [None, 0])
def test_frames(pad: float | None) -> None:
    padding = "same" if pad is None else "constant"
    other = theirs(transforms.CatFrames(N=3, dim=-1, in_keys=["obs", ("next", "obs")], padding=padding))
    mine = CatFrames("obs", frames=3, pad=pad)(slices())
    np.testing.assert_array_equal(mine["obs"], other["obs"].numpy())


def test_rewards_of_a_trajectory() -> None:
    other = theirs(postprocs.DensifyReward(discount=0.9))
    mine = ReturnsToGo(0.9, to=("next", "reward"))(slices())
    np.testing.assert_allclose(mine["next"]["reward"], other["next", "reward"].numpy(), rtol=1e-5)


def test_known_numbers_and_vectors() -> None:
    loc, scale = np.array([0.5, -1.0]), np.array([2.0, 0.1])
    norm = transforms.ObservationNorm(torch.tensor(loc), torch.tensor(scale), in_keys=["obs"], standard_normal=True)
    mine = Apply({"obs": Scaling("mean_std", loc, scale).apply})(slices())
    np.testing.assert_allclose(mine["obs"], theirs(norm)["obs"].numpy(), rtol=1e-5, atol=1e-6)
    joined = theirs(transforms.CatTensors(in_keys=["more", "obs"], out_key="all"))["all"]
    np.testing.assert_array_equal(Concatenate("more", "obs", to="all")(slices())["all"], joined.numpy())


def test_burn_in() -> None:
    from torchrl.modules import GRUModule

    gru = GRUModule(
        input_size=2,
        hidden_size=4,
        in_keys=["obs", "hidden"],
        out_keys=["made", ("next", "hidden")],
        default_recurrent_mode=True,
    )
    given = map_tree(torch.from_numpy, slices())
    start = torch.zeros(3, 9, 1, 4)
    other = transforms.BurnInTransform(modules=[gru], burn_in=4)(
        TensorDict({**given, "hidden": start}, batch_size=[3, 9])
    )

    def warm(first: Any) -> dict[str, Any]:
        with torch.no_grad():
            rows = TensorDict({**first, "hidden": start[:, :4]}, batch_size=[3, 4])
            return {"hidden": gru(rows)["next", "hidden"][:, -1]}

    mine = BurnIn(warm, steps=4)(given)
    torch.testing.assert_close(mine["hidden"], other["hidden"][:, 0])
    assert torch.equal(mine["obs"], other["obs"])
