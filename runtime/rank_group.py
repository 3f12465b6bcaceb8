"""The rank processes of one run, as the fork server sees them: reads, judges and ends them."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime import limits, processes
from runtime.measurement import Outcome
from runtime.rank_process import RankProcess
from runtime.verdict import Failure, GroupEnd, format_bytes, judge, judge_death, tail

TAIL_BYTES = 16 << 10
"""What is kept of each output stream of a rank."""

_CAUSE_SECONDS = 1.0
"""How long a lost connection waits for the failure that it follows from."""
_STACK_SECONDS = 0.15
"""How long ranks have to print where they hang."""
_GIVE_UP_SECONDS = 20.0
_READ_BYTES = 1 << 16


@dataclass
class _State:
    process: RankProcess
    line: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    ready: bool = False
    baseline: dict[str, int] | None = None
    """Set once the rank is ready, where its limit is on host memory."""
    done: bool = False
    failed: bool = False
    exited: bool = False


class RankProcesses:
    """From the first rank's start until the last process of any of them has gone."""

    def __init__(
        self,
        number: int,
        *,
        deadline: float,
        seconds: float,
        limit_bytes: int | None,
        on_event: Callable[[int, str, dict[str, Any]], None],
    ) -> None:
        self.number = number
        self._seconds = seconds
        self._deadline = deadline
        self._limit_bytes = limit_bytes
        self._on_event = on_event
        self._ranks: dict[int, _State] = {}
        self._failures: list[Failure] = []
        self._judged_at: float | None = None
        """When to decide on `_failures`."""
        self._end: GroupEnd | None = None
        self._kill_at = 0.0
        self._ending_since = 0.0
        self._oom_kills = limits.oom_kills()

    @property
    def is_ending(self) -> bool:
        return self._end is not None

    @property
    def pids(self) -> list[int]:
        return [state.process.pid for state in self._ranks.values()]

    @property
    def fds(self) -> list[int]:
        return [fd for state in self._ranks.values() for fd in state.process.fds]

    def add(self, process: RankProcess) -> None:
        self._ranks[process.rank] = _State(process)

    def stop(self) -> None:
        """End the run; a run that is stopped is not a failure."""
        self._finish(GroupEnd(Outcome.OK))

    def fail(self, error: OSError) -> None:
        """End the run since a rank could not be started."""
        memory = error.errno == errno.ENOMEM
        outcome = Outcome.OUT_OF_MEMORY if memory else Outcome.CRASHED
        self._finish(GroupEnd(outcome, f"could not start a rank: {error.strerror}"))

    def read(self, rank: int, fd: int) -> int | None:
        """Take some of what one pipe of a rank holds: bytes taken, 0 at its end, None if empty."""
        state = self._ranks[rank]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if fd == state.process.report_fd:
            state.line += data
            *lines, rest = state.line.split(b"\n")
            state.line = bytearray(rest)
            for line in lines:
                self._on_line(rank, state, bytes(line))
        else:
            kept = state.output if fd == state.process.output_fd else state.errors
            kept += data
            del kept[:-TAIL_BYTES]
        return len(data)

    def on_exit(self, pid: int, status: int) -> None:
        """Process `pid` has been reaped with exit code `status` (negative: a signal)."""
        for rank, state in self._ranks.items():
            if state.process.pid != pid:
                continue
            state.exited = True
            self._drain(rank, *state.process.fds)
            if not state.failed and not state.done and not self.is_ending:
                state.failed = True
                self._failures.append(
                    judge_death(
                        rank,
                        status,
                        errors=state.errors.decode(errors="replace"),
                        memory_limit_bytes=self._limit_bytes,
                        oom_killed=limits.oom_kills() > self._oom_kills,
                    )
                )

    def check_memory(self, *, host_is_low: bool, reserve_bytes: int) -> None:
        """End the run where a rank is beyond its limit, or the host nearly out of memory."""
        if self.is_ending:
            return
        if host_is_low:
            self._finish(
                GroupEnd(
                    Outcome.OUT_OF_MEMORY,
                    f"the host had less than {format_bytes(reserve_bytes)} of memory left",
                )
            )
            return
        if self._limit_bytes is None:
            return
        for rank, state in self._ranks.items():
            host = limits.read_host_memory(state.process.pid) if state.baseline else None
            if host is None or state.baseline is None:
                continue
            charged = limits.charged_bytes(host, **state.baseline)
            if charged > self._limit_bytes + limits.polling_margin_bytes(self._limit_bytes):
                self._finish(
                    GroupEnd(
                        Outcome.OUT_OF_MEMORY,
                        f"rank {rank} held {format_bytes(charged)}, over the memory limit of "
                        f"{format_bytes(self._limit_bytes)}",
                        failed_rank=rank,
                    )
                )
                return

    def advance(self, now: float, *, alone: bool) -> dict[str, Any] | None:
        """Decide, or go on ending; how the run ended once its last process has gone, else None.

        `alone`: no other group runs, so an orphan of unknown session must be of this one.
        """
        if self._end is None:
            self._decide(now)
        if self._end is None:
            return None
        if now < self._kill_at:
            return None
        left = self._kill_all(now, alone=alone)
        if left and now - self._ending_since < _GIVE_UP_SECONDS:
            return None
        end = self._end
        reason = end.reason
        if left:
            reason += f" (processes that could not be ended: {', '.join(map(str, left))})"
        return {
            "outcome": end.outcome.value,
            "reason": reason.strip(),
            "traceback": end.traceback or self._hung_stacks(),
            "failed_rank": end.failed_rank,
            "user_error": end.user_error,
        }

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def _on_line(self, rank: int, state: _State, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:  # the user's code has written to a descriptor that it did not open
            if not state.failed:
                state.failed = True
                shown = line[:80].decode(errors="replace")
                reason = f"rank {rank} wrote into the pipe of its reports: {shown}"
                self._failures.append(Failure(rank=rank, kind="crash", reason=reason, traceback=""))
            return
        self._on_message(rank, state, message)

    def _on_message(self, rank: int, state: _State, message: dict[str, Any]) -> None:
        if self.is_ending:
            return
        if "event" in message:
            self._on_event(rank, message["event"], message["data"])
        elif message["state"] == "ready":
            state.ready = True
            if message["host_limit"]:
                state.baseline = {
                    "anonymous_bytes": message["anonymous_bytes"],
                    "shared_bytes": message["shared_bytes"],
                }
        elif message["state"] == "done":
            state.done = True
        else:
            state.failed = True
            self._drain(rank, state.process.errors_fd)
            said = tail(state.errors.decode(errors="replace"))
            self._failures.append(
                Failure(
                    rank=rank,
                    kind=message["kind"],
                    reason=message["reason"],
                    traceback=message["traceback"]
                    + (f"\n--- end of standard error of rank {rank} ---\n{said}\n" if said else ""),
                )
            )

    def _drain(self, rank: int, *fds: int) -> None:
        """Read what a rank wrote before its end; bounded, since its children may write on."""
        for fd in fds:
            for _ in range(64):
                if not self.read(rank, fd):
                    break

    def _decide(self, now: float) -> None:
        if self._failures:
            if self._judged_at is None:
                self._judged_at = now + _CAUSE_SECONDS
            only_lost = all(item.kind == "communication" for item in self._failures)
            waiting = any(not (state.failed or state.done) for state in self._ranks.values())
            if not only_lost or not waiting or now >= self._judged_at:
                self._finish(judge(self._failures))
        elif all(state.done for state in self._ranks.values()):
            self._finish(GroupEnd(Outcome.OK))
        elif now >= self._deadline:
            late = [rank for rank, state in self._ranks.items() if not state.done]
            self._finish(
                GroupEnd(
                    Outcome.TIMED_OUT,
                    f"did not finish within {self._seconds:g} s "
                    f"(rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} still ran)",
                    failed_rank=late[0] if len(late) == 1 else None,
                )
            )
            for rank in late:
                if self._ranks[rank].ready:
                    os.kill(self._ranks[rank].process.pid, signal.SIGUSR1)
            self._kill_at = now + _STACK_SECONDS

    def _finish(self, end: GroupEnd) -> None:
        if self._end is None:
            self._end = end
            self._ending_since = time.monotonic()

    def _hung_stacks(self) -> str:
        if self._end is None or self._end.outcome is not Outcome.TIMED_OUT:
            return ""
        return "\n".join(
            f"--- rank {rank} ---\n{tail(state.errors.decode(errors='replace'))}"
            for rank, state in self._ranks.items()
            if not state.done
        )

    def _kill_all(self, now: float, *, alone: bool) -> list[int]:
        """Kill what is left of the group, and return it: ranks, descendants, adopted orphans."""
        sessions = set(self.pids)
        ranks = [state.process.pid for state in self._ranks.values() if not state.exited]
        left = list(ranks)
        for pid in ranks:
            left.extend(processes.descendants(pid))
        for pid in processes.children(os.getpid()):
            found = processes.session(pid, zombies=True)  # those are about to be reaped
            if pid not in left and found is not None and (alone or found in sessions):
                left += [pid, *processes.descendants(pid)]
        spare = now - self._ending_since < processes.CLEANER_SECONDS
        processes.kill_all(left, spare_cleaners=spare)
        return left
