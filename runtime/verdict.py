"""Why a group of ranks ended: which failure is the cause, and which only follow from it.

No torch here: exceptions are known by class name and message.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.measurement import Outcome

FailureKind = Literal["out of memory", "user error", "crash", "communication"]

_TAIL_LINES = 30

_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc|out of memory"
    r"|could not create a (memory|primitive)|unable to mmap|CUBLAS_STATUS_ALLOC_FAILED"
    r"|can't start new thread|Thread creation failed|cannot allocate memory in static TLS",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"gloo/|gloo::|Connection (closed|reset|refused)|Broken pipe|Socket Timeout|NCCL error"
    r"|ncclRemoteError|ncclSystemError|Timed out waiting",
    re.IGNORECASE,
)
_COMMUNICATION_CLASSES = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
}
_TRIED_BYTES = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_TRIED_TEXT = re.compile(r"(?:tried|unable) to allocate ([\d.]+ [KMG]iB)", re.IGNORECASE)

_SIGNAL_MEANING: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGILL: "illegal instruction",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
}


@dataclass(frozen=True)
class GroupEnd:
    """How a group of ranks ended."""

    outcome: Outcome
    reason: str = ""
    """One line that says why the outcome is not ok; empty where it is."""
    traceback: str = ""
    """The failing rank's traceback and the end of its standard error."""
    failed_rank: int | None = None
    user_error: bool = False
    """The user's own doing (`runtime.errors.UserError`); `reason` is the message, verbatim."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed."""

    rank: int
    kind: FailureKind
    reason: str
    traceback: str


def judge(failures: Sequence[Failure]) -> GroupEnd:
    """The cause among `failures`, which are in order of time.

    A lost connection is a consequence of a peer's end wherever any other failure is known.
    """
    cause = next((item for item in failures if item.kind != "communication"), failures[0])
    return GroupEnd(
        outcome=Outcome.OUT_OF_MEMORY if cause.kind == "out of memory" else Outcome.CRASHED,
        reason=cause.reason,
        traceback=cause.traceback,
        failed_rank=cause.rank,
        user_error=cause.kind == "user error",
    )


def judge_death(
    rank: int, status: int, *, errors: str, memory_limit_bytes: int | None, oom_killed: bool
) -> Failure:
    """A rank's end by `status` (as `os.waitstatus_to_exitcode` gives it) with no word from it.

    `errors` is the end of its standard error; `oom_killed` whether the kernel's out-of-memory
    killer has struck during the run.
    """
    said = _last_words(errors)
    if status < 0:
        meaning = _SIGNAL_MEANING.get(-status)
        how = f"was killed by {signal_name(-status)}" + (f" ({meaning})" if meaning else "")
    else:
        how = f"exited with code {status} before its job had returned"
    kind: FailureKind = "crash"
    if status == -signal.SIGKILL and oom_killed:
        kind, how = "out of memory", "was killed by the kernel's out-of-memory killer"
    elif status != -signal.SIGKILL and _OUT_OF_MEMORY.search(errors):
        kind = "out of memory"
    elif _COMMUNICATION.search(errors):
        kind = "communication"
    limit = (
        f" under a memory limit of {format_bytes(memory_limit_bytes)}"
        if (memory_limit_bytes is not None and kind == "out of memory")
        else ""
    )
    return Failure(
        rank=rank,
        kind=kind,
        reason=f"rank {rank} {how}{limit}" + (f": {said}" if said else ""),
        traceback=tail(errors),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or an error that it was raised from or while handling, is want of memory."""
    for item in _chain(error):
        if isinstance(item, MemoryError) or type(item).__name__ == "OutOfMemoryError":
            return True
        if isinstance(item, OSError) and item.errno == errno.ENOMEM:
            return True
        if isinstance(item, RuntimeError) and _OUT_OF_MEMORY.search(str(item)):
            return True
    return False


def is_communication(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that a peer could not be reached.

    Mostly that is because the peer has ended.
    """
    item: BaseException | None = error
    while item is not None:
        if {kind.__name__ for kind in type(item).__mro__} & _COMMUNICATION_CLASSES:
            return True
        if isinstance(item, RuntimeError) and _COMMUNICATION.search(str(item)):
            return True
        item = item.__cause__
    return False


def out_of_memory_reason(error: BaseException, limit_bytes: int | None) -> str:
    """One line: how much was asked for, and under which limit."""
    within = f" within the memory limit of {format_bytes(limit_bytes)}" if limit_bytes else ""
    for item in _chain(error):
        if found := _TRIED_BYTES.search(str(item)):
            return f"could not allocate {format_bytes(int(found[1]))}{within}"
        if found := _TRIED_TEXT.search(str(item)):
            return f"could not allocate {found[1]}{within}"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"could not allocate memory{within} ({text})"


def tail(text: str) -> str:
    """The last lines of what a rank printed."""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


def signal_name(number: int) -> str:
    """Such as "SIGKILL"; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_bytes(size: int) -> str:
    """Such as "1.50 GiB", "200.0 MiB" or "256.0 KiB"."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _last_words(errors: str) -> str:
    """The line of standard error that says most: what(), or the last before Python's stack dump."""
    lines = [line.strip() for line in errors.partition("Fatal Python error")[0].splitlines()]
    lines = [line for line in lines if line]
    said = next((line for line in reversed(lines) if line.startswith("what():")), "")
    return said or (lines[-1] if lines else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    item: BaseException | None = error
    while item is not None and id(item) not in seen:
        seen.add(id(item))
        yield item
        item = item.__cause__ or item.__context__
