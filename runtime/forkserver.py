"""The fork server: one process that has torch imported and starts, watches and ends ranks.

It speaks JSON lines over one socket. Orders are `start` and `stop`; answers are `hello` (once),
then for each group `pids`, any number of `event`, and exactly one `end`. At end-of-file, or when
its parent is another one than at the start, it ends every rank and exits.

It may fork only while it has a single thread and no CUDA context; else every rank is a new
process, which costs the imports again.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import site
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime import limits, processes
from runtime.rank_group import RankProcesses
from runtime.rank_process import start_rank

OWN_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer imports it
    "runtime.rank",
)
OWN_IMPORTS_IF_PRESENT = ("runtime.engine", "runtime.measure")

_TICK_SECONDS = 0.05
_IDLE_SECONDS = 0.5
_ENDING_SECONDS = 0.005
_OUTGOING_BYTES = 16 << 20
"""Beyond this many unread bytes the ranks' pipes are left to fill."""
_FULL_SECONDS = 0.002


def main(socket_fd: int, options: str) -> None:
    """Entry of the server process; `options` is a JSON object of `preload` and `fork`."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    processes.adopt_orphans()
    connection = socket.socket(fileno=socket_fd)
    given = json.loads(options)
    hello = prepare(given["preload"], fork=given["fork"])
    server = Server(connection, parent, fork=hello["fork"])
    server.send({"op": "hello", **hello})
    if hello["culprit"] is None:
        server.serve()


def prepare(preload: Sequence[str], *, fork: bool) -> dict[str, Any]:
    """Import all that ranks need.

    Returns `fork` (whether this process may fork), `problems` (one line each) and `culprit`: a
    module of `preload` that must be left out, since importing it made forking impossible.
    """
    problems: list[str] = []
    culprit: str | None = None
    if not fork:
        return {"fork": False, "problems": problems, "culprit": culprit}
    present = [name for name in OWN_IMPORTS_IF_PRESENT if importlib.util.find_spec(name)]
    for name in (*OWN_IMPORTS, *present):
        problems.extend(_try_import(name))
    reason = why_not_fork()
    if reason is None:
        for name in preload:
            if not _is_installed(name):
                continue
            problems.extend(_try_import(name))
            reason = why_not_fork()
            if reason is not None:
                culprit = name
                problems.append(f"each rank imports {name} itself, since importing it {reason}")
                break
    else:
        problems.append(f"each rank is a new process (slower), since importing torch {reason}")
    gc.collect()
    gc.freeze()  # a rank's collections would copy every page of the objects that lie here
    return {"fork": reason is None, "problems": problems, "culprit": culprit}


def why_not_fork() -> str | None:
    """What makes forking this process unsafe, as the end of a sentence; None where nothing does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"started {threads - 1} thread{'s' if threads > 2 else ''}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initialised CUDA"
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return "opened a CUDA device"
        except OSError:  # the descriptor of the listing itself
            continue
    return None


def _is_installed(name: str) -> bool:
    """Whether module `name` lies among the installed packages, not beside a model file."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
    folders = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
    return any(
        Path(place).is_relative_to(folder) for place in places if place for folder in folders
    )


def _try_import(name: str) -> list[str]:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, and met again in the rank
        first = (str(error).strip().splitlines() or [""])[0]
        return [f"preloading {name} failed: {type(error).__name__}: {first}".rstrip(": ")]
    return []


class Server:
    """The loop: orders in, ranks watched, answers out. Single-threaded."""

    def __init__(self, connection: socket.socket, parent: int, *, fork: bool) -> None:
        self._connection = connection
        self._parent = parent
        self._fork = fork
        self._groups: dict[int, RankProcesses] = {}
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        connection.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        """Queue an answer, and write what the socket takes."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._flush()

    def serve(self) -> None:
        """Run until the parent has gone; then end all."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._drain_wakeup)
        self._selector.register(self._connection, selectors.EVENT_READ, self._receive)
        reserve = limits.host_reserve_bytes()
        next_tick = 0.0
        while self._open or self._groups:
            for key, events in self._selector.select(self._timeout()):
                if events & selectors.EVENT_READ:
                    key.data()
            self._reap()
            if os.getppid() != self._parent:
                self._open = False
            now = time.monotonic()
            if now >= next_tick and self._groups:
                next_tick = now + _TICK_SECONDS
                low = limits.is_low(reserve)
                for group in self._groups.values():
                    group.check_memory(host_is_low=low, reserve_bytes=reserve)
            for group in list(self._groups.values()):
                if not self._open:
                    group.stop()
                end = group.advance(now, alone=len(self._groups) == 1)
                if end is not None:
                    self._forget(group)
                    self.send({"op": "end", "group": group.number, **end})
            self._flush()
            self._watch()
        # What left its session while another group ran.
        since = time.monotonic()
        while left := processes.descendants(os.getpid()):
            spare = time.monotonic() - since < processes.CLEANER_SECONDS
            processes.kill_all(left, spare_cleaners=spare)
            self._reap()
            time.sleep(_ENDING_SECONDS)

    def _watch(self) -> None:
        """Wake up for the socket's space only while something waits for it."""
        if self._open:
            write = selectors.EVENT_WRITE if self._outgoing else 0
            self._selector.modify(self._connection, selectors.EVENT_READ | write, self._receive)

    def _timeout(self) -> float:
        if not self._groups:
            return _IDLE_SECONDS
        if any(group.is_ending for group in self._groups.values()):
            return _ENDING_SECONDS
        return _TICK_SECONDS

    def _receive(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._open = False
            self._selector.unregister(self._connection)
            return
        self._incoming += data
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            order = json.loads(line)
            if order["op"] == "start":
                self._start(order)
            elif order["group"] in self._groups:
                self._groups[order["group"]].stop()

    def _start(self, order: dict[str, Any]) -> None:
        number = order["group"]

        def on_event(rank: int, name: str, data: dict[str, Any]) -> None:
            self.send({"op": "event", "group": number, "rank": rank, "name": name, "data": data})

        group = RankProcesses(
            number,
            deadline=order["deadline"],
            seconds=order["seconds"],
            limit_bytes=order["memory_limit"],
            on_event=on_event,
        )
        self._groups[number] = group
        ranks = order["ranks"]
        store_fd = os.memfd_create("ranks-store") if ranks > 1 else None
        try:
            for rank in range(ranks):
                process = start_rank(
                    {
                        **order["rank_order"],
                        "rank": rank,
                        "seconds": max(0.0, order["deadline"] - time.monotonic()),
                    },
                    store_fd=store_fd,
                    fork=self._fork,
                    close_in_rank=self._own_fds,
                )
                group.add(process)
                for fd in process.fds:
                    self._selector.register(
                        fd, selectors.EVENT_READ, self._reader(group, process.rank, fd)
                    )
        except OSError as error:
            group.fail(error)
        finally:
            if store_fd is not None:
                os.close(store_fd)
        self.send({"op": "pids", "group": number, "pids": group.pids})

    def _reader(self, group: RankProcesses, rank: int, fd: int) -> Callable[[], None]:
        def read() -> None:
            if len(self._outgoing) >= _OUTGOING_BYTES:
                time.sleep(_FULL_SECONDS)
            elif group.read(rank, fd) == 0:
                self._selector.unregister(fd)

        return read

    def _own_fds(self) -> list[int]:
        """What a rank must not keep: the parent's socket above all, or its end goes unseen."""
        others = [fd for group in self._groups.values() for fd in group.fds]
        return [
            self._connection.fileno(),
            self._wakeup,
            self._wakeup_write,
            self._selector.fileno(),
            *others,
        ]

    def _reap(self) -> None:
        """Collect every process that has ended; adopted orphans too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for group in self._groups.values():
                group.on_exit(pid, os.waitstatus_to_exitcode(status))

    def _forget(self, group: RankProcesses) -> None:
        del self._groups[group.number]
        registered = self._selector.get_map()
        for fd in group.fds:
            if fd in registered:
                self._selector.unregister(fd)
        group.close()

    def _drain_wakeup(self) -> None:
        try:
            os.read(self._wakeup, 4096)
        except BlockingIOError:
            return

    def _flush(self) -> None:
        while self._outgoing and self._open:
            try:
                sent = self._connection.send(self._outgoing)
            except BlockingIOError:
                break
            except OSError:  # the parent has gone; the next read says so
                self._outgoing.clear()
                break
            del self._outgoing[:sent]
