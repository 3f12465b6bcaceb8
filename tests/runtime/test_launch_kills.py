"""Processes killed from outside in the middle of a run: nothing stays, and the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime import processes
from runtime.launch import Launcher
from runtime.measurement import Outcome
from tests.runtime.test_launch import OK, start
from tests.runtime.test_launch_failures import finish, is_gone

ROOT = Path(__file__).resolve().parents[2]
MARK = "LAUNCH_TEST_MARK"


@dataclass
class Running:
    process: subprocess.Popen[str]
    mark: str
    server: int
    ranks: list[int]
    relatives: list[int]
    memory: list[str]

    def lines(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()

    def left(self) -> list[int]:
        """Processes that still carry the mark in their environment, or were reported."""
        found = processes.with_variable(MARK, self.mark)
        reported = [self.server, *self.ranks, *self.relatives]
        # A zombie of a dead parent is for init to collect, however slow it is.
        return sorted({*found, *(pid for pid in reported if processes.session(pid) is not None)})

    def wait_until_gone(self, seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.02)
        assert left == []
        assert not [name for name in self.memory if (Path("/dev/shm") / name).exists()]


@contextmanager
def running(job: str, ranks: int = 2) -> Iterator[Running]:
    """A parent process in the middle of a run."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.kill_parent", job, str(ranks)],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Running(process, mark, 0, [], [], [])
    assert process.stdout is not None
    try:
        for line in process.stdout:
            word, *numbers = line.split()
            if word == "server":
                run.server = int(numbers[0])
            elif word == "memory":
                run.memory.extend(numbers)
            elif word == "pids":
                run.ranks.append(int(numbers[0]))
                run.relatives.extend(map(int, numbers[1:]))
            else:
                break
        assert len(run.ranks) == ranks
        assert len(run.left()) >= ranks + 2
        yield run
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in run.left():
            processes.kill(pid)


def test_nothing_outlives_a_killed_parent() -> None:
    with running("family") as run:
        run.process.kill()
        run.process.wait()
        run.wait_until_gone()


@pytest.mark.slow
def test_nothing_outlives_a_parent_killed_while_a_rank_is_stopped() -> None:
    with running("sleep") as run:
        os.kill(run.ranks[0], signal.SIGSTOP)
        run.process.terminate()
        run.process.wait()
        run.wait_until_gone()


def test_a_killed_server_takes_all_along_and_the_search_goes_on() -> None:
    with running("family") as run:
        os.kill(run.server, signal.SIGKILL)
        lines = run.lines()
        assert lines[0] == (
            f"end crashed the fork server (process {run.server}) was killed by SIGKILL and its "
            "ranks with it; the next run starts a new one"
        )
        assert lines[1] == "next [3.0, 3.0]"
        assert run.process.wait() == 0
        run.wait_until_gone()


@pytest.mark.slow
def test_parent_and_server_killed_at_once() -> None:
    with running("train_forever") as run:
        os.kill(run.server, signal.SIGSTOP)
        run.process.kill()
        run.process.wait()
        os.kill(run.server, signal.SIGKILL)
        run.wait_until_gone()


def test_a_killed_rank_ends_its_group_and_is_named(launcher: Launcher) -> None:
    with start(launcher, "train_forever", ranks=3) as group:
        events = group.events()
        pids = {(event := next(events)).rank: event.data["pid"] for _ in range(3)}
        begin = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        list(events)
    assert time.monotonic() - begin < 5
    assert group.end is not None
    assert group.end.outcome is Outcome.CRASHED
    assert group.end.failed_rank == 1
    assert group.end.reason == "rank 1 was killed by SIGKILL"
    assert all(is_gone(pid) for pid in pids.values())


def test_ctrl_c_reaches_the_parent_alone_which_ends_the_run() -> None:
    with running("train_forever") as run:
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.lines() == ["interrupted"]
        assert run.process.wait() == 0
        run.wait_until_gone()


def test_ranks_and_server_ignore_an_interrupt_of_their_own(launcher: Launcher) -> None:
    with start(launcher, "sleep", ranks=2) as group:
        events = group.events()
        pids = [next(events).data["pid"] for _ in range(2)]
        assert launcher.server_pid is not None
        for pid in [*pids, launcher.server_pid]:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert group.end is None
        assert not any(is_gone(pid) for pid in pids)
    assert group.end == OK


def test_a_server_that_hangs_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.launch._ANSWER_SECONDS", 0.5)
    with Launcher() as launcher:
        with start(launcher, "sleep", ranks=2) as group:
            events = group.events()
            pids = [next(events).data["pid"] for _ in range(2)]
            assert launcher.server_pid is not None
            os.kill(launcher.server_pid, signal.SIGSTOP)
        assert group.end == OK
        assert all(is_gone(pid) or processes.session(pid) is None for pid in pids)
        end, _ = finish(start(launcher, "total", ranks=2))
        assert end == OK


@pytest.mark.slow
def test_a_deadline_holds_where_the_server_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.launch._ANSWER_SECONDS", 0.5)
    with Launcher() as launcher:
        assert launcher.problems == ()
        group = launcher.start(
            "tests.runtime.launch_jobs:sleep",
            {},
            ranks=1,
            threads_per_rank=1,
            memory_limit_bytes=None,
            deadline_seconds=1.0,
        )
        assert launcher.server_pid is not None
        os.kill(launcher.server_pid, signal.SIGSTOP)
        end, _ = finish(group)
    assert end.outcome is Outcome.TIMED_OUT
