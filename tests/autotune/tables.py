"""A made-up machine for the tests of the search: a cost table over the whole space."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from autotune.records import Prediction, Role, TrialRecord
from autotune.space import Space, build_space
from runtime.config import TrainConfig
from runtime.measurement import Measurement
from tests.autotune import factories
from tests.autotune.factories import GLOBAL_BATCH, LIMIT, MIB, measurement_of, memory_of


def space_of(ranks: int = 2, **fix: str) -> Space:
    """The space of the made-up model on this many ranks."""
    return build_space(
        factories.hardware(),
        factories.profile(),
        ranks=ranks,
        global_batch_size=GLOBAL_BATCH,
        threads_per_rank=1,
        fix=fix,
        vary={},
    )


def exact_prediction(config: TrainConfig, limit: int = LIMIT) -> Prediction:
    """What the made-up machine needs, 5 MiB give or take."""
    memory = memory_of(config)
    reserved = memory.charged_peak_bytes
    return Prediction(
        allocated_bytes=memory.allocated_peak_bytes,
        reserved_bytes=reserved,
        reserved_deviation_bytes=5 * MIB,
        fit_probability=float(reserved <= limit),
        terms={"parameters": memory.parameter_bytes, "activations": memory.other_bytes},
    )


def timed(config: TrainConfig, seconds: Callable[[TrainConfig], float]) -> Measurement:
    """A run whose steps each take `seconds(config)`."""
    measurement = measurement_of(config, random.Random(0))
    return replace(measurement, step_seconds=(seconds(config),) * 6)


def record_of(config: TrainConfig, measurement: Measurement, role: Role = "search") -> TrialRecord:
    """A finished run."""
    return TrialRecord(number=0, role=role, config=config, prediction=None, measurement=measurement)
