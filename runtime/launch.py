"""Starts and ends the rank processes of one run, on one node.

`Launcher` owns one fork server (`runtime.forkserver`), a process that has torch imported; a run
of it costs a fork, not the imports. No torch in this process. One thread at a time may use a
launcher and its groups.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from runtime import processes
from runtime.errors import RunError
from runtime.measurement import Outcome
from runtime.server_process import MARK, ServerProcess, python_path
from runtime.verdict import GroupEnd

__all__ = ["GroupEnd", "Launcher", "RankEvent", "RankGroup"]

_START_SECONDS = 180.0
_POLL_SECONDS = 0.005
_ANSWER_SECONDS = 30.0
"""Beyond a deadline, or after a request to stop: then the server itself is taken to hang.
Freeing the memory of a large rank takes seconds."""


@dataclass(frozen=True)
class RankEvent:
    """One `context.report(name, **data)` of a rank."""

    rank: int
    name: str
    data: dict[str, Any]


class Launcher:
    """Starts groups of rank processes; closing it ends them all. Use it in a `with` statement.

    `preload` names installed modules that the server imports beside torch, so that ranks need
    not; modules that are not installed packages are left to the ranks.
    """

    def __init__(self, *, preload: Sequence[str] = (), fork: bool = True) -> None:
        self._preload = list(preload)
        self._fork = fork
        self._problems: list[str] = []
        self._groups: dict[int, RankGroup] = {}
        self._number = 0
        self._server: ServerProcess | None = None
        self._closed = False
        self._boot()  # it imports while the caller goes on

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each preload that failed, and why ranks are new processes if they are.

        Raises:
            RunError: the server does not start.
        """
        self._ready()
        return tuple(self._problems)

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server; None where it has ended."""
        return self._server.pid if self._server is not None else None

    def start(
        self,
        target: str,
        payload: dict[str, Any],
        *,
        ranks: int,
        threads_per_rank: int,
        memory_limit_bytes: int | None,
        deadline_seconds: float,
    ) -> RankGroup:
        """Start `ranks` processes that each call `target` ("package.module:function").

        It is called as `function(payload, context)`, with a `runtime.rank.RankContext`. `payload`
        must be JSON values. The limit is that of one rank (`runtime.limits`); at the deadline,
        counted from here, the group is killed. Python's path, the environment and the working
        directory of this process are those of the ranks.

        Raises:
            RunError: the server does not start.
        """
        if ranks < 1 or threads_per_rank < 1 or deadline_seconds <= 0:
            raise ValueError(
                "`ranks >= 1`, `threads_per_rank >= 1` and `deadline_seconds > 0` must hold, "
                f"but got ({ranks=}, {threads_per_rank=}, {deadline_seconds=})."
            )
        server = self._ready()
        self._number += 1
        deadline = time.monotonic() + deadline_seconds
        server.send(
            {
                "op": "start",
                "group": self._number,
                "ranks": ranks,
                "deadline": deadline,
                "seconds": deadline_seconds,
                "memory_limit": memory_limit_bytes,
                "rank_order": {
                    "target": target,
                    "payload": payload,
                    "ranks": ranks,
                    "threads": threads_per_rank,
                    "memory_limit_bytes": memory_limit_bytes,
                    "environment": {**os.environ, MARK: server.mark},
                    "path": python_path(),
                    "folder": _folder(),
                },
            }
        )
        group = RankGroup(self, self._number, deadline)
        self._groups[self._number] = group
        return group

    def close(self) -> None:
        """End every process: ranks, what they started, and the server. Idempotent."""
        self._closed = True
        server = self._server
        if server is not None:
            server.close(_ANSWER_SECONDS)
            self._end_all(server, GroupEnd(Outcome.OK))

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _boot(self) -> ServerProcess:
        self._server = ServerProcess(self._preload, fork=self._fork)
        return self._server

    def _ready(self) -> ServerProcess:
        """The server, once it has said hello; a new one where it has ended."""
        if self._closed:
            raise RunError("this launcher has been closed: start a new one")
        server = self._server
        if server is not None and server.hello is not None:
            if server.is_alive():
                return server
            self._lose(server)
            server = None
        while True:
            server = server or self._boot()
            problem = server.wait_for_hello(time.monotonic() + _START_SECONDS)
            hello = server.hello
            if hello is not None and hello["culprit"] is None:
                self._add_problems(hello["problems"])
                return server
            server.close(_ANSWER_SECONDS)
            server = self._server = None
            if hello is not None:
                self._add_problems(hello["problems"])
                self._preload.remove(hello["culprit"])
            elif self._preload:
                names = ", ".join(self._preload)
                self._add_problems([f"preloading {names} ended the fork server: {problem}"])
                self._preload.clear()
            else:
                raise RunError(f"the fork server did not start: {problem}")

    def _add_problems(self, problems: Sequence[str]) -> None:
        self._problems.extend(item for item in problems if item not in self._problems)

    def _pump(self, until: float) -> bool:
        """Handle what the server says, waiting for it until then; whether it said anything."""
        server = self._server
        if server is None:
            return False
        messages = server.receive(until)
        if messages is None:
            self._lose(server)
            return True
        for message in messages:
            group = self._groups.get(message["group"])
            if group is not None:
                group._take(message)
        return bool(messages)

    def _lose(self, server: ServerProcess) -> None:
        """The server has ended by itself: end what it left, and say so."""
        how = server.close(_ANSWER_SECONDS)
        self._end_all(
            server,
            GroupEnd(
                Outcome.CRASHED,
                f"the fork server (process {server.pid}) {how} and its ranks with it; "
                "the next run starts a new one",
            ),
        )

    def _hung(self, end: GroupEnd) -> None:
        """The server does not answer: end it, and all with it."""
        server = self._server
        if server is not None:
            server.close(0.0)
            self._end_all(server, end)

    def _end_all(self, server: ServerProcess, end: GroupEnd) -> None:
        """End what a dead server left of its groups."""
        self._server = None
        if self._groups:
            _end_processes(
                server.mark, [pid for item in self._groups.values() for pid in item._pids]
            )
        for group in list(self._groups.values()):
            group._finish(end)


class RankGroup:
    """The ranks of one run. Leaving its `with` statement ends every process."""

    def __init__(self, launcher: Launcher, number: int, deadline: float) -> None:
        self._launcher = launcher
        self._number = number
        self._deadline = deadline
        self._events: deque[RankEvent] = deque()
        self._pids: list[int] = []
        self.end: GroupEnd | None = None
        """How the group ended; None while it runs."""

    def events(self) -> Iterator[RankEvent]:
        """Events as they arrive; ends when the last process of the group has gone."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self.end is not None:
                return
            patience = self._deadline + _ANSWER_SECONDS
            self._launcher._pump(patience)
            if self.end is None and time.monotonic() >= patience:
                self._launcher._hung(
                    GroupEnd(Outcome.TIMED_OUT, "did not finish, and the fork server hung")
                )

    def stop(self) -> None:
        """End every process of the group, and return when they have gone. Idempotent."""
        if self.end is not None:
            return
        server = self._launcher._server
        if server is not None:
            server.send({"op": "stop", "group": self._number})
        patience = time.monotonic() + _ANSWER_SECONDS
        while self.end is None:
            self._launcher._pump(patience)
            if self.end is None and time.monotonic() >= patience:
                self._launcher._hung(GroupEnd(Outcome.OK))

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "event":
            self._events.append(RankEvent(message["rank"], message["name"], message["data"]))
        elif message["op"] == "pids":
            self._pids = message["pids"]
        else:
            self._finish(
                GroupEnd(
                    Outcome(message["outcome"]),
                    message["reason"],
                    message["traceback"],
                    message["failed_rank"],
                    message["user_error"],
                )
            )

    def _finish(self, end: GroupEnd) -> None:
        self.end = end
        self._launcher._groups.pop(self._number, None)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # removed under this process
        return "/"


def _end_processes(mark: str, leaders: Sequence[int]) -> None:
    """Kill what descends from a dead server; returns when nothing is left.

    That is what carries its mark, and the sessions of its ranks: a process can lose one or the
    other, by writing over its environment or by leaving its session.
    """
    since = time.monotonic()
    while (seconds := time.monotonic() - since) < _ANSWER_SECONDS:
        left = {*processes.with_variable(MARK, mark), *processes.in_sessions(leaders)}
        if not left:
            return
        processes.kill_all(left, spare_cleaners=seconds < processes.CLEANER_SECONDS)
        time.sleep(_POLL_SECONDS)
