"""TED's files against tensordict: what it writes is read, and what we write it loads."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")

from mouse_core.errors import ConfigError, DataError  # noqa: E402
from mouse_core.formats.base import RowStream  # noqa: E402
from mouse_core.formats.ted import read_ted, write_ted  # noqa: E402


class Counter:
    """An environment that counts: its own log is what a reader must give back."""

    def __init__(self) -> None:
        self.log: list[tuple[float, int, float, int]] = []

    def record(self, episodes: int) -> Any:
        rng = np.random.default_rng(0)
        found = []
        for episode in range(episodes):
            value = float(100 * episode)
            self.log.append((value, 0, 0.0, 0))
            length = int(rng.integers(1, 7))
            for step in range(1, length + 1):
                action, reward = int(rng.integers(5)), float(rng.normal())
                code = (1 + episode % 2) if step == length else 0
                found.append(self.step(value, action, reward, code))
                value += 1
                self.log.append((value, action, reward, code))
        return torch.stack(found)

    @staticmethod
    def step(value: float, action: int, reward: float, code: int) -> Any:
        flags = {"done": torch.tensor([code != 0])}
        flags |= {"terminated": torch.tensor([code == 1]), "truncated": torch.tensor([code == 2])}
        nothing = {name: torch.zeros_like(flag) for name, flag in flags.items()}
        following = {"observation": torch.tensor([value + 1] * 2, dtype=torch.float64), **flags}
        following["reward"] = torch.tensor([reward], dtype=torch.float64)
        return tensordict.TensorDict(
            {
                "observation": torch.tensor([value] * 2, dtype=torch.float64),
                "action": torch.tensor(action),
                "sample_log_prob": torch.tensor(-0.5, dtype=torch.bfloat16),
                **nothing,
                "next": tensordict.TensorDict(following, batch_size=[]),
            },
            batch_size=[],
        )


def check(folder: Path, environment: Counter, **options: Any) -> None:
    table = read_ted(folder, **options).to_table()
    found = zip(
        (row[0] for row in table.column("observation").to_pylist()),
        *(table.column(name).to_pylist() for name in ("action", "reward", "done")),
        strict=True,
    )
    assert list(found) == environment.log


@pytest.mark.parametrize("size", [1, 3, 8192])
def test_what_tensordict_wrote(tmp_path: Path, size: int) -> None:
    environment = Counter()
    data = environment.record(9)
    data.set_non_tensor("note", "recorded at night")  # which is left alone
    data.memmap_(str(tmp_path / "td"))
    check(tmp_path / "td", environment, batch_rows=size)
    probabilities = read_ted(tmp_path / "td").to_table().column("metadata_sample_log_prob").to_pylist()
    assert set(probabilities) == {0.0, -0.5}
    pytest.importorskip("h5py")
    data.exclude("sample_log_prob", "note").to_h5(str(tmp_path / "td.h5")).close()
    check(tmp_path / "td.h5", environment)


def test_what_we_write_it_loads(tmp_path: Path) -> None:
    environment = Counter()
    environment.record(9).exclude("sample_log_prob").memmap_(str(tmp_path / "td"))
    steps = write_ted(read_ted(tmp_path / "td"), tmp_path / "ours")
    loaded = tensordict.TensorDict.load(str(tmp_path / "ours"))
    assert loaded.batch_size == torch.Size([steps])
    assert loaded["next", "reward"].shape == (steps, 1)
    transitions = [
        now for before, now in zip(environment.log, environment.log[1:], strict=False) if now[1:] != (0, 0.0, 0)
    ]
    assert loaded["next", "reward"][:, 0].tolist() == [reward for _, _, reward, _ in transitions]
    assert loaded["next", "observation"][:, 0].tolist() == [value for value, _, _, _ in transitions]
    assert loaded["observation"][:, 0].tolist() == [value - 1 for value, _, _, _ in transitions]
    assert loaded["next", "terminated"][:, 0].tolist() == [code == 1 for _, _, _, code in transitions]
    assert loaded["next", "done"].dtype == torch.bool
    assert not loaded["done"].any()


def test_a_stack_of_different_shapes_is_refused(tmp_path: Path) -> None:
    rows = [tensordict.TensorDict({"observation": torch.zeros(n)}, []) for n in (2, 3)]
    tensordict.lazy_stack(rows).memmap_(str(tmp_path / "td"))
    with pytest.raises((ConfigError, DataError), match="expected"):
        read_ted(tmp_path / "td")


def test_rows_of_ours_go_both_ways(tmp_path: Path) -> None:
    table = pa.table(
        {
            "action": [0, 1, 2, 0, 1],
            "reward": [0.0, 1.5, 2.5, 0.0, -1.0],
            "done": [0, 0, 1, 0, 2],
            "episode_step": [0, 1, 2, 0, 1],
            "observation_discrete": [5, 6, 7, 1, 2],
        }
    )
    stream = RowStream("made", "datasets", table.schema, lambda: iter(table.to_batches()))
    write_ted(stream, tmp_path / "ours")
    again = tensordict.TensorDict.load(str(tmp_path / "ours"))
    again.memmap_(str(tmp_path / "again"), copy_existing=True)
    found = read_ted(tmp_path / "again").to_table()
    assert found.select(table.column_names).to_pydict() == table.to_pydict()
