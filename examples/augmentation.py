"""What each augmentation does to a real window, as a picture.

    python examples/augmentation.py

Records a LunarLander episode with its frames, and a few FrozenLake episodes with their exact action values, reads one
window of each through mouse_core, augments it, and draws it before and after.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import gymnasium as gym
    import matplotlib
    import matplotlib.pyplot as plt
    from gymnasium.envs.box2d.lunar_lander import heuristic
    from PIL import Image
except ImportError as error:
    raise SystemExit(f"augmentation.py needs {error.name}: pip install 'mouse-data[demo]'") from error

from mouse_core import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    DatasetStore,
    RandomCrop,
    RandomShift,
)

matplotlib.use("agg")

STEPS = 64
FRAME = 84
STATES = 64
DISCOUNT = 0.95
ACTIONS = ("left", "down", "right", "up")
GREY, BLUE, RED = "#9ca3af", "#2563eb", "#b45309"

Batch = dict[str, NDArray[Any]]


def record_lander(seed: int = 3) -> DatasetStore:
    """LunarLander steps with frames of 84x84: episodes of gymnasium's own pilot."""
    store = DatasetStore(max_action_dim=4)
    with gym.make("LunarLander-v3", render_mode="rgb_array") as environment:
        for episode in range(2):
            observation, _ = environment.reset(seed=seed + episode)
            row: dict[str, Any] = {"action": 0, "reward": 0.0, "done": 0}
            step = 0
            while True:
                frame = Image.fromarray(np.asarray(environment.render())[:, 100:500])
                pixels = np.asarray(frame.resize((FRAME, FRAME), Image.Resampling.BOX))
                store.append(row | {"observation": observation, "episode_step": step, "observation_image": pixels})
                if row["done"]:
                    break
                action = int(heuristic(environment, observation))  # type: ignore[no-untyped-call]
                observation, reward, terminated, truncated, _ = environment.step(action)
                # The action, reward and done of a row are those that led to its observation.
                row = {"action": action, "reward": float(reward), "done": 1 if terminated else 2 if truncated else 0}
                step += 1
    return store


def frozen_lake_values(environment: gym.Env[Any, Any]) -> NDArray[np.float64]:
    """The exact optimal action values of FrozenLake, float64 [states, actions], by value iteration."""
    model = environment.unwrapped.P  # type: ignore[attr-defined]
    values = np.zeros((STATES, len(ACTIONS)))
    for _ in range(500):
        best = values.max(axis=1)
        for state in range(STATES):
            for action in range(len(ACTIONS)):
                values[state, action] = sum(
                    chance * (reward + DISCOUNT * best[following] * (not over))
                    for chance, following, reward, over in model[state][action]
                )
    return values


def record_lake(rows: int = 3 * STEPS, seed: int = 0) -> DatasetStore:
    """FrozenLake steps of a player who takes the best action four times out of five."""
    store = DatasetStore(max_action_dim=len(ACTIONS))
    random = np.random.default_rng(seed)
    with gym.make("FrozenLake-v1", map_name="8x8", is_slippery=True, max_episode_steps=40) as environment:
        values = frozen_lake_values(environment)
        while len(store) < rows:
            state, _ = environment.reset(seed=seed + len(store))
            row: dict[str, Any] = {"action": 0, "reward": 0.0, "done": 0}
            step = 0
            while True:
                store.append(
                    row | {"observation_discrete": int(state), "episode_step": step, "metadata_q_star": values[state]}
                )
                if row["done"]:
                    break
                action = int(values[state].argmax() if random.random() < 0.8 else random.integers(len(ACTIONS)))
                state, reward, terminated, truncated, _ = environment.step(action)
                row = {"action": action, "reward": float(reward), "done": 1 if terminated else 2 if truncated else 0}
                step += 1
    return store


def window(store: DatasetStore, augment: AugmentTokensConfig | None) -> Batch:
    """A window towards the end of a store, augmented or as it is."""
    snapshot = store.snapshot(len(store) - STEPS // 2)
    source = BatchSource(snapshot, STEPS, 1, "last", seed=5, augment=augment)
    return {name: values[0] for name, values in source[0].items()}


def compare(before: Any, after: Any, old: Any, new: Any, what: str, *, ticks: tuple[str, ...] = ()) -> None:
    """Lines or points before and after, on two axes."""
    for axes, values, title in ((before, old, "recorded"), (after, new, what)):
        if ticks or np.asarray(values).dtype.kind == "i":
            axes.step(range(STEPS), values, where="mid", color=GREY if axes is before else BLUE)
        else:
            axes.plot(values, color=GREY if axes is before else BLUE, linewidth=1)
        axes.set_title(title, fontsize=9, loc="left", family="monospace" if axes is after else "sans-serif")
        if ticks:
            axes.set_yticks(range(len(ticks)), ticks)


def show_values(axes: Any, batch: Batch, title: str, *, names: tuple[str, ...]) -> None:
    """The action values of a window as an image, the best action of each step marked."""
    axes.imshow(batch["q_star"].T, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.plot(batch["q_star"].argmax(axis=1), ".", color=RED, markersize=4)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=9, loc="left", family="sans-serif" if "recorded" in title else "monospace")


def draw(lander: DatasetStore, lake: DatasetStore, output: Path) -> None:
    """Draw the picture to a file."""
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(9, 12.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[5.4, 1.25])
    rows = top.subplots(6, 2)
    for axes in rows.flat:
        axes.set_xlim(-0.5, STEPS - 0.5)
    for axes in rows[:-1].flat:
        axes.tick_params(labelbottom=False)

    plain = window(lander, None)
    half = AugmentScalarSpec(low=0.4, high=0.6)
    up = AugmentScalarSpec(mean=1.0)
    scaled = window(lander, AugmentTokensConfig(scale_reward=half, shift_reward=up, scale_obs=half))
    compare(*rows[0], plain["reward"], scaled["reward"], "scale_reward, shift_reward")
    compare(*rows[1], plain["obs_continuous"][:, :6], scaled["obs_continuous"][:, :6], "scale_obs")
    for axes in rows[0]:
        axes.set_ylim(-13, 13)
    for axes in rows[1]:
        axes.set_ylim(-0.8, 0.8)
    rows[0, 0].set_ylabel("reward")
    rows[1, 0].set_ylabel("obs_continuous")

    game = window(lake, None)
    permuted = window(
        lake,
        AugmentTokensConfig(
            permute_action="both", permute_done=True, permute_obs_discrete=True, max_num_obs_discrete=STATES
        ),
    )
    show_values(rows[2, 0], game, "recorded; the dot is the best action", names=ACTIONS)
    show_values(rows[2, 1], permuted, 'permute_action="both"', names=("0", "1", "2", "3"))
    rows[2, 0].set_ylabel("q_star")
    compare(*rows[3], game["obs_discrete"], permuted["obs_discrete"], "permute_obs_discrete")
    compare(*rows[4], game["done"], permuted["done"], "permute_done", ticks=("0", "1", "2"))
    for axes in rows[3]:
        axes.set_ylim(0, STATES)
    rows[3, 0].set_ylabel("obs_discrete")
    rows[4, 0].set_ylabel("done")

    masked = window(
        lander, AugmentTokensConfig(mask_prob=AugmentMaskProbConfig(obs_continuous=0.15), deliver_masks=True)
    )
    for axes, batch, title in ((rows[5, 0], plain, "recorded"), (rows[5, 1], masked, "mask_prob: obs_continuous=0.15")):
        shown = np.clip(batch["obs_continuous"], -1, 1)
        if "obs_continuous_mask" in batch:
            shown[batch["obs_continuous_mask"]] = np.nan
        axes.set_facecolor("#374151")  # what is masked
        axes.imshow(shown.T, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9, loc="left", family="monospace" if batch is masked else "sans-serif")
        axes.set_xlabel("step")
    rows[5, 0].set_ylabel("obs_continuous")

    pictures = [
        ("recorded", None, FRAME),
        (
            "scale_obs_image,\nshift_obs_image",
            {"scale_obs_image": AugmentScalarSpec(mean=0.6), "shift_obs_image": AugmentScalarSpec(mean=60.0)},
            FRAME,
        ),
        ("RandomShift(pad=8)", {"crop_obs_image": RandomShift(8)}, FRAME),
        ("RandomCrop(64, 64)", {"crop_obs_image": RandomCrop(64, 64)}, 64),
        ("mask_prob:\nobs_image=0.5", {"mask_prob": AugmentMaskProbConfig(obs_image=0.5)}, FRAME),
    ]
    panels = bottom.subplots(1, len(pictures))
    for axes, (title, options, size) in zip(panels, pictures, strict=True):
        batch = window(lander, AugmentTokensConfig(**options) if options else None)
        images = batch["obs_image"].reshape(STEPS, size, size, 3).astype(np.uint8)
        framed = np.pad(images[[8, 24, 40, 56]], ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
        axes.imshow(np.vstack([np.hstack(framed[:2]), np.hstack(framed[2:])]))
        axes.set_title(title, fontsize=8, loc="left", family="monospace" if options else "sans-serif")
        axes.set_axis_off()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=85, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Record, augment and draw."""
    parser = argparse.ArgumentParser(description="Draw what each augmentation does to a real window.")
    parser.add_argument("--output", type=Path, default=Path("out/augmentation.png"), help="the picture (PNG or SVG)")
    arguments = parser.parse_args()
    lander, lake = record_lander(), record_lake()
    print(f"steps recorded: {len(lander) + len(lake)}")
    draw(lander, lake, arguments.output)
    print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
