"""The search: profile, predict, propose, run, learn, stop, confirm.

Every run is an Optuna trial of the study in the output folder, so that the same command goes on
where it stopped, however it ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

import autotune
from autotune.candidates import Candidates
from autotune.confirm import confirm
from autotune.explore import (
    explore,
    measure_own,
    measure_plain,
    nothing_fits,
    own_config,
    untried,
)
from autotune.folder import (
    FolderOwner,
    choose_folder,
    locked,
    remove_folders,
    sqlite_url,
    study_name,
)
from autotune.memory import MemoryModel
from autotune.observer import Observer, Silent
from autotune.records import Hardware, ModelProfile, Objective, SearchResult, dump
from autotune.runner import ProcessRunner, Runner, installed_packages
from autotune.sampler import SpaceSampler, check_sampler, make_sampler
from autotune.session import Session, StopSearch
from autotune.space import build_space
from autotune.store import open_store
from autotune.study import (
    Closing,
    StoredStudy,
    StudyHeader,
    fingerprint,
    headers,
    now,
    open_storage,
    to_result,
)
from autotune.units import format_bytes
from runtime.config import TrainConfig
from runtime.errors import ConfigError, RunError, UserError
from runtime.measurement import Outcome
from runtime.model_file import check_model_file, imported_modules, model_file_hash

__all__ = ["Observer", "SearchOptions", "search"]

DEFAULT_GLOBAL_BATCH_SIZE = 32
MEMORY_SHARE = 0.9
"""Of the memory that is available, what the default limit lets the ranks have together."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the user asked for."""

    model_file: Path
    ranks: int | None = None
    """None: as many as there are CUDA devices, else one."""
    threads_per_rank: int | None = None
    """None: the cores, divided by the ranks."""
    memory_limit_bytes: int | None = None
    """Of one rank; None: `MEMORY_SHARE` of the device, or of the host's available memory."""
    global_batch_size: int | None = None
    """None: the model file's, else `DEFAULT_GLOBAL_BATCH_SIZE`."""
    fix: Mapping[str, str] = field(default_factory=dict)
    vary: Mapping[str, Sequence[str]] = field(default_factory=dict)
    max_trials: int = 40
    """Over all sessions of the study; baselines and confirmations are not counted."""
    time_budget_seconds: float | None = None
    """Of this session. No run starts that is not expected to end in time."""
    objective: Objective = "throughput"
    """`memory`: the least reserved peak; of peaks within 1% the faster."""
    seed: int = 0
    storage: str | None = None
    """Optuna storage URL; None: `study.db` in the output folder."""
    out: Path | None = None
    """None: `studies/<name>`, with a suffix where another model has that name."""
    own: TrainConfig | None = None
    """The user's own configuration, measured as a second baseline."""
    sampler: str = "predictive"
    command: str = ""
    """The command line that runs this search again."""


def search(
    options: SearchOptions,
    observer: Observer | None = None,
    *,
    make_runner: Callable[[Path, Sequence[str]], Runner] = ProcessRunner,
) -> SearchResult:
    """Find the best configuration; the study is in the output folder when this returns.

    Ctrl-C ends the running trial and returns what there is.

    Raises:
        UserError: the model file, an option or the output folder is not as it must be.
        ModelFileError: nothing ran well; with the user's traceback as its `detail`.
    """
    started = time.monotonic()
    observer = observer or Silent()
    model_file = options.model_file.resolve()
    tree = check_model_file(model_file)
    check_sampler(options.sampler)
    model_hash = model_file_hash(model_file)
    folder = choose_folder(model_file, model_hash, options.out).resolve()
    owner = FolderOwner(model_file=str(model_file), model_hash=model_hash, storage=options.storage)
    packages = installed_packages(imported_modules(tree), model_file)
    new = [place for place in (folder, folder.parent) if not place.exists()]
    with locked(folder, owner):
        prepared = False
        try:
            with (
                make_runner(model_file, packages) as runner,
                open_storage(options.storage or sqlite_url(folder), write=True) as storage,
            ):
                session, sampler = _prepare(
                    options, observer, runner, storage, model_file, model_hash, folder, started
                )
                prepared = True
                return _run(session, sampler, options.own)
        except (UserError, RunError):
            if not prepared:  # nothing was measured: a mistake leaves no trace
                remove_folders(folder, new)
            raise


def output_folder(options: SearchOptions) -> Path:
    """Where a search with these options writes."""
    model_file = options.model_file.resolve()
    return choose_folder(model_file, model_file_hash(model_file), options.out).resolve()


def _run(session: Session, sampler: SpaceSampler, own: TrainConfig | None) -> SearchResult:
    session.replay()
    observer = session.observer
    try:
        observer.on_phase("measuring the baselines")
        measure_plain(session)
        measure_own(session, own)
        observer.on_phase("searching")
        stopped_because = explore(session, sampler)
        observer.on_phase("confirming the leaders")
        confirm(session)
    except KeyboardInterrupt:
        stopped_because = "interrupted; the same command goes on where it stopped"
    except (StopSearch, RunError) as stop:
        stopped_because = str(stop)
    if session.standing().best is None and not stopped_because.startswith("interrupted"):
        error = session.failure()
        if error is not None:
            raise error
        if any(r.measurement.outcome is Outcome.OUT_OF_MEMORY for r in session.records):
            stopped_because = nothing_fits(session)
    return _result(session, stopped_because)


def _result(session: Session, stopped_because: str) -> SearchResult:
    store = session.store
    left = untried(session, stopped_because)
    if store.problem:
        store.flush()
    if store.problem:
        session.note(f"{store.problem}; what was measured is in this report only")
    for problem in session.runner.problems():
        session.note(problem)
    closing = Closing(stopped_because=stopped_because, notes=tuple(session.notes))
    store.spend(session.elapsed())
    store.close(closing, left)
    return to_result(
        StoredStudy(
            header=store.header,
            records=tuple(store.records),
            untried=tuple(left),
            closing=closing,
            seconds=store.earlier_seconds + session.elapsed(),
        )
    )


def _prepare(
    options: SearchOptions,
    observer: Observer,
    runner: Runner,
    storage: BaseStorage,
    model_file: Path,
    model_hash: str,
    folder: Path,
    started: float,
) -> tuple[Session, SpaceSampler]:
    hardware = runner.hardware()
    ranks = _ranks(options, hardware)
    threads = options.threads_per_rank or max(1, hardware.cores // ranks)
    earlier = [header for header in headers(storage) if header.folder == str(folder)]
    inputs = fingerprint(_inputs(options, hardware, model_hash, ranks, threads))
    same = next((header for header in earlier if header.inputs == inputs), None)
    limit = _memory_limit(options, hardware, ranks, same)
    if same is None:
        observer.on_phase("profiling the model")
        profile = runner.profile(threads=threads, memory_limit_bytes=limit)
    else:
        profile = same.profile
    global_batch_size, notes = _global_batch_size(options, profile, ranks)
    space = build_space(
        hardware,
        profile,
        ranks=ranks,
        global_batch_size=global_batch_size,
        threads_per_rank=threads,
        fix=options.fix,
        vary=options.vary,
    )
    identity = fingerprint({"inputs": inputs, "space": [dump(c) for c in space.configs]})
    header = StudyHeader(
        inputs=inputs,
        folder=str(folder),
        model_file=str(model_file),
        model_hash=model_hash,
        study_name=f"{study_name(model_file)}-{identity}",
        command=options.command,
        started_at=now(),
        updated_at=now(),
        objective=options.objective,
        global_batch_size=global_batch_size,
        ranks=ranks,
        memory_limit_bytes=limit,
        hardware=hardware,
        profile=profile,
        dropped_dimensions=space.dropped,
    )
    memory = MemoryModel(profile, hardware, limit)
    candidates = Candidates(
        space.configs,
        objective=options.objective,
        memory_limit_bytes=limit,
        predict=memory.predict,
    )
    sampler = make_sampler(options.sampler, candidates, options.seed)
    store = open_store(storage, header, candidates.parameters, sampler)
    session = Session(
        store=store,
        runner=runner,
        space=space,
        memory=memory,
        candidates=candidates,
        observer=observer,
        max_trials=options.max_trials,
        time_budget_seconds=options.time_budget_seconds,
        started=started,
    )
    for text in (*notes, *_about_earlier(header, earlier)):
        session.note(text)
    if store.records:
        observer.on_phase(f"resuming with {len(store.records)} finished runs")
    if options.own is not None:
        own_config(session, options.own)  # refused before anything runs
    return session, sampler


def _ranks(options: SearchOptions, hardware: Hardware) -> int:
    ranks = options.ranks or max(1, hardware.device_count)
    if hardware.device == "cuda" and ranks > hardware.device_count:
        raise ConfigError(
            f"--ranks must be at most the number of CUDA devices, {hardware.device_count}, "
            f"but got {ranks}"
        )
    return ranks


def _inputs(
    options: SearchOptions, hardware: Hardware, model_hash: str, ranks: int, threads: int
) -> dict[str, Any]:
    """All that the profile and the space follow from, and what makes runs comparable.

    The memory available now is left out: it differs from one minute to the next.
    """
    machine = dump(dataclasses.replace(hardware, host_memory_bytes=0))
    return {
        "version": autotune.__version__,
        "model": model_hash,
        "machine": machine,
        "ranks": ranks,
        "threads": threads,
        "global batch": options.global_batch_size,
        "memory limit": options.memory_limit_bytes,
        "objective": options.objective,
        "fix": dict(options.fix),
        "vary": {name: list(values) for name, values in options.vary.items()},
    }


def _memory_limit(
    options: SearchOptions, hardware: Hardware, ranks: int, same: StudyHeader | None
) -> int:
    """Bytes of one rank: as asked, as before in this study, or a share of what there is."""
    if hardware.device == "cuda":
        available, source = hardware.device_memory_bytes, "a device has"
    else:
        available, source = hardware.host_memory_bytes // ranks, f"{ranks} ranks can have each"
    if options.memory_limit_bytes is not None:
        if options.memory_limit_bytes > available:
            raise ConfigError(
                f"--memory-limit must be at most {format_bytes(available)}, what {source}, "
                f"but got {format_bytes(options.memory_limit_bytes)}"
            )
        return options.memory_limit_bytes
    if same is not None and same.memory_limit_bytes <= available:
        return same.memory_limit_bytes
    return int(MEMORY_SHARE * available)


def _global_batch_size(
    options: SearchOptions, profile: ModelProfile, ranks: int
) -> tuple[int, list[str]]:
    """The global batch size, and what is to be said about it."""
    asked, own = options.global_batch_size, profile.global_batch_size
    if asked is not None:
        said = f"--global-batch-size {asked} is used, not the model file's {own}"
        return asked, [said] if own not in (None, asked) else []
    if own is not None:
        return own, []
    size = max(1, round(DEFAULT_GLOBAL_BATCH_SIZE / ranks)) * ranks
    said = (
        f"the global batch size is {size}, a default: neither the model file nor an option sets it"
    )
    return size, [said]


def _about_earlier(header: StudyHeader, earlier: Sequence[StudyHeader]) -> list[str]:
    """What changed since the folder's latest study, where this is another one."""
    if not earlier or earlier[0].study_name == header.study_name:
        return []
    latest = earlier[0]
    known = header.study_name in {item.study_name for item in earlier}
    if latest.model_hash != header.model_hash:
        what = "the model file has changed"
    elif latest.hardware.device_name != header.hardware.device_name:
        what = "this is another machine"
    else:
        what = "the options, the space or the software have changed"
    study = "an earlier study goes on" if known else "this is a new study"
    return [f"{what} since the latest search: {study}, and {latest.study_name} stays as it is"]
