"""Bytes that kernels take for themselves and free before they return.

A trace sees the tensors that go into an operation and come out of it, not what a convolution
reorders its weights into. So each kind of operation met in a trace of fake tensors is run once on
zeros of the same shapes, dtypes and strides, while the profiler records its allocations; in a pass
over real tensors the profiler records the operations themselves.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

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
# fmt: off
_SAFE = frozenset({
    "addmm", "addbmm", "baddbmm", "bmm", "mm", "convolution", "convolution_backward",
    "embedding_dense_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax",
    "_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "_native_batch_norm_legit", "native_group_norm",
    "native_group_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "upsample_nearest2d",
    "upsample_bilinear2d", "cumsum", "sort", "topk", "index_put", "index_add", "sum", "mean",
    "var_mean", "linalg_vector_norm",
})
# fmt: on
"""Operations that may run on zeros; others might follow a pointer found in an opaque buffer."""
_OPAQUE = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused", "_flex_attention")
"""Operations whose workspace matters, and that run on their true arguments only."""


class HiddenWorkspaceError(RuntimeError):
    """The model uses an operation that must run for real to be measured."""


class Recorder(Protocol):
    """Runs the operations of a pass, and knows afterwards what each took."""

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Hashable | None]:
        """The result, and a key for `taken`; None where no workspace is expected."""

    def in_dtype(self, key: Hashable, dtype: torch.dtype) -> Hashable:
        """The key of the same operation with every bfloat16 replaced by `dtype`."""

    def taken(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        """Peak bytes allocated within each operation of `keys`, its results included."""


class RecordedCalls:
    """Records the operations of real passes; enter it around each."""

    def __init__(self) -> None:
        self._bytes: dict[Hashable, int] = {}
        self._count = 0
        self._profiler: profile | None = None

    def __enter__(self) -> None:
        self._profiler = profile(use_cpu=True, profile_memory=True)
        self._profiler.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        assert self._profiler is not None
        self._profiler.__exit__(*error)  # type: ignore[no-untyped-call]
        for number, taken in _marked(self._profiler).items():
            self._bytes[number] = taken

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Hashable | None]:
        self._count += 1
        with record_function(f"{_MARK}{self._count}"):
            return func(*args, **kwargs), self._count

    def in_dtype(self, key: Hashable, dtype: torch.dtype) -> Hashable:
        return key

    def taken(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        return {key: self._bytes.get(key, 0) for key in keys}


class Workspaces:
    """Measures kinds of operations, each once, on zeros."""

    def __init__(self) -> None:
        self._bytes: dict[Hashable, int] = {}
        self._structures: dict[Hashable, Any] = {}
        self._seconds = 0.0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Hashable | None]:
        return func(*args, **kwargs), self._key(func, args, kwargs)

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        name = func._opname
        if name not in _SAFE:
            if name.startswith(_OPAQUE):
                raise HiddenWorkspaceError(f"{name} hides its workspace")
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
        assert isinstance(key, tuple)
        func, described = key
        replaced = tuple(
            tuple(dtype if part is torch.bfloat16 else part for part in leaf) for leaf in described
        )
        narrow = (func, replaced)
        self._structures.setdefault(narrow, self._structures[key])
        return narrow

    def taken(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        """0 for an operation that cannot be run by itself."""
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
                    func(*args, **kwargs)  # what the first call alone takes is kept by the library
                    with record_function(f"{_MARK}{number}"):
                        func(*args, **kwargs)
                except (RuntimeError, IndexError, ValueError, NotImplementedError):
                    continue  # it depends on values that zeros do not stand for
        self._bytes.update({keys[number]: taken for number, taken in _marked(profiler).items()})
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


def _marked(profiler: profile) -> dict[int, int]:
    """Number of each marked call → peak of the bytes allocated within it."""
    results = profiler.kineto_results
    assert results is not None
    found = {}
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if event.name.startswith(_MARK):
            found[int(event.name[len(_MARK) :])] = _passing_bytes(event)
        else:
            stack.extend(event.children)
    return found


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
