"""The configurations of the space, and what the runs so far say about each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.parameters import Parameters
from autotune.ranking import full_run
from autotune.records import Objective, Prediction, TrialRecord
from autotune.surrogate import StepTimeRegression
from runtime.config import TrainConfig
from runtime.measurement import Outcome

Array = NDArray[np.float64]

HOPELESS = 0.05
"""A configuration that fits with less probability than this is not run."""


class Candidates:
    """Which configurations are left, whether they fit, and what they would cost.

    The *cost* is what the objective minimises, as a logarithm: of the step's seconds, or of the
    reserved bytes. Memory is predicted for one configuration at a time and kept until a run changes
    the predictions.
    """

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        *,
        objective: Objective,
        memory_limit_bytes: int,
        predict: Callable[[TrainConfig], Prediction],
        prior: Callable[[TrainConfig], float] | None = None,
    ) -> None:
        """
        Args:
            configs: the whole space, n configurations.
            predict: memory of a configuration, as the memory model knows it now.
            prior: expected log(step seconds) of a configuration, where its time is predicted.
        """
        self.configs = tuple(configs)
        self.parameters = Parameters(self.configs)
        self.objective = objective
        self.best: float | None = None
        """Lowest log cost of a configuration: the mean over its runs that count, since of many
        single runs the lowest is a lucky one."""
        self._memory_limit_bytes = memory_limit_bytes
        self._predict = predict
        self._predictions: dict[int, Prediction] = {}
        self._tried: set[int] = set()
        self._costs: dict[TrainConfig, list[float]] = {}
        self._index = {config: index for index, config in enumerate(self.configs)}
        self._times = StepTimeRegression(self.configs, prior)
        self._step_times: tuple[Array, Array] | None = None
        self._positions = self._grid_positions()

    def __len__(self) -> int:
        return len(self.configs)

    def observe(self, record: TrialRecord) -> None:
        """Take in a finished run; the memory model has learned from it already."""
        index = self._index.get(record.config)
        if index is not None:
            self._tried.add(index)
        self._predictions.clear()
        self._step_times = None
        measurement = record.measurement
        seconds = measurement.median_step_seconds
        if measurement.outcome is not Outcome.OK or seconds is None:
            return
        self._times.observe(record.config, seconds)
        if record.eligible and full_run(record, self._memory_limit_bytes):
            reserved = measurement.reserved_peak_bytes
            cost = math.log(seconds if self.objective == "throughput" else max(1, reserved or 1))
            self._costs.setdefault(record.config, []).append(cost)
            self.best = min(map(statistics.fmean, self._costs.values()))

    def is_tried(self, index: int) -> bool:
        """Whether it was run, with whatever outcome."""
        return index in self._tried

    def prediction(self, index: int) -> Prediction:
        """Memory of one candidate, as known now."""
        if index not in self._predictions:
            self._predictions[index] = self._predict(self.configs[index])
        return self._predictions[index]

    def fit_probability(self, index: int) -> float:
        """That one candidate stays below the memory limit."""
        return self.prediction(index).fit_probability

    def is_open(self, index: int) -> bool:
        """Whether it is worth asking for: not tried, and not hopeless."""
        return index not in self._tried and self.fit_probability(index) >= HOPELESS

    def any_open(self) -> bool:
        """Whether a sampler has anything left to choose from."""
        return any(map(self.is_open, range(len(self))))

    def first_open(self, order: Iterable[int]) -> int:
        """The first candidate left, in this order of indices."""
        return next(int(index) for index in order if self.is_open(int(index)))

    def posterior(self) -> tuple[Array, Array]:
        """Mean and standard deviation of the log cost of every candidate, (n,) each."""
        return self.step_times() if self.objective == "throughput" else self._reserved()

    def step_times(self) -> tuple[Array, Array]:
        """Mean and standard deviation of log(step seconds) of every candidate, (n,) each."""
        return self._times.posterior()

    def step_seconds(self, config: TrainConfig) -> tuple[float, float, float] | None:
        """Predicted median step with its 95% interval: (value, low, high), in seconds.

        None for a configuration outside the space, and until a run was timed.
        """
        index = self._index.get(config)
        if index is None or not self._times.observations:
            return None
        if self._step_times is None:
            self._step_times = self.step_times()
        mean, deviation = self._step_times[0][index], self._step_times[1][index]
        half = 1.96 * deviation
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)

    def information(self) -> Array:
        """(n,): how much a run of each would tell about the step times of the others."""
        return self._times.information()

    def nearest(self, parameters: Mapping[str, Any]) -> NDArray[np.int64]:
        """Indices by distance from these parameters, nearest first; the space's order breaks ties.

        Each parameter counts by the places between two values in its list, from 0 to 1.
        """
        target = self._position(parameters)
        distance = np.abs(self._positions - target).sum(axis=1)
        order: NDArray[np.int64] = np.argsort(distance, kind="stable")
        return order

    def _reserved(self) -> tuple[Array, Array]:
        predictions = [self.prediction(index) for index in range(len(self))]
        reserved = np.array([max(1.0, prediction.reserved_bytes) for prediction in predictions])
        deviation = np.array([prediction.reserved_deviation_bytes for prediction in predictions])
        return np.log(reserved), np.maximum(deviation / reserved, 1e-6)

    def _grid_positions(self) -> Array:
        rows = [self._position(self.parameters.of(config)) for config in self.configs]
        return np.stack(rows) if rows else np.zeros((0, len(self.parameters.choices)))

    def _position(self, parameters: Mapping[str, Any]) -> Array:
        return np.array(
            [
                choices.index(parameters[name]) / (len(choices) - 1)
                for name, choices in self.parameters.choices.items()
            ]
        )
