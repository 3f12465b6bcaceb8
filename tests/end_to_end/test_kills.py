"""`kill -9` in the middle of a trial: no finished trial is lost, no process stays."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.commands import (
    SMALL_MODEL,
    answer,
    finished_trials,
    marked_processes,
    search_command,
    start_marked,
    wait_for,
)

OPTIONS = ("--ranks", "2", "--max-trials", "5", "--fix", "precision=fp32")


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    left = marked_processes(value)
    for process in left:
        process.kill()
    assert not left


def _server(mark: str, search: int) -> psutil.Process:
    return next(
        item for item in psutil.Process(search).children() if item in marked_processes(mark)
    )


def _in_a_trial(out: Path, mark: str) -> Callable[[], bool]:
    return lambda: len(finished_trials(out)) >= 1 and len(_forked(mark)) >= 2


def _forked(mark: str) -> list[psutil.Process]:
    """The ranks: grandchildren of the search."""
    found = []
    for process in marked_processes(mark):
        try:
            parent = process.parent()
            if parent is not None and "runtime.forkserver" in " ".join(parent.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_of_the_search(tmp_path: Path, mark: str) -> None:
    search = start_marked(search_command(SMALL_MODEL, tmp_path, *OPTIONS), mark)
    wait_for(_in_a_trial(tmp_path, mark))
    before = finished_trials(tmp_path)
    search.send_signal(signal.SIGKILL)
    search.wait()
    wait_for(lambda: not marked_processes(mark), seconds=10)

    answer(search_command(SMALL_MODEL, tmp_path, *OPTIONS))
    after = finished_trials(tmp_path)
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_of_one_rank(tmp_path: Path, mark: str) -> None:
    search = start_marked(search_command(SMALL_MODEL, tmp_path, *OPTIONS), mark)
    wait_for(_in_a_trial(tmp_path, mark))
    before = finished_trials(tmp_path)
    _forked(mark)[0].kill()
    assert search.wait(timeout=240) == 0
    after = finished_trials(tmp_path)
    assert after[: len(before)] == before
    assert len(after) > len(before) + 1  # it went on


def test_of_the_fork_server(tmp_path: Path, mark: str) -> None:
    search = start_marked(search_command(SMALL_MODEL, tmp_path, *OPTIONS), mark)
    wait_for(_in_a_trial(tmp_path, mark))
    before = finished_trials(tmp_path)
    _server(mark, search.pid).kill()
    assert search.wait(timeout=240) == 0
    after = finished_trials(tmp_path)
    assert after[: len(before)] == before
    assert len(after) > len(before) + 1
