"""Random numbers as a function of their key: the same everywhere, for ever, and unlike under any other key."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core import ConfigError
from mouse_core.randomness import Key, Purpose, as_exponential, as_normal, check_seed
from tests.core import golden
from tests.raising import assert_raises

GOLDEN_BITS = [728270853895265413, 3368791684434327545, 17632913842018588667]
GOLDEN_UNIFORM = [0.039479642097555945, 0.18262256314573988]
GOLDEN_INTEGERS = [39, 182, 955, 61, 974, 138]
GOLDEN_INTEGERS_OF_CALL_3 = [406, 110, 101, 371, 639, 966]

words = st.integers(0, 2**64 - 1)
keys = st.builds(Key, words, st.sampled_from(list(Purpose)), words, words)


def reference_bits(key: Key, n: int) -> np.ndarray:
    generator = np.random.Philox(
        key=np.array([key.seed, int(key.purpose)], np.uint64), counter=np.array([0, key.call, key.index, 0], np.uint64)
    )
    return np.array([generator.random_raw() for _ in range(n)], np.uint64)


@given(key=keys, n=st.integers(0, 12))
def test_bits_are_philox_at_the_key(key: Key, n: int) -> None:
    bits = key.bits(n)
    assert bits.dtype == np.uint64
    assert bits.tolist() == reference_bits(key, n).tolist()


@given(key=keys, other=keys, n=st.integers(1, 9))
def test_drawing_has_no_memory(key: Key, other: Key, n: int) -> None:
    first = key.bits(n)
    other.bits(5)
    other.uniform(3)
    assert np.array_equal(key.bits(n), first)
    assert np.array_equal(key.bits(n + 3)[:n], first)
    assert key == other or not np.array_equal(other.bits(4), key.bits(4))


def test_golden_numbers() -> None:
    key = Key(12345, Purpose.AUGMENT, 7, 2)
    assert key.bits(3).tolist() == GOLDEN_BITS
    assert key.uniform(2).tolist() == GOLDEN_UNIFORM
    assert key.integers(1000, 6).tolist() == GOLDEN_INTEGERS
    assert key.with_call(3).integers(1000, 6).tolist() == GOLDEN_INTEGERS_OF_CALL_3
    assert [purpose.value for purpose in (Purpose.WINDOWS, Purpose.EPOCH, Purpose.AUGMENT)] == [1, 2, 3]
    ends = np.array([0.0, 2.0**-53, 1 - 2.0**-53])
    assert as_exponential(ends).tolist() == [0.0, 2.0**-53, 53 * math.log(2)]
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr] # noqa: NPY002
    Key(0, Purpose.WINDOWS).normal(100)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr] # noqa: NPY002


@given(key=keys, high=st.integers(1, 2**40) | st.integers(2**53 - 9, 2**53 + 9), n=st.integers(1, 50))
def test_integers_lie_below(key: Key, high: int, n: int) -> None:
    drawn = key.integers(high, n)
    assert high > 2**53 or int((1.0 - 2.0**-53) * high) < high  # of the largest number that is drawn, too
    assert drawn.dtype == np.int64
    assert drawn.shape == (n,)
    assert drawn.min() >= 0
    assert drawn.max() < high
    uniform = key.uniform(n)
    assert uniform.dtype == np.float64
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_distributions() -> None:
    n = 40_000
    key = Key(99, Purpose.AUGMENT, 1)
    uniform, normal = key.uniform(n), key.normal(n)
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    counts = np.histogram(uniform, 100, (0, 1))[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 148.2  # 99 degrees of freedom, 0.999
    assert abs(normal.mean()) < 5 / n**0.5
    assert abs(normal.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((normal**4).mean() - 3) < 0.3
    assert np.isfinite(normal).all()


@given(key=keys, n=st.integers(1, 20))
def test_normal_numbers_are_those_of_the_formula_however_many_are_drawn(key: Key, n: int) -> None:
    uniform = key.uniform(2 * n).tolist()
    pairs = list(zip(uniform[:n], uniform[n:], strict=True))
    drawn = key.normal(n)
    assert drawn.tolist() == [as_normal(*pair, xp=math) for pair in pairs]
    expected = [math.sqrt(-2 * math.log1p(-one)) * math.cos(2 * math.pi * other) for one, other in pairs]
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=2e-15)
    decays = as_exponential(np.array(uniform))
    np.testing.assert_allclose(decays, [-math.log1p(-one) for one in uniform], rtol=5e-16, atol=0)


@pytest.mark.slow
def test_streams_are_the_same_on_a_processor_that_can_do_less() -> None:
    from numpy._core._multiarray_umath import __cpu_dispatch__ as dispatched  # type: ignore[attr-defined]
    from numpy._core._multiarray_umath import __cpu_features__ as features

    without = " ".join(name for name in dispatched if features.get(name))
    if not without:
        pytest.skip("NumPy uses nothing of this processor that others lack")
    program = (
        "import json; from tests.core import golden; "
        "print(json.dumps([golden.sources(), golden.buffers(), golden.digests(), golden.specs()]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": without}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    known = json.loads(golden.FILE.read_text(encoding="utf-8"))
    assert json.loads(found) == [known[part] for part in ("sources", "buffers", "digests", "specs")]


def test_threads_do_not_disturb_each_other() -> None:
    wanted = {index: Key(5, Purpose.WINDOWS, index).bits(64).tolist() for index in range(40)}

    def draw(index: int) -> bool:
        return all(Key(5, Purpose.WINDOWS, index).bits(64).tolist() == wanted[index] for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(draw, [*wanted] * 4))


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1, np.int64(3), np.uint64(2**64 - 1)])
def test_seeds(seed: int) -> None:
    checked = check_seed(seed)
    assert type(checked) is int
    assert checked == seed


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True, np.bool_(True), [1]])
def test_what_is_no_seed(seed: object) -> None:
    assert_raises(ConfigError, r"seed: expected an integer in \[0, 2\*\*64\), found", check_seed, seed)
