"""Two real gloo ranks that live through a test session and run functions by name.

A function that fails on one rank may leave the other in a collective, so both are then ended and
started afresh for the next call.
"""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 60


class RankError(AssertionError):
    """A function raised in a rank; `message` is the exception's own."""

    def __init__(self, kind: str, message: str, detail: str) -> None:
        super().__init__(f"{kind}: {message}\n{detail}")
        self.kind = kind
        self.message = message


class Ranks:
    """A group of rank processes; `call` runs one function in all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0

    def call(self, target: str, /, seconds: float = SECONDS, **arguments: Any) -> list[Any]:
        """What `target` ("package.module:function") returned, rank by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((target, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.count:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=seconds)
            if not ready:
                self.stop()
                raise TimeoutError(f"{target} did not return within {seconds} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "died", ("EOFError", "the process ended", "")
                if kind != "ok":
                    self.stop()
                    raise RankError(*value)
                results[rank] = value
        return [results[rank] for rank in range(self.count)]

    def stop(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        self._started += 1
        store = str(Path(self._folder.name) / f"store{self._started}")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.count, store))
            process.daemon = True
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(pipe: Connection, rank: int, ranks: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=10 * SECONDS),
        )
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            target, arguments = pipe.recv()
            module, _, name = target.partition(":")
            try:
                value = getattr(importlib.import_module(module), name)(**arguments)
            except BaseException as error:  # noqa: BLE001 - handed to the test that asked
                problem = (type(error).__name__, str(error), traceback.format_exc())
                pipe.send(("error", problem))
            else:
                pipe.send(("ok", value))
