"""Peak of live tensor bytes within a block of code."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
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
    inside kernels included; a step takes up to a third longer under it. Tensors that live at the
    start and are freed within the block are subtracted when they die, if Python knows of them
    (`gc` or as some tensor's gradient); a storage that is shrunk in place is not subtracted.
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
    existing.stop()
    live: dict[int, int] = {}
    rise = 0
    for _, pointer, size in sorted(_cpu_events(profiler) + existing.frees()):
        if size > 0:
            live[pointer] = size
            rise += size
        elif pointer == _EXISTING:
            rise += size
        else:
            # A pointer unknown to this block may carry a size left over from an earlier trace.
            rise -= live.pop(pointer, 0)
        trace.peak_bytes = max(trace.peak_bytes, rise)
    trace.end_bytes = rise


_EXISTING = -1
_Event = tuple[int, int, int]  # nanoseconds since the epoch, pointer, bytes (< 0: freed)


def _cpu_events(profiler: profile) -> list[_Event]:
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
        seen: set[int] = set()
        for item in gc.get_objects():
            if not issubclass(type(item), Tensor):
                continue
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):
            return  # a wrapper (DTensor, fake, sparse): what it holds are tensors of their own
        if storage.device.type != "cpu" or not pointer:
            return
        self._sizes[pointer] = size
        self._storages.setdefault(pointer, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._tensors[pointer] = self._tensors.get(pointer, 0) + 1

        def died(_: weakref.ref[Tensor]) -> None:
            self._tensors[pointer] -= 1
            if not self._tensors[pointer]:
                self._deaths[pointer] = time.time_ns()

        self._watched.append(weakref.ref(tensor, died))

    def stop(self) -> None:
        self._watched.clear()

    def frees(self) -> list[_Event]:
        return [
            (when, _EXISTING, -self._sizes[pointer])
            for pointer, when in self._deaths.items()
            if self._storages[pointer].expired()  # type: ignore[no-untyped-call]
        ]
