"""Processes as /proc shows them: who descends from whom, and how to end them. Linux, no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)

CLEANER_SECONDS = 1.0
"""How long cleaners have: they outlive those they serve, to remove what these left in /dev/shm."""

_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def adopt_orphans() -> None:
    """Make every descendant whose parent ends a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def children(pid: int) -> list[int]:
    """Child processes of `pid`, zombies included; [] where it has gone."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for task in tasks:
        try:
            found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split()))
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{task}"):  # a kernel without PROC_CHILDREN
                return [child for child in _all() if (_stat(child) or ("", 0, 0))[1] == pid]
        except ProcessLookupError:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children, and so on, nearest first."""
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children(queue.pop(0))
        found.extend(below)
        queue.extend(below)
    return found


def session(pid: int, *, zombies: bool = False) -> int | None:
    """Session id of a process; None where it has gone, or is a zombie unless `zombies`."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in ("X" if zombies else "ZX") else stat[2]


def in_sessions(sessions: Iterable[int]) -> list[int]:
    """Live processes of the given sessions; reads all of /proc."""
    wanted = set(sessions)
    return [pid for pid in _all() if session(pid) in wanted] if wanted else []


def with_variable(name: str, value: str) -> list[int]:
    """Live processes started with `name` = `value` in their environment; reads all of /proc."""
    entry = f"{name}={value}".encode()
    return [pid for pid in _all() if entry in _environment(pid) and session(pid) is not None]


def is_cleaner(pid: int) -> bool:
    """Whether `pid` removes shared memory that others left, and then ends by itself."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)


def kill_all(pids: Iterable[int], *, spare_cleaners: bool) -> None:
    """SIGKILL to each; `spare_cleaners` leaves those that are about to end by themselves."""
    for pid in pids:
        if not (spare_cleaners and is_cleaner(pid)):
            kill(pid)


def kill(pid: int) -> None:
    """SIGKILL, where `pid` still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and session of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command in brackets may hold anything
    return fields[0], int(fields[1]), int(fields[3])


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
