"""The Optuna study of a search: every finished run, kept so that nothing is measured twice.

One study holds one model file (its hash), one space, one machine. Each run is an Optuna trial: its
parameters, the objective's value, memory as a constraint, and the whole `TrialRecord` as JSON in
the user attribute `record`. What a `SearchResult` needs beside them stands in the study's own user
attributes, so that the study alone rebuilds it.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.engine
import sqlalchemy.event
import sqlalchemy.exc

from autotune.folder import locate
from autotune.longtext import read_long
from autotune.ranking import rank
from autotune.records import (
    Hardware,
    ModelProfile,
    Objective,
    SearchResult,
    TrialRecord,
    Untried,
    load,
)
from runtime.errors import RunError, UserError

STORAGE_ERRORS = (
    optuna.exceptions.StorageInternalError,
    sqlalchemy.exc.SQLAlchemyError,
    OSError,
)

HEADER, CLOSING, SECONDS, UNTRIED = "header", "closing", "seconds", "untried"
"""User attributes of a study."""

RECORD = "record"
"""User attribute of a trial."""


@dataclass(frozen=True, kw_only=True)
class StudyHeader:
    """What is known before the first run; written at the start of each session."""

    inputs: str
    """Fingerprint of all that the profile and the space follow from."""
    folder: str
    """Where the search writes, absolute."""
    model_file: str
    model_hash: str
    study_name: str
    command: str
    started_at: str
    updated_at: str
    """ISO 8601, UTC; the newest study of a folder is the one with the latest."""
    objective: Objective
    global_batch_size: int
    ranks: int
    memory_limit_bytes: int
    hardware: Hardware
    profile: ModelProfile
    dropped_dimensions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Closing:
    """How the latest session ended."""

    stopped_because: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoredStudy:
    """Everything that a study holds."""

    header: StudyHeader
    records: tuple[TrialRecord, ...]
    untried: tuple[Untried, ...]
    closing: Closing | None
    """None where the latest session was killed."""
    seconds: float


@contextmanager
def open_storage(url: str, *, write: bool = False) -> Iterator[optuna.storages.BaseStorage]:
    """Open (and create, where it is missing) the Optuna storage at `url`.

    A SQLite file is written through a write-ahead log: a trial makes some twenty commits, each of
    which would wait for the disk otherwise (0.5 s a trial on a busy one). A killed process loses
    none of them. It is one plain file again once this is left.

    Raises:
        UserError: not a storage URL, a missing driver, or a database that does not answer.
    """
    quiet_optuna()
    sqlite = url.startswith("sqlite")
    try:
        file = sqlalchemy.engine.make_url(url).database if sqlite else None
        if file and not write and not Path(file).is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", file)
        # RDBStorage fills {SCHEMA_VERSION} into its URL: braces in a path are doubled.
        rdb = optuna.storages.RDBStorage(
            url.replace("{", "{{").replace("}", "}}"),
            engine_kwargs={"connect_args": {"timeout": 60}} if sqlite else None,
        )
        if sqlite and write:
            sqlalchemy.event.listen(rdb.engine, "connect", _write_ahead)
            rdb.engine.dispose()  # connections made from here on have a log
    except (*STORAGE_ERRORS, ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the storage must be a database URL that Optuna can open, such as sqlite:///study.db, "
            f"but {url} gave: {cause(error)}; give another, or move a damaged file away"
        ) from error
    try:
        yield optuna.storages.get_storage(rdb)
    finally:
        rdb.remove_session()
        if sqlite and write:
            with suppress(*STORAGE_ERRORS), rdb.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
        rdb.engine.dispose()


def _write_ahead(connection: sqlite3.Connection, record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def quiet_optuna() -> None:
    """Optuna logs each trial; this tool reports them itself."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def headers(storage: optuna.storages.BaseStorage) -> list[StudyHeader]:
    """The headers of all studies of this tool in `storage`, the newest first."""
    found = []
    for name in optuna.get_all_study_names(storage):
        header = header_of(optuna.load_study(study_name=name, storage=storage))
        if header is not None:
            found.append(header)
    return sorted(found, key=lambda header: header.updated_at, reverse=True)


def header_of(study: optuna.Study) -> StudyHeader | None:
    """None where another program, or another version of this one, made the study."""
    data = study.user_attrs.get(HEADER)
    try:
        return load(StudyHeader, data) if isinstance(data, dict) else None
    except ValueError:
        return None


def read_study(storage: optuna.storages.BaseStorage, name: str) -> StoredStudy:
    """Read one study back, changing nothing in it."""
    study = optuna.load_study(study_name=name, storage=storage)
    header = header_of(study)
    if header is None:
        raise RunError(f"the study {name} was not written by this version of the tool")
    closing = study.user_attrs.get(CLOSING)
    untried = read_long(study, UNTRIED) or []
    return StoredStudy(
        header=header,
        records=tuple(finished_records(study)),
        untried=tuple(load(Untried, item) for item in untried),
        closing=load(Closing, closing) if closing else None,
        seconds=float(study.user_attrs.get(SECONDS, 0.0)),
    )


def load_result(folder_or_storage: Path | str) -> SearchResult:
    """Rebuild the newest search of an output folder, or of an Optuna storage URL.

    Raises:
        UserError: no such folder or storage, or no search in it.
    """
    url, folder = locate(folder_or_storage)
    with open_storage(url) as storage:
        try:
            found = headers(storage)
            if folder is not None:  # a storage that several folders share
                found = [header for header in found if header.folder == folder]
            if found:
                return to_result(read_study(storage, found[0].study_name))
        except (*STORAGE_ERRORS, ValueError) as error:
            raise UserError(
                f"the study in {url} cannot be read: {cause(error)}; where its file is damaged, "
                "search again into another folder"
            ) from error
    raise UserError(f"{folder_or_storage} must hold a search, but its storage {url} has none")


def to_result(stored: StoredStudy) -> SearchResult:
    """What the study amounts to."""
    header = stored.header
    standing = rank(
        stored.records,
        objective=header.objective,
        memory_limit_bytes=header.memory_limit_bytes,
    )
    closing = stored.closing or Closing(
        stopped_because="the search was killed; the same command goes on where it stopped"
    )
    return SearchResult(
        model_file=header.model_file,
        model_hash=header.model_hash,
        study_name=header.study_name,
        command=header.command,
        started_at=header.started_at,
        seconds=stored.seconds,
        objective=header.objective,
        global_batch_size=header.global_batch_size,
        ranks=header.ranks,
        memory_limit_bytes=header.memory_limit_bytes,
        hardware=header.hardware,
        profile=header.profile,
        trials=stored.records,
        untried=stored.untried,
        dropped_dimensions=header.dropped_dimensions,
        best=standing.best,
        runner_up=standing.runner_up,
        plain=standing.plain,
        own=standing.own,
        stopped_because=closing.stopped_because,
        notes=closing.notes,
    )


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Ten hex digits that change when any of `parts` (JSON values) does."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat()


def finished_records(study: optuna.Study) -> list[TrialRecord]:
    """The runs that ended with a measurement, in their order."""
    return [
        load(TrialRecord, trial.user_attrs[RECORD])
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and RECORD in trial.user_attrs
    ]


def cause(error: BaseException) -> str:
    """The first line of the error at the bottom of `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
