"""Ranks that fail, hang, flood or leave relatives: the outcome, the cause, and nothing left."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.launch import GroupEnd, Launcher, RankEvent, RankGroup
from runtime.measurement import Outcome
from tests.runtime.test_launch import JOBS, OK, start


def finish(group: RankGroup) -> tuple[GroupEnd, list[RankEvent]]:
    with group:
        events = list(group.events())
    assert group.end is not None
    return group.end, events


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_an_exception_is_told_with_class_message_and_the_line_it_came_from(
    launcher: Launcher,
) -> None:
    end, _ = finish(start(launcher, "end", how="raise"))
    assert end.outcome is Outcome.CRASHED
    assert not end.user_error
    assert end.failed_rank == 0
    file, line, rest = end.reason.split(":", 2)
    assert file.endswith("tests/runtime/launch_jobs.py")
    assert "raise IndexError" in Path(file).read_text().splitlines()[int(line) - 1]
    assert rest == " IndexError: a value"
    assert "Traceback (most recent call last)" in end.traceback
    assert "and a second line" in end.traceback
    assert "some words before the end" in end.traceback


def test_a_users_error_is_told_verbatim(launcher: Launcher) -> None:
    end, _ = finish(start(launcher, "end", how="config"))
    assert end.user_error
    assert end.outcome is Outcome.CRASHED
    assert end.reason == "ranks must be even, but got 3"
    end, _ = finish(start(launcher, "end", how="model file"))
    assert end.user_error
    assert end.reason == "/m.py:3: build_model() raised"
    assert end.traceback.startswith("their traceback")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("segfault", "rank 1 was killed by SIGSEGV (segmentation fault)"),
        ("SIGABRT", "rank 1 was killed by SIGABRT (aborted)"),
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("SIGTERM", "rank 1 was killed by SIGTERM"),
        ("_exit", "rank 1 exited with code 3 before its job had returned"),
        ("exit", "SystemExit: no more"),
        ("raise", "IndexError: a value"),
    ],
)
def test_the_cause_is_told_and_not_the_peers_lost_connection(
    launcher: Launcher, how: str, words: str
) -> None:
    begin = time.monotonic()
    end, _ = finish(start(launcher, "end", ranks=2, how=how, rank=1))
    assert time.monotonic() - begin < 10  # no collective's timeout has been waited for
    assert end.outcome is Outcome.CRASHED
    assert end.failed_rank == 1
    assert words in end.reason
    assert "some words before the end" in end.traceback


def test_a_segfault_shows_where_python_was(launcher: Launcher) -> None:
    end, _ = finish(start(launcher, "end", how="segfault"))
    assert "launch_jobs.py" in end.traceback
    assert end.reason.endswith(": some words before the end")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (f"{JOBS}:missing", "AttributeError: module"),
        (f"{JOBS}:JOBS_MIB", "AttributeError: module"),
        (f"{JOBS}:MIB", "target must name a function"),
        ("no_such_module:job", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_target_that_is_no_function(launcher: Launcher, target: str, words: str) -> None:
    group = launcher.start(
        target,
        {},
        ranks=1,
        threads_per_rank=1,
        memory_limit_bytes=None,
        deadline_seconds=60,
    )
    end, _ = finish(group)
    assert end.outcome is Outcome.CRASHED
    assert words in end.reason


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("write", "rank 0 wrote into the pipe of its reports: no JSON"),
        ("close", "OSError: [Errno 9] Bad file descriptor"),
        ("tensor", "TypeError: Object of type Tensor is not JSON serializable"),
    ],
)
def test_a_rank_that_spoils_its_reports_harms_nobody_else(
    launcher: Launcher, how: str, words: str
) -> None:
    end, _ = finish(start(launcher, "meddle", how=how))
    assert end.outcome is Outcome.CRASHED
    assert words in end.reason
    assert finish(start(launcher, "total", ranks=2))[0] == OK


@pytest.mark.parametrize("how", ["stopped", "c", "waiting for a peer"])
def test_the_deadline_ends_ranks_that_nothing_else_would(launcher: Launcher, how: str) -> None:
    begin = time.monotonic()
    group = launcher.start(
        f"{JOBS}:hang",
        {"how": how},
        ranks=2,
        threads_per_rank=1,
        memory_limit_bytes=None,
        deadline_seconds=1.0,
    )
    end, events = finish(group)
    assert 1.0 <= time.monotonic() - begin < 5.0
    assert end.outcome is Outcome.TIMED_OUT
    assert end.reason == "did not finish within 1 s (ranks 0, 1 still ran)"
    assert len(events) == 2
    assert all(is_gone(event.data["pid"]) for event in events)
    if how == "waiting for a peer":
        assert "in all_reduce" in end.traceback


def test_a_group_that_ended_leaves_the_server_fit_for_the_next(launcher: Launcher) -> None:
    finish(start(launcher, "end", ranks=2, how="SIGKILL"))
    end, events = finish(start(launcher, "total", ranks=2))
    assert end == OK
    assert [event.data["value"] for event in events] == [3.0, 3.0]


def test_a_flood_of_output_is_kept_out_of_memory_but_for_its_end(launcher: Launcher) -> None:
    server = launcher.server_pid
    assert server is not None
    before = _resident(server)
    end, _ = finish(start(launcher, "flood", mib=100))
    assert "RuntimeError: after the flood" in end.reason
    assert "the last line" in end.traceback
    assert len(end.traceback) < 100_000
    assert _resident(server) - before < 16 << 20


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("stay", [True, False, None], ids=["stopped", "returned", "crashed"])
def test_processes_that_ranks_started_end_with_them(launcher: Launcher, stay: bool | None) -> None:
    with start(launcher, "family", ranks=2, stay=stay) as group:
        events: list[Any] = []
        for event in group.events():
            events.append(event.data)
            if stay and len(events) == 2:
                break
    assert len(events) == 2
    assert group.end is not None
    assert group.end.outcome is (Outcome.CRASHED if stay is None else Outcome.OK)
    for data in events:
        assert len(data["pids"]) == 4
        assert all(is_gone(pid) for pid in [*data["pids"], data["rank"]])
        assert not os.path.exists(f"/dev/shm/{data['memory']}")


def test_a_group_that_ends_leaves_another_groups_relatives_alone(launcher: Launcher) -> None:
    with start(launcher, "family", stay=True) as group:
        event = next(group.events())
        finish(start(launcher, "total", ranks=2))
        assert not any(is_gone(pid) for pid in event.data["pids"])
    assert all(is_gone(pid) for pid in event.data["pids"])
