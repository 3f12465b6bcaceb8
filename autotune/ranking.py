"""What the finished runs amount to: which configuration is best, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.intervals import (
    SINGLE_PROCESS_DEVIATION,
    fresh_run_interval,
    paired_difference,
    pooled_deviation,
)
from autotune.records import Objective, Ranked, TrialRecord
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome

CONFIRMED_PROCESSES = 3
"""Fresh processes from which a figure counts as confirmed."""

TIE = 0.02
"""Throughputs this close (relative), and not told apart by their runs, are a tie: the
configuration with more memory headroom wins."""

SAME_BYTES = 0.01
"""Reserved peaks this close (relative) count as equal."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The configurations that a search is about; see the same fields of `SearchResult`."""

    best: Ranked | None
    runner_up: Ranked | None
    plain: Ranked | None
    own: Ranked | None


def full_run(record: TrialRecord, memory_limit_bytes: int) -> bool:
    """Whether the run counts: ended well, was not given up, and stayed below the limit."""
    measurement = record.measurement
    return (
        measurement.outcome is Outcome.OK
        and not measurement.stopped_early
        and measurement.samples_per_second is not None
        and (measurement.reserved_peak_bytes or 0) <= memory_limit_bytes
    )


def rank(
    records: Iterable[TrialRecord], *, objective: Objective, memory_limit_bytes: int
) -> Standing:
    """Rank the configurations that ran in full below the memory limit, and never ran out of it.

    A configuration's figure is the geometric mean over its confirmation runs once it has
    `CONFIRMED_PROCESSES` of them (fresh ones first), else over all of its full runs: the run that
    made it a leader is the lucky one of many, so it counts no longer once others exist. Baselines
    outside the space (`--fix zero_stage=3` leaves no plain configuration) are baselines only.
    """
    records = list(records)
    failed = {
        record.config
        for record in records
        if record.measurement.outcome is Outcome.OUT_OF_MEMORY
        or (record.measurement.reserved_peak_bytes or 0) > memory_limit_bytes
    }
    runs = _runs(
        record
        for record in records
        if full_run(record, memory_limit_bytes) and record.config not in failed
    )
    fresh = _runs(
        record for record in fresh_confirmations(records) if full_run(record, memory_limit_bytes)
    )
    in_turn = {config for config, again in fresh.items() if len(again) >= CONFIRMED_PROCESSES}
    figures = {
        config: _figures(fresh[config] if config in in_turn else config_runs)
        for config, config_runs in runs.items()
    }
    throughputs = {
        config: [_throughput(measurement) for measurement in measurements]
        for config, measurements in figures.items()
    }
    confirmed = [
        figure
        for config, figure in throughputs.items()
        if len(figure) >= CONFIRMED_PROCESSES and (config in in_turn or not in_turn)
    ]
    least = pooled_deviation(confirmed) or 0.0
    ranked = {
        config: Ranked(
            config=config,
            samples_per_second=fresh_run_interval(throughputs[config], least_deviation=least),
            measurements=tuple(figures[config]),
            in_turn=config in in_turn,
        )
        for config in runs
    }
    eligible = {record.config for record in records if record.eligible}
    contenders = [item for config, item in ranked.items() if config in eligible]
    order = (_by_memory if objective == "memory" else _by_throughput)(contenders)
    return Standing(
        best=order[0] if order else None,
        runner_up=order[1] if len(order) > 1 else None,
        plain=_baseline(runs, ranked, "plain"),
        own=_baseline(runs, ranked, "own"),
    )


def leaders(
    records: Iterable[TrialRecord], *, objective: Objective, memory_limit_bytes: int
) -> list[Ranked]:
    """Every configuration that ran in full below the limit, the most promising first."""
    remaining = list(records)
    order: list[Ranked] = []
    while True:
        best = rank(remaining, objective=objective, memory_limit_bytes=memory_limit_bytes).best
        if best is None:
            return order
        order.append(best)
        remaining = [record for record in remaining if record.config != best.config]


def reserved_bytes(ranked: Ranked) -> int:
    """Reserved peak of a rank: the largest of the configuration's runs."""
    return max(measurement.reserved_peak_bytes or 0 for measurement in ranked.measurements)


def fresh_confirmations(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The confirmation runs since the last other run.

    A search that goes on after a confirmation, hours later perhaps, compares with figures of
    another state of the machine: its leaders are then confirmed again, side by side.
    """
    last = max((index for index, item in enumerate(records) if item.role != "confirm"), default=-1)
    return list(records[last + 1 :])


def is_confirmed(ranked: Ranked) -> bool:
    """Whether enough fresh processes stand behind the figure."""
    return ranked.samples_per_second.processes >= CONFIRMED_PROCESSES


def _runs(records: Iterable[TrialRecord]) -> dict[TrainConfig, list[TrialRecord]]:
    runs: dict[TrainConfig, list[TrialRecord]] = {}
    for record in records:
        runs.setdefault(record.config, []).append(record)
    return runs


def _figures(records: Sequence[TrialRecord]) -> list[Measurement]:
    confirmations = [record.measurement for record in records if record.role == "confirm"]
    if len(confirmations) >= CONFIRMED_PROCESSES:
        return confirmations
    return [record.measurement for record in records]


def rates(ranked: Ranked) -> list[float]:
    """Samples per second of each of its runs, in the order in which they ran."""
    return [_throughput(measurement) for measurement in ranked.measurements]


def _throughput(measurement: Measurement) -> float:
    samples = measurement.samples_per_second
    assert samples is not None  # full runs only
    return samples


def _baseline(
    runs: dict[TrainConfig, list[TrialRecord]], ranked: dict[TrainConfig, Ranked], role: str
) -> Ranked | None:
    """Of several plain runs, the one with the largest micro-batch; the newest of one's own."""
    configs = [
        config for config, records in runs.items() if any(record.role == role for record in records)
    ]
    if not configs:
        return None
    if role == "plain":
        return ranked[max(configs, key=lambda config: config.micro_batch_size)]
    return ranked[configs[-1]]


def _by_throughput(ranked: list[Ranked]) -> list[Ranked]:
    any_confirmed = any(map(is_confirmed, ranked))

    def figure(item: Ranked) -> float:
        # Beside confirmed figures, a single run must lead by more than its own scatter.
        discount = SINGLE_PROCESS_DEVIATION if any_confirmed and not is_confirmed(item) else 0.0
        return item.samples_per_second.value * (1 - discount)

    order = sorted(ranked, key=figure, reverse=True)
    if order and is_confirmed(order[0]):
        ties = [item for item in order[1:] if is_confirmed(item) and _tie(order[0], item)]
        winner = order[0]
        for item in ties:
            if reserved_bytes(item) < reserved_bytes(winner) * (1 - SAME_BYTES):
                winner = item
        order.remove(winner)
        order.insert(0, winner)
    return order


def _tie(first: Ranked, second: Ranked) -> bool:
    if second.samples_per_second.value < first.samples_per_second.value * (1 - TIE):
        return False
    rounds = min(len(first.measurements), len(second.measurements))
    mean, half_width = paired_difference(rates(first)[:rounds], rates(second)[:rounds])
    return mean <= half_width


def _by_memory(ranked: list[Ranked]) -> list[Ranked]:
    """Least reserved peak first; of peaks that count as equal, the faster first."""
    remaining = sorted(ranked, key=reserved_bytes)
    order: list[Ranked] = []
    while remaining:
        bound = reserved_bytes(remaining[0]) * (1 + SAME_BYTES)
        equal = [item for item in remaining if reserved_bytes(item) <= bound]
        fastest = max(equal, key=lambda item: item.samples_per_second.value)
        order.append(fastest)
        remaining.remove(fastest)
    return order
