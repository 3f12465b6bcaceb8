"""Bayesian linear regression on named features, with a standard normal prior on every weight.

A feature's value carries the prior's scale: a value of 3 MiB says that this feature shifts the
target by 3 MiB, give or take (one standard deviation), before anything was observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Features = Mapping[str, float]


@dataclass(frozen=True)
class Estimate:
    """A normal distribution."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class _Observation:
    features: Features
    value: float
    deviation: float


@dataclass
class Regression:
    """target = Σ weight x feature + noise; weights ~ N(0, 1), noise of a known deviation each.

    Posterior: Bishop, Pattern Recognition and Machine Learning, equations 3.50 and 3.51. Features
    not yet observed keep their prior.
    """

    _observations: list[_Observation] = field(default_factory=list)
    _bounds: list[_Observation] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _covariance: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    def observe(self, features: Features, value: float, deviation: float) -> None:
        """The target was `value`, with noise of standard deviation `deviation` > 0."""
        self._observations.append(_Observation(dict(features), value, deviation))
        self._fit()

    def observe_above(self, features: Features, bound: float, deviation: float) -> None:
        """The target, `deviation` > 0 of noise included, was larger than `bound`."""
        self._bounds.append(_Observation(dict(features), bound, deviation))
        self._fit()

    def estimate(self, features: Features) -> Estimate:
        """Of the target without noise."""
        known = [(self._names[name], x) for name, x in features.items() if name in self._names]
        variance = sum(x * x for name, x in features.items() if name not in self._names)
        mean = 0.0
        if known:
            index = np.array([position for position, _ in known])
            x = np.array([value for _, value in known])
            mean = float(x @ self._mean[index])
            variance += float(x @ self._covariance[np.ix_(index, index)] @ x)
        return Estimate(mean, math.sqrt(max(0.0, variance)))

    def weight(self, name: str) -> float:
        """Posterior mean of a feature's weight."""
        return float(self._mean[self._names[name]]) if name in self._names else 0.0

    def _fit(self) -> None:
        for seen in (*self._observations, *self._bounds):
            for name in seen.features:
                self._names.setdefault(name, len(self._names))
        self._mean = np.zeros(len(self._names))
        self._covariance = np.eye(len(self._names))
        for seen in self._observations:
            self._update(seen.features, seen.value, seen.deviation)
        for seen in self._bounds:
            self._update_above(seen)

    def _update(self, features: Features, value: float, deviation: float) -> None:
        """One rank-1 step: the new covariance is smaller along `features`."""
        x = np.zeros(len(self._names))
        for name, feature in features.items():
            x[self._names[name]] = feature
        projected = self._covariance @ x
        total = float(x @ projected) + deviation**2
        self._mean = self._mean + projected * ((value - float(x @ self._mean)) / total)
        self._covariance = self._covariance - np.outer(projected, projected) / total

    def _update_above(self, seen: _Observation) -> None:
        """Match the moments of the normal truncated to values above the bound.

        One site of expectation propagation (Minka 2001): the exact value whose observation leaves
        the target with the mean and variance of the truncated distribution.
        """
        prior = self.estimate(seen.features)
        variance = prior.deviation**2
        if variance == 0.0:
            return
        total = math.sqrt(variance + seen.deviation**2)
        z = (prior.mean - seen.value) / total
        ratio = _hazard(z)
        shrink = min(1.0, ratio * (ratio + z))
        gain = variance / total
        mean = prior.mean + gain * ratio
        new_variance = variance - gain * gain * shrink
        precision = 1 / new_variance - 1 / variance
        if precision * variance <= 1e-9:
            return  # the bound lies far below the prediction and says nothing
        site = (mean / new_variance - prior.mean / variance) / precision
        self._update(seen.features, site, 1 / math.sqrt(precision))


def normal_cdf(z: float) -> float:
    """Probability that a standard normal lies below `z`."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _hazard(z: float) -> float:
    """phi(z) / Phi(z), by its asymptote -z - 1 / z where Phi(z) underflows."""
    if z < -30:
        return -z - 1 / z
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / normal_cdf(z)
