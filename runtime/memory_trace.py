"""Peak of live tensor bytes within a block of code."""

from __future__ import annotations

import bisect
import gc
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class AllocationTrace:
    """Filled in when the traced block ends."""

    peak_bytes: int = 0
    """Largest rise of the live tensor bytes above those at the block's start; never negative."""
    end_bytes: int = 0
    """Live tensor bytes at the block's end minus those at its start; may be negative."""


@contextmanager
def trace_allocations(device: torch.device) -> Iterator[AllocationTrace]:
    """Trace the tensor memory that the enclosed code takes on `device`.

    On CUDA these are the caching allocator's own figures. On CPU they come from the profiler's
    memory events, which tell of what this thread and its backward passes allocate, workspaces
    inside kernels included; a step takes up to a third longer under it. Two kinds of frees are
    told by other means:

    - tensors that live at the start count as freed when they die, if Python knows of them (`gc`,
      or as some tensor's gradient); a storage that is shrunk in place does not;
    - a communication thread may be the last to let a buffer go, which the profiler misses. Such a
      buffer is known by its address being handed out again, or, in a process group, by no tensor
      holding it at the end (so leave no autograd graph behind). It counts as having lived as long
      as buffers of its size usually do.
    """
    trace = AllocationTrace()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield trace
        torch.cuda.synchronize(device)
        trace.peak_bytes = torch.cuda.max_memory_allocated(device) - start
        trace.end_bytes = torch.cuda.memory_allocated(device) - start
        return
    existing = _ExistingStorages()
    with profile(use_cpu=True, profile_memory=True) as profiler:
        yield trace
    changes = existing.stop()
    held = _held_pointers() if dist.is_initialized() else None
    for block in lives(_cpu_events(profiler), held):
        changes.append((block.start_ns, block.size))
        if block.end_ns is not None:
            changes.append((block.end_ns, -block.size))
    rise = 0
    for _, change in sorted(changes):
        rise += change
        trace.peak_bytes = max(trace.peak_bytes, rise)
    trace.end_bytes = rise


@dataclass
class Block:
    """One allocation."""

    pointer: int
    size: int
    start_ns: int
    end_ns: int | None = None
    """None while it lives."""
    silent: bool = False
    """`end_ns` is only the latest time at which it can have been freed."""


Event = tuple[int, int, int]
"""Nanoseconds since the epoch, pointer, bytes (negative where freed)."""


def lives(events: Sequence[Event], held: set[int] | None) -> list[Block]:
    """Each block that `events` allocate, with when it was freed.

    `held` are the pointers that tensors hold at the end: other blocks that still seem to live
    were freed silently. None where that cannot be known.
    """
    blocks: list[Block] = []
    live: dict[int, Block] = {}
    addresses: list[int] = []  # of `live`, ascending

    def end(pointer: int, when: int, *, silent: bool) -> None:
        block = live.pop(pointer)
        addresses.pop(bisect.bisect_left(addresses, pointer))
        block.end_ns, block.silent = when, silent

    for when, pointer, size in sorted(events):
        if size <= 0:
            # A pointer that this block of code did not allocate may carry the size that an
            # earlier trace saw: `_ExistingStorages` knows better.
            if pointer in live:
                end(pointer, when, silent=False)
            continue
        first = bisect.bisect_right(addresses, pointer) - 1
        if first >= 0 and addresses[first] + live[addresses[first]].size <= pointer:
            first += 1
        last = bisect.bisect_left(addresses, pointer + size)
        for address in addresses[max(0, first) : last]:
            end(address, when, silent=True)
        live[pointer] = Block(pointer, size, when)
        bisect.insort(addresses, pointer)
        blocks.append(live[pointer])
    if held is not None and blocks:
        for address in [address for address in addresses if address not in held]:
            end(address, max(when for when, _, _ in events), silent=True)
    _shorten_silent(blocks)
    return blocks


def _shorten_silent(blocks: Sequence[Block]) -> None:
    usual: dict[int, list[int]] = defaultdict(list)
    for block in blocks:
        if block.end_ns is not None and not block.silent:
            usual[block.size].append(block.end_ns - block.start_ns)
    for block in blocks:
        if block.end_ns is not None and block.silent and usual[block.size]:
            life = int(statistics.median(usual[block.size]))
            block.end_ns = min(block.end_ns, block.start_ns + life)


def _cpu_events(profiler: profile) -> list[Event]:
    results = profiler.kineto_results
    if results is None:
        raise RuntimeError("the profiler must have run, but it holds no results")
    events = []
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return events


def _python_tensors() -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """Every tensor that Python knows of and that has host memory of its own, with its storage."""
    seen: set[int] = set()
    for item in gc.get_objects():
        if not issubclass(type(item), Tensor):
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == "cpu" and storage.data_ptr():
                    yield tensor, storage
            except (NotImplementedError, RuntimeError):
                continue  # a wrapper (DTensor, fake, sparse): what it holds are tensors themselves


def _held_pointers() -> set[int]:
    return {storage.data_ptr() for _, storage in _python_tensors()}


class _ExistingStorages:
    """Notes when each storage that lives now dies.

    The profiler says nothing of blocks that were allocated before it started. A storage counts as
    dead when the last of its Python tensors is, provided that C++ has let go of it too.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._tensors: dict[int, int] = {}
        self._deaths: dict[int, int] = {}
        self._watched: list[weakref.ref[Tensor]] = []
        for tensor, storage in _python_tensors():
            self._watch(tensor, storage)

    def _watch(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        pointer = storage.data_ptr()
        self._sizes[pointer] = storage.nbytes()
        self._storages.setdefault(pointer, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._tensors[pointer] = self._tensors.get(pointer, 0) + 1

        def died(_: weakref.ref[Tensor]) -> None:
            self._tensors[pointer] -= 1
            if not self._tensors[pointer]:
                self._deaths[pointer] = time.time_ns()

        self._watched.append(weakref.ref(tensor, died))

    def stop(self) -> list[tuple[int, int]]:
        """Stop watching; the time of each death, in nanoseconds, and minus the bytes it freed."""
        self._watched.clear()
        return [
            (when, -self._sizes[pointer])
            for pointer, when in self._deaths.items()
            if self._storages[pointer].expired()  # type: ignore[no-untyped-call]
        ]
