"""Starts one rank process, from inside the fork server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime import processes

_FRESH = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from runtime.rank import fresh_rank; fresh_rank(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class RankProcess:
    """A started rank, and the server's ends of its three pipes."""

    rank: int
    pid: int
    report_fd: int
    output_fd: int
    errors_fd: int

    @property
    def fds(self) -> tuple[int, int, int]:
        return (self.report_fd, self.output_fd, self.errors_fd)


def start_rank(
    order: dict[str, Any],
    *,
    store_fd: int | None,
    fork: bool,
    close_in_rank: Callable[[], list[int]],
) -> RankProcess:
    """Start the rank that `order` describes (the fields of `RankOrder`, less the descriptors).

    It leads a session of its own, ignores SIGINT, dies with the server, reads nothing, and holds
    of the server's descriptors none of those in `close_in_rank`.

    Raises:
        OSError: no more processes or descriptors.
    """
    server = os.getpid()
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(3):
            pipes.append(os.pipe2(os.O_CLOEXEC))
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
    except OSError:
        for pair in pipes:
            for fd in pair:
                os.close(fd)
        raise
    (report_read, report), (output_read, output), (errors_read, errors) = pipes
    if pid == 0:
        try:
            processes.die_with_parent(server)
            os.setsid()
            _reset_signals()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for fd in (null, output, errors, report_read, output_read, errors_read):
                os.close(fd)
            for fd in close_in_rank():
                os.close(fd)
            full = {**order, "report_fd": report, "store_fd": store_fd}
            if fork:
                from runtime.rank import RankOrder, run_rank

                run_rank(RankOrder(**full))
            else:
                _exec(full)
        except BaseException as error:  # noqa: BLE001 - the server's loop must not go on in a rank
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    for fd in (report, output, errors):
        os.close(fd)
    for fd in (report_read, output_read, errors_read):
        os.set_blocking(fd, False)
    return RankProcess(order["rank"], pid, report_read, output_read, errors_read)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exec(order: dict[str, Any]) -> NoReturn:
    file = os.memfd_create("rank-order", 0)
    os.write(file, json.dumps(order).encode())
    os.lseek(file, 0, os.SEEK_SET)
    for fd in (order["report_fd"], order["store_fd"]):
        if fd is not None:
            os.set_inheritable(fd, True)
    threads = str(order["threads"])
    environment = {
        **order["environment"],
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
    }
    arguments = [sys.executable, "-c", _FRESH, str(file), *order["path"]]
    os.execve(sys.executable, arguments, environment)
