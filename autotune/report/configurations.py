"""What the runs of a search amount to, one record for each configuration that was tried."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from autotune.records import Interval, Prediction, Ranked, Role, SearchResult, TrialRecord
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One configuration with all of its runs."""

    config: TrainConfig
    trials: tuple[TrialRecord, ...]
    interval: Interval | None
    """Samples per second, for the configurations that the search ranked; else None."""

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(dict.fromkeys(trial.role for trial in self.trials))

    @property
    def prediction(self) -> Prediction | None:
        """As it was before the first run."""
        return self.trials[0].prediction

    @property
    def finished(self) -> tuple[Measurement, ...]:
        """The runs that ended well."""
        runs = (trial.measurement for trial in self.trials)
        return tuple(run for run in runs if run.outcome is Outcome.OK)

    @property
    def outcome(self) -> Outcome:
        """The worst that happened: a configuration that failed once cannot be trusted."""
        failed = [t.measurement for t in self.trials if t.measurement.outcome is not Outcome.OK]
        return failed[-1].outcome if failed else Outcome.OK

    @property
    def reason(self) -> str:
        return next((t.measurement.reason for t in self.trials if t.measurement.reason), "")

    @property
    def stopped_early(self) -> bool:
        """Every run was ended before its full length, so the figures rest on few steps."""
        return bool(self.finished) and all(run.stopped_early for run in self.finished)

    @property
    def samples_per_second(self) -> float | None:
        """Over all ranks: the interval's figure, else the median over the runs."""
        if self.interval is not None:
            return self.interval.value
        rates = [run.samples_per_second for run in self.finished]
        known = [rate for rate in rates if rate is not None]
        return statistics.median(known) if known else None

    @property
    def median_step_seconds(self) -> float | None:
        rate = self.samples_per_second
        return self.config.global_batch_size / rate if rate else None

    @property
    def tokens_per_second(self) -> float | None:
        """None where samples are not sequences of tokens."""
        tokens = next((run.tokens_per_sample for run in self.finished), None)
        rate = self.samples_per_second
        return rate * tokens if rate and tokens else None

    @property
    def allocated_peak_bytes(self) -> int | None:
        """Of the rank and the run with the largest."""
        return _largest([run.allocated_peak_bytes for run in self.finished])

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Of the rank and the run with the largest: what a memory limit is compared with."""
        return _largest([run.reserved_peak_bytes for run in self.finished])


def tried_configurations(result: SearchResult) -> list[Tried]:
    """In the order of their first run."""
    runs: dict[TrainConfig, list[TrialRecord]] = {}
    for trial in result.trials:
        runs.setdefault(trial.config, []).append(trial)
    intervals = {ranked.config: ranked.samples_per_second for ranked in ranked_of(result)}
    return [
        Tried(config=config, trials=tuple(trials), interval=intervals.get(config))
        for config, trials in runs.items()
    ]


def ranked_of(result: SearchResult) -> list[Ranked]:
    """The configurations with an interval, the best first; each once."""
    named = (result.best, result.runner_up, result.plain, result.own)
    return list({ranked.config: ranked for ranked in reversed(named) if ranked}.values())[::-1]


def name_of(config: TrainConfig, result: SearchResult) -> str:
    """`winner`, `plain`, `yours`, `runner-up`, several joined by ` = `, or empty."""
    named = {
        "winner": result.best,
        "plain": result.plain,
        "yours": result.own,
        "runner-up": result.runner_up,
    }
    return " = ".join(
        name for name, ranked in named.items() if ranked is not None and ranked.config == config
    )


def series_name(config: TrainConfig, configs: list[TrainConfig]) -> str:
    """What `config` is grouped by in figures: its ZeRO stage, or where all share one, precision."""
    if len({other.zero_stage for other in configs}) > 1:
        return f"ZeRO {config.zero_stage}"
    return config.precision


def _largest(figures: list[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)
