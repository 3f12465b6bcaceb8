"""Every run with its outcome and reason, and why the other configurations were not tried."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from autotune.records import Role, SearchResult, TrialRecord, Untried
from autotune.report.configurations import name_of
from autotune.report.render import render
from runtime.measurement import Outcome

SHOWN_OF_A_GROUP = 25
"""Untried configurations listed for each reason; trials.csv has them all."""

SHOWN_GROUPS = 12


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row: one run of one configuration in fresh processes."""

    number: int
    label: str
    name: str
    role: Role
    outcome: Outcome
    stopped_early: bool
    step_seconds: float | None
    samples_per_second: float | None
    share: float
    """Of the fastest run's throughput, in [0, 1]."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    predicted_bytes: float | None
    """Reserved peak, as predicted before the run."""
    fit_probability: float | None
    reason: str
    failed_rank: int | None
    traceback: str


@dataclass(frozen=True, kw_only=True)
class UntriedGroup:
    """Untried configurations with the same reason, numbers apart."""

    reason: str
    count: int
    shown: tuple[Untried, ...]
    """The most promising first."""
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What ran, and what did not."""

    runs: tuple[Run, ...]
    outcomes: tuple[tuple[str, int], ...]
    """How many runs ended in each way, in the order of `Outcome`."""
    groups: tuple[UntriedGroup, ...]
    """The largest first."""
    groups_left_out: int
    untried_count: int


def runs(result: SearchResult) -> Runs:
    """The runs in their order, and the untried by reason."""
    rates = [trial.measurement.samples_per_second or 0.0 for trial in result.trials]
    fastest = max(rates, default=0.0) or 1.0
    outcomes = [trial.measurement.outcome for trial in result.trials]
    groups = _groups(result)
    return Runs(
        runs=tuple(_run(trial, result, fastest) for trial in result.trials),
        outcomes=tuple((kind.value, outcomes.count(kind)) for kind in Outcome if kind in outcomes),
        groups=tuple(groups[:SHOWN_GROUPS]),
        groups_left_out=len(groups[SHOWN_GROUPS:]),
        untried_count=len(result.untried),
    )


def draw_runs(record: Runs) -> Markup:
    """The table of runs, and the untried by reason."""
    return render("runs.html", record=record)


def _run(trial: TrialRecord, result: SearchResult, fastest: float) -> Run:
    run = trial.measurement
    return Run(
        number=trial.number,
        label=trial.config.label(),
        name=name_of(trial.config, result),
        role=trial.role,
        outcome=run.outcome,
        stopped_early=run.stopped_early,
        step_seconds=run.median_step_seconds,
        samples_per_second=run.samples_per_second,
        share=(run.samples_per_second or 0.0) / fastest,
        allocated_bytes=run.allocated_peak_bytes,
        reserved_bytes=run.reserved_peak_bytes,
        predicted_bytes=trial.prediction.reserved_bytes if trial.prediction else None,
        fit_probability=trial.prediction.fit_probability if trial.prediction else None,
        reason=run.reason,
        failed_rank=run.failed_rank,
        traceback=run.traceback,
    )


def _groups(result: SearchResult) -> list[UntriedGroup]:
    members: dict[str, list[Untried]] = {}
    for item in result.untried:
        members.setdefault(_pattern(item.reason), []).append(item)
    groups = [
        UntriedGroup(
            reason=_common_reason(pattern, items),
            count=len(items),
            shown=tuple(sorted(items, key=_promise)[:SHOWN_OF_A_GROUP]),
            global_batch_size=result.global_batch_size,
        )
        for pattern, items in members.items()
    ]
    return sorted(groups, key=lambda group: -group.count)


def _pattern(reason: str) -> str:
    """`reason` with its figures left out: `predicted to need … of …`."""
    return re.sub(r"[-+±]?\d[\d.,]*\d?(?:e[-+]?\d+)?\s?(?:[KMGT]i?B|ms|s\b|%)?", "…", reason)


def _common_reason(pattern: str, items: Iterable[Untried]) -> str:
    reasons = {item.reason for item in items}
    return reasons.pop() if len(reasons) == 1 else pattern


def _promise(item: Untried) -> tuple[float, float]:
    prediction = item.prediction
    if prediction is None:
        return float("inf"), float("inf")
    seconds = prediction.step_seconds
    return seconds if seconds is not None else float("inf"), prediction.reserved_bytes
