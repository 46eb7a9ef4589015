"""What rows weigh is the same in torch, to the last bit."""

import numpy as np
import pytest
import torch

from mouse_core.replay.samplers.weighing import Powers, bits_of, plus_bits, powers, sums_of, weights_of


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.7])
def test_weights_are_those_of_numpy(alpha: float) -> None:
    rng = np.random.default_rng(0)
    bits = ((np.arange(255)[:, None] << 23) | rng.integers(0, 1 << 23, (255, 20))).reshape(-1).astype(np.int32)
    numbers = bits.view(np.float32)
    tables = powers(alpha)
    factors, shifts, pieces = (torch.tensor(array) for array in (tables.factors, tables.shifts, tables.pieces))
    of_torch = Powers(factors, shifts, pieces, tables.bends_down, tables.most)
    found = plus_bits(torch.tensor(numbers).view(torch.int32).to(torch.int64), bits_of(1e-8), torch)
    with np.errstate(over="ignore"):
        expected = sums_of(numbers, 1e-8)
    assert found.tolist() == expected.tolist()
    assert weights_of(found, of_torch, torch).tolist() == weights_of(expected, tables).tolist()
