import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.folder import (
    FolderOwner,
    choose_folder,
    locked,
    owner_of,
    sqlite_url,
    study_name,
)
from autotune.longtext import read_long, write_long
from autotune.parameters import Parameters
from autotune.records import Untried
from autotune.store import Store, open_store
from autotune.study import Closing, StudyHeader, load_result, now, open_storage
from runtime.config import TrainConfig
from runtime.errors import UserError
from runtime.measurement import Measurement, Outcome
from tests.autotune import factories
from tests.autotune.factories import LIMIT, config, measurement_of

CONFIGS = [
    config(micro_batch_size=size, zero_stage=stage) for stage in (0, 1, 2, 3) for size in (2, 4, 8)
]
GENERATOR = random.Random(0)


def header(folder: Path, **changes: Any) -> StudyHeader:
    values: dict[str, Any] = {
        "inputs": "0",
        "folder": str(folder.resolve()),
        "model_file": "/home/ada/gpt/model.py",
        "model_hash": "ab" * 32,
        "study_name": "gpt-0123456789",
        "command": "autotune search model.py",
        "started_at": now(),
        "updated_at": now(),
        "objective": "throughput",
        "global_batch_size": 64,
        "ranks": 2,
        "memory_limit_bytes": LIMIT,
        "hardware": factories.hardware(),
        "profile": factories.profile(),
        "dropped_dimensions": {"compile": "takes long"},
    }
    return StudyHeader(**{**values, **changes})


def open_in(folder: Path, **changes: Any) -> Store:
    storage = opened(sqlite_url(folder))
    sampler = optuna.samplers.RandomSampler(seed=0)
    return open_store(storage, header(folder, **changes), Parameters(CONFIGS), sampler)


def opened(url: str) -> optuna.storages.BaseStorage:
    """Left open, as a killed process leaves it."""
    return _OPEN.enter_context(open_storage(url, write=True))


_OPEN = ExitStack()


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    _OPEN.close()


def ok(cfg: TrainConfig, **changes: Any) -> Measurement:
    return replace(measurement_of(cfg, GENERATOR, outcome=Outcome.OK), **changes)


def test_every_outcome_has_its_state_and_its_memory_constraint(tmp_path: Path) -> None:
    store = open_in(tmp_path)
    cfg = CONFIGS[0]
    reserved = ok(cfg).reserved_peak_bytes
    assert reserved is not None
    cases = [
        (ok(cfg), TrialState.COMPLETE),
        (ok(cfg, stopped_early=True), TrialState.PRUNED),
        (measurement_of(cfg, GENERATOR, outcome=Outcome.OUT_OF_MEMORY), TrialState.PRUNED),
        (measurement_of(cfg, GENERATOR, outcome=Outcome.CRASHED), TrialState.FAIL),
        (measurement_of(cfg, GENERATOR, outcome=Outcome.TIMED_OUT), TrialState.FAIL),
        (ok(cfg, outcome=Outcome.NOT_FINITE, losses=(math.nan,)), TrialState.FAIL),
    ]
    for measurement, _ in cases:
        store.finish(store.begin(cfg, "search"), measurement)
    trials = store.study.trials
    assert [trial.state for trial in trials] == [state for _, state in cases]
    assert trials[0].value == pytest.approx(cases[0][0].samples_per_second)
    assert trials[1].value == pytest.approx(cases[1][0].samples_per_second)
    assert trials[0].constraints == {"memory": reserved - LIMIT}
    assert trials[2].constraints["memory"] > 0
    assert trials[0].params == {"micro_batch_size": 2, "zero_stage": 0}
    assert trials[0].user_attrs["configuration"] == cfg.label()


def test_the_study_of_memory_minimises_reserved_bytes(tmp_path: Path) -> None:
    store = open_in(tmp_path, objective="memory")
    for cfg in (CONFIGS[0], CONFIGS[9]):
        store.finish(store.begin(cfg, "search"), ok(cfg))
    assert store.study.best_trial.number == 1
    assert store.study.best_value == ok(CONFIGS[9]).reserved_peak_bytes


def test_a_result_is_rebuilt_from_the_study_alone(tmp_path: Path) -> None:
    store = open_in(tmp_path)
    plain = store.finish(store.begin(CONFIGS[0], "plain"), ok(CONFIGS[0]))
    outside = config(micro_batch_size=1)
    own = store.finish(store.begin(outside, "own"), ok(outside))
    bad = ok(CONFIGS[4], outcome=Outcome.NOT_FINITE, losses=(1.0, math.nan))
    store.finish(store.begin(CONFIGS[4], "search"), bad)
    untried = [Untried(config=cfg, reason="not reached: stopped") for cfg in CONFIGS * 200]
    store.spend(12.5)
    store.close(Closing(stopped_because="because", notes=("one", "two")), untried)

    result = load_result(tmp_path)
    assert result.trials[:2] == (plain, own)
    assert math.isnan(result.trials[2].measurement.losses[1])
    assert result.untried == tuple(untried)
    assert (result.stopped_because, result.notes) == ("because", ("one", "two"))
    assert result.plain is not None
    assert result.plain.config == CONFIGS[0]
    assert result.own is not None
    assert result.own.config == outside
    assert result.seconds == 12.5
    assert result.hardware == factories.hardware()
    assert result.profile == factories.profile()
    assert load_result(sqlite_url(tmp_path)).trials[:2] == result.trials[:2]


def test_a_resumed_study_keeps_its_records_and_settles_what_was_left_running(
    tmp_path: Path,
) -> None:
    first = open_in(tmp_path)
    kept = first.finish(first.begin(CONFIGS[0], "plain"), ok(CONFIGS[0]))
    measured = first.begin(CONFIGS[1], "search")
    tell, first.study.tell = first.study.tell, _killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.finish(measured, ok(CONFIGS[1]))
    first.study.tell = tell  # type: ignore[method-assign]
    first.begin(CONFIGS[2], "search")
    first.study.enqueue_trial(first.parameters.of(CONFIGS[3]))

    again = open_in(tmp_path, command="the second")
    assert [record.config for record in again.records] == CONFIGS[:2]
    assert again.records[0] == kept
    assert [trial.state for trial in again.study.trials] == [
        TrialState.COMPLETE,
        TrialState.COMPLETE,
        TrialState.FAIL,
        TrialState.FAIL,
    ]
    assert again.header.started_at == first.header.started_at
    assert load_result(tmp_path).command == "the second"


def _killed(*arguments: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_search_says_so(tmp_path: Path) -> None:
    store = open_in(tmp_path)
    store.finish(store.begin(CONFIGS[0], "plain"), ok(CONFIGS[0]))
    assert "killed" in load_result(tmp_path).stopped_because


@pytest.mark.parametrize("method", ["create_new_trial", "set_trial_user_attr"])
def test_a_full_disk_loses_nothing_and_is_made_good_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    store = open_in(tmp_path)
    store.finish(store.begin(CONFIGS[0], "plain"), ok(CONFIGS[0]))
    with monkeypatch.context() as full:
        full.setattr(store.study._storage, method, _disk_full)
        second = store.finish(store.begin(CONFIGS[1], "search"), ok(CONFIGS[1]))
        assert "cannot be written: database or disk is full" in store.problem
        assert store.records[-1] == second
        assert len(load_result(tmp_path).trials) == 1
    store.close(Closing(stopped_because="the disk was full"), [])
    assert store.problem == ""
    stored = load_result(tmp_path).trials
    assert [record.measurement for record in stored] == [
        record.measurement for record in store.records
    ]


def _disk_full(*arguments: object, **named: object) -> None:
    raise optuna.exceptions.StorageInternalError("commit") from OSError("database or disk is full")


def test_long_values_come_back_whole_and_are_replaced(tmp_path: Path) -> None:
    study = optuna.create_study(storage=opened(sqlite_url(tmp_path)))
    generator = random.Random(1)
    values = [generator.random() for _ in range(20_000)]
    assert read_long(study, "values") is None
    write_long(study, "values", values)
    assert study.user_attrs["values"] > 1
    assert read_long(study, "values") == values
    write_long(study, "values", [1])
    assert read_long(study, "values") == [1]


@pytest.mark.parametrize("url", ["nonsense", "nosuch://host/db", "sqlite:////proc/none/x.db"])
def test_a_storage_that_cannot_be_opened_is_a_user_error(url: str) -> None:
    with pytest.raises(UserError, match="must be a database URL"):
        opened(url)


def test_braces_and_spaces_in_a_path_are_no_template(tmp_path: Path) -> None:
    folder = tmp_path / "a {b} c"
    folder.mkdir()
    open_in(folder)
    assert (folder / "study.db").is_file()


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "one" / "gpt" / "model.py", tmp_path / "two" / "gpt.py"
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text("", encoding="utf-8")
    return paths


def test_the_name_is_the_stem_or_the_folder_of_model_py(models: tuple[Path, Path]) -> None:
    assert [study_name(path) for path in models] == ["gpt", "gpt"]


def test_another_model_of_the_same_name_gets_a_suffix(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = models
    studies = tmp_path / "studies"
    for path, name in ((one, "gpt"), (two, "gpt-2"), (one, "gpt")):
        folder = choose_folder(path, f"hash of {path}", None, studies)
        assert folder == studies / name
        with locked(folder, FolderOwner(model_file=str(path), model_hash="x", storage=None)):
            pass
    with pytest.raises(UserError, match=r"holds the study of .*gpt/model\.py"):
        choose_folder(two, "y", studies / "gpt")


def test_a_model_that_moved_keeps_its_folder(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = models
    folder = tmp_path / "studies" / "gpt"
    with locked(folder, FolderOwner(model_file=str(one), model_hash="same", storage=None)):
        pass
    one.rename(two)
    assert choose_folder(two, "same", None, tmp_path / "studies") == folder


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    owner = FolderOwner(model_file="m.py", model_hash="", storage=None)
    with (
        pytest.raises(UserError, match="must be writable"),
        locked(tmp_path / "file" / "out", owner),
    ):
        pass


def test_the_second_search_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from autotune.folder import FolderOwner, locked\n"
        "owner = FolderOwner(model_file='m.py', model_hash='', storage=None)\n"
        "with locked(pathlib.Path(sys.argv[1]), owner):\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        owner = FolderOwner(model_file="m.py", model_hash="", storage=None)
        with (
            pytest.raises(UserError, match=f"process {holder.pid} is doing so"),
            locked(tmp_path, owner),
        ):
            pass
        holder.kill()
    with locked(tmp_path, owner):
        assert owner_of(tmp_path) == owner


def test_a_shared_storage_tells_its_folders_apart(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path)
    storage = opened(url)
    for name in ("a", "b"):
        folder = tmp_path / name
        owner = FolderOwner(model_file=f"{name}.py", model_hash=name, storage=url)
        with locked(folder, owner):
            open_store(
                storage,
                header(folder, study_name=name, model_file=f"{name}.py"),
                Parameters(CONFIGS),
                optuna.samplers.RandomSampler(),
            )
    assert load_result(tmp_path / "a").model_file == "a.py"
    assert load_result(tmp_path / "b").model_file == "b.py"


def test_a_folder_without_a_study_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has none"):
        load_result(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        load_result(tmp_path / "missing")


def test_a_study_is_one_plain_file_once_it_is_closed(tmp_path: Path) -> None:
    store = open_in(tmp_path)
    store.finish(store.begin(CONFIGS[0], "plain"), ok(CONFIGS[0]))
    assert (tmp_path / "study.db-wal").is_file()
    _OPEN.close()
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]
    assert len(load_result(tmp_path).trials) == 1
