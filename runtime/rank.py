"""What runs in a rank process: it joins its group, takes its baseline, and calls the job.

A rank is forked by `runtime.forkserver`, or is a fresh process where that cannot fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing in its __all__

from runtime.errors import ConfigError, UserError
from runtime.limits import (
    MemoryBaseline,
    apply_limit,
    lift_limit,
    steady_allocator,
    take_baseline,
    volunteer_for_oom_killer,
)
from runtime.loopback import loopback_interface
from runtime.verdict import is_communication, is_out_of_memory, out_of_memory_reason

_REPORT_BUFFER_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_PARALLEL_GRAIN = 32768  # at::internal::GRAIN_SIZE: elements that one thread works through alone


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """All that a rank is told; JSON values only."""

    target: str
    """"package.module:function"."""
    payload: dict[str, Any]
    rank: int
    ranks: int
    threads: int
    memory_limit_bytes: int | None
    seconds: float
    """Until the deadline; no collective gives up before it."""
    report_fd: int
    store_fd: int | None
    """A file in memory that the ranks of a group share, for `torch.distributed.FileStore`."""
    environment: dict[str, str]
    path: list[str]
    """`sys.path` of the process that asked."""
    folder: str
    """Its working directory."""


@dataclass(frozen=True)
class RankContext:
    """What a job is given beside its payload."""

    rank: int
    ranks: int
    device: torch.device
    memory_baseline: MemoryBaseline
    report: Callable[..., None]
    """`report("step", index=3, seconds=0.2)` sends one event; the fields must be JSON values."""


def run_rank(order: RankOrder) -> NoReturn:
    """Do what `order` says, report how it ended, and wait to be ended; never returns.

    A rank does not leave by itself: its sockets would close under peers that still read.
    """
    reporter = _Reporter(order.report_fd)
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)  # the server asks where a rank hangs
        _enter(order)
        device = _join(order)
        function = _resolve(order.target)
        _start_threads(order.threads)
        baseline = take_baseline(device)
        reporter.send(
            state="ready",
            anonymous_bytes=baseline.anonymous_bytes,
            shared_bytes=baseline.shared_bytes,
            host_limit=baseline.device == "cpu",
        )
        if order.memory_limit_bytes is not None:
            apply_limit(baseline, order.memory_limit_bytes)
        function(
            order.payload,
            RankContext(order.rank, order.ranks, device, baseline, reporter.report),
        )
        message: dict[str, Any] = {"state": "done"}
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported, not hidden
        lift_limit()
        message = _failure(error, order.memory_limit_bytes)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user's code
            stream.flush()
    reporter.send(**message)
    while True:
        signal.pause()


def fresh_rank(order_fd: int) -> NoReturn:
    """Entry of a rank that is a new process; the order is a JSON file at `order_fd`."""
    with os.fdopen(order_fd, encoding="utf-8") as file:
        order = RankOrder(**json.load(file))
    run_rank(order)


class _Reporter:
    """Writes JSON lines; the pipe holds some thousands, so a slow reader stops no training."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):  # above the user's share of pipe memory
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _REPORT_BUFFER_BYTES)

    def report(self, name: str, /, **fields: Any) -> None:
        self.send(event=name, data=fields)

    def send(self, **message: Any) -> None:
        left = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while left:
                left = left[os.write(self._fd, left) :]


def _enter(order: RankOrder) -> None:
    steady_allocator()
    volunteer_for_oom_killer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threads = str(order.threads)
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ.update(
        # Libraries that load later, and processes started from here, read these.
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OPENBLAS_NUM_THREADS=threads,
        RANK=str(order.rank),
        LOCAL_RANK=str(order.rank),
        WORLD_SIZE=str(order.ranks),
        LOCAL_WORLD_SIZE=str(order.ranks),
    )
    sys.path[:] = order.path
    sys.argv[:] = sys.argv[:1]
    tempfile.tempdir = None
    with contextlib.suppress(OSError):  # removed since: a job that needs none still runs
        os.chdir(order.folder)
    if "numpy" in sys.modules:  # a fork repeats its state; `random` reseeds itself
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(order.threads)


def _join(order: RankOrder) -> torch.device:
    """The rank's device, in its process group where there is more than one rank."""
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        if order.ranks > torch.cuda.device_count():
            raise ConfigError(
                f"ranks must be at most the number of CUDA devices, {torch.cuda.device_count()}, "
                f"but got {order.ranks}"
            )
        device = torch.device("cuda", order.rank)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context belongs to the baseline
        backend = "cpu:gloo,cuda:nccl"
    if order.store_fd is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
        dist.init_process_group(
            backend,
            store=FileStore(f"/proc/self/fd/{order.store_fd}", order.ranks),
            rank=order.rank,
            world_size=order.ranks,
            timeout=timedelta(seconds=order.seconds + 60),
            device_id=device if device.type == "cuda" else None,
        )
    return device


def _start_threads(threads: int) -> None:
    """Have the OpenMP team started before the baseline: RLIMIT_DATA counts the threads' stacks."""
    torch.zeros(threads * _PARALLEL_GRAIN).add_(1)


def _resolve(target: str) -> Callable[[dict[str, Any], RankContext], Any]:
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"target must name a function, but {target} is {function!r}")
    return function  # type: ignore[no-any-return]


def _failure(error: BaseException, limit_bytes: int | None) -> dict[str, Any]:
    detail = "".join(traceback.format_exception(error))
    if is_out_of_memory(error):
        kind, reason = "out of memory", out_of_memory_reason(error, limit_bytes)
    elif is_communication(error):
        kind, reason = "communication", _one_line(error)
    elif isinstance(error, UserError):
        kind, reason = "user error", str(error)
        detail = getattr(error, "detail", "") or detail
    else:
        kind, reason = "crash", _one_line(error)
    return {"state": "error", "kind": kind, "reason": reason, "traceback": detail}


def _one_line(error: BaseException) -> str:
    """Class and message, after the line of the user's own code that it came from."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    installed |= {Path(__file__).resolve().parent, Path(torch.__file__).resolve().parent}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(file.is_relative_to(folder) for folder in installed):
            return f"{file}:{frame.lineno}: {text}"
    return text
