"""Every block of the docs and every example that pairs an observation with an action pairs the right ones.

Row t of an "arrived" store holds the action that led to its observation; the action that was chosen there stands in row
t + 1. A block that reads both from a batch is in `CHECKED`, with an oracle, or in `SETTLED`, with what settles its
alignment. An oracle gives the block a batch whose observations name the action that leaves them, and a policy that says
that action: the block finds no mistake, and finds many where each action stands beside the observation it leaves.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mouse_core import BatchSource, DatasetStore
from scripts.house import ROOT
from scripts.notebooks import NOTEBOOKS, code_of
from tests.programs import EXAMPLES
from tests.test_docs import PAGES, blocks, named, program

OBSERVATIONS = {"obs_continuous", "obs_discrete", "obs_image", "obs", "observation", "observations", "q_star"}
OBSERVATIONS |= {"observation.state", "observation.images.top"}
ACTIONS = {"action", "actions"}

Batch = dict[str, Any]
LENGTH, WIDTH, NOTHING = 5, 8, 3  # rows of an episode, numbers of an observation, the action that nobody takes


def coded() -> Batch:
    """Windows `[4, 12]` over the ends of episodes: an observation begins with the action that leaves it."""
    store = DatasetStore()
    for episode in range(20):
        leaving = np.array([*((np.arange(LENGTH - 1) + episode) % 3), NOTHING])
        store.extend(
            {
                "action": np.array([2, *leaving[:-1]]),  # the first is a placeholder
                "reward": np.r_[0.0, np.ones(LENGTH - 1)],
                "done": np.arange(LENGTH) // (LENGTH - 1) * (1 + episode % 2),
                "episode_step": np.arange(LENGTH),
                "observation": np.repeat(leaving[:, None], WIDTH, axis=1).astype(np.float64),
                "metadata_q_star": np.eye(4, dtype=np.float32)[leaving],
            }
        )
    batch = BatchSource(store, 12, 4, seed=1)[0]
    return {**batch, "observation": batch["obs_continuous"]}


def outgoing(batch: Batch) -> Batch:
    """The batch with each action beside the observation that it leaves: what nobody may take it for."""
    return {**batch, "action": np.roll(batch["action"], -1, axis=1)}


def tensors(batch: Batch) -> Batch:
    return {name: torch.from_numpy(np.array(values)) for name, values in batch.items()}


class Policy(torch.nn.Module):
    """Scores of actions that are sure of the one that leaves an observation."""

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot(seen[..., 0].long(), 4).float()


policy = Policy()


def paired(*names: str, function: str = "") -> Callable[[str, Batch], float]:
    """Of statements that cut out of a batch what was seen, what was chosen, and which of them are pairs, or begin."""

    def mistakes(code: str, batch: Batch) -> float:
        namespace: dict[str, Any] = {"batch": tensors(batch)}
        (tree,) = [tree for name, tree in scopes(code) if name == function]
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and set(names) & {
                name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }:
                exec(compile(ast.Module([node], []), "pairs", "exec"), namespace)
        seen, chosen, pairs = (namespace[name] for name in names)
        pairs = ~pairs if names[2] == "begins" else pairs
        assert pairs.sum() > 20
        return float((seen[..., 0][pairs] != chosen[pairs]).double().mean())

    return mistakes


def of_the_trainers_policy(code: str, batch: Batch) -> float:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    made = namespace["Policy"]()
    made.layer = policy
    return float(made(**tensors(batch))["loss"])


def of_recorded_values(code: str, batch: Batch) -> float:
    namespace: dict[str, Any] = {"np": np}
    made = next(node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    exec(compile(ast.Module([made], []), "values", "exec"), namespace)
    ends = batch["q_star"][:, :-1].argmax(-1) == NOTHING
    return float(1 - namespace["value_of_action"](batch)[~ends].mean())


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def of_carts(code: str, batch: Batch) -> float:
    pushes = {name: np.isin(batch[name], (1, NOTHING)) for name in ("obs_continuous", "action")}
    carts = {**batch, "obs_continuous": 2.0 * pushes["obs_continuous"] - 1, "action": pushes["action"].astype(int)}
    return 1 - float(importlib.import_module("from_object_storage").learn(np.array([1.0, 0.0]), carts))


CHECKED: dict[tuple[str, str], Callable[[str, Batch], float]] = {
    ("docs/guides/minari.md", ""): paired("seen", "done_next", "pairs"),
    ("docs/guides/augmentation.md", "value_of_action"): of_recorded_values,
    ("docs/guides/in-your-trainer.md", "forward"): of_the_trainers_policy,
    ("examples/collect_and_train.py", "train"): paired("observation", "action", "begins", function="train"),
    ("examples/from_object_storage.py", "learn"): of_carts,
}

# What settles an alignment where nothing is checked: the words of which the page or program has one, and the places.
SETTLED: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "`windows=` delivers the action that leaves the anchor's observation, in either alignment": (
        ('"windows": {', "windows={"),
        (("docs/notebooks/robot.ipynb", ""), ("examples/offline_to_online.py", "update")),
    ),
    "`transitions=True` delivers the action that was taken at the observation, in either alignment": (
        ('"transitions": True', "transitions=True"),
        (
            ("docs/getting-started.md", ""),
            ("docs/notebooks/offline.ipynb", "loss_of"),
            ("docs/notebooks/online.ipynb", "learn"),
            *(("docs/notebooks/study.ipynb", name) for name in ("loss_of", "step", "train_jax", "train_torch")),
        ),
    ),
    "rows of a replay buffer or a rollout: the action leaves the observation beside it": (
        ("ReplayBuffer", "RolloutStorage", "device.init", "Replay("),
        (
            ("docs/guides/rollouts.md", ""),
            ("docs/notebooks/jax.ipynb", "loss_of"),
            *(("examples/ppo_cartpole.py", name) for name in ("loss_of", "update")),
            ("examples/sac_on_device.py", "critic_loss"),
        ),
    ),
    "Minari has T+1 observations and T actions: the first row's action is left out": (
        ("minari",),
        (("docs/guides/minari.md", "buffer_of"),),
    ),
    "a policy that acts: what it says is no part of a batch": (("",), (("docs/guides/normalisation.md", ""),)),
}


def reads(tree: ast.AST) -> set[str]:
    """The fields that code reads, in whatever it does but assert."""
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
            found |= {name} if isinstance(name, str) else set()
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:  # called as `function(**batch)`
            found |= {argument.arg for argument in node.args.args}
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.Assert)]
    return found


def scopes(code: str) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a program, and under no name what stands outside of them."""
    tree = ast.parse(code)
    yield from ((node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    yield "", ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])


def pairings() -> set[tuple[str, str]]:
    """The blocks of pages and the functions of notebooks and examples that read an observation and an action."""
    found = set()
    sources = [
        (named(page), block.code)
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language == "python"
    ]
    sources += [(named(path), "\n".join(code_of(path))) for path in NOTEBOOKS]
    sources += [(named(path), path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.py"))]
    for source, code in sources:
        for scope, tree in scopes(code):
            if reads(tree) & OBSERVATIONS and reads(tree) & ACTIONS:
                found.add((source, scope))
    return found


def test_every_pairing_is_known() -> None:
    """A new one gets an oracle in `CHECKED`, or in `SETTLED` a reason why none is needed."""
    settled = [where for _, places in SETTLED.values() for where in places]
    assert sorted(pairings()) == sorted([*CHECKED, *settled])


@pytest.mark.parametrize("where", [pytest.param(where, id="-".join(where)) for where in CHECKED])
def test_an_observation_is_paired_with_the_action_that_leaves_it(where: tuple[str, str]) -> None:
    source, scope = where
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        found = [
            block.code
            for block in blocks(text)
            if block.language == "python"
            and any(
                name == scope and reads(tree) & OBSERVATIONS and reads(tree) & ACTIONS
                for name, tree in scopes(block.code)
            )
        ]
        assert len(found) == 1
        (text,) = found
    batch = coded()
    assert CHECKED[where](text, batch) < 1e-6
    assert CHECKED[where](text, outgoing(batch)) > 0.2


@pytest.mark.parametrize("reason", SETTLED)
def test_what_settles_an_alignment_is_there(reason: str) -> None:
    words, places = SETTLED[reason]
    for path in {ROOT / source for source, _ in places}:
        text = "\n".join(code_of(path)) if path in NOTEBOOKS else path.read_text(encoding="utf-8")
        code = program(text) if path.suffix == ".md" else text
        assert any(word in code for word in words), path
