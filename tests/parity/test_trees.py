"""Tree search in NumPy, torch and under jax.jit: the same trees, the same actions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from mouse_core import ConfigError, trees
from mouse_jax import search as jax_search
from tests.core.tree_cases import World, search

STATES, SEARCHES, NODES = np.array([0, 3, 5, 7]), 20, 28
PLAYED = np.array([0, 1, 2, 0])


@pytest.fixture(scope="module")
def world() -> World:
    return World.random(3, states=9, dtype=np.float32)


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, Any]:
    return everything(search(world, world.root(STATES, NODES), SEARCHES), PLAYED)


def everything(tree: trees.SearchTree, played: Any) -> dict[str, Any]:
    """The tree, what comes of it, and every score of its roots."""
    root = trees.node_statistics(tree, played * 0)
    values, visits, logits = root.values, root.visits, root.prior_logits
    exp3 = trees.exp3_update(values, played, root.node_value)
    return {
        **{name: array for name, array in tree._asdict().items() if name != "embeddings"},
        "state": tree.embeddings["state"],
        "subtree": trees.subtree(tree, played),
        "policy": trees.visit_probabilities(visits, dtype=values.dtype),
        "sharp": trees.visit_probabilities(visits, temperature=0, dtype=values.dtype),
        "ucb": trees.ucb(values, visits, root.node_visits),
        "tuned": trees.ucb_tuned(values, values**2, visits),
        "puct": trees.puct(values, visits, 0.5),
        "means": trees.mean_values(values, visits),
        "exp3": trees.exp3(exp3),
        "range": trees.qtransform_by_min_max(values, visits, min_value=-3, max_value=3),
        "mixed": trees.qtransform_completed_by_mix_value(values, visits, root.raw_value, logits),
        "lost": trees.virtual_loss(values, visits, visits % 2),
        "paths": trees.backup_paths(values[0], visits[0], visits % 4 - 1, values, root.node_value, discount=0.5),
        "best": trees.best_action(values, logits > -np.inf),
    }


def assert_alike(found: Any, expected: Any, name: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key], f"{name} {key}")
    elif isinstance(expected, tuple):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{name} {number}")
    else:
        one, other = np.asarray(found), np.asarray(expected)
        assert (one.shape, one.dtype.kind) == (other.shape, other.dtype.kind), name
        assert other.dtype.kind != "f" or one.dtype == other.dtype, name
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)


def test_torch_searches_alike(world: World, expected: dict[str, Any]) -> None:
    tensors = world.moved(torch.from_numpy)
    tree = search(tensors, tensors.root(torch.from_numpy(STATES), NODES), SEARCHES)
    assert_alike(everything(tree, torch.from_numpy(PLAYED)), expected)


@pytest.mark.slow
def test_jax_searches_alike_in_one_compiled_loop(world: World, expected: dict[str, Any]) -> None:
    arrays, rows = world.moved(jnp.asarray), np.arange(len(STATES))

    @jax.jit
    def searched(states: Any) -> Any:
        def once(_: Any, state: Any) -> Any:
            tree, pending, _ = state
            parent, action = jax_search.descend(tree)
            pending = jax_search.add_pending(tree, pending, parent, action)
            tree, node = arrays.step(tree, rows, parent, action)
            tree = jax_search.backup(tree, node)
            return tree, jax_search.remove_pending(tree, pending, parent, action), node

        tree = arrays.root(states, NODES)
        tree, pending, node = jax.lax.fori_loop(0, SEARCHES, once, (tree, tree.children_visits, states * 0))
        full = tree._replace(node_visits=tree.node_visits + 1)  # no place left, so that nothing may happen
        return everything(tree, jnp.asarray(PLAYED)), pending, (full, *once(0, (full, pending, node)))

    found, pending, (full, same, _, node) = searched(jnp.asarray(STATES))
    assert_alike(found, expected)
    assert not pending.any()
    new = np.asarray(node) < 0  # where an existing node was evaluated once more there was no need of a place
    assert new.any()
    for before, after in zip(full[:-1], same[:-1], strict=True):
        np.testing.assert_array_equal(np.asarray(before)[new], np.asarray(after)[new])


def test_pythons_loop_is_refused_where_it_cannot_run() -> None:
    root = trees.new_tree(np.zeros((1, 2), np.float32), np.zeros(1, np.float32), num_nodes=2)
    with pytest.raises(ConfigError, match=r"loop: expected jax.lax.while_loop under jax.jit, found Python's"):
        jax.jit(trees.descend)(root)


def test_forests_take_what_frameworks_have() -> None:
    """Tensors, TensorDicts and JAX's arrays as they are: all become the same forest, of NumPy."""
    rows = {
        "observation": np.arange(8, dtype=np.float32).reshape(4, 2),
        "action": np.array([0, 1, 1, 0], np.int32),
        "reward": np.array([0.0, 1.0, 2.0, 3.0], np.float32),
        "done": np.array([0, 0, 0, 1], np.int32),
    }
    ted = {name: rows[name][:-1] for name in ("observation", "action")}
    ted["next"] = {name: rows[name][1:] for name in ("observation", "reward", "done")}  # type: ignore[assignment]
    made = []
    for given in (rows, ted):
        tensors = jax.tree.map(torch.from_numpy, given)
        batch = [3] if given is ted else [4]
        for one in (given, tensors, TensorDict(tensors, batch), jax.tree.map(jnp.asarray, given)):
            forest = trees.Forest()
            forest.extend(one)
            root = jax.tree.map(lambda leaf: leaf[0], {"observation": one["observation"]})
            made.append(forest.get_tree(root).rows())
    for one in made:
        assert_alike(one["observation"], rows["observation"][:-1])
        assert_alike(one["next"]["observation"], rows["observation"][1:])
        assert one["next"]["reward"].tolist() == [1, 2, 3]
        assert one["next"]["terminated"].tolist() == [False, False, True]
    assert {leaf.dtype for one in made for leaf in (one["observation"], one["next"]["observation"])} == {
        np.dtype(np.float32)
    }
