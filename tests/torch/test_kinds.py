"""Text and rows of differing length in TensorDicts."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from mouse_core import DatasetStore, SchemaError
from mouse_core import replay as core
from mouse_core.replay import ArrayStorage, ListStorage, MemmapStorage, NextView, NStep, Pad, SliceSampler
from mouse_core.rollouts import RolloutField
from mouse_torch import PrefetchBatchifier, ReplayBuffer, ReplayBufferEnsemble, RolloutStorage, TensorStorage
from mouse_torch.transfer import to_numpy

KINDS = ["list", "array", "memmap", "tensor"]


def made(kind: str, folder: Path) -> Any:
    if kind == "memmap":
        return MemmapStorage(20, folder / "m")
    return {"list": ListStorage, "array": ArrayStorage, "tensor": TensorStorage}[kind](20)


def rows(n: int) -> TensorDict:
    return TensorDict(
        text=NonTensorStack(*["t" * number for number in range(n)]),
        x=NonTensorStack(*[torch.arange(number, dtype=torch.int32) for number in range(n)]),
        n=torch.arange(n),
        reward=torch.arange(n) * 1.0,
        done=torch.zeros(n, dtype=torch.bool),
        batch_size=[n],
    )


def check(batch: TensorDict) -> None:
    for place, number in enumerate(batch["n"].tolist()):
        assert batch["text"][place] == "t" * number
        assert batch["x"][place].dtype == torch.int32
        assert batch["x"][place].tolist() == list(range(number))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_differing_length_come_back_as_tensors_and_text(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(made(kind, tmp_path), batch_size=6)
    buffer.extend(rows(5))
    buffer.append(rows(9)[7])
    for _ in range(5):
        check(buffer.sample())
    assert (buffer[5]["text"], buffer[5]["x"].tolist()) == ("t" * 7, list(range(7)))
    buffer[0] = rows(9)[8]
    assert buffer[0]["text"] == "t" * 8
    with PrefetchBatchifier(buffer, num_workers=0) as loader:
        check(loader.next_batch())
        state = loader.state_dict()
        wanted = loader.next_batch()
        loader.load_state_dict(state)
        assert loader.next_batch()["text"] == wanted["text"]
    other = ReplayBuffer(TensorStorage(20) if kind == "array" else made(kind, tmp_path), batch_size=6)
    other.load_state_dict(buffer.state_dict())
    again, wanted = other.sample(), buffer.sample()
    check(again)
    assert again["n"].tolist() == wanted["n"].tolist()
    check(ReplayBufferEnsemble(buffer, other, batch_size=8).sample())


@pytest.mark.parametrize("kind", KINDS)
def test_slices_steps_ahead_and_padding(kind: str, tmp_path: Path) -> None:
    storage = made(kind, tmp_path)
    pad = Pad("x", length=12)
    slices = ReplayBuffer(storage, SliceSampler(sequence_length=3), transform=pad, batch_size=2)
    slices.extend(rows(12))
    batch = slices.sample()
    assert batch.batch_size == torch.Size([2, 3])
    assert batch["x"].shape == (2, 3, 12)
    assert torch.equal(batch["x_mask"].sum(-1), batch["n"])
    assert [len(text) for row in batch["text"] for text in row] == batch["n"].reshape(-1).tolist()
    check(ReplayBuffer(storage, transform=NStep(2, 0.9), batch_size=6).sample())
    for transform in (NextView(), (pad, NextView())):
        batch = slices.with_parts(transform=transform).sample()
        after = [[len(text) for text in row] for row in batch["next"]["text"]]
        assert [row[:2] for row in after] == (batch["n"][:, :2] + 1).tolist()
        assert batch["mask"].tolist() == [[True, True, False]] * 2


NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, [*NARROW, NARROW[0]], strict=True), ("tensor", NARROW[1])])
def test_narrow_floats_come_back_bit_by_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    given = torch.linspace(-2, 2, 24).reshape(8, 3).to(dtype)
    buffer = ReplayBuffer(made(kind, tmp_path), batch_size=6)
    buffer.extend(TensorDict(x=given, n=torch.arange(8), batch_size=[8]))
    batch = buffer.sample()
    assert batch["x"].dtype == dtype
    assert torch.equal(batch["x"].view(torch.uint8), given[batch["n"]].view(torch.uint8))
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    buffer.load_state_dict(torch.load(file))
    assert torch.equal(buffer[3]["x"].float(), given[3].float())
    buffer.dumps(tmp_path / "c")
    other = core.ReplayBuffer(ArrayStorage(20) if kind != "list" else ListStorage(20), batch_size=6)
    other.loads(tmp_path / "c")
    assert other.sample()["x"].tobytes() == to_numpy(buffer.sample()["x"]).tobytes()
    with PrefetchBatchifier(buffer, num_workers=0) as loader:
        assert loader.next_batch()["x"].dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_floats_in_the_core_stores_loaders_and_rollouts(dtype: torch.dtype) -> None:
    pytest.importorskip("ml_dtypes")
    name = str(dtype).removeprefix("torch.")
    reward, codes = (torch.arange(8) / 2).to(dtype), torch.zeros(8, dtype=torch.long)
    store = DatasetStore()
    store.extend({"action": codes, "reward": reward, "done": codes})
    assert [store[row]["reward"] for row in range(8)] == reward.float().tolist()
    with PrefetchBatchifier(store, 1, 8, "sequential", num_workers=0, dtypes={"reward": name}) as loader:
        found = loader.next_batch()["reward"]
    assert found.dtype == dtype
    assert found.reshape(-1).float().sort().values.tolist() == reward.float().tolist()
    storage = RolloutStorage(num_envs=2, num_transitions_per_env=1, fields={"observations": RolloutField((2,), name)})
    row = {"observations": torch.ones(2, 2).to(dtype), "rewards": torch.ones(2), "dones": torch.zeros(2)}
    storage.add_transitions(row)
    assert storage.observations.dtype == dtype
    buffer = core.ReplayBuffer(core.ArrayStorage(20))
    buffer.extend({"x": reward, "n": torch.arange(8)})
    buffer.append({"x": reward[1].clone(), "n": 8})
    buffer.extend([{"x": reward[2], "n": 9}, {"x": reward[3], "n": 10}])
    kept = buffer[:]["x"]
    assert str(kept.dtype) == name
    np.testing.assert_array_equal(kept.astype(np.float32), torch.cat([reward, reward[1:4]]).float())


@pytest.mark.parametrize("kind", ["array", "memmap", "tensor"])
def test_rows_of_a_list_are_not_promoted_to_a_common_dtype(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(made(kind, tmp_path))
    buffer.append({"text": "a", "n": torch.tensor(1)})
    for one, other in (
        ({"text": "a", "n": 1}, {"text": 3, "n": 1}),
        ({"text": "a", "n": 1}, {"text": b"a", "n": 1}),
        ({"text": "a", "n": 1}, {"text": "b", "n": True}),
        ({"text": "a", "n": torch.tensor(1)}, {"text": "b", "n": torch.tensor(1, dtype=torch.int32)}),
    ):
        with pytest.raises(SchemaError, match="expected"):
            buffer.extend([one, other])
    assert len(buffer) == 1
    buffer.extend([{"text": "b", "n": 2}, {"text": "c", "n": 3}])
    assert buffer[2]["text"] == "c"


def test_dtypes_that_numpy_or_torch_has_not_are_refused_by_name() -> None:
    plain = core.ReplayBuffer(core.ArrayStorage(20))
    with pytest.raises(SchemaError, match=r"field 'x': .* found torch.float32: .*requires grad"):
        plain.extend({"x": torch.zeros(3, requires_grad=True)})
    buffer = ReplayBuffer(TensorStorage(20))
    with pytest.raises(SchemaError, match=r"expected a dtype that torch supports, found datetime64"):
        buffer.extend({"n": np.arange(3), "when": np.arange(3).astype("M8[s]")})
    with pytest.raises(SchemaError, match=r"expected a dtype that torch supports, found (float128|float96)"):
        buffer.extend({"n": np.arange(3), "long": np.arange(3).astype(np.longdouble)})
    assert len(buffer) == 0
    large = ReplayBuffer(TensorStorage(20))
    large.extend({"n": [2**63] * 3})
    assert large[1]["n"] == 2**63
    buffer.extend({"n": np.arange(3)})
    assert buffer[2]["n"] == 2
