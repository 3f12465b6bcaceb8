from __future__ import annotations

import errno
import signal

import pytest

from runtime.errors import ModelFileError
from runtime.measurement import Outcome
from runtime.verdict import (
    Failure,
    FailureKind,
    format_bytes,
    is_communication,
    is_out_of_memory,
    judge,
    judge_death,
    out_of_memory_reason,
)

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    "Connection closed by peer [127.0.0.1]:4711"
)
TORCH_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4096000000 bytes. Error code 12 (Cannot allocate memory)"
)


def failure(rank: int, kind: FailureKind) -> Failure:
    return Failure(rank=rank, kind=kind, reason=f"{kind} of {rank}", traceback="")


@pytest.mark.parametrize(
    ("kinds", "rank", "outcome"),
    [
        (("communication", "crash"), 1, Outcome.CRASHED),
        (("communication", "out of memory"), 1, Outcome.OUT_OF_MEMORY),
        (("crash", "out of memory"), 0, Outcome.CRASHED),
        (("communication", "communication"), 0, Outcome.CRASHED),
        (("communication", "user error", "crash"), 1, Outcome.CRASHED),
    ],
)
def test_the_first_failure_that_is_no_consequence_is_the_cause(
    kinds: tuple[FailureKind, ...], rank: int, outcome: Outcome
) -> None:
    end = judge([failure(rank, kind) for rank, kind in enumerate(kinds)])
    assert (end.failed_rank, end.outcome) == (rank, outcome)
    assert end.user_error is (kinds[rank] == "user error")


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(TORCH_OOM),
        RuntimeError("could not create a memory object"),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        RuntimeError("CUDA error: out of memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        chained(ModelFileError("make_batch(8) raised"), RuntimeError(TORCH_OOM)),
    ],
    ids=str,
)
def test_want_of_memory_is_known_by_its_words(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_communication(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        ConnectionResetError(104, "reset"),
        chained(ValueError(), RuntimeError(GLOO)),
    ],
)
def test_a_lost_peer_is_known_by_its_words(error: Exception) -> None:
    assert is_communication(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shape mismatch")])
def test_other_errors_are_neither(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert not is_communication(error)


def test_the_reason_says_how_much_was_asked_for() -> None:
    limit = 1 << 30
    within = "within the memory limit of 1.00 GiB"
    assert out_of_memory_reason(RuntimeError(TORCH_OOM), limit) == (
        f"could not allocate 3.81 GiB {within}"
    )
    cuda = OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    assert out_of_memory_reason(cuda, None) == "could not allocate 20.00 MiB"
    assert out_of_memory_reason(MemoryError(), limit) == (
        f"could not allocate memory {within} (MemoryError)"
    )


def death(status: int, errors: str = "", *, oom_killed: bool = False) -> Failure:
    return judge_death(
        2, status, errors=errors, memory_limit_bytes=200 << 20, oom_killed=oom_killed
    )


def test_a_death_without_a_word() -> None:
    assert death(3).reason == "rank 2 exited with code 3 before its job had returned"
    assert death(-signal.SIGSEGV, "boom\n").reason == (
        "rank 2 was killed by SIGSEGV (segmentation fault): boom"
    )
    assert death(-signal.SIGKILL).kind == "crash"
    assert death(-40).reason == "rank 2 was killed by signal 40"


def test_a_kill_by_the_kernels_out_of_memory_killer() -> None:
    killed = death(-signal.SIGKILL, oom_killed=True)
    assert killed.kind == "out of memory"
    assert killed.reason == (
        "rank 2 was killed by the kernel's out-of-memory killer under a memory limit of 200.0 MiB"
    )
    assert death(-signal.SIGSEGV, oom_killed=True).kind == "crash"


def test_an_abort_for_want_of_memory() -> None:
    errors = (
        "terminate called after throwing an instance of 'std::bad_alloc'\n"
        "  what():  std::bad_alloc\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n"
    )
    aborted = death(-signal.SIGABRT, errors)
    assert aborted.kind == "out of memory"
    assert aborted.reason.endswith("200.0 MiB: what():  std::bad_alloc")


def test_an_abort_for_a_lost_peer() -> None:
    errors = (
        f"terminate called after throwing an instance of 'gloo::IoException'\n  what():  {GLOO}"
    )
    assert death(-signal.SIGABRT, errors).kind == "communication"


@pytest.mark.parametrize(
    ("size", "text"), [(100, "0.1 KiB"), (3 << 20, "3.0 MiB"), (3 << 29, "1.50 GiB")]
)
def test_bytes_as_text(size: int, text: str) -> None:
    assert format_bytes(size) == text
