from __future__ import annotations

from typing import Any

import pytest

from runtime.measurement import Measurement, Outcome, RankMemory


def measure(**fields: Any) -> Measurement:
    return Measurement(outcome=Outcome.OK, global_batch_size=32, ranks=2, **fields)


def test_throughput_comes_from_the_median_step() -> None:
    measurement = measure(step_seconds=(0.5, 0.4, 9.0), tokens_per_sample=64)
    assert measurement.median_step_seconds == 0.5
    assert measurement.samples_per_second == 64.0
    assert measurement.tokens_per_second == 64.0 * 64


def test_what_was_not_measured_is_none() -> None:
    measurement = measure(tokens_per_sample=64)
    assert measurement.median_step_seconds is None
    assert measurement.samples_per_second is None
    assert measurement.tokens_per_second is None
    assert measurement.allocated_peak_bytes is None
    assert measurement.reserved_peak_bytes is None


def test_images_have_no_tokens() -> None:
    assert measure(step_seconds=(1.0,)).tokens_per_second is None


def test_the_rank_with_the_largest_peak_counts() -> None:
    low = RankMemory(allocated_peak_bytes=10, reserved_peak_bytes=30)
    high = RankMemory(allocated_peak_bytes=20, reserved_peak_bytes=25, startup_peak_bytes=40)
    measurement = measure(memory=(low, high))
    assert measurement.allocated_peak_bytes == 20
    assert measurement.reserved_peak_bytes == 40


def test_parts_of_memory_add_up_to_the_peak() -> None:
    memory = RankMemory(
        parameter_bytes=10, gradient_bytes=11, optimizer_bytes=20, allocated_peak_bytes=100
    )
    assert memory.other_bytes == 59
    # The parts are those just before the optimizer step, which need not be the peak's moment.
    assert RankMemory(parameter_bytes=10, allocated_peak_bytes=4).other_bytes == 0


def test_overhead_is_what_is_left() -> None:
    measurement = measure(total_seconds=5.0, build_seconds=1.0, training_seconds=3.5)
    assert measurement.overhead_seconds == pytest.approx(0.5)
