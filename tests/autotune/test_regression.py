from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.regression import Regression, normal_cdf


def test_prior_is_the_features_norm() -> None:
    estimate = Regression().estimate({"a": 3.0, "b": -4.0})
    assert (estimate.mean, estimate.deviation) == (0.0, 5.0)


def test_posterior_equals_the_closed_form() -> None:
    generator = np.random.default_rng(0)
    inputs, noise = generator.normal(size=(7, 3)), 0.3
    targets = generator.normal(size=7)
    model = Regression()
    for row, target in zip(inputs, targets, strict=True):
        model.observe(dict(zip("abc", row, strict=True)), float(target), noise)
    precision = np.eye(3) + inputs.T @ inputs / noise**2
    mean = np.linalg.solve(precision, inputs.T @ targets / noise**2)
    probe = generator.normal(size=3)
    estimate = model.estimate({**dict(zip("abc", probe, strict=True)), "unseen": 2.0})
    assert estimate.mean == pytest.approx(probe @ mean)
    variance = probe @ np.linalg.solve(precision, probe) + 4.0
    assert estimate.deviation**2 == pytest.approx(variance)
    assert model.weight("b") == pytest.approx(mean[1])
    assert model.weight("unseen") == 0.0


@given(value=st.floats(-50, 50), deviation=st.floats(0.01, 10))
def test_an_observation_never_takes_the_estimate_away_from_it(
    value: float, deviation: float
) -> None:
    model = Regression()
    features = {"a": 2.0, "b": 1.0}
    before = abs(model.estimate(features).mean - value)
    model.observe(features, value, deviation)
    assert abs(model.estimate(features).mean - value) <= before + 1e-12


@pytest.mark.parametrize("bound", [-2.0, 0.0, 1.5, 6.0])
def test_a_lower_bound_leaves_the_moments_of_the_truncated_normal(bound: float) -> None:
    model = Regression()
    model.observe_above({"a": 2.0}, bound, 0.1)
    draws = np.random.default_rng(1).normal(size=2_000_000) * 2
    noisy = draws + np.random.default_rng(2).normal(size=draws.size) * 0.1
    kept = draws[noisy > bound]
    estimate = model.estimate({"a": 2.0})
    assert estimate.mean == pytest.approx(kept.mean(), abs=0.02)
    assert estimate.deviation == pytest.approx(kept.std(), abs=0.02)


def test_a_bound_far_above_or_below_stays_finite() -> None:
    for bound in (-1e6, 1e6):
        model = Regression()
        model.observe_above({"a": 1.0}, bound, 1.0)
        estimate = model.estimate({"a": 1.0})
        assert np.isfinite([estimate.mean, estimate.deviation]).all()
        assert (estimate.mean > 1e5) == (bound > 0)


def test_normal_cdf() -> None:
    assert normal_cdf(0) == 0.5
    assert normal_cdf(1.959964) == pytest.approx(0.975, abs=1e-6)
