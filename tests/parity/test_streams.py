"""NumPy, PyTorch and JAX deliver the same batches, to the bit: one digest for one configuration.

Only here all frameworks are in one process. JAX without x64 narrows numbers of 64 bits, so float64 is delivered as
float32 here; with x64 nothing is narrowed at all.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import mouse_core
import mouse_jax
import mouse_torch
from mouse_core import BatchSource, DatasetStore, Field, Map, text
from mouse_core.augment import AugmentMaskProbConfig, AugmentScalarSpec, AugmentTokensConfig, RandomShift
from mouse_core.digest import StreamDigest
from mouse_core.mixtures import Mixture
from mouse_core.replay import ArrayStorage, ReplayBuffer
from mouse_core.sampling import SAMPLERS
from mouse_core.store import Store
from mouse_core.store.derived import DerivedStore, IsFirst, NStepDiscount, NStepReturn, Previous, Return, TimeToEnd
from mouse_core.testing import as_arrays, example_columns, example_store, stream_digest
from mouse_core.text import chat
from tests.core import chat_cases, text_cases
from tests.core import test_augment_by_field as by_field
from tests.core import test_augment_cameras as cameras
from tests.core.augment_cases import full_config, make_store
from tests.core.test_pictures import DEPTH, TOP, colours, depth, kept, rows_of, video_of
from tests.core.text_cases import EOS, PAD, examples, tokenizer
from tests.core.video_cases import video_rows, write_video

PACKAGES = {"numpy": mouse_core, "torch": mouse_torch, "jax": mouse_jax}
N = 10
OPTIONS: dict[str, Any] = {"sequence_length": 8, "batch_size": 12, "seed": 5}
Case = tuple[Store, dict[str, Any]]

AUGMENT = AugmentTokensConfig(
    scale_reward=AugmentScalarSpec(mean=1.0, low=0.5, high=2.0),
    shift_obs=AugmentScalarSpec(mean=0.0, std=1.0),
    permute_action="both",
    permute_done=True,
    mask_prob=AugmentMaskProbConfig(reward=0.1, obs_continuous=0.15),
)


def loader(package: str, store: Store, **options: Any) -> Any:
    return PACKAGES[package].PrefetchBatchifier(store, **{**OPTIONS, **options})


def digest(package: str, store: Store, n: int = N, **options: Any) -> str:
    with loader(package, store, **options) as opened:
        return stream_digest(opened, n)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


@cache
def mixed_in(folder: Path) -> DatasetStore:
    """Two files with images in them, rows in memory, and appended rows."""
    store = DatasetStore()
    for number, (first, rows) in enumerate([(0, 130), (130, 41)]):
        part = example_store(0)
        part.extend(example_columns(rows, first=first))
        part.to_dataset().save_to_disk(folder / str(number))
        store.from_dataset(datasets.load_from_disk(folder / str(number)))
    store.extend(example_columns(77, first=171))
    for row in range(3):
        store.append({name: values[row] for name, values in example_columns(3, first=248).items()})
    return store


@pytest.fixture
def mixed(folder: Path) -> DatasetStore:
    return mixed_in(folder)


WINDOWS = {"action": range(6), "obs_image": [-3, -1, 0], "obs_continuous": [-1, 0], "done": [0]}
LENGTHS: dict[str, Any] = {"lengths": range(1, 9), "fields": ["action", "reward", "obs_continuous", "obs_image"]}
KINDS: dict[str, Any] = {"obs_continuous": "mean_std", "q_star": "min_max", "reward": "quantiles"}
PLAIN: list[dict[str, Any]] = [
    *({"sampling": sampling} for sampling in SAMPLERS),
    {"boundary": "episode", "weighting": "trajectory", "pad": 0},
    {"windows": WINDOWS, "sequence_length": None, "pad": False},
    {"windows": WINDOWS, "boundary": "episode", "pad": 0},
    {"augment": AUGMENT, "views": 2},
    {"fields": ["reward", "obs_image"], "dtypes": {"obs_image": "uint8"}, "shard": (1, 3)},
    {**LENGTHS, "packed": True, "windows": {"action": range(3)}},
    {**LENGTHS, "packed": 96, "boundary": "episode"},
    {"normalize": KINDS, "boundary": "episode", "pad": 0.0, "fields": [*KINDS, "done"]},
    {"normalize": KINDS, "augment": AUGMENT, "views": 2},
    {"normalize": {**KINDS, "obs_image": "mean_std"}, "sequence_length": None, "windows": WINDOWS},
    {"transitions": True, "sequence_length": None},
    {"transitions": True, "sampling": "blocks", "normalize": KINDS},
    {
        "transitions": True,
        "layout": "stored",
        "shard": (1, 3),
        "fields": ["action", "next_observation_image", "truncated"],
    },
]


def made(fields: Any, generator: np.random.Generator) -> Any:
    """Fields of what comes as float64 and int64, which JAX may lack."""
    scaled = fields["obs_continuous"] * np.pi + fields["action"][..., None] / 3
    return {"scaled": scaled.astype(np.float32), "code": generator.integers(0, 100, fields["reward"].shape)}


MADE: dict[str, Any] = {"scaled": ("float32", (5,)), "code": ("int64", ())}
DERIVED: dict[str, Any] = {
    "to_go": Return(0.99),
    "target": NStepReturn(3, 0.9),
    "factor": NStepDiscount(3, 0.9),
    "left": TimeToEnd(),
    "before": Previous(),
    "first": IsFirst(),
}
CHATS = [
    {"messages": talk, "prompt": talk[:1], "chosen": talk[1:], "rejected": talk[1:2]}
    for talk in (list(talk[:end]) for talk in (chat_cases.TALK, chat_cases.TOOL_TALK[1:]) for end in (2, 3, 4, 5))
]
TEMPLATE = chat_cases.template(chat_cases.TOOLS)
ROWS: dict[str, Any] = {"windows": {}, "sampling": "sequential", "batch_size": 4, "sequence_length": None}
PACKED: dict[str, Any] = {"batch_size": 4, "boundary": "episode"}
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompts": (text.Prompts(max_length=16, pad_id=PAD), ROWS),
    "pairs": (text.Pairs(max_length=16, pad_id=PAD), ROWS),
    "a share of texts": (text.Texts(max_length=8, pad_id=PAD), {**ROWS, "shard": (1, 2)}),
    "windows": (text.Tokens(eos_id=EOS), {"batch_size": 4}),
    "packed": (text.Tokens(eos_id=EOS), {**PACKED, "packed": 32}),
    "chats": (chat.Chats(template=TEMPLATE, max_length=64, pad_id=PAD), ROWS),
    "pairs of chats": (chat.Preferences(template=TEMPLATE, max_length=256, pad_id=PAD), ROWS),
    "packed chats": (chat.ChatTokens(template=TEMPLATE), {**PACKED, "sequence_length": 24, "packed": 96}),
}


def tokens(folder: Path, name: str) -> Case:
    recipe, options = RECIPES[name]
    of_chats = "template" in vars(recipe)
    source, made_by = (CHATS, chat_cases.tokenizer()) if of_chats else (text_cases.examples(), text_cases.tokenizer())
    return text.tokenize(source, made_by, folder, recipe).to_store(), options


def view(folder: Path) -> Store:
    return mixed_in(folder).where(length=(3, None)).split(train=0.8, seed=1)["train"]


def mixture(folder: Path) -> Store:
    """One member on disk and in memory, one that is shown in part, one of appended rows."""
    kept = DatasetStore().from_dataset(example_store(150).to_dataset().select(range(40, 110)))
    return Mixture({"mixed": mixed_in(folder), "kept": kept, "grown": example_store(90)}, [2, 1, 3])


def video(folder: Path) -> Case:
    cameras = ("observation_images_top", "observation_images_wrist")
    for k in range(2):
        write_video(folder / f"{k}.mp4", options={"g": "4"}, count=8, seed=k)
    rows = video_rows(folder, {name: np.roll(np.arange(8), k) for k, name in enumerate(cameras)}, videos=2)
    windows = {cameras[0]: [-1, 0], cameras[1]: [0], "action": range(3)}
    store = DatasetStore(image_roots=[folder]).from_dataset(rows)
    return store, {"windows": windows, "sequence_length": None, "batch_size": 6}


def cases() -> dict[str, Callable[[Path], Case]]:
    found: dict[str, Callable[[Path], Case]] = {
        f"plain {number}": lambda folder, options=options: (mixed_in(folder), options)
        for number, options in enumerate(PLAIN)
    }
    for per in ("batch", "window"):
        chosen = Map(made, "made/1", MADE, per=per, drop=["obs_image"])
        found[f"map per {per}"] = lambda folder, chosen=chosen: (mixed_in(folder), {"map": chosen})
    derived = {"windows": {"to_go": [0, 1], "before": [0]}}
    found["derived"] = lambda folder: (DerivedStore(mixed_in(folder), DERIVED), derived)
    found["view"] = lambda folder: (view(folder), {"boundary": "episode", "weighting": "trajectory"})
    found["mixture"] = lambda folder: (mixture(folder), {"augment": AUGMENT, "views": 2})
    augmented = {"dtypes": by_field.DTYPES, "augment": by_field.AUGMENT, "views": 2}
    for number, options in enumerate(by_field.WINDOWS):
        asked = {**augmented, **options}
        found[f"augment by field {number}"] = lambda folder, asked=asked: (by_field.make_store(), asked)
    sizes = {"sequence_length": 3, "dtypes": dict.fromkeys(cameras.cameras(), "uint8"), "augment": cameras.CONFIG}
    images = {"sequence_length": 5, "augment": full_config(crop_obs_image=RandomShift(2)), "views": 2}
    found["augmented images"] = lambda folder: (make_store(), images)
    found["cameras"] = lambda folder: (cameras.make_store(), sizes)
    found |= {name: lambda folder, name=name: tokens(folder, name) for name in RECIPES}
    return found | {"video": video}


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_one_stream_of_bits(name: str, folder: Path) -> None:
    store, options = CASES[name](folder)
    options = {**OPTIONS, **options}
    source = BatchSource(store, **options)
    wide = {field for field, spec in source.spec.items() if spec.dtype == np.float64} & set(source.snapshot.spec)
    options["dtypes"] = {**dict.fromkeys(wide, "float32"), **options.get("dtypes", {})}
    source = BatchSource(store, **options)
    first, second = (stream_digest([source[index] for index in batches], 4) for batches in (range(4), range(4, 8)))
    with loader("numpy", store, digest=True, **options) as whole:
        digests = [whole.digest for _ in range(8) if whole.next_batch() is not None]
    states = {}
    for package in PACKAGES:
        with loader(package, store, digest=True, num_workers=2, **options) as opened:
            assert stream_digest(opened, 4) == first, package
            assert opened.digest == digests[3]
            states[package] = json.loads(json.dumps(opened.state_dict()))
    for package, state in zip(PACKAGES, [states["jax"], states["numpy"], states["torch"]], strict=True):
        with loader(package, store, digest=True, num_workers=0, **{**options, "seed": 8}) as opened:
            opened.load_state_dict(state)
            assert stream_digest(opened, 4) == second, package
            assert "shard" in options or opened.digest == digests[7]
    if "shard" in options or name == "map per batch":
        return  # of which there are no shares
    shares = StreamDigest()
    # JAX compiles a program for the size of a share: for the samplings alone.
    for rank, package in enumerate(PACKAGES if "sampling" in options else ("numpy", "torch", "numpy")):
        with loader(package, store, digest=True, shard=(rank, 3), uneven="pad", **options) as opened:
            for _ in range(4):
                opened.next_batch()
            shares += opened.digest
    assert shares == digests[3]


@pytest.mark.parametrize(
    ("kind", "begin", "finish"),
    [("folder", "numpy", "torch"), ("view", "torch", "jax"), ("mixture", "jax", "numpy")],
)
def test_rows_come_and_another_package_goes_on(kind: str, begin: str, finish: str, tmp_path: Path) -> None:
    store = example_store(200) if kind != "folder" else DatasetStore.open(tmp_path, "a")
    if kind == "folder":
        store.extend(example_columns(200))
        store.flush()
    members = {"kept": example_store(70), "grown": store}
    made: dict[str, Callable[[], Store]] = {
        "folder": lambda: DatasetStore.open(tmp_path),
        "view": lambda: store.best(0.5),
        "mixture": lambda: Mixture(members, [1, 3], per="step"),
    }
    options = {"sampling": "batch", "dtypes": {"obs_continuous": "float32"}}
    with loader(begin, made[kind](), **options) as opened:
        stream_digest(opened, 3)
        store.extend(example_columns(100, first=200))
        if kind == "folder":
            store.flush()
        opened.refresh()
        stream_digest(opened, 4)
        state = json.loads(json.dumps(opened.state_dict()))
        wanted = stream_digest(opened, 5)
    store.extend(example_columns(90, first=300))
    with loader(finish, made[kind](), **options) as opened:
        opened.load_state_dict(state)
        assert stream_digest(opened, 5) == wanted
    store.close()


def test_without_x64_the_values_differ_by_rule_alone(mixed: DatasetStore) -> None:
    with loader("numpy", mixed) as wide, loader("jax", mixed) as narrow:
        assert {name: spec.dtype for name, spec in narrow.spec.items()} == {
            name: mouse_jax.REPLACED_DTYPES.get(spec.dtype, spec.dtype) for name, spec in wide.spec.items()
        }
        for _ in range(N):
            expected, found = as_arrays(wide.next_batch()), as_arrays(narrow.next_batch())
            assert expected["obs_continuous"].dtype == np.float64
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values.astype(found[name].dtype), strict=True)


def test_with_x64_nothing_is_narrowed(mixed: DatasetStore) -> None:
    expected = digest("numpy", mixed)
    with jax.enable_x64(True), loader("jax", mixed) as found:
        assert found.spec == BatchSource(mixed, **OPTIONS).spec
        for name, values in found.next_batch().items():
            assert values.dtype == found.spec[name].dtype
    with jax.enable_x64(True):
        assert digest("jax", mixed, num_workers=2) == expected


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_one_byte_makes_another_digest(package: str, mixed: DatasetStore) -> None:
    with jax.enable_x64(True):
        with loader(package, mixed) as opened:
            batches = [opened.next_batch() for _ in range(N)]
        right = digest("numpy", mixed)
        assert stream_digest(batches, N) == right
        for number, field in enumerate(("action", "reward", "done", "time", "q_star", "obs_continuous", "obs_image")):
            values = as_arrays(batches[7])[field].copy()
            values.reshape(-1).view(np.uint8)[-(number % 2)] ^= 1
            array = torch.from_numpy(values) if package == "torch" else jax.numpy.asarray(values)
            changed = [*batches[:7], {**dict(batches[7].items()), field: array}, *batches[8:]]
            assert stream_digest(changed, N) != right, field
            assert stream_digest(changed, 7) == stream_digest(batches, 7)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_narrow_floats_are_digested_as_the_same_numbers_in_all_frameworks(name: str) -> None:
    values = np.arange(-3, 3, dtype=np.float32).reshape(3, 2)
    narrow = {
        "numpy": values.astype(jax.numpy.dtype(name)),
        "torch": torch.from_numpy(values).to(getattr(torch, name)).requires_grad_(name == "bfloat16"),
        "jax": jax.numpy.asarray(values, dtype=name),
    }
    for package, batch in narrow.items():
        assert StreamDigest.of(3, {"x": batch}) == StreamDigest.of(3, {"x": values}), package
        with pytest.raises(TypeError):
            stream_digest([{"x": batch}], 1)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_buffer_delivers_is_digested_as_it_is_delivered(package: str, x64: bool) -> None:
    kind = {"numpy": ReplayBuffer, "torch": mouse_torch.ReplayBuffer, "jax": mouse_jax.ReplayBuffer}[package]

    def filled(kind: Any) -> Any:
        buffer = kind(ArrayStorage(50), batch_size=6, seed=3)
        buffer.extend({"obs": {"x": np.arange(40.0) / 7}, "action": np.arange(40)})
        return buffer

    def digest_of(buffer: Any) -> StreamDigest:
        return sum((StreamDigest.of(index, buffer.sample()) for index in range(4)), StreamDigest())

    with jax.enable_x64(x64):
        expected = digest_of(filled(kind))
        for workers in (0, 2):
            with PACKAGES[package].PrefetchBatchifier(filled(kind), num_workers=workers, digest=True) as opened:
                for _ in range(4):
                    opened.next_batch()
                assert opened.digest == expected
        assert (digest_of(filled(ReplayBuffer)) == expected) == (x64 or package != "jax")


def test_converted_pictures_have_one_digest(tmp_path: Path) -> None:
    source = rows_of({TOP: colours(), DEPTH: depth()})
    streams = {way: kept(source, tmp_path / way, way) for way in ("raw", "png")}
    streams["video"] = video_of(tmp_path, {TOP: colours()}, **{DEPTH: depth()})
    fields = [Field(TOP, image=True), Field(DEPTH, image=True, dtype="int32", bounds=(0, 4095))]
    found = set()
    for stream in streams.values():
        store = stream.to_store(fields=fields)
        for package in (mouse_core, mouse_torch, mouse_jax):
            with package.PrefetchBatchifier(store, 3, 4, seed=2, num_workers=1) as loader:
                found.add(stream_digest(loader, 3))
    assert len(found) == 1


IN_ORDER: dict[str, Any] = {"windows": {}, "sampling": "sequential", "batch_size": 4}


@pytest.mark.parametrize("package", PACKAGES)
def test_pairs_and_prompts_of_any_framework(package: str, folder: Path) -> None:
    def batch_of(recipe: Any) -> Any:
        store = text.tokenize(examples(), tokenizer(), folder, recipe).to_store()
        with PACKAGES[package].PrefetchBatchifier(store, **IN_ORDER) as loader:
            return loader.next_batch()

    batch = batch_of(text.Pairs(max_length=16, pad_id=PAD))
    pairs = text.as_pairs(batch)
    assert pairs["rejected_data"]["input_ids"].shape == (4, 16)
    prompts = batch_of(text.Prompts(max_length=16, pad_id=PAD))
    alone = text.mask_label(prompts, pad_id=PAD)
    wanted = text.mask_label(as_arrays(prompts), pad_id=PAD)
    for field, values in wanted.items():
        assert type(alone[field]) is type(prompts["input_ids"])
        np.testing.assert_array_equal(np.asarray(alone[field]), values)
    if package == "torch":
        assert tuple(batch.batch_size) == (4,)
        assert alone["attention_mask"].dtype == torch.int64


NORMALIZED: Any = {"obs_continuous": "mean_std", "q_star": "min_max", "reward": "quantiles", "obs_image": "mean_std"}


def test_what_is_moved_in_stored_dtypes_has_the_same_bits() -> None:
    source = BatchSource(example_store(300), 8, 4, normalize=NORMALIZED)
    stored, delivered = source.gather(source.plan(1), stored=True), source[1]
    for name, spec in source.spec.items():
        assert stored[name].dtype == spec.stored_dtype
        assert torch.from_numpy(stored[name]).to(torch.from_numpy(delivered[name]).dtype).numpy().tobytes() == (
            delivered[name].tobytes()
        )


@pytest.mark.parametrize("x64", [False, True])
def test_applying_and_undoing_in_each_framework(x64: bool) -> None:
    values = np.random.default_rng(0).normal([0, 1e5, -3], [1, 2, 1e-3], (64, 3)).astype(np.float32)
    plain = DatasetStore()
    n = len(values)
    plain.extend({"action": [0] * n, "reward": [0.0] * n, "done": [0] * n, "observation": values})
    scaling = BatchSource(plain, 8, 4, normalize={"obs_continuous": "mean_std"}).normalizer["obs_continuous"]
    expected = scaling.apply(values)
    tolerance = 4e-7 * (np.abs(scaling.centre) + np.abs(values - scaling.centre))
    with jax.enable_x64(x64):
        jitted = jax.jit(scaling.undo)
        for given, to_numpy, undo in (
            (torch.from_numpy(values), lambda found: found.numpy(), scaling.undo),
            (jnp.asarray(values), np.asarray, scaling.undo),
            (jnp.asarray(values), np.asarray, jitted),
        ):
            applied: Any = scaling.apply(given)
            assert type(applied) is type(given)
            assert to_numpy(applied).tobytes() == expected.tobytes()
            back = undo(applied)
            assert type(back) is type(given)
            assert (np.abs(to_numpy(back).astype(np.float64) - values) <= tolerance).all()
    half = torch.from_numpy(expected).to(torch.bfloat16)
    assert scaling.undo(half).dtype == torch.float32
    gradient = torch.zeros(3, requires_grad=True)
    scaling.undo(gradient).sum().backward()  # type: ignore[no-untyped-call]
    assert gradient.grad is not None
    np.testing.assert_allclose(gradient.grad.numpy(), scaling.spread, rtol=1e-6)
