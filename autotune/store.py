"""Asking and telling: each run of a search becomes a trial of its Optuna study, as it ends.

A storage that fails in mid-search loses nothing: the records stay in memory, and what could not be
written is written as soon as the storage takes it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import optuna
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import TrialState

from autotune.longtext import write_long
from autotune.parameters import Parameters
from autotune.records import Prediction, Role, TrialRecord, Untried, dump, load
from autotune.study import (
    CLOSING,
    HEADER,
    RECORD,
    SECONDS,
    STORAGE_ERRORS,
    UNTRIED,
    Closing,
    StudyHeader,
    cause,
    finished_records,
    header_of,
)
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome


@dataclass
class OpenTrial:
    """A run that has begun and is not told yet."""

    config: TrainConfig
    role: Role
    number: int
    trial: optuna.Trial | None
    """None where the storage failed before it."""
    prediction: Prediction | None = None
    eligible: bool = True
    reported: bool = False
    """Whether its intermediate value is written; Optuna takes only one for a step."""


@dataclass
class Store:
    """Asks and tells one Optuna study. A storage that fails loses nothing: `records` stays in
    memory, `problem` says so in one line, and `flush` tries again."""

    study: optuna.Study
    header: StudyHeader
    parameters: Parameters
    records: list[TrialRecord] = field(default_factory=list)
    problem: str = ""
    earlier_seconds: float = 0.0
    """Spent by earlier sessions."""
    _pending: list[tuple[OpenTrial, TrialRecord]] = field(default_factory=list)
    _cause: str = ""
    """Of the problem, as the storage put it."""

    def ask(self) -> OpenTrial:
        """Begin the run that the study's sampler proposes.

        Raises:
            One of `STORAGE_ERRORS`: the study cannot be written.
        """
        trial = self.study.ask()
        for name, choices in self.parameters.choices.items():
            trial.suggest_categorical(name, choices)
        config = self.parameters.find(trial.params)
        if config is None:
            raise RuntimeError(f"the sampler proposed what the space does not hold: {trial.params}")
        return OpenTrial(config, "search", trial.number, trial)

    def begin(self, config: TrainConfig, role: Role) -> OpenTrial:
        """Begin a run of a configuration of our own choosing."""
        trial: optuna.Trial | None = None
        number = max((record.number for record in self.records), default=-1) + 1
        with self._noting_problems():
            parameters = self.parameters.of(config)
            self.study.enqueue_trial(parameters)
            trial = self.study.ask()
            for name in parameters:
                trial.suggest_categorical(name, self.parameters.choices[name])
            number = trial.number
        return OpenTrial(config, role, number, trial)

    def finish(self, open_trial: OpenTrial, measurement: Measurement) -> TrialRecord:
        """Keep the measurement, in memory and in the study."""
        record = TrialRecord(
            number=open_trial.number,
            role=open_trial.role,
            config=open_trial.config,
            prediction=open_trial.prediction,
            measurement=measurement,
            eligible=open_trial.eligible,
        )
        self.records.append(record)
        self._pending.append((open_trial, record))
        self.flush()
        return record

    def abandon(self, open_trial: OpenTrial, reason: str) -> None:
        """End a run that has no measurement: interrupted."""
        with self._noting_problems():
            if open_trial.trial is not None:
                open_trial.trial.set_user_attr("reason", reason)
                self.study.tell(open_trial.trial, state=TrialState.FAIL)

    def flush(self) -> None:
        """Write what could not be written before; `problem` is empty once all is written."""
        while self._pending:
            open_trial, record = self._pending[0]
            with self._noting_problems() as failed:
                self._write(open_trial, record)
            if failed:
                return
            self._pending.pop(0)
        self.problem = ""

    def spend(self, seconds: float) -> None:
        """Note the seconds that this session has taken so far."""
        with self._noting_problems():
            self.study.set_user_attr(SECONDS, self.earlier_seconds + seconds)

    def close(self, closing: Closing, untried: Sequence[Untried]) -> None:
        """Keep how the session ended."""
        self.flush()
        if not self.problem:
            with self._noting_problems():
                write_long(self.study, UNTRIED, [dump(item) for item in untried])
                self.study.set_user_attr(CLOSING, dump(closing))

    @contextmanager
    def _noting_problems(self) -> Iterator[list[str]]:
        failed: list[str] = []
        try:
            yield failed
        except STORAGE_ERRORS as error:
            self._cause = cause(error)
            failed.append(self._cause)
            self.problem = f"the study {self.header.study_name} cannot be written: {self._cause}"

    def _write(self, open_trial: OpenTrial, record: TrialRecord) -> None:
        if open_trial.trial is None:
            again = self.begin(record.config, record.role)
            if again.trial is None:
                raise OSError(self._cause)
            open_trial.trial = again.trial
        trial, measurement = open_trial.trial, record.measurement
        if "memory" not in trial.constraints:
            limit = self.header.memory_limit_bytes
            trial.set_constraint("memory", _constraint(measurement, limit))
        value = _value(self.study, measurement)
        if value is not None and measurement.stopped_early and not open_trial.reported:
            trial.report(float(value), step=len(measurement.step_seconds))
            open_trial.reported = True
        trial.set_user_attr("role", record.role)
        trial.set_user_attr("configuration", record.config.label())
        trial.set_user_attr("outcome", measurement.outcome.value)
        # From here on a resumed search can tell the trial itself.
        trial.set_user_attr(RECORD, dump(record))
        _tell(self.study, trial, record)


def open_store(
    storage: optuna.storages.BaseStorage,
    header: StudyHeader,
    parameters: Parameters,
    sampler: BaseSampler,
) -> Store:
    """Create the study, or go on where an earlier session stopped.

    Trials that an earlier session left running (it was killed) are told where they were measured
    and failed where they were not.
    """
    maximize = header.objective == "throughput"
    study = optuna.create_study(
        storage=storage,
        sampler=sampler,
        study_name=header.study_name,
        direction=StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE,
        load_if_exists=True,
    )
    _settle(study)
    stored = header_of(study)
    if stored is not None:
        header = dataclasses.replace(header, started_at=stored.started_at)
    study.set_user_attr(HEADER, dump(header))
    study.set_user_attr(CLOSING, None)
    return Store(
        study=study,
        header=header,
        parameters=parameters,
        records=finished_records(study),
        earlier_seconds=float(study.user_attrs.get(SECONDS, 0.0)),
    )


def _settle(study: optuna.Study) -> None:
    for _ in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.tell(study.ask(), state=TrialState.FAIL)  # `ask` takes a waiting trial first
    for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if RECORD in frozen.user_attrs:
            _tell(study, frozen.number, load(TrialRecord, frozen.user_attrs[RECORD]))
        else:
            study.tell(frozen.number, state=TrialState.FAIL)


def _value(study: optuna.Study, measurement: Measurement) -> float | None:
    if measurement.outcome is not Outcome.OK:
        return None
    throughput = study.direction == StudyDirection.MAXIMIZE
    return measurement.samples_per_second if throughput else measurement.reserved_peak_bytes


def _constraint(measurement: Measurement, memory_limit_bytes: int) -> float:
    """Bytes above the limit; samplers count a trial as feasible where it is zero or less."""
    over = (measurement.reserved_peak_bytes or 0) - memory_limit_bytes
    return float(max(over, 1) if measurement.outcome is Outcome.OUT_OF_MEMORY else over)


def _tell(study: optuna.Study, trial: optuna.Trial | int, record: TrialRecord) -> None:
    """FAIL for crashes, which samplers then ignore; PRUNED for out of memory and lost races."""
    measurement = record.measurement
    value = _value(study, measurement)
    if value is not None and not measurement.stopped_early:
        study.tell(trial, float(value))
    elif measurement.outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY):
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, state=TrialState.FAIL)
