"""Specs as tensors; those of TorchRL, there and back."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from mouse_core import ConfigError
from mouse_core import spec as core
from mouse_torch import from_torchrl, to_torchrl
from mouse_torch.specs import sample

MASK = [True, False, True]
WHOLE = core.Composite(
    {
        "observation": {"state": core.Bounded(-1, [1.0, 2.0], (2,)), "text": core.NonTensor(example="a")},
        "action": core.Categorical(3, mask=MASK),
        "step": core.Unbounded((), np.int64),
    }
)


def test_values_are_tensors() -> None:
    drawn = sample(WHOLE.without(("observation", "text")), 5, (4, 2))
    assert isinstance(drawn, TensorDict)
    assert drawn.batch_size == (4, 2)
    one = sample(core.OneHot(3), 1)
    assert one.dtype == torch.bool
    np.testing.assert_array_equal(one.numpy(), core.OneHot(3).sample(1))
    values = sample(WHOLE, 3, 6)
    assert values in WHOLE
    assert TensorDict({}) not in WHOLE
    assert sample(core.Unbounded((2,), "bfloat16"), 0).dtype == torch.bfloat16
    assert sample(core.NonTensor(example="a"), 0) == "a"


def test_stacks_are_tensors_too() -> None:
    shapes = core.stack_specs([core.Unbounded((2,)), core.Unbounded((3,))])
    for part, expected in zip(sample(shapes, 0, 4), shapes.sample(0, 4), strict=True):
        assert torch.equal(part, torch.from_numpy(expected))
    nested = core.stack_specs([core.Composite({"a": core.Bounded(0, 1)}), core.Composite({"a": core.Bounded(0, 2)})])
    drawn = sample(nested, 0, (4,))
    assert isinstance(drawn, TensorDict)
    assert drawn.batch_size == (4, 2)
    assert nested.contains(drawn)
    fields = core.stack_specs([core.Composite({"a": core.Bounded(0, 1)}), core.Composite({"b": core.Bounded(0, 2)})])
    assert [set(part.keys()) for part in sample(fields, 0, 4)] == [{"a"}, {"b"}]


SPECS: list[Any] = [
    core.Bounded(-1, [1.0, 2.0], (2,)),
    core.Bounded(0, 7, (2, 1), np.int32),
    core.Unbounded((2,), np.float64),
    core.Unbounded((), np.uint8),
    core.Categorical(3),
    core.Categorical(3, (2,), mask=[MASK, MASK[::-1]]),
    core.OneHot(3, mask=MASK),
    core.OneHot(3, (2, 3), np.int64),
    core.MultiCategorical([2, 3]),
    core.MultiCategorical([2, 3], mask=[True, False, *MASK]),
    core.MultiCategorical([[2, 3], [4, 5]]),
    core.MultiOneHot((2, 3), mask=[True, False, *MASK]),
    core.Binary((4,), np.int8),
    core.NonTensor(example="a"),
    core.Choice([core.Bounded(0, 1, (1,)), core.Bounded(2, 3, (1,))]),
    core.Choice([core.NonTensor(example="a"), core.NonTensor(example="b")]),
    WHOLE,
    WHOLE.expand((3,)),
    core.stack_specs([core.Bounded(0, 1, (2,)), core.Bounded(0, 2, (2,))], 1),
    core.stack_specs(
        [core.Composite({"a": core.Bounded(0, 1, (2,))}), core.Composite({"a": core.Bounded(0, 2, (3,))})]
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: repr(spec)[:50])
def test_specs_of_torchrl(spec: Any) -> None:
    pytest.importorskip("torchrl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = to_torchrl(spec)
        assert from_torchrl(theirs) == spec
        if isinstance(spec, core.Stacked):  # theirs has no arrays
            return
        torch.manual_seed(0)
        drawn = theirs.rand()
        assert spec.contains(drawn.data if isinstance(drawn, NonTensorData) else drawn)
        if "NonTensor" not in repr(spec):
            assert theirs.is_in(sample(spec, 3))


def test_what_is_no_spec_of_torchrl_is_refused() -> None:
    data = pytest.importorskip("torchrl.data")
    with pytest.raises(ConfigError, match="spec: expected one of TorchRL's specs, found 3"):
        from_torchrl(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unknown = data.Composite(a=data.Categorical(-1))
    with pytest.raises(ConfigError, match="spec/a: expected a spec with a known number of codes"):
        from_torchrl(unknown)


def test_torchrl_has_the_same_domains() -> None:
    theirs: Any = pytest.importorskip("torchrl.data")
    mask = torch.tensor(MASK)
    pairs: list[tuple[Any, Any]] = [
        (core.Bounded(-1, 2, (3,)), theirs.Bounded(-1, 2, (3,))),
        (core.Bounded(-3, 4, (2,), "int64"), theirs.Bounded(-3, 4, (2,), dtype=torch.int64)),
        (core.Unbounded((2,)), theirs.Unbounded((2,))),
        (core.Unbounded((2,), "int64"), theirs.Unbounded((2,), dtype=torch.int64)),
        (core.Binary((4,), "int8"), theirs.Binary(4)),
        (core.Categorical(5, (2,)), theirs.Categorical(5, (2,))),
        (core.Categorical(3, mask=MASK), theirs.Categorical(3, mask=mask)),
        (core.MultiCategorical([3, 4], (2, 2)), theirs.MultiCategorical([3, 4], (2, 2))),
        (core.OneHot(4, (2, 4)), theirs.OneHot(4, (2, 4))),
        (core.OneHot(3, mask=MASK), theirs.OneHot(3, mask=mask)),
        (core.MultiOneHot([2, 3], (3, 5)), theirs.MultiOneHot([2, 3], (3, 5))),
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
    whole = core.Composite({name: ours for name, (ours, _) in zip("abcdefghijk", pairs, strict=True)})
    other = theirs.Composite({name: one for name, (_, one) in zip("abcdefghijk", pairs, strict=True)})
    assert whole.contains({name: values.numpy() for name, values in other.rand((6,)).items()})
