import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from autotune.intervals import (
    CLEARLY_SLOWER,
    MARGIN,
    SINGLE_PROCESS_DEVIATION,
    cannot_win,
    enough_steps,
    fresh_run_interval,
    margin,
    median_interval,
    median_is_narrow,
    paired_difference,
    pooled_deviation,
    student_t_probability,
    student_t_quantile,
)

seconds = st.floats(min_value=1e-3, max_value=1e3)
steps = st.lists(seconds, min_size=1, max_size=40)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 30, 101])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_student_t_quantile_is_scipys(degrees: int, level: float) -> None:
    assert student_t_quantile(level, degrees) == pytest.approx(
        stats.t.ppf((1 + level) / 2, degrees), rel=1e-9
    )


@given(t=st.floats(min_value=0, max_value=50), degrees=st.integers(min_value=1, max_value=60))
def test_student_t_probability_is_scipys(t: float, degrees: int) -> None:
    expected = 1 - 2 * stats.t.sf(t, degrees)
    assert student_t_probability(t, degrees) == pytest.approx(
        expected, abs=1e-9
    )  # scipy's tail loses digits


@pytest.mark.parametrize(("level", "degrees"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_student_t_quantile_refuses_what_has_none(level: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="must hold"):
        student_t_quantile(level, degrees)


def test_median_interval_needs_six_values_at_95_percent() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert median_interval([3.0, 1.0, 2.0, 6.0, 4.0, 5.0]) == (1.0, 6.0)
    assert median_interval(range(1, 10)) == (2, 8)  # tabulated: n = 9 leaves out one at each end


@given(steps)
def test_median_interval_holds_the_median(values: list[float]) -> None:
    interval = median_interval(values)
    if interval is not None:
        low, high = interval
        assert low <= statistics.median(values) <= high
        wider = median_interval(values, 0.99)
        assert wider is None or (wider[0] <= low and high <= wider[1])


@pytest.mark.parametrize("count", [6, 11, 30])
def test_median_interval_covers_as_often_as_it_says(count: int) -> None:
    draws = np.random.default_rng(count).lognormal(sigma=0.4, size=(2000, count))
    intervals = [median_interval(list(row)) for row in draws]
    covered = sum(low <= 1.0 <= high for low, high in intervals if low is not None)
    assert covered / len(draws) >= 0.94


def test_narrow_means_six_agreeing_steps() -> None:
    assert not median_is_narrow([1.0] * 5)
    assert median_is_narrow([1.0] * 6)
    assert not median_is_narrow([1.0, 1.3, 0.8, 1.1, 0.9, 1.2])


def test_a_process_ends_after_enough_seconds_or_steps() -> None:
    scattered = [1.0, 1.5, 1.0, 0.9, 1.4]
    assert not enough_steps(scattered[:3])
    assert enough_steps(scattered)
    assert not enough_steps([100.0, 150.0])
    assert enough_steps([100.0, 150.0, 120.0])
    assert not enough_steps([value / 100 for value in scattered])
    assert enough_steps([0.001 * (1 + index % 7) for index in range(30)])


@given(steps, seconds)
def test_a_run_with_a_step_as_fast_as_the_best_is_not_given_up_early(
    values: list[float], best: float
) -> None:
    if cannot_win(values[:4], best):
        assert min(values[:4]) > best
    if cannot_win(values, best):
        assert statistics.median(values) > best * (1 + MARGIN)


@given(steps, seconds, st.floats(min_value=1.0, max_value=10.0))
def test_a_run_given_up_would_be_given_up_against_a_better_best(
    values: list[float], best: float, factor: float
) -> None:
    if cannot_win(values, best):
        assert cannot_win(values, best / factor)


def test_the_margin_grows_with_the_scatter_of_the_best() -> None:
    assert margin([1.0, 1.01, 0.99, 1.0]) == MARGIN
    assert margin([1.0, 1.1, 0.9, 1.1, 0.9]) == pytest.approx(0.29652)
    assert margin([1.0, 9.0, 0.1, 5.0]) == CLEARLY_SLOWER - 1
    assert cannot_win([1.2, 1.2, 1.2], 1.0)
    assert not cannot_win([1.2, 1.2, 1.2], 1.0, 0.3)


def test_cannot_win_at_its_bounds() -> None:
    assert not cannot_win([9.0, 9.0, 9.0], None)
    assert not cannot_win([9.0], 1.0)
    assert cannot_win([CLEARLY_SLOWER * 1.01] * 2, 1.0)
    assert not cannot_win([CLEARLY_SLOWER * 0.99] * 2, 1.0)
    assert cannot_win([1.2, 1.2, 1.2], 1.0)
    assert not cannot_win([1.05] * 30, 1.0)
    assert cannot_win([1.0, *[1.3] * 9], 1.0)  # one lucky step of ten decides nothing


@given(st.lists(seconds, min_size=1, max_size=10), st.floats(min_value=0.1, max_value=10))
def test_fresh_run_interval_scales_with_the_figures(values: list[float], factor: float) -> None:
    one = fresh_run_interval(values)
    other = fresh_run_interval([value * factor for value in values])
    assert one.low <= one.value <= one.high
    assert one.processes == len(values)
    for name in ("low", "value", "high"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) * factor, rel=1e-6)


@given(st.lists(seconds, min_size=1, max_size=10), st.floats(min_value=0, max_value=2))
def test_a_larger_least_deviation_never_narrows(values: list[float], deviation: float) -> None:
    plain, floored = (
        fresh_run_interval(values),
        fresh_run_interval(values, least_deviation=deviation),
    )
    assert floored.low <= plain.low
    assert floored.high >= plain.high


def test_a_single_process_has_the_assumed_scatter() -> None:
    interval = fresh_run_interval([100.0])
    half = 1.959964 * SINGLE_PROCESS_DEVIATION * math.sqrt(2)
    assert interval.high == pytest.approx(100 * math.exp(half), rel=1e-5)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_fresh_run_interval_covers_a_fresh_run(count: int) -> None:
    draws = np.random.default_rng(count).lognormal(sigma=0.05, size=(2000, count + 1))
    covered = 0
    for row in draws:
        interval = fresh_run_interval(list(row[:count]))
        covered += interval.low <= row[count] <= interval.high
    assert covered / len(draws) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.04])
def test_coverage_survives_adding_processes_until_the_interval_is_narrow(deviation: float) -> None:
    rng = np.random.default_rng(7)
    covered, narrow, narrow_covered, trials = 0, 0, 0, 600
    for _ in range(trials):
        best, other = rng.lognormal(sigma=deviation, size=(2, 9))
        for count in range(3, 9):
            pooled = pooled_deviation([best[:count], other[:3]])
            assert pooled is not None
            interval = fresh_run_interval(best[:count], least_deviation=pooled)
            if interval.relative_half_width <= 0.05:
                break
        hit = interval.low <= best[8] <= interval.high
        covered += hit
        narrow += interval.relative_half_width <= 0.05
        narrow_covered += hit and interval.relative_half_width <= 0.05
    assert covered / trials >= 0.93
    assert narrow < 30 or narrow_covered / narrow >= 0.9


def test_pooled_deviation_weighs_groups_by_their_degrees_of_freedom() -> None:
    assert pooled_deviation([[1.0], []]) is None
    first, second = [1.0, 1.1, 1.2], [5.0, 5.2]
    logs = [[math.log(value) for value in group] for group in (first, second)]
    expected = math.sqrt((2 * statistics.variance(logs[0]) + statistics.variance(logs[1])) / 3)
    assert pooled_deviation([first, second, [9.0]]) == pytest.approx(expected)


def test_paired_difference_is_blind_to_drift() -> None:
    drift = [1.0, 0.8, 1.3, 0.9]
    mean, half = paired_difference([1.1 * value for value in drift], drift)
    assert mean == pytest.approx(math.log(1.1))
    assert half == pytest.approx(0.0, abs=1e-9)
    assert paired_difference([1.0], [2.0])[1] == math.inf
