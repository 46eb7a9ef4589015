"""The table of specs in docs/reference/coming-from.md, line by line, and TorchRL's specs beside ours."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mouse_core import spec
from mouse_core.errors import ConfigError
from mouse_core.spec import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    Domain,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    Unbounded,
    from_arrow,
    from_batch,
    from_json,
    stack_specs,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from.md"
MASK = np.array([True, False, True])


def test_every_line_has_a_test() -> None:
    numbers = re.findall(r"^\| (S\d\d) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers))
    assert {part for name in globals() for part in re.findall(r"S\d\d", name)} == set(numbers)


def test_S01_S02_kinds() -> None:
    assert Bounded(0, 3, dtype="int64").is_discrete
    assert not Bounded(0, 3).is_discrete
    assert Unbounded((), "int64").is_discrete
    assert Bounded(0, math.inf).sample(0, 9).min() >= 0
    assert Bounded(0, 3).low == 0
    for wrong in (lambda: Categorical(3, dtype="float32"), lambda: Categorical(-1), lambda: Categorical(0)):
        with pytest.raises(ConfigError):
            wrong()
    assert Binary((3,)).sample(0).shape == MultiCategorical([2, 3, 4]).sample(0).shape == OneHot(3).sample(0).shape
    assert MultiOneHot([2, 1]).sample(0).shape == (3,)


def test_S03_choices() -> None:
    one = Choice([Categorical(3), Bounded(10, 12, dtype="int64")])
    assert one.contains([1, 11])
    assert len({value > 9 for value in one.sample(0, 20)}) == 2
    assert not Choice([NonTensor(example="a"), NonTensor(example="b")]).contains("c")
    assert NonTensor(example="a").sample(0) == "a"


def test_S04_specs_are_values() -> None:
    one = Composite({"a": Binary((2, 1))}, (2,))
    assert one.with_fields({"b": Binary((2,))}).without("b") == one
    with pytest.raises(TypeError):
        one["b"] = Binary((2,))  # type: ignore[index]


def test_S05_S07_draws_and_projections_are_functions() -> None:
    one = Categorical(3, mask=MASK)
    assert one.sample(4, 99).tolist() == one.sample(4, 99).tolist()
    assert one.project([1] * 9).tolist() == [0] * 9
    assert Bounded(1, 2).project([math.nan]).tolist() == [1]
    with pytest.raises(ConfigError, match="sizes"):
        Categorical(3, (-1,)).sample(0)


def test_S06_reasons() -> None:
    one = Composite({"a": Binary()})
    assert one.why_not({}) == "field 'a': expected it, found []"
    assert not OneHot(3, mask=MASK).contains([1, 0, 1])
    assert not one.contains({"a": np.zeros(3)})
    assert one.contains({"a": np.zeros(3, bool)})
    assert not Bounded(0, 1, (1,)).contains(0.5)
    assert not MultiCategorical([3]).contains(1)


def test_S08_one_hot() -> None:
    codes = Categorical(3)
    assert codes.one_hot().categorical() == codes
    assert codes.one_hot().decode(codes.one_hot().encode(2)) == 2


def test_S09_S10_all_values() -> None:
    assert len(Categorical(5, (3,)).enumerate()) == Categorical(5, (3,)).cardinality == 125
    assert Binary((3,)).cardinality == 8
    assert Categorical(3).with_mask(MASK).enumerate().tolist() == [0, 2]


def test_S11_S13_axes() -> None:
    one = Bounded(np.zeros((2, 3)), np.arange(6).reshape(2, 3))
    assert one[:, [0, 2]].high.tolist() == [[0, 2], [3, 5]]
    assert one.reshape(-1).high.tolist() == list(range(6))
    assert one.expand((4, 2, 3)).unbind(0)[3] == one
    assert Unbounded((-1,)).expand(4) == Unbounded((4,))
    assert Binary((5, 3))[..., :2].shape == (5, 2)
    assert Binary((5, 3, 4, 6, 7))[2:, [[[0, 1]]], :3, 0].shape == (1, 1, 2, 3, 3, 7)
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        one[2]


def test_S12_stacks() -> None:
    one = stack_specs([Categorical(2, (3,)), Categorical(3, (3,))])
    assert isinstance(one, Stacked)
    assert one[:, 0] == stack_specs([Categorical(2), Categorical(3)])
    assert one.reshape(6)[4] == Categorical(3)
    assert len(one.enumerate()) == 8 * 27
    assert isinstance(stack_specs([Binary(), Binary()]), Binary)


def test_S14_S15_S16_S17_S18_the_rest() -> None:
    batch = {"a": np.zeros((2, 3))}
    assert from_batch(batch, batch_dims=0) == Composite({"a": Unbounded((2, 3), "float64")})
    assert from_batch(batch) == Composite({"a": Unbounded((), "float64")})
    assert spec.contains_lazy(spec.consolidate(stack_specs([Composite({"a": Binary((2,))}), Composite({})])))
    assert Binary().to("cuda").device == "cuda"
    assert Binary().astype("int8") == Binary((), "int8")
    assert not hasattr(Composite({}), "names")
    assert from_json(Binary().to_json()) == from_arrow(Binary().to_arrow()) == Binary()


@pytest.mark.slow
def test_S19_S20_what_is_no_spec() -> None:
    with pytest.raises(ConfigError, match="field 'a': expected a spec, found None"):
        Composite({"a": None})
    assert Composite({"b": Binary()}).contains({"a": object(), "b": True})
    with pytest.raises(ConfigError, match="expected bounds that bool holds"):
        Bounded(-1, 1, dtype="bool")
    assert Bounded(False, True, dtype="bool").contains([True, False])


def test_torchrl_has_the_same_domains() -> None:
    """What either draws, the other contains; what is outside of one is outside of the other."""
    torch: Any = pytest.importorskip("torch")
    theirs: Any = pytest.importorskip("torchrl.data")
    mask = torch.tensor(MASK)
    pairs: list[tuple[Domain, Any]] = [
        (Bounded(-1, 2, (3,)), theirs.Bounded(-1, 2, (3,))),
        (Bounded(-3, 4, (2,), "int64"), theirs.Bounded(-3, 4, (2,), dtype=torch.int64)),
        (Unbounded((2,)), theirs.Unbounded((2,))),
        (Unbounded((2,), "int64"), theirs.Unbounded((2,), dtype=torch.int64)),
        (Binary((4,), "int8"), theirs.Binary(4)),
        (Categorical(5, (2,)), theirs.Categorical(5, (2,))),
        (Categorical(3, mask=MASK), theirs.Categorical(3, mask=mask)),
        (MultiCategorical([3, 4], (2, 2)), theirs.MultiCategorical([3, 4], (2, 2))),
        (OneHot(4, (2, 4)), theirs.OneHot(4, (2, 4))),
        (OneHot(3, mask=MASK), theirs.OneHot(3, mask=mask)),
        (MultiOneHot([2, 3], (3, 5)), theirs.MultiOneHot([2, 3], (3, 5))),
    ]
    torch.manual_seed(0)
    for ours, other in pairs:
        assert ours.shape == tuple(other.shape)
        assert other.is_in(torch.from_numpy(ours.sample(0, (20,)))), ours
        assert ours.contains(other.rand((20,)).numpy()), ours
        for shift in (-3, 1, 7):
            moved = ours.sample(1, ())
            moved = (moved.astype(np.int64) + shift).astype(moved.dtype) if ours.dtype.kind != "f" else moved + shift
            # With a mask TorchRL looks up codes that there are not, and takes vectors of several ones.
            if getattr(ours, "mask", None) is None:
                assert ours.contains(moved) == bool(other.is_in(torch.from_numpy(np.asarray(moved)))), (ours, moved)
        for change in (lambda one: one.unsqueeze(0), lambda one: one.expand((7, *one.shape))):
            if ours.shape:
                assert change(ours).shape == tuple(change(other).shape), ours
    whole = Composite({name: ours for name, (ours, _) in zip("abcdefghijk", pairs, strict=True)})
    other = theirs.Composite({name: one for name, (_, one) in zip("abcdefghijk", pairs, strict=True)})
    assert whole.contains({name: values.numpy() for name, values in other.rand((6,)).items()})
