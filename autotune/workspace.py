"""Bytes that kernels take for themselves and free before they return.

A trace sees the tensors that go into an operation and come out of it, not what a convolution
reorders its weights into. So each kind of operation met in a trace is run once on real tensors of
the same shapes, dtypes and strides, while the profiler records its allocations.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd.profiler import profile, record_function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

_LARGEST_BYTES = 64 * 2**20
"""Operations on more than that are not run: beside such tensors, workspaces are small."""
_SECONDS = 2.0
"""Spent on runs, at most, in the life of one `Workspaces`."""
_MARK = "workspace "

_Leaf = tuple[Any, ...]


class Workspaces:
    """Measures operations, each kind once."""

    def __init__(self) -> None:
        self._bytes: dict[Hashable, int] = {}
        self._structures: dict[Hashable, Any] = {}
        self._seconds = 0.0

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """What tells operations of one kind from others; None where no workspace is expected."""
        if torch.Tag.pointwise in func.tags or func.is_view:
            return None
        leaves, structure = tree_flatten((args, kwargs))
        described = [_describe(leaf) for leaf in leaves]
        key = (func, tuple(described))
        try:
            self._structures.setdefault(key, structure)
        except TypeError:  # an argument that cannot be hashed
            return None
        return key

    def in_dtype(self, key: Hashable, dtype: torch.dtype) -> Hashable:
        """The key of the same operation with every bfloat16 replaced by `dtype`."""
        assert isinstance(key, tuple)
        func, described = key
        replaced = tuple(
            tuple(dtype if part is torch.bfloat16 else part for part in leaf) for leaf in described
        )
        narrow = (func, replaced)
        self._structures.setdefault(narrow, self._structures[key])
        return narrow

    def taken(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        """Workspace of each operation of `keys`; 0 where it cannot be run by itself."""
        wanted = dict.fromkeys(keys)
        new = [key for key in wanted if key not in self._bytes]
        if new:
            self._measure(new)
        return {key: self._bytes.get(key, 0) for key in wanted}

    def _measure(self, keys: list[Any]) -> None:
        start = time.perf_counter()
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch.random.fork_rng(),
            profile(use_cpu=True, profile_memory=True) as profiler,
        ):
            for number, key in enumerate(keys):
                self._bytes[key] = 0
                func, described = key
                size = sum(leaf[-1] for leaf in described if leaf[0] is Tensor)
                spent = self._seconds + time.perf_counter() - start
                if size > _LARGEST_BYTES or spent > _SECONDS:
                    continue
                try:
                    leaves = [_real(leaf) for leaf in described]
                    args, kwargs = tree_unflatten(leaves, self._structures[key])
                    with record_function(f"{_MARK}{number}"):
                        func(*args, **kwargs)
                except (RuntimeError, IndexError, ValueError, NotImplementedError):
                    continue  # it depends on values that zeros do not stand for
        results = profiler.kineto_results
        assert results is not None
        for event in results.experimental_event_tree():
            if event.name.startswith(_MARK):
                self._bytes[keys[int(event.name[len(_MARK) :])]] = _passing_bytes(event)
        self._seconds += time.perf_counter() - start


def _describe(leaf: Any) -> _Leaf:
    if isinstance(leaf, Tensor):
        shape, stride = tuple(leaf.shape), leaf.stride()
        return (Tensor, shape, stride, leaf.dtype, leaf.numel() * leaf.element_size())
    return (None, type(leaf), leaf)


def _real(leaf: _Leaf) -> Any:
    if leaf[0] is not Tensor:
        return leaf[2]
    _, shape, stride, dtype, _ = leaf
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 in shape:
        extent = 0
    return torch.zeros(extent, dtype=dtype).as_strided(shape, stride)


def _passing_bytes(event: Any) -> int:
    """Peak of the bytes allocated within `event`, its results included."""
    changes = []
    stack = [event]
    while stack:
        item = stack.pop()
        stack.extend(item.children)
        fields = item.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            changes.append((item.start_time_ns, fields.alloc_size))
    live = peak = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak
