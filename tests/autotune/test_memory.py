from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory import MemoryModel
from autotune.model_states import model_state_terms
from autotune.records import ModelProfile
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome, RankMemory
from tests.autotune import factories

MIB = 2**20

configs = st.builds(
    TrainConfig,
    ranks=st.sampled_from([1, 2, 8]),
    micro_batch_size=st.integers(1, 64),
    gradient_accumulation_steps=st.sampled_from([1, 4]),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    reduce_dtype=st.sampled_from(["fp32", "compute"]),
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
    compile=st.booleans(),
)
sizes = st.floats(MIB, 4096 * MIB)


def make_model(limit: int | None = 1024 * MIB, **profile: Any) -> MemoryModel:
    return MemoryModel(factories.profile(**profile), factories.hardware(), limit)


def ran(config: TrainConfig, allocated: float, reserved: float | None = None) -> Measurement:
    peak = allocated * 1.4 if reserved is None else reserved
    return Measurement(
        outcome=Outcome.OK,
        global_batch_size=config.global_batch_size,
        ranks=config.ranks,
        memory=(
            RankMemory(
                allocated_peak_bytes=int(allocated),
                reserved_peak_bytes=int(peak),
                startup_peak_bytes=int(factories.PARAMETER_BYTES * 1.2),
            ),
        ),
    )


def failed(config: TrainConfig, outcome: Outcome = Outcome.OUT_OF_MEMORY) -> Measurement:
    return Measurement(
        outcome=outcome, global_batch_size=config.global_batch_size, ranks=config.ranks
    )


def true_bytes(profile: ModelProfile, config: TrainConfig) -> float:
    """A world in which bf16 saves less, and the engine holds more, than the priors say."""
    factor = {"fp32": 1.0, "bf16": 0.75, "fp16": 0.75}[config.precision]
    factor *= {"none": 1.0, "selective": 0.6, "full": 0.2}[config.activation_checkpointing]
    activations = (18 + 41 * config.micro_batch_size) * MIB * factor
    return sum(model_state_terms(profile, config).values()) * 1.05 + activations + 7 * MIB


@settings(deadline=None)
@given(config=configs, seen=st.lists(st.tuples(configs, sizes), max_size=4))
def test_predictions_are_physical_whatever_was_learned(
    config: TrainConfig, seen: list[tuple[TrainConfig, float]]
) -> None:
    model = make_model()
    for other, allocated in seen:
        model.learn(other, ran(other, allocated))
    prediction = model.predict(config)
    terms = model_state_terms(factories.profile(), config)
    states = sum(terms.values()) - terms["communication"]
    assert prediction.allocated_bytes >= states
    assert prediction.reserved_bytes >= states
    assert prediction.reserved_deviation_bytes > 0
    assert 0 <= prediction.fit_probability <= 1
    assert sum(prediction.terms.values()) == pytest.approx(prediction.allocated_bytes)
    assert all(size >= 0 for size in prediction.terms.values())


@settings(deadline=None)
@given(config=configs, seen=st.lists(st.tuples(configs, sizes), max_size=4))
def test_a_larger_micro_batch_never_needs_less(
    config: TrainConfig, seen: list[tuple[TrainConfig, float]]
) -> None:
    model = make_model()
    for other, allocated in seen:
        model.learn(other, ran(other, allocated))
    larger = config.model_copy(update={"micro_batch_size": config.micro_batch_size + 3})
    small, large = model.predict(config), model.predict(larger)
    assert large.allocated_bytes >= small.allocated_bytes


@settings(deadline=None)
@given(config=configs, allocated=sizes, overhead=st.floats(1.0, 1.8))
def test_learning_brings_the_prediction_to_what_was_measured(
    config: TrainConfig, allocated: float, overhead: float
) -> None:
    model = make_model()
    allocated += sum(model_state_terms(factories.profile(), config).values())
    measured = ran(config, allocated, allocated * overhead)
    before = model.predict(config)
    model.learn(config, measured)
    after = model.predict(config)
    error = abs(before.allocated_bytes - allocated)
    assert abs(after.allocated_bytes - allocated) <= error + 1


@settings(deadline=None)
@given(config=configs, low=sizes, high=sizes)
def test_a_larger_limit_never_fits_less(config: TrainConfig, low: float, high: float) -> None:
    low, high = sorted((low, high))
    seen = TrainConfig(ranks=2, micro_batch_size=4)
    chances = []
    for limit in (int(low), int(high), None):
        model = make_model(limit)
        model.learn(seen, ran(seen, 400 * MIB))
        chances.append(model.predict(config).fit_probability)
    assert chances == sorted(chances)
    assert chances[-1] == 1.0


def test_an_affine_law_is_found_from_two_runs_of_its_kind() -> None:
    profile = factories.profile()
    model = make_model()
    at = {"ranks": 2, "precision": "bf16", "activation_checkpointing": "selective"}
    for size in (2, 4):
        config = TrainConfig(micro_batch_size=size, **at)
        model.learn(config, ran(config, true_bytes(profile, config)))
    for size, tolerance in ((1, 0.02), (8, 0.04), (32, 0.07)):
        config = TrainConfig(micro_batch_size=size, **at)
        expected = true_bytes(profile, config)
        assert model.predict(config).allocated_bytes == pytest.approx(expected, rel=tolerance)


def test_what_is_learned_carries_over_to_other_kinds() -> None:
    profile = factories.profile()
    untaught, taught = make_model(), make_model()
    for stage in (0, 2):
        config = TrainConfig(ranks=2, micro_batch_size=8, precision="bf16", zero_stage=stage)
        taught.learn(config, ran(config, true_bytes(profile, config)))
    config = TrainConfig(ranks=2, micro_batch_size=8, precision="bf16", zero_stage=3)
    expected = true_bytes(profile, config)
    errors = [abs(model.predict(config).allocated_bytes - expected) for model in (taught, untaught)]
    assert errors[0] < errors[1] / 3


def test_uncertainty_grows_beyond_what_was_measured() -> None:
    model = make_model()
    config = TrainConfig(ranks=2, micro_batch_size=2, precision="bf16")
    model.learn(config, ran(config, 300 * MIB))
    deviations = [
        model.predict(config.model_copy(update={"micro_batch_size": size})) for size in (2, 8, 32)
    ]
    spread = [item.reserved_deviation_bytes for item in deviations]
    assert spread == sorted(spread)


def test_running_out_of_memory_is_a_lower_bound() -> None:
    model = make_model()
    config = TrainConfig(ranks=2, micro_batch_size=8, precision="bf16")
    larger = config.model_copy(update={"micro_batch_size": 16})
    smaller = config.model_copy(update={"micro_batch_size": 2})
    before = {item: model.predict(item) for item in (config, larger, smaller)}
    model.learn(config, failed(config))
    assert model.predict(config).fit_probability <= 0.02
    assert model.predict(larger).fit_probability <= 0.02
    assert model.predict(config).allocated_bytes > before[config].allocated_bytes
    assert model.predict(smaller).reserved_bytes > before[smaller].reserved_bytes
    other = TrainConfig(ranks=2, micro_batch_size=16, zero_stage=3, precision="bf16")
    assert model.predict(other).fit_probability > 0.02


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.NOT_FINITE])
def test_other_failures_teach_nothing(outcome: Outcome) -> None:
    model = make_model()
    config = TrainConfig(ranks=2, micro_batch_size=8)
    before = model.predict(config)
    model.learn(config, failed(config, outcome))
    assert model.predict(config) == before


def test_the_largest_micro_batch_is_approached_with_few_failures() -> None:
    """Always try the largest that is more likely to fit than not: one failure at most, per kind."""
    profile, limit = factories.profile(), 1500 * MIB
    for precision in ("fp32", "bf16"):
        model = make_model(limit)
        tried: dict[int, bool] = {}
        while True:
            untried = [
                config
                for size in (1, 2, 4, 8, 16, 32, 64)
                if size not in tried
                for config in [
                    TrainConfig(
                        ranks=2,
                        micro_batch_size=size,
                        precision=precision,
                        gradient_accumulation_steps=64 // size,
                    )
                ]
                if model.predict(config).fit_probability > 0.5
            ]
            if not untried:
                break
            config = max(untried, key=lambda item: item.micro_batch_size)
            allocated = true_bytes(profile, config)
            fits = allocated * 1.4 < limit
            tried[config.micro_batch_size] = fits
            model.learn(config, ran(config, allocated) if fits else failed(config))
        best = max(size for size, fits in tried.items() if fits)
        at_best = TrainConfig(ranks=2, micro_batch_size=2 * best, precision=precision)
        assert true_bytes(profile, at_best) * 1.4 > limit
        assert list(tried.values()).count(False) <= 1


def test_startup_alone_can_exceed_the_limit() -> None:
    profile = factories.profile(parameter_bytes=4096 * MIB, optimizer_state_bytes=0)
    config = TrainConfig(ranks=64, zero_stage=3, activation_checkpointing="full")
    limit = 2048 * MIB
    model = MemoryModel(profile, factories.hardware(device="cuda"), limit)
    prediction = model.predict(config)
    assert prediction.allocated_bytes < limit / 4
    assert prediction.reserved_bytes > limit
    assert prediction.fit_probability < 0.2


def test_a_profile_without_activations_is_uncertain_but_usable() -> None:
    model = make_model(activation_bytes={})
    config = TrainConfig(ranks=2, micro_batch_size=4)
    prediction = model.predict(config)
    assert prediction.reserved_deviation_bytes > 0.5 * prediction.terms["activations"]
    model.learn(config, ran(config, 700 * MIB))
    assert model.predict(config).allocated_bytes == pytest.approx(700 * MIB, rel=0.02)


def test_needs_names_the_largest_part() -> None:
    model = make_model()
    small = TrainConfig(ranks=2, zero_stage=0, activation_checkpointing="full")
    text = model.needs(small)
    assert "MiB, of which optimizer states 82.6 MiB" in text
    large = TrainConfig(ranks=2, micro_batch_size=32)
    assert "activations" in model.needs(large)
    assert model.smallest([large, small]) == small
    assert math.isfinite(model.predict(large).reserved_bytes)
