import random
from dataclasses import replace
from typing import Any

import pytest

from autotune.ranking import leaders, rank, reserved_bytes
from autotune.records import Role, TrialRecord
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome, RankMemory
from tests.autotune.factories import LIMIT, MIB, config, measurement_of
from tests.autotune.tables import record_of

A, B, C = (config(micro_batch_size=size) for size in (1, 2, 4))


def measured(cfg: TrainConfig, rate: float, megabytes: int = 300) -> Measurement:
    """A run at `rate` samples per second that reserved so many MiB."""
    return replace(
        measurement_of(cfg, random.Random(0), outcome=Outcome.OK),
        step_seconds=(64 / rate,) * 6,
        memory=(RankMemory(reserved_peak_bytes=megabytes * MIB),),
    )


def runs(
    cfg: TrainConfig, *rates: float, role: Role = "confirm", megabytes: int = 300
) -> list[TrialRecord]:
    return [record_of(cfg, measured(cfg, rate, megabytes), role) for rate in rates]


OPTIONS: dict[str, Any] = {"objective": "throughput", "memory_limit_bytes": LIMIT}


def best(records: list[TrialRecord]) -> TrainConfig | None:
    found = rank(records, objective="throughput", memory_limit_bytes=LIMIT).best
    return None if found is None else found.config


def test_confirmation_runs_replace_the_lucky_one() -> None:
    records = [*runs(A, 130.0, role="search"), *runs(A, 99.0, 100.0, 101.0)]
    standing = rank(records, objective="throughput", memory_limit_bytes=LIMIT)
    assert standing.best is not None
    assert standing.best.samples_per_second.value == pytest.approx(100.0, rel=1e-3)
    assert standing.best.samples_per_second.processes == 3
    assert standing.runner_up is None


def test_an_older_confirmation_counts_until_the_search_went_on() -> None:
    older = runs(A, 200.0, 202.0, 201.0)  # the machine was twice as fast
    found = rank([*older, *runs(B, 110.0, role="search")], **OPTIONS).best
    assert found is not None
    assert (found.config, found.in_turn) == (A, False)
    fresh = [*runs(A, 100.0, 101.0, 99.0), *runs(B, 110.0, 111.0, 109.0)]
    found = rank([*older, *runs(B, 110.0, role="search"), *fresh], **OPTIONS).best
    assert found is not None
    assert (found.config, found.in_turn) == (B, True)
    assert found.samples_per_second.relative_half_width < 0.1


def test_a_tie_goes_to_more_memory_headroom() -> None:
    fast = runs(A, 100.0, 110.0, 105.0, megabytes=400)
    small = runs(B, 99.5, 109.0, 105.5, megabytes=300)
    assert best(fast) == A
    assert best([*fast, *small]) == B
    assert best([*fast, *runs(B, 99.5, 109.0, 105.5, megabytes=399)]) == A


def test_a_baseline_outside_the_space_does_not_win() -> None:
    plain = [replace(record, eligible=False) for record in runs(A, 200.0, role="plain")]
    standing = rank(
        [*plain, *runs(B, 100.0, role="search")], objective="throughput", memory_limit_bytes=LIMIT
    )
    assert standing.best is not None
    assert standing.best.config == B
    assert standing.plain is not None
    assert standing.plain.config == A


def test_a_difference_that_every_round_shows_is_no_tie() -> None:
    fast = runs(A, 100.0, 150.0, 120.0, megabytes=400)
    slow = runs(B, 98.9, 148.4, 118.7, megabytes=300)  # 1.1% slower under any drift
    assert best([*fast, *slow]) == A


def test_more_than_two_percent_is_no_tie_however_noisy() -> None:
    fast = runs(A, 100.0, 150.0, 80.0, megabytes=400)
    slow = runs(B, 130.0, 95.0, 88.0, megabytes=100)
    assert best([*fast, *slow]) == A


def test_beside_confirmed_figures_a_single_run_must_lead_by_its_scatter() -> None:
    confirmed = runs(A, 99.0, 100.0, 101.0)
    assert best([*confirmed, *runs(B, 105.0, role="search")]) == A
    assert best([*confirmed, *runs(B, 110.0, role="search")]) == B


@pytest.mark.parametrize(
    "bad",
    [
        replace(measured(A, 200.0), outcome=Outcome.OUT_OF_MEMORY),
        measured(A, 200.0, megabytes=LIMIT // MIB + 1),
    ],
)
def test_what_ran_out_of_memory_once_does_not_win(bad: Measurement) -> None:
    records = [*runs(A, 200.0, role="search"), record_of(A, bad), *runs(B, 100.0, role="search")]
    assert best(records) == B


@pytest.mark.parametrize(
    "changes", [{"stopped_early": True}, {"outcome": Outcome.CRASHED}, {"step_seconds": ()}]
)
def test_runs_that_did_not_end_well_do_not_count(changes: dict[str, object]) -> None:
    bad = replace(measured(A, 200.0), **changes)  # type: ignore[arg-type]
    assert best([record_of(A, bad)]) is None


def test_the_interval_takes_the_scatter_of_all_confirmed_configurations() -> None:
    alone = rank(runs(A, 100.0, 100.1, 100.2), objective="throughput", memory_limit_bytes=LIMIT)
    beside = rank(
        [*runs(A, 100.0, 100.1, 100.2), *runs(B, 40.0, 50.0, 60.0)],
        objective="throughput",
        memory_limit_bytes=LIMIT,
    )
    assert alone.best is not None
    assert beside.best is not None
    narrow, wide = alone.best.samples_per_second, beside.best.samples_per_second
    assert wide.relative_half_width > 10 * narrow.relative_half_width


def test_the_plain_baseline_is_the_one_with_the_largest_micro_batch() -> None:
    records = [
        *runs(C, 50.0, role="plain"),
        *runs(B, 60.0, role="plain"),
        *runs(A, 70.0, role="own"),
    ]
    standing = rank(records, objective="throughput", memory_limit_bytes=LIMIT)
    assert standing.plain is not None
    assert standing.plain.config == C
    assert standing.own is not None
    assert standing.own.config == A


def test_least_memory_wins_and_of_equal_memory_the_faster() -> None:
    records = [
        *runs(A, 100.0, role="search", megabytes=300),
        *runs(B, 120.0, role="search", megabytes=302),
        *runs(C, 500.0, role="search", megabytes=400),
    ]
    order = leaders(records, objective="memory", memory_limit_bytes=LIMIT)
    assert [item.config for item in order] == [B, A, C]
    assert reserved_bytes(order[0]) == 302 * MIB
