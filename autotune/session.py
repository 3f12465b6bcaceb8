"""One session of a search: runs configurations, learns from each, and keeps the time."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.candidates import Candidates
from autotune.intervals import ENOUGH_SECONDS, MARGIN, MAX_STEPS, cannot_win, enough_steps, margin
from autotune.memory import MemoryModel
from autotune.observer import Observer
from autotune.ranking import Standing, full_run, rank
from autotune.records import Objective, Prediction, Role, TrialRecord
from autotune.runner import Runner
from autotune.space import Space
from autotune.store import OpenTrial, Store
from runtime.config import TrainConfig
from runtime.errors import ModelFileError, RunError
from runtime.measurement import Outcome

LEAST_DEADLINE_SECONDS = 60.0
LONGEST_DEADLINE_SECONDS = 1800.0
_ASSUMED_FIXED_SECONDS = 5.0
"""Start, build and warm-up of a run, until one was measured."""

_MEMORY_STEPS = 3
"""Timed steps of a run that is after memory alone: the peak repeats from step to step."""

_USUAL_TRIALS, _USUAL_CONFIRMATIONS = 10, 12
"""Runs of a usual search, for a guess of the time left."""

_REPEATED_FAILURES = 2
"""Runs that fail, where none has ended well, after which the search ends."""


class StopSearch(Exception):  # noqa: N818  it is no error
    """Ends the search; the message is why."""


@dataclass
class Session:
    """The state that the parts of a search share."""

    store: Store
    runner: Runner
    space: Space
    memory: MemoryModel
    candidates: Candidates
    observer: Observer
    max_trials: int
    time_budget_seconds: float | None
    started: float
    """`time.monotonic()` at the start of this session."""
    notes: list[str] = field(default_factory=list)

    @property
    def objective(self) -> Objective:
        """What the search optimises."""
        return self.store.header.objective

    @property
    def memory_limit_bytes(self) -> int:
        """Of one rank."""
        return self.store.header.memory_limit_bytes

    @property
    def records(self) -> list[TrialRecord]:
        """Every finished run of the study."""
        return self.store.records

    def standing(self) -> Standing:
        """Best, runner-up and baselines so far."""
        return rank(
            self.records, objective=self.objective, memory_limit_bytes=self.memory_limit_bytes
        )

    def note(self, text: str) -> None:
        """Tell the observer, and keep the sentence for the result."""
        if text not in self.notes:
            self.notes.append(text)
            self.observer.on_note(text)

    def replay(self) -> None:
        """Learn from the runs of earlier sessions.

        An earlier session in which nothing ran well leaves nothing but its limits: what was wrong
        may have been mended outside the model file.
        """
        if not any(record.measurement.outcome is Outcome.OK for record in self.records):
            self.store.records = [
                record
                for record in self.records
                if record.measurement.outcome is Outcome.OUT_OF_MEMORY
            ]
        for record in self.records:
            self._learn(record)

    def elapsed(self) -> float:
        """Seconds of this session."""
        return time.monotonic() - self.started

    def time_left(self) -> float:
        """Of the time budget, in seconds; infinite without one."""
        if self.time_budget_seconds is None:
            return math.inf
        return self.time_budget_seconds - self.elapsed()

    def trials_left(self) -> int:
        """Of --max-trials, over all sessions; baselines and confirmations are not counted."""
        return self.max_trials - sum(record.role == "search" for record in self.records)

    def trial_seconds(self, config: TrainConfig) -> float:
        """What a full run of `config` is expected to take, start and end included."""
        runs = [record.measurement for record in self.records if full_run(record, 2**63)]
        fixed = [run.total_seconds - math.fsum(run.step_seconds) for run in runs]
        step = self._step_seconds(config)
        timed = min(max(3 * step, ENOUGH_SECONDS), MAX_STEPS * step)
        return (statistics.median(fixed) if fixed else _ASSUMED_FIXED_SECONDS) + timed

    def seconds_left(self) -> float:
        """A rough guess of the seconds until the search ends, confirmation included."""
        runs = [record.measurement.total_seconds for record in self.records]
        typical = statistics.median(runs) if runs else 2 * _ASSUMED_FIXED_SECONDS
        confirmed = sum(record.role == "confirm" for record in self.records)
        searched = len(self.records) - confirmed
        search = 0 if confirmed else max(1, _USUAL_TRIALS - searched)
        confirm = max(1, _USUAL_CONFIRMATIONS - confirmed)
        return min(self.time_left(), (min(search, self.trials_left()) + confirm) * typical)

    def predict(self, config: TrainConfig) -> Prediction:
        """Memory, and the step time once a run has been measured."""
        prediction = self.memory.predict(config)
        seconds = self.candidates.step_seconds(config)
        if seconds is None:
            return prediction
        value, low, high = seconds
        return dataclasses.replace(
            prediction, step_seconds=value, step_seconds_low=low, step_seconds_high=high
        )

    def measure(
        self,
        config: TrainConfig,
        role: Role,
        *,
        race: bool = False,
        opened: OpenTrial | None = None,
    ) -> TrialRecord:
        """Run `config`, learn from it, and keep the record.

        Args:
            race: end the run once it cannot win against the best so far.
            opened: the trial, where the study asked for it.

        Raises:
            StopSearch: the study cannot be written any more; the record is kept in memory.
            ModelFileError, RunError: nothing ran well so far, and this was not the first failure.
        """
        opened = opened or self.store.begin(config, role)
        opened.prediction = self.predict(config)
        opened.eligible = self.space.find(config) is not None
        self.observer.on_trial_start(config, role, opened.prediction)
        best = self.standing().best if race and self.objective == "throughput" else None
        best_steps = [] if best is None else list(best.measurements[-1].step_seconds)
        best_seconds = None if best is None else self._step_seconds(best.config)
        slack = margin(best_steps) if best_steps else MARGIN
        lost = False

        def keep_going(step_seconds: Sequence[float]) -> bool:
            nonlocal lost
            lost = cannot_win(step_seconds, best_seconds, slack)
            if self.objective == "memory" and role == "search":
                return len(step_seconds) < _MEMORY_STEPS
            return not lost and not enough_steps(step_seconds) and self.time_left() > 0

        try:
            measurement = self.runner.run(
                config,
                threads_per_rank=self.space.threads_per_rank,
                memory_limit_bytes=self.memory_limit_bytes,
                deadline_seconds=self._deadline_seconds(config),
                keep_going=keep_going,
                on_step=self.observer.on_step,
            )
        except BaseException as error:
            self.store.abandon(opened, type(error).__name__)
            raise
        if lost and measurement.outcome is Outcome.OK:
            measurement = dataclasses.replace(measurement, stopped_early=True)
        record = self.store.finish(opened, measurement)
        self._learn(record)
        self.store.spend(self.elapsed())
        self.observer.on_trial_end(record)
        standing = self.standing()
        if standing.best is not None:
            self.observer.on_best(standing.best)
        self.observer.on_time_left(self.seconds_left())
        if self.store.problem:
            raise StopSearch(self.store.problem)
        self._check_failures()
        return record

    def failure(self) -> ModelFileError | RunError | None:
        """The first failure, where nothing ran well and something failed; else None.

        Out of memory is no failure. A ModelFileError where the user's code is known to be at fault.
        """
        if any(record.measurement.outcome is Outcome.OK for record in self.records):
            return None
        failed = [
            record
            for record in self.records
            if record.measurement.outcome is not Outcome.OUT_OF_MEMORY
        ]
        if not failed:
            return None
        measurement = failed[0].measurement
        if measurement.user_error:
            return ModelFileError(measurement.reason, measurement.traceback)
        return RunError(
            f"{self.store.header.model_file}: no run ended well; the first "
            f"({failed[0].config.label()}): {measurement.outcome.value}: {measurement.reason}",
            measurement.traceback,
        )

    def _check_failures(self) -> None:
        failures = sum(
            record.measurement.outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY)
            for record in self.records
        )
        error = self.failure()
        if error is not None and failures >= _REPEATED_FAILURES:
            raise error

    def _learn(self, record: TrialRecord) -> None:
        self.memory.learn(record.config, record.measurement)
        self.candidates.observe(record)

    def _step_seconds(self, config: TrainConfig) -> float:
        known = [
            record.measurement.median_step_seconds
            for record in self.records
            if record.config == config and record.measurement.median_step_seconds is not None
        ]
        if known:
            return statistics.geometric_mean(known)
        predicted = self.candidates.step_seconds(config)
        if predicted is not None:
            return predicted[0]
        profiled = self.store.header.profile.micro_batch_seconds
        if profiled:
            size = max(profiled)
            share = self.space.global_batch_size / self.space.ranks
            return profiled[size] / size * share
        return 1.0

    def _deadline_seconds(self, config: TrainConfig) -> float:
        """Generous: it is there for runs that hang. Near the end of a time budget a run may last
        twice as long as expected, since ending it would leave nothing."""
        expected = self.trial_seconds(config)
        deadline = min(max(LEAST_DEADLINE_SECONDS, 30 + 6 * expected), LONGEST_DEADLINE_SECONDS)
        return min(deadline, max(0.0, self.time_left()) + expected + _ASSUMED_FIXED_SECONDS)
