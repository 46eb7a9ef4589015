"""The statistics of studies, against plain Python and against rliable."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mouse_core.errors import ConfigError, DataError
from mouse_study.statistics import Band, band, iqm, parting, relative_difference

NUMBERS = st.floats(-1e6, 1e6)


@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_the_mean_of_what_lies_between_the_quarters(values: list[float]) -> None:
    cut = len(values) // 4
    kept = sorted(values)[cut : len(values) - cut]
    assert iqm(values) == pytest.approx(math.fsum(kept) / len(kept), rel=1e-9, abs=1e-9)


def test_it_is_no_number_where_one_is_missing() -> None:
    assert math.isnan(iqm([1.0] * 8 + [math.nan]))
    np.testing.assert_array_equal(iqm([[1.0, math.nan], [3.0, 2.0]]), [2.0, math.nan])
    with pytest.raises(DataError, match="expected at least one value"):
        iqm([])


@pytest.mark.slow
def test_means_and_bands_are_those_of_rliable(monkeypatch: pytest.MonkeyPatch) -> None:
    # A decorator of pandas 3.1 takes another argument than arch gives it, with which rliable resamples.
    monkeypatch.setattr("pandas.util._decorators.deprecate_kwarg", lambda *_, **__: lambda function: function)
    library, metrics = pytest.importorskip("rliable.library"), pytest.importorskip("rliable.metrics")
    for rows, columns in ((1, 1), (3, 2), (12, 5), (7, 1)):
        values = np.random.default_rng(rows).normal(0, 1e3, (rows, columns))
        assert iqm(values.ravel()) == pytest.approx(metrics.aggregate_iqm(values), rel=1e-9, abs=1e-9)
        np.testing.assert_array_equal(iqm(values, axis=0), [iqm(column) for column in values.T])
    scores = np.random.default_rng(0).normal(loc=[0.0, 5.0, 10.0], size=(10, 3))
    np.random.seed(1)  # noqa: NPY002  rliable draws from NumPy's global generator
    points, intervals = library.get_interval_estimates(
        {"one": scores}, lambda values: np.array([metrics.aggregate_iqm(values)]), reps=4000
    )
    found = band(list(scores.T), repetitions=4000)
    assert found.value == pytest.approx(points["one"][0])
    low, high = intervals["one"][:, 0]
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))


def resamples(strata: list[list[float]]) -> list[float]:
    """The interquartile mean of every resample that there is, each as likely as any other."""
    ways = [list(itertools.product(stratum, repeat=len(stratum))) for stratum in strata]
    return sorted(float(iqm([value for part in parts for value in part])) for parts in itertools.product(*ways))


@pytest.mark.parametrize("strata", [[[1.0, 5.0, 2.0, 9.0, 4.0]], [[1.0, 3.0, 8.0], [10.0, 30.0]]])
def test_a_band_is_that_of_all_resamples(strata: list[list[float]]) -> None:
    every = resamples(strata)
    found = band(strata, repetitions=10_000)
    assert found.value == pytest.approx(iqm(list(itertools.chain(*strata))))
    assert found.runs == tuple(map(len, strata))
    span = every[-1] - every[0]
    assert (found.low, found.high) == pytest.approx(np.quantile(every, [0.025, 0.975]), abs=0.05 * span)


def test_curves_are_taken_whole_and_each_step_has_its_band() -> None:
    curves = np.random.default_rng(2).normal(size=(5, 40)).cumsum(axis=1)
    found = band([curves])
    assert found.low is not None
    assert found.high is not None
    for step in (0, 17, 39):
        alone = band([curves[:, step]])
        assert (found.value[step], found.low[step], found.high[step]) == (alone.value, alone.low, alone.high)
    # A curve and the same a hundred lower: of whichever runs a resample is, all steps are of the same ones.
    both = np.concatenate([curves, curves - 100.0], axis=1)
    twice = band([both])
    np.testing.assert_allclose(twice.low[:40] - 100.0, twice.low[40:])


def test_a_band_depends_on_its_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    curves = np.random.default_rng(3).normal(size=(20, 30))
    whole, other = band([curves]), band([curves], seed=1)
    monkeypatch.setattr("mouse_study.statistics._MOST_VALUES", 7 * curves.size)
    parts = band([curves])
    np.testing.assert_array_equal([whole.low, whole.high], [parts.low, parts.high])
    assert (np.asarray(whole.low) != other.low).any()
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_bands_of_few_runs() -> None:
    for count in (2, 3, 4):
        values = [5.0, 1.0, 8.0, 2.0][:count]
        found = band([values])
        assert (found.low, found.high) == (min(values), max(values))
    assert band([[3.0]]) == Band(np.float64(3.0), None, None, (1,))
    alone = band([[1.0, 2.0, 3.0], [9.0]])
    assert (alone.low, alone.high) == (None, None)
    for strata, options, error in (
        ([], {}, ConfigError),
        ([[1.0], []], {}, DataError),
        ([[1.0, 2.0]], {"repetitions": 0}, ConfigError),
        ([[1.0, 2.0]], {"confidence": 1.0}, ConfigError),
        ([[1.0, 2.0]], {"seed": -1}, ConfigError),
    ):
        with pytest.raises(error):
            band(strata, **options)


def test_where_curves_part() -> None:
    difference = relative_difference([1.0, 2.0, -4.0, 1.0], [1.0, 2.0, -3.0, 0.0])
    np.testing.assert_allclose(difference, [0.0, 0.0, 0.25, 1.0])
    assert [parting(difference, tolerance) for tolerance in (0.0, 0.1, 0.3, 1.0)] == [2, 2, 3, None]
    both = relative_difference([0.0, math.nan, math.inf, 1.0, 1e308], [0.0, math.nan, math.inf, math.inf, -1e308])
    np.testing.assert_array_equal(both, [0.0, math.inf, math.inf, math.inf, 2.0])
    assert parting(both, 1e300) == 1
    with pytest.raises(DataError, match="equal length"):
        relative_difference([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("runs", "said"), [(2, 50), (3, 75), (5, 90), (10, 93)])
def test_the_band_holds_the_truth_as_often_as_the_guide_says(runs: int, said: int) -> None:
    samples = np.random.default_rng(runs).normal(size=(300, runs))
    bands = [band([sample], repetitions=400) for sample in samples]
    held = sum(bool(found.low <= 0.0 <= found.high) for found in bands)  # type: ignore[operator]
    assert 100 * held / len(samples) == pytest.approx(said, abs=6)


@given(NUMBERS)
def test_neighbours_among_floats_are_not_equal(value: float) -> None:
    assert parting(relative_difference([value], [value]), 0.0) is None
    if abs(value) > 1e-300:
        assert parting(relative_difference([value], [np.nextafter(value, np.inf)]), 0.0) == 0
