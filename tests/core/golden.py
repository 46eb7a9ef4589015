"""What seeds, data and configurations have given so far: digests of whole streams, fingerprints, saved states.

``python -m tests.core.golden`` prints what they give now. A change of ``golden.json`` is a change of the interface:
whoever trains from a seed, or resumes from a state, sees it, and CHANGELOG has to say so.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mouse_core import (
    AugmentMaskProbConfig,
    AugmentScalarSpec,
    AugmentTokensConfig,
    BatchSource,
    DatasetStore,
    Field,
    MaskFields,
    PermuteFields,
    PrefetchBatchifier,
    ScaleFields,
    spec,
)
from mouse_core.digest import StreamDigest
from mouse_core.groups import RLExample, examples_digest
from mouse_core.mixtures import Mixture, MixtureSource, Schedule
from mouse_core.replay import (
    ArrayStorage,
    ConsumingSampler,
    LinearSchedule,
    ListStorage,
    MarkSlices,
    MaxValueWriter,
    NextView,
    NStep,
    PrioritizedReplayBuffer,
    PrioritizedSliceSampler,
    RandomTimeCrop,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReverseSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessSampler,
)
from mouse_core.rollouts import RolloutField, RolloutStorage
from mouse_core.sampling import Blocks, Column
from mouse_core.testing import stream_digest

FILE = Path(__file__).with_name("golden.json")
BATCHES = 40


def columns(rows: int, first: int = 0) -> dict[str, Any]:
    """Rows whose values are fractions that every dtype holds, so that no machine computes them otherwise."""
    number = np.arange(first, first + rows)
    step = number % 13
    step = np.where(number % 39 < 5, number % 39, step)
    done = np.where(step == 12, 1 + number // 13 % 2, 0)
    return {
        "action": number * 7 % 5,
        "reward": (number % 17 / 4).astype(np.float32),
        "done": done,
        "episode_step": step,
        "metadata_q_star": (number[:, None] % 23 / 8 + np.arange(5)).astype(np.float32),
        "observation": number[:, None] / 32 + np.arange(3) / 4,
        "observation_discrete": number * 11 % 64,
        "observation_image": (number[:, None, None] + np.arange(12).reshape(3, 4)).astype(np.uint8),
    }


def store(rows: int = 400, **options: Any) -> DatasetStore:
    """A store of two segments in chunks of their own and appended rows."""
    made = DatasetStore(**options)
    table = pa.table({name: list(values) for name, values in columns(rows).items() if name != "observation_image"})
    pieces = [table.slice(0, 100), table.slice(100, 57), table.slice(157)]
    made.from_dataset(pa.concat_tables(pieces[:2]))
    made.from_dataset(pieces[2])
    made.extend({name: values for name, values in columns(50, rows).items() if name != "observation_image"})
    return made


def images() -> DatasetStore:
    made = DatasetStore()
    made.extend(columns(200))
    return made


AUGMENT = AugmentTokensConfig(
    scale_reward=AugmentScalarSpec(low=0.5, high=2.0),
    shift_obs=AugmentScalarSpec(mean=0.0, std=0.25),
    permute_action="both",
    mask_prob=AugmentMaskProbConfig(reward=0.1, obs_continuous=0.15),
)
BY_NAME = AugmentTokensConfig(
    by_field=[
        PermuteFields(5, codes="action", columns="q_star"),
        ScaleFields("reward", scale=AugmentScalarSpec(low=0.5, high=2.0)),
        ScaleFields("obs_continuous", endpoints=((0, -1), (2, 1))),
        MaskFields(["time", "done"], 0.2),
    ]
)


def of_source(source: Any, n: int = BATCHES) -> dict[str, Any]:
    return {"stream": stream_digest(source, n), "fingerprint": source.fingerprint}


def sources() -> dict[str, Any]:
    """Windows in every mode, by shard, augmented, within episodes, of pictures and of fields of one's own."""
    made, own = store(), [Field("level", column="reward", dtype="float64"), Field("kind", column="done", dtype="int16")]
    options: dict[str, dict[str, Any]] = {
        **{mode: {"sampling": mode} for mode in ("random", "last", "sequential", "batch")},
        "the rest of an epoch": {"sampling": "sequential", "drop_last": False},
        "another seed": {"seed": 2**63 + 5},
        "the second of two shards": {"shard": (1, 2)},
        "some fields": {"fields": ["time", "obs_continuous"], "dtypes": {"obs_continuous": "float32"}},
        "augmented": {"augment": AUGMENT},
        "three views": {"augment": AUGMENT, "views": 3},
        "augmented by name": {"augment": BY_NAME, "views": 2},
        "augmented around anchors": {"augment": BY_NAME, "sequence_length": None, "windows": {"action": range(4)}},
        "a later epoch": {"epoch_start": 1000, "sampling": "batch"},
        **{
            f"episodes {weighting} {pad}": {"boundary": "episode", "weighting": weighting, "pad": pad}
            for weighting in ("step", "trajectory")
            for pad in (True, False, 0)
        },
        "episodes side by side": {"boundary": "episode", "sampling": "sequential"},
        "all of it in a pool": {"sampling": "blocks"},
        "blocks": {"sampling": Blocks(rows=27, pool=8), "seed": 3, "sequence_length": 2, "shard": (1, 2)},
        "blocks of episodes": {"sampling": Blocks(rows=27, pool=8), "boundary": "episode", "sequence_length": 2},
    }
    sized = {"sequence_length": 9, "batch_size": 8}
    found = {name: of_source(BatchSource(made, **{**sized, **chosen})) for name, chosen in options.items()}
    found["fields of one's own"] = of_source(BatchSource(store(fields=own), 9, 8))
    found["outgoing"] = of_source(BatchSource(store(alignment="outgoing", max_action_dim=7), 9, 8))
    found["pictures"] = of_source(BatchSource(images(), 9, 8), 10)
    found["a subset"] = of_source(BatchSource(made.snapshot(211), 9, 8))
    found["one long batch"] = of_source(BatchSource(made, 1, 512), 3)
    found["the best episodes"] = of_source(BatchSource(made.best(0.3), 9, 8))
    found["a part of a split"] = of_source(
        BatchSource(made.split(train=0.7, seed=5)["train"], 9, 8, boundary="episode")
    )
    found["a part by return"] = of_source(BatchSource(made.split(train=0.5, by="return")["train"], 3, 8))
    found["within one done"] = of_source(BatchSource(made, 2, 8, boundary=Column("done")))
    return found


# In five equal steps from [1, 0, 0] to [1/6, 2/6, 3/6].
RAMP = Schedule({4 * stage: [30 - 5 * stage, 2 * stage, 3 * stage] for stage in range(6)})


def mixtures() -> dict[str, Any]:
    members = {"a": store(150), "b": store(), "c": store(70)}
    made = {
        "weights": Mixture(members, [0.7, 0.2, 0.1]),
        "steps": Mixture(members, per="step", temperature=2),
        "trajectories": Mixture(members, [3, 1, 1], per="trajectory"),
        "schedule": Mixture(members, RAMP),
    }
    found = {name: of_source(BatchSource(one, 9, 8)) for name, one in made.items()}
    for name, options in {
        "in turn": {"sampling": "batch", "epoch_start": 7},
        "episodes": {"boundary": "episode", "weighting": "trajectory"},
        "last": {"sampling": "last"},
    }.items():
        found[name] = of_source(BatchSource(made["weights"], 9, 8, **options))
    sources = {name: BatchSource(member, 9, 8, "batch") for name, member in members.items()}
    mixed = MixtureSource(sources, [1, 2, 1], batch_size=10)
    stream = stream_digest([mixed[index] for index in range(BATCHES)], BATCHES)
    return {**found, "sources": {"stream": stream, "fingerprint": mixed.fingerprint}}


def loader_states() -> dict[str, Any]:
    """The state of a loader that is 25 batches in, after a refresh, and what follows."""
    made = store()
    with PrefetchBatchifier(made, 9, 8, sampling="batch", seed=3) as loader:
        for _ in range(20):
            loader.next_batch()
        made.extend({name: values for name, values in columns(60, 450).items() if name != "observation_image"})
        loader.refresh()
        for _ in range(5):
            loader.next_batch()
        return {"state": loader.state_dict(), "next": stream_digest(loader, BATCHES)}


def resumed(state: dict[str, Any]) -> str:
    made = store()
    made.extend({name: values for name, values in columns(60, 450).items() if name != "observation_image"})
    with PrefetchBatchifier(made, 9, 8, sampling="batch") as loader:
        loader.load_state_dict(state)
        return stream_digest(loader, BATCHES)


def transitions(rows: int, first: int = 0) -> dict[str, Any]:
    number = np.arange(first, first + rows)
    return {
        "obs": (number[:, None] / 8 + np.arange(3)).astype(np.float32),
        "action": number * 7 % 5,
        "reward": (number % 17 / 4).astype(np.float32),
        "done": np.where(number % 11 == 10, 1 + number // 11 % 2, 0).astype(np.int8),
        "episode": number // 11,
    }


def of_buffer(buffer: Any, *, priorities: bool = False, envs: int = 0) -> str:
    digest = hashlib.sha256()
    for turn in range(12):
        rows = transitions(36, 36 * turn)
        if envs:  # each environment has steps that follow each other
            rows = {k: v.reshape(envs, -1, *v.shape[1:]).swapaxes(0, 1) for k, v in rows.items()}
        buffer.extend(rows)
        for _ in range(4):
            batch = buffer.sample()
            digest.update(stream_digest([flat(batch)], 1).encode())
            if priorities:
                index = np.asarray(batch["index"])
                buffer.update_priority(index, (index % 7 + 1) / 4)
    return digest.hexdigest()[:32]


def flat(batch: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in batch.items():
        found |= flat(values, f"{prefix}{name}.") if isinstance(values, dict) else {f"{prefix}{name}": values}
    return found


def buffers() -> dict[str, Any]:
    """Draws of every sampler over rings that have come round."""

    def ring(**options: Any) -> ReplayBuffer:
        return ReplayBuffer(ArrayStorage(150), batch_size=24, seed=5, **options)

    def sliced(sampler: Any, **options: Any) -> ReplayBuffer:
        """A ring that gives 24 steps a batch."""
        return ReplayBuffer(ArrayStorage(150), sampler, batch_size=24 // sampler.sequence_length, seed=5, **options)

    slices: dict[str, Any] = {"sequence_length": 6, "end_key": "done", "pad": False}
    plain: dict[str, Callable[[], Any]] = {
        "random": ring,
        "without replacement": lambda: ring(sampler=SamplerWithoutReplacement()),
        "list": lambda: ReplayBuffer(ListStorage(150), batch_size=24, seed=5),
        "slices": lambda: sliced(SliceSampler(**slices)),
        "slices by episode": lambda: sliced(SliceSampler(**slices, weighting="trajectory")),
        "slices padded": lambda: sliced(SliceSampler(sequence_length=8, traj_key="episode", pad=True)),
        "slices once": lambda: sliced(SliceSamplerWithoutReplacement(sequence_length=3, end_key="done", pad=False)),
        "crops": lambda: sliced(SliceSampler(**slices), transform=RandomTimeCrop(4)),
        "three steps": lambda: ring(transform=[NextView(), NStep(3, 0.5)]),
        "the best": lambda: ring(writer=MaxValueWriter("reward")),
        "consumed": lambda: ring(sampler=ConsumingSampler(3)),
        "backwards": lambda: ring(sampler=ReverseSampler(5)),
        "by version": lambda: ring(
            sampler=StalenessSampler(9, weight=lambda age: 1 / (age + 1), version_key="episode"), generations=True
        ),
        "slices thinned out": lambda: sliced(
            SliceSampler(sequence_length=4, end_key="done", period=2, dilation=2, burn_in=1, span=(False, True)),
            transform=MarkSlices(first="first", last="last"),
        ),
    }
    found = {name: of_buffer(make()) for name, make in plain.items()}
    found["priorities"] = of_buffer(
        PrioritizedReplayBuffer(
            alpha=1.0, beta=LinearSchedule(0.5, 1.0, samples=100), storage=ArrayStorage(150), batch_size=24, seed=5
        ),
        priorities=True,
    )
    found["slices by priority"] = of_buffer(sliced(PrioritizedSliceSampler(**slices)), priorities=False)
    vector = ReplayBuffer(ArrayStorage(150, ndim=2), SliceSampler(**slices), batch_size=4, seed=9)
    found["environments"] = of_buffer(vector, envs=3)
    found["an ensemble"] = ensemble()
    found["few members"] = few_members()
    return found


def ensemble() -> str:
    fresh = ReplayBuffer(ArrayStorage(150), batch_size=8, seed=1)
    other = ReplayBuffer(ArrayStorage(90), batch_size=8, seed=2)
    other.extend(transitions(80, 1000))
    fresh.extend(transitions(80))
    mixed = ReplayBufferEnsemble(fresh, other, p=[0.25, 0.75], batch_size=32, seed=4)
    return stream_digest([flat(mixed.sample()) for _ in range(BATCHES)], BATCHES)


def few_members() -> str:
    members = [ReplayBuffer(ArrayStorage(20)) for _ in range(4)]
    mixed = ReplayBufferEnsemble(*members, p=[1, 2, 3, 4], num_buffer_sampled=2, batch_size=9, seed=4)
    mixed.extend(transitions(60), np.arange(60) % 4)
    return stream_digest([flat(mixed.sample()) for _ in range(BATCHES)], BATCHES)


def buffer_state() -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(alpha=1.0, storage=ArrayStorage(50), batch_size=8, seed=5)
    buffer.extend(transitions(70))
    for _ in range(3):
        index = np.asarray(buffer.sample()["index"])
        buffer.update_priority(index, (index % 7 + 1) / 4)
    return buffer


def after(buffer: Any) -> str:
    return stream_digest([flat(buffer.sample()) for _ in range(BATCHES)], BATCHES)


def rollouts() -> dict[str, Any]:
    steps, envs = 6, 4
    storage = RolloutStorage(
        num_envs=envs, num_transitions_per_env=steps, fields={"observations": (3,), "values": ()}, seed=11
    )
    for step in range(steps):
        number = np.arange(envs) + step * envs
        storage.add_transitions(
            {
                "observations": (number[:, None] / 4 + np.arange(3)).astype(np.float32),
                "values": (number % 5 / 2).astype(np.float32),
                "rewards": (number % 3).astype(np.float32),
                "dones": number % 9 == 8,
            }
        )
    storage.compute_returns(last_values=np.ones(envs), gamma=0.5, lam=0.5)
    found = {"returns": stream_digest([{"returns": storage.returns}], 1)}
    batches: Iterable[Any] = list(storage.mini_batch_generator(num_mini_batches=3, num_epochs=4))
    names = ("observations", "returns")
    found["mini-batches"] = stream_digest([{name: batch[name] for name in names} for batch in batches], 12)
    return {**found, "state": storage.state_dict()}


def digests() -> dict[str, str]:
    """Digests that run along, of values at the edges of dtypes and of what loaders give, as they are kept in states."""
    number = np.arange(24)
    floats = np.array([0.0, -0.0, 0.5, np.nan, np.inf, -np.inf, 2.0**-149, 2.0**127])
    halves = np.array([0.0, -0.0, 0.5, np.nan, np.inf, -np.inf, 2.0**-24, 2.0**15], np.float16)
    wide = {"lost": 1 / 3, "too large": 1e39, "too small": 2.0**-150, "exact": 2.0**-126}
    batches: dict[str, Any] = {
        "integers": {"a": number.astype(np.int8), "b": number.reshape(24, 1), "c": number.reshape(24, 1) % 2 == 0},
        "unsigned": {"x": number.astype(np.uint64) << np.uint64(40), "y": number.astype(np.uint16)},
        "unsigned beyond 63 bits": {"x": np.array([1, 2**63, 2**64 - 1, 2**63 - 1], np.uint64), "y": number[:4]},
        "floats": {"half": halves, "single": floats.astype(np.float32), "double": floats},
        "another nan": {"x": np.array([0x7FC00001, 0xFF800001], np.uint32).view(np.float32), "y": [0.5, 0.25]},
        "columns": {"x": (number / 8).reshape(6, 4).T, "y": (number[::-1] * 3).reshape(4, 6)},
        "big-endian": {"x": number.astype(">i4"), "y": (number / 3).astype(">f8")},
        "complex": {"x": (number + 1j / 4).astype(np.complex64)},
        "nothing in a row": {"x": np.empty((4, 0), np.float32), "y": number[:4]},
        "nested": {"next": {"a/b": number[:4], "t": (number[4:8] / 2, None)}, "one": 0.25},
        "texts": {"text": np.array(["a", "bc", "", "d"]), "rows": [number[:3], number[:0], number[:1], number[5:7]]},
        "views": ({"x": number / 4}, {"x": number / 8}),
        "rows of a megabyte": {"x": np.arange(300_000).reshape(2, -1).astype(np.int32), "y": number[:2]},
    }
    for name, value in wide.items():
        mixed = np.tile(floats, (3, 2))
        mixed[1, 11] = value
        batches[f"some rows {name}"] = {"x": mixed, "y": np.arange(3)}
    found = {name: str(StreamDigest.of(5, batch)) for name, batch in batches.items()}
    found["from row 7"] = str(StreamDigest.of(5, batches["columns"], first_row=7))
    found["rows of a rank"] = str(StreamDigest.of(5, batches["columns"], first_row=[2, -1, 9]))
    for name, options in {"a loader": {}, "augmented": {"augment": AUGMENT, "views": 2}}.items():
        with PrefetchBatchifier(store(), 9, 8, digest=True, **options) as loader:
            for _ in range(BATCHES):
                loader.next_batch()
            found[name] = str(loader.digest)
    return found | {"a buffer": buffer_digest(), "a rollout": rollout_digest(), "examples": examples()}


def buffer_digest() -> str:
    buffer = ReplayBuffer(ArrayStorage(150), batch_size=24, seed=5)
    buffer.extend(transitions(200))
    return str(sum((StreamDigest.of(index, buffer.sample()) for index in range(BATCHES)), StreamDigest()))


def rollout_digest() -> str:
    extract = {"amp_obs_extractor": lambda obs: obs[..., :1], "amp_ref_obs_extractor": lambda ref: ref[0][..., :1]}
    fields: dict[str, Any] = {"observations": (3,), "reference_observations": RolloutField((2,), mask=True)}
    storage = RolloutStorage(4, 6, fields, seed=11, amp_cfg=extract)
    for step in range(6):
        number = np.arange(4) + 4 * step
        row = {"observations": number[:, None] / 4 + np.arange(3), "rewards": number % 3, "dones": number % 9 == 8}
        reference = np.repeat(number[:, None] / 8, 2, axis=1), number % 4 == 1
        states = (np.repeat(number[None, :, None] / 2, 2, axis=0), None)
        storage.add_transitions(row | {"reference_observations": reference, "hidden_states": states})
    batches = [*storage.mini_batch_generator(3, 2, histories={"observations": 2})]
    batches += storage.recurrent_mini_batch_generator(2, 1)
    return str(sum((batch.digest(index) for index, batch in enumerate(batches)), StreamDigest()))


def examples() -> str:
    made = []
    for number, length in enumerate((5, 3, 0, 7)):
        places = np.arange(length)
        made.append(RLExample(100 * number + places, places % 2 == 1, places / 4, -places / 8, f"r{number}"))
    return str(examples_digest(3, made))


def specs() -> dict[str, Any]:
    half = np.array([True, False, True, True])
    whole = spec.Composite(
        {
            "whole": spec.Bounded(-(2**63), 2**63 - 1, (2,), "int64"),
            "small": spec.Bounded(np.array([0, 5]), np.array([9, 200]), dtype="uint8"),
            "uniform": spec.Bounded(-1, 3, (3,)),
            "unbounded": spec.Unbounded((2,), "int16"),
            "normal": spec.Unbounded((2,), "float16"),
            "binary": spec.Binary((3,), "int8"),
            "choices": spec.Choice([spec.Categorical(3), spec.Bounded(5, 9, dtype="int64")]),
            "nested": {"codes": spec.Categorical(4, (2,), mask=half), "hot": spec.OneHot(4, mask=half)},
            "several": spec.MultiCategorical([3, 4], (2, 2)),
            "several hot": spec.MultiOneHot([2, 3]),
            "stack": spec.stack_specs([spec.Categorical(3), spec.Categorical(5)]),
        }
    )
    return {"draws": stream_digest([flat(whole.sample(seed, 16)) for seed in range(8)], 8), "json": whole.to_json()}


def all_of_it() -> dict[str, Any]:
    return {
        "sources": sources(),
        "mixtures": mixtures(),
        "loader": loader_states(),
        "buffers": buffers(),
        "buffer after its state": after(buffer_state()),
        "rollouts": rollouts(),
        "digests": digests(),
        "specs": specs(),
    }


if __name__ == "__main__":
    print(json.dumps(all_of_it(), indent=1))
