"""What the finished runs say about the step time of the others.

Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 3.3) on the logarithm
of the step time, over features that a step's time is known to depend on. The priors alone make
sensible choices with two or three runs; a prediction from probes enters as `prior`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.config import TrainConfig

Array = NDArray[np.float64]

_CONFIG_DEVIATION = 0.06
"""Standard deviation of what the features cannot say about one configuration."""

_RUN_DEVIATION = 0.05
"""Standard deviation of one run's median, process to process."""

_SCALE_DEGREES = 4.0
"""Weight, in runs, of the belief that the prior's deviations are right."""

_Feature = tuple[float, float, Callable[[TrainConfig], float]]


def _log_micro_batch(config: TrainConfig) -> float:
    return math.log2(config.micro_batch_size)


def _is(name: str, value: object) -> Callable[[TrainConfig], float]:
    return lambda config: float(getattr(config, name) == value)


def _stage_from(stage: int) -> Callable[[TrainConfig], float]:
    return lambda config: float(config.zero_stage >= stage)


def _times(*factors: Callable[[TrainConfig], float]) -> Callable[[TrainConfig], float]:
    return lambda config: math.prod(factor(config) for factor in factors)


def _small(config: TrainConfig) -> float:
    return 1 / config.micro_batch_size


_CHECKPOINTED = _is("activation_checkpointing", "full")
_SELECTIVE = _is("activation_checkpointing", "selective")
_BF16, _FP16 = _is("precision", "bf16"), _is("precision", "fp16")

# (prior mean, prior standard deviation) of the effect on log(step seconds), and the feature. With a
# fixed global batch, log2 of the accumulation steps is a constant less log2 of the micro-batch, and
# 1 / micro-batch is proportional to the accumulation steps: the cost paid once a micro-batch.
_FEATURES: tuple[_Feature, ...] = (
    (0.0, 10.0, lambda config: 1.0),
    (-0.03, 0.08, _log_micro_batch),
    (0.0, 0.02, lambda config: _log_micro_batch(config) ** 2),
    (0.1, 0.3, _small),
    (0.0, 0.15, _stage_from(1)),
    (0.0, 0.10, _stage_from(2)),
    (0.03, 0.15, _stage_from(3)),
    (0.0, 0.2, _times(_stage_from(2), _small)),
    (0.1, 0.3, _times(_stage_from(3), _small)),
    (-0.1, 0.5, _BF16),
    (-0.1, 0.5, _FP16),
    (0.0, 0.05, _times(_BF16, _log_micro_batch)),
    (0.0, 0.05, _times(_FP16, _log_micro_batch)),
    (0.0, 0.1, _times(_BF16, _stage_from(1))),
    (-0.02, 0.1, _is("reduce_dtype", "compute")),
    # Recomputing the forward pass adds a third of a step; matrix products are most of it.
    (0.26, 0.12, _CHECKPOINTED),
    (0.12, 0.12, _SELECTIVE),
    (0.0, 0.03, _times(_CHECKPOINTED, _log_micro_batch)),
    (0.0, 0.08, _times(_CHECKPOINTED, _BF16)),
    (-0.05, 0.2, _is("compile", True)),
)


class StepTimeRegression:
    """Posterior of log(step seconds) of a fixed list of configurations."""

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        prior: Callable[[TrainConfig], float] | None = None,
    ) -> None:
        """
        Args:
            configs: n configurations of one global batch size.
            prior: expected log(step seconds) of a configuration, from a prediction; without one,
                what the features' prior means add up to.
        """
        self._prior = prior
        self._features = feature_matrix(configs)  # (n, d)
        self._prior_mean = np.array([self._expected(config) for config in configs])
        self._rows: list[Array] = []
        self._residuals: list[float] = []

    def observe(self, config: TrainConfig, step_seconds: float) -> None:
        """A run of `config` took `step_seconds` in the median; it need not be one of the list."""
        self._rows.append(feature_matrix([config])[0])
        self._residuals.append(math.log(step_seconds) - self._expected(config))

    @property
    def observations(self) -> int:
        """Runs observed so far."""
        return len(self._rows)

    def posterior(self) -> tuple[Array, Array]:
        """Mean and standard deviation, (n,) each, of log(step seconds) of a run to come.

        The deviations are scaled by how far the residuals lie from where the prior put them, so
        that a model with effects larger than expected is not believed too soon.
        """
        mean, covariance, scale = self._weights()
        prediction = self._prior_mean + self._features @ mean
        variance = np.sum(self._features @ covariance * self._features, axis=1)
        return prediction, np.sqrt(scale * (variance + _CONFIG_DEVIATION**2))

    def information(self) -> Array:
        """(n,): by how much a run of each configuration would shrink the mean variance of all."""
        _, covariance, _ = self._weights()
        spread = self._features.T @ self._features / len(self._features)
        reach = self._features @ covariance  # (n, d)
        variance = np.sum(reach * self._features, axis=1)
        gain = np.sum(reach @ spread * reach, axis=1)
        result: Array = gain / (variance + _CONFIG_DEVIATION**2 + _RUN_DEVIATION**2)
        return result

    def _weights(self) -> tuple[Array, Array, float]:
        """Posterior of the weights, (d,) and (d, d), and the scale of the variances."""
        dimensions = self._features.shape[1]
        if not self._rows:
            return np.zeros(dimensions), np.eye(dimensions), 1.0
        rows, residuals = np.stack(self._rows), np.array(self._residuals)  # (k, d), (k,)
        noise = _CONFIG_DEVIATION**2 + _RUN_DEVIATION**2
        gram = rows @ rows.T + noise * np.eye(len(rows))
        gain = np.linalg.solve(gram, rows).T  # (d, k)
        quadratic = float(residuals @ np.linalg.solve(gram, residuals))
        scale = (_SCALE_DEGREES + quadratic) / (_SCALE_DEGREES + len(rows))
        return gain @ residuals, np.eye(dimensions) - gain @ rows, scale

    def _expected(self, config: TrainConfig) -> float:
        if self._prior is not None:
            return self._prior(config)
        return math.fsum(mean * feature(config) for mean, _, feature in _FEATURES)


def feature_matrix(configs: Sequence[TrainConfig]) -> Array:
    """Features in units of their prior deviation, (n, d)."""
    return np.array(
        [[deviation * feature(config) for _, deviation, feature in _FEATURES] for config in configs]
    )


def expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """E[max(0, best - X)] for X ~ N(mean, deviation^2), elementwise (Jones et al. 1998, eq. 15).

    Of logarithms of a cost, this is the expected relative improvement.
    """
    z = (best - mean) / deviation
    cumulative = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    result: Array = np.maximum(0.0, deviation * (z * cumulative + density))
    return result
