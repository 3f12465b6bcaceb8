"""Jobs that the launch tests run in ranks: one for each way in which a rank can behave."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import ConfigError, ModelFileError
from runtime.limits import reserved_peak, reset_peak
from runtime.rank import RankContext

MIB = 1 << 20


def echo(payload: dict[str, Any], context: RankContext) -> None:
    context.report(
        "echo",
        payload=payload,
        rank=context.rank,
        ranks=context.ranks,
        device=str(context.device),
        initialised=dist.is_initialized(),
        pid=os.getpid(),
        parent=os.getppid(),
        session=os.getsid(0),
        folder=os.getcwd(),
        path=sys.path,
        environment=dict(os.environ),
        input=sys.stdin.read(),
        numpy_seed=_numpy_number(),
        descriptors=sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    )


def _numpy_number() -> int:
    import numpy as np

    return int(np.random.randint(1 << 31))


def cost(payload: dict[str, Any], context: RankContext) -> None:
    context.report("cost", parent=os.getppid(), seconds=time.process_time())


def load_data(payload: dict[str, Any], context: RankContext) -> None:
    """Stays in the middle of a pass over a loader with two workers."""
    data = torch.utils.data.TensorDataset(torch.arange(1000.0))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, num_workers=2))
    (batch,) = next(batches)
    workers = [process.pid for process in multiprocessing.active_children()]
    context.report("batch", total=batch.sum().item(), workers=workers)
    time.sleep(600)


def loaded(payload: dict[str, Any], context: RankContext) -> None:
    """Which modules were there before the job."""
    names = [name for name in payload["names"] if name in sys.modules]
    context.report("loaded", loaded=names, parent=os.getppid())


def total(payload: dict[str, Any], context: RankContext) -> None:
    tensor = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(tensor)
    context.report("total", value=tensor.item())


def steps(payload: dict[str, Any], context: RankContext) -> None:
    for index in range(payload["count"]):
        context.report("step", index=index, text="x" * payload.get("size", 0))


def threads(payload: dict[str, Any], context: RankContext) -> None:
    """How many threads' processor time a matrix product adds to."""
    a = torch.randn(1200, 1200)
    before = _ticks()
    until = time.monotonic() + 20
    busy = 0
    while time.monotonic() < until and busy < torch.get_num_threads():
        for _ in range(10):
            a @ a
        busy = sum(ticks > before.get(task, 0) for task, ticks in _ticks().items())
    context.report("threads", set=torch.get_num_threads(), busy=busy)


def _ticks() -> dict[str, int]:
    ticks = {}
    for task in os.listdir("/proc/self/task"):
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
        ticks[task] = int(fields[11])
    return ticks


def sleep(payload: dict[str, Any], context: RankContext) -> None:
    context.report("pid", pid=os.getpid())
    time.sleep(600)


def train_forever(payload: dict[str, Any], context: RankContext) -> None:
    """Collectives without end: peers notice each other's end."""
    tensor = torch.ones(1000)
    context.report("pid", pid=os.getpid())
    while True:
        dist.all_reduce(tensor)


def hang(payload: dict[str, Any], context: RankContext) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    context.report("pid", pid=os.getpid())
    if payload["how"] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif payload["how"] == "c":
        ctypes.PyDLL(None).sleep(600)  # C code that keeps the interpreter's lock
    else:
        peer = torch.ones(1)
        if context.rank == 0:
            dist.all_reduce(peer)  # the other rank never comes
        time.sleep(600)


def end(payload: dict[str, Any], context: RankContext) -> None:
    """Rank `payload["rank"]` ends in the given way; the others are in a collective."""
    if context.rank == payload.get("rank", 0):
        print("some words before the end", file=sys.stderr)
        _end(payload["how"])
    elif context.ranks > 1:
        dist.all_reduce(torch.ones(1))


def _end(how: str) -> None:
    if how == "raise":
        raise IndexError("a value\nand a second line")
    if how == "config":
        raise ConfigError("ranks must be even, but got 3")
    if how == "model file":
        raise ModelFileError("/m.py:3: build_model() raised", "their traceback")
    if how == "exit":
        sys.exit("no more")
    if how == "_exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, how))


def meddle(payload: dict[str, Any], context: RankContext) -> None:
    """Does to the pipe of its reports what careless code does to descriptors."""
    fd = context.report.__self__._fd  # type: ignore[attr-defined]
    if payload["how"] == "write":
        os.write(fd, b"no JSON\n")
        time.sleep(600)
    elif payload["how"] == "close":
        os.close(fd)
    else:
        context.report("step", loss=torch.ones(1))


def flood(payload: dict[str, Any], context: RankContext) -> None:
    """Prints `payload["mib"]` MiB to each stream, then fails."""
    block = b"x" * (MIB - 1) + b"\n"
    for _ in range(payload["mib"]):
        for stream in (sys.stdout, sys.stderr):
            stream.buffer.write(block)
    print("the last line", file=sys.stderr)
    raise RuntimeError("after the flood")


def family(payload: dict[str, Any], context: RankContext) -> None:
    """Starts processes that would outlive it: in its session, in their own, orphaned, deaf."""
    sleeper = [sys.executable, "-c", _SLEEPER]
    pids = [subprocess.Popen(sleeper).pid, subprocess.Popen(sleeper, start_new_session=True).pid]
    read, write = os.pipe()
    if os.fork() == 0:  # a daemon: its parent ends at once
        os.setsid()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os.write(write, str(pid).encode())
        os._exit(0)
    pids.append(int(os.read(read, 20)))
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    assert worker.pid is not None
    memory = shared_memory.SharedMemory(create=True, size=4096)
    context.report("family", pids=[*pids, worker.pid], memory=memory.name, rank=os.getpid())
    time.sleep(600 if payload["stay"] else 0.1)
    if payload["stay"] is None:
        os.kill(os.getpid(), signal.SIGSEGV)


_SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def allocate(payload: dict[str, Any], context: RankContext) -> None:
    """Wants far more than its limit, in one of several ways."""
    how = payload["how"]
    context.report("start")
    if how == "tensor":
        torch.ones(payload["mib"] * MIB, dtype=torch.uint8)
    elif how == "many tensors":
        kept = []
        while True:
            kept.append(torch.ones(64 << 10))
    elif how == "python":
        bytearray(payload["mib"] * MIB)
    elif how == "numpy":
        import numpy as np

        np.ones(payload["mib"] * MIB, dtype=np.uint8)
    elif how == "backward":
        x = torch.ones(MIB, requires_grad=True)
        for _ in range(payload["mib"]):
            x = x.exp().log()
        x.sum().backward()
    elif how == "convolution":
        layer = torch.nn.Conv2d(16, 64, 3)
        kept_outputs = []
        while True:
            kept_outputs.append(layer(torch.ones(8, 16, 64, 64)))
    elif how == "shared":  # RLIMIT_DATA does not count it
        block = mmap.mmap(-1, payload["mib"] * MIB)
        for start in range(0, len(block), 4 * MIB):
            block[start : start + 4 * MIB] = b"x" * (4 * MIB)
            time.sleep(0.002)
        time.sleep(600)
    else:
        raise ValueError(how)


def peak(payload: dict[str, Any], context: RankContext) -> None:
    """Reserved peaks: at rest, after a tensor has come and gone, after touching a file."""
    baseline = context.memory_baseline
    context.report("rest", bytes=reserved_peak(baseline))
    tensor = torch.ones(payload["mib"] * MIB, dtype=torch.uint8)
    del tensor
    context.report("tensor", bytes=reserved_peak(baseline))
    reset_peak(baseline)
    context.report("reset", bytes=reserved_peak(baseline))
    with open(payload["file"], "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        sum(mapped[offset] for offset in range(0, len(mapped), 4096))
        context.report("file", bytes=reserved_peak(baseline))
        mapped.close()
    shared = mmap.mmap(-1, payload["mib"] * MIB)
    for start in range(0, len(shared), MIB):
        shared[start : start + MIB] = b"x" * MIB
    context.report("shared", bytes=reserved_peak(baseline))


def hold(payload: dict[str, Any], context: RankContext) -> None:
    tensor = torch.ones(payload["mib"] * MIB, dtype=torch.uint8)
    context.report("held", bytes=tensor.numel())


def one_allocates(payload: dict[str, Any], context: RankContext) -> None:
    if context.rank == payload["rank"]:
        time.sleep(0.1)
        torch.ones(payload["mib"] * MIB, dtype=torch.uint8)
    dist.all_reduce(torch.ones(1))


def allocate_on_device(payload: dict[str, Any], context: RankContext) -> None:
    tensor = torch.ones(payload["mib"] * MIB, dtype=torch.uint8, device=context.device)
    context.report("peak", bytes=reserved_peak(context.memory_baseline), held=tensor.numel())
