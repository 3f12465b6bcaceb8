"""How many bytes a configuration needs on each rank: by arithmetic, then by what was measured.

allocated = model states and gathered parameters (arithmetic, `autotune.model_states`)
          + activations (the profile's affine law in the micro-batch size, times a factor for the
            precision, checkpointing and engine), less what is not there yet when they peak
reserved  = factor x allocated + churn x parameters (sharded engines only) + constant

Every factor starts from a stated prior and is refitted on the residuals after each trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.model_states import absent_at_activation_peak, model_state_terms, startup_bytes
from autotune.records import Hardware, ModelProfile, Prediction
from autotune.regression import Estimate, Regression, normal_cdf
from autotune.units import format_bytes
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome

_MIB = 2**20
_LOW_PRECISION = 0.55
"""Activations in bf16 or fp16 against fp32: half, but norms, losses and masks stay wide."""
_SELECTIVE = 0.7
_FULL = 0.1
"""Full checkpointing keeps the blocks' inputs and, at any time, one block's own activations: this
share plus 1 / blocks."""
_PARTS = 0.95
"""Checkpointing parts that do not repeat, such as single layers, keeps nearly everything."""
_COMPILED = 0.85
_MEASURED_DEVIATION = 0.005
"""Of an allocated peak around the law, as a share: it repeats exactly, but is not quite affine."""
_MIN_SCALE = 0.02
"""The learned factor on activations stays above this, whatever a few residuals say."""
_DOMINATED = 0.02
"""Fit probability, at most, of what is larger in every respect than one that did not fit."""


@dataclass(frozen=True)
class _Allocator:
    """Prior of what an allocator holds for what is in use: means, and standard deviations."""

    factor: float
    """Of the allocated bytes."""
    factor_deviation: float
    churn: float
    """Of the parameter bytes, where blocks gather and let go: freed blocks of odd sizes stay."""
    churn_deviation: float
    constant_bytes: float
    constant_deviation_bytes: float
    measured_deviation: float
    """Of one run's reserved bytes around the law, as a share of them; and beside it in bytes:"""
    measured_deviation_bytes: float


_ALLOCATORS = {
    # glibc's malloc; on two ranks of a 10M GPT it held 1.2 times the allocated bytes at stage 0
    # and from 1.5 to 4 times at stage 3, and moved by 6% from run to run.
    "cpu": _Allocator(1.2, 0.15, 1.5, 1.5, 30 * _MIB, 30 * _MIB, 0.06, 15 * _MIB),
    # The caching allocator rounds and fragments; context and NCCL's buffers count too.
    "cuda": _Allocator(1.1, 0.1, 0.1, 0.2, 400 * _MIB, 300 * _MIB, 0.03, 10 * _MIB),
}


class MemoryModel:
    """Predicts bytes per rank, and learns from every trial.

    Largest micro-batch sizes are approached safely: a configuration is as uncertain as it lies
    beyond what was measured, and `Prediction.fit_probability` falls with it.
    """

    def __init__(
        self, profile: ModelProfile, hardware: Hardware, memory_limit_bytes: int | None
    ) -> None:
        self._profile = profile
        self._limit = math.inf if memory_limit_bytes is None else float(memory_limit_bytes)
        self._allocator = _ALLOCATORS[hardware.device]
        self._activations = _ActivationLaw.of(profile)
        self._allocated = Regression()
        self._reserved = Regression()
        self._startup = Regression()
        self._too_large: list[TrainConfig] = []

    def predict(self, config: TrainConfig) -> Prediction:
        """What `config` is expected to need, on the rank that needs most."""
        terms = model_state_terms(self._profile, config)
        states = sum(terms.values()) - terms["communication"]
        scales, offsets = self._allocated_features(config)
        beyond = self._activations_beyond(config, terms, scales) + self._learned(offsets)
        terms["activations"] = max(0.0, beyond)
        terms["communication"] = max(0.0, terms["communication"] + min(0.0, beyond))
        allocated = sum(terms.values())
        deviation = self._allocated.estimate({**scales, **offsets}).deviation
        deviation = math.hypot(deviation, _MEASURED_DEVIATION * allocated)
        reserved = self._reserved_estimate(config, Estimate(allocated, deviation))
        startup = self._startup_estimate(config)
        charged = max(reserved, startup, key=lambda item: item.mean)
        probability = min(self._fits(reserved), self._fits(startup))
        if any(_at_least(config, failed) for failed in self._too_large):
            probability = min(probability, _DOMINATED)
        return Prediction(
            allocated_bytes=allocated,
            reserved_bytes=max(charged.mean, states),
            reserved_deviation_bytes=charged.deviation,
            fit_probability=probability,
            terms=terms,
        )

    def learn(self, config: TrainConfig, measurement: Measurement) -> None:
        """Refit on what a run of `config` measured; a run out of memory sets a lower bound.

        Runs that ended in another way before their memory was measured teach nothing.
        """
        allocated = measurement.allocated_peak_bytes
        if allocated:
            self._learn_allocated(config, float(allocated))
            step = max(rank.reserved_peak_bytes for rank in measurement.memory)
            self._learn_reserved(config, float(allocated), float(step))
            startup = max(rank.startup_peak_bytes for rank in measurement.memory)
            self._learn_startup(config, float(startup))
        elif measurement.outcome is Outcome.OUT_OF_MEMORY and math.isfinite(self._limit):
            self._too_large.append(config)
            self._learn_too_large(config)

    def needs(self, config: TrainConfig) -> str:
        """Such as `3.1 GiB, of which optimizer states 2 GiB`; of one rank, reserved bytes."""
        prediction = self.predict(config)
        name, size = max(prediction.terms.items(), key=lambda item: item[1])
        name = {"optimizer": "optimizer states"}.get(name, name)
        return f"{format_bytes(prediction.reserved_bytes)}, of which {name} {format_bytes(size)}"

    def smallest(self, configs: Iterable[TrainConfig]) -> TrainConfig:
        """The configuration that is expected to need the fewest bytes.

        Raises:
            ValueError: `configs` is empty.
        """
        return min(configs, key=lambda config: self.predict(config).reserved_bytes)

    def _fits(self, need: Estimate) -> float:
        return normal_cdf((self._limit - need.mean) / max(1.0, need.deviation))

    def _activations_beyond(
        self, config: TrainConfig, terms: dict[str, float], scales: dict[str, float]
    ) -> float:
        """Activations at their peak, above what takes their place later in the backward pass."""
        base = self._activations.bytes(config)
        activations = max(_MIN_SCALE * base, base + self._learned(scales))
        return max(0.0, activations - absent_at_activation_peak(terms, config))

    def _learned(self, features: dict[str, float]) -> float:
        return sum(self._allocated.weight(name) * value for name, value in features.items())

    def _allocated_residual(
        self, config: TrainConfig, allocated: float
    ) -> tuple[dict[str, float], float]:
        """The features that explain an allocated peak, and what they have to explain.

        Where activations lie below what takes their place, the peak tells nothing of them.
        """
        terms = model_state_terms(self._profile, config)
        scales, offsets = self._allocated_features(config)
        residual = allocated - sum(terms.values())
        if self._activations_beyond(config, terms, scales) == 0.0:
            return offsets, residual
        absent = absent_at_activation_peak(terms, config)
        return {**scales, **offsets}, residual + absent - self._activations.bytes(config)

    def _learn_allocated(self, config: TrainConfig, allocated: float) -> None:
        features, residual = self._allocated_residual(config, allocated)
        self._allocated.observe(features, residual, _MEASURED_DEVIATION * allocated)

    def _allocated_features(self, config: TrainConfig) -> tuple[dict[str, float], dict[str, float]]:
        """Corrections to the activations: those that grow with them, and those that do not.

        What configurations have in common shares a weight, so a trial teaches its neighbours.
        """
        base, law = self._activations.bytes(config), self._activations
        kind = _kind(config)
        scales = {
            "all": law.deviation,
            f"engine {_engine(config)}": 0.1,
            f"kind {kind} {_engine(config)}": 0.1,
        }
        if config.precision != "fp32":
            scales["low precision"] = 0.25
            scales[config.precision] = 0.1
        if config.activation_checkpointing != "none":
            scales[config.activation_checkpointing] = 0.5
        if config.compile:
            scales["compile"] = 0.3
        steps = _steps(config)
        # Buffers of the engine, in proportion to the parameters; workspaces, to one sample's.
        engine = 0.1 * self._profile.parameter_bytes
        offsets = {
            f"states {_engine(config)}": engine,
            f"states {config.zero_stage} {steps} {config.precision} {config.reduce_dtype}": engine,
            f"workspace {kind}": 0.2 * law.factor(config) * law.per_sample,
            "constant": float(_MIB),
        }
        return {name: share * base for name, share in scales.items()}, offsets

    def _reserved_estimate(self, config: TrainConfig, allocated: Estimate) -> Estimate:
        learned = self._reserved.estimate(self._reserved_features(config, allocated.mean))
        factor, rest = self._reserved_law(config)
        mean = factor * allocated.mean + rest
        return Estimate(
            mean,
            math.hypot(
                learned.deviation,
                factor * allocated.deviation,
                self._reserved_noise(mean),
            ),
        )

    def _reserved_law(self, config: TrainConfig) -> tuple[float, float]:
        """reserved = factor x allocated + rest, as learned so far; the factor is 1 at least."""
        prior = self._allocator
        factor, rest = prior.factor, self._reserved_rest(config)
        for name, value in self._reserved_features(config, 1.0).items():
            learned = value * self._reserved.weight(name)
            if name.startswith("factor"):
                factor += learned
            else:
                rest += learned
        return max(1.0, factor), rest

    def _reserved_rest(self, config: TrainConfig) -> float:
        prior = self._allocator
        return prior.constant_bytes + prior.churn * _churned(config, self._profile)

    def _learn_reserved(self, config: TrainConfig, allocated: float, reserved: float) -> None:
        expected = self._allocator.factor * allocated + self._reserved_rest(config)
        noise = self._reserved_noise(max(reserved, expected))
        features = self._reserved_features(config, allocated)
        self._reserved.observe(features, reserved - expected, noise)

    def _reserved_noise(self, reserved: float) -> float:
        prior = self._allocator
        return math.hypot(prior.measured_deviation * reserved, prior.measured_deviation_bytes)

    def _reserved_features(self, config: TrainConfig, allocated: float) -> dict[str, float]:
        prior, engine, kind = self._allocator, _engine(config), _kind(config)
        churned = prior.churn_deviation * _churned(config, self._profile)
        return {
            "factor": prior.factor_deviation * allocated,
            f"factor {engine}": prior.factor_deviation / 3 * allocated,
            "churn": churned,
            f"churn {engine} {config.precision} {_steps(config)}": churned,
            "constant": prior.constant_deviation_bytes,
            f"constant {engine} {kind} {_steps(config)}": prior.constant_deviation_bytes / 2,
        }

    def _startup_estimate(self, config: TrainConfig) -> Estimate:
        expected = startup_bytes(self._profile, config)
        learned = self._startup.estimate(self._startup_features(config))
        noise = self._allocator.measured_deviation * expected
        return Estimate(expected + learned.mean, math.hypot(learned.deviation, noise))

    def _learn_startup(self, config: TrainConfig, startup: float) -> None:
        expected = startup_bytes(self._profile, config)
        noise = max(1.0, self._allocator.measured_deviation * expected)
        self._startup.observe(self._startup_features(config), startup - expected, noise)

    def _startup_features(self, config: TrainConfig) -> dict[str, float]:
        expected = startup_bytes(self._profile, config)
        return {
            "factor": 0.3 * expected,
            f"factor {_engine(config)}": 0.3 * expected,
            "constant": self._allocator.constant_deviation_bytes,
        }

    def _learn_too_large(self, config: TrainConfig) -> None:
        """Its reserved bytes exceed the limit, so its allocated bytes exceed what that allows."""
        factor, rest = self._reserved_law(config)
        bound = (self._limit - rest) / factor
        features, residual = self._allocated_residual(config, bound)
        deviation = max(1.0, self._allocator.measured_deviation * abs(bound))
        self._allocated.observe_above(features, residual, deviation)


@dataclass(frozen=True)
class _ActivationLaw:
    """Activation bytes = factor(config) x (fixed + per_sample x micro-batch size)."""

    fixed: float
    per_sample: float
    deviation: float
    """Standard deviation of the whole, as a share of it, before any trial."""
    block_count: int
    """Of repeated blocks."""

    @classmethod
    def of(cls, profile: ModelProfile) -> _ActivationLaw:
        """Through the profile's smallest and largest micro-batch; neither part is negative."""
        points = sorted(profile.activation_bytes.items())
        blocks = profile.block_count if profile.block_class else 0
        if not points:
            # Nothing ran. A sample of a transformer keeps about as many bytes as its parameters
            # take, give or take an order of magnitude.
            return cls(0.0, max(1.0, profile.parameter_bytes), 1.0, blocks)
        (small, low), (large, high) = points[0], points[-1]
        slope = (high - low) / (large - small) if large > small else low / small
        slope = max(slope, 0.01 * high / large, 1.0)
        return cls(max(0.0, high - slope * large), slope, 0.05, blocks)

    def bytes(self, config: TrainConfig) -> float:
        """The prior's mean for `config`, above zero."""
        return self.factor(config) * (self.fixed + self.per_sample * config.micro_batch_size)

    def factor(self, config: TrainConfig) -> float:
        """Against fp32 without checkpointing and without compilation."""
        factor = 1.0 if config.precision == "fp32" else _LOW_PRECISION
        if config.activation_checkpointing == "selective":
            factor *= _SELECTIVE if self.block_count else _PARTS
        elif config.activation_checkpointing == "full":
            factor *= min(1.0, _FULL + 1 / self.block_count) if self.block_count else _PARTS
        return factor * (_COMPILED if config.compile else 1.0)


def _engine(config: TrainConfig) -> str:
    """Configurations whose engine casts and buffers alike."""
    if config.ranks == 1:
        return "plain"
    return ("replicated", "gathered", "gathered", "sharded")[config.zero_stage]


def _steps(config: TrainConfig) -> str:
    return "many" if config.gradient_accumulation_steps > 1 else "one"


def _churned(config: TrainConfig, profile: ModelProfile) -> float:
    """Parameter bytes that are gathered and let go in a step."""
    return float(profile.parameter_bytes) if config.ranks > 1 and config.zero_stage else 0.0


def _kind(config: TrainConfig) -> str:
    """Configurations whose activations are alike, but for the micro-batch size."""
    compiled = "compiled" if config.compile else "eager"
    return f"{config.precision} {config.activation_checkpointing} {compiled}"


def _at_least(config: TrainConfig, failed: TrainConfig) -> bool:
    """Whether `config` differs from `failed` in no way but a micro-batch at least as large.

    With more than one accumulation step gradients may be kept whole, so the larger micro-batch
    must not be the one that escapes that.
    """
    changes = {
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }
    escapes = config.gradient_accumulation_steps == 1 < failed.gradient_accumulation_steps
    return (
        config.micro_batch_size >= failed.micro_batch_size
        and (config == failed or not escapes)
        and config == failed.model_copy(update=changes)
    )
