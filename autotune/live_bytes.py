"""Follows the live tensor bytes of one forward and backward pass, operation by operation.

Works alike on fake tensors (shapes without memory) and on real ones: a storage lives from the
operation that returns it until the last tensor on it is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autotune.timeline import MomentKind, Sample
from autotune.workspace import Recorder

_ACTIVATION, _LOGITS, _TEMPORARY, _WEIGHT = range(4)  # autotune.timeline.CATEGORIES
_aten = torch.ops.aten
_prim = torch.ops.prim


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around the pass; `sample` then tells what was live."""

    def __init__(self, known: list[Tensor], workspaces: Recorder | None = None) -> None:
        """`known` tensors (parameters, buffers, the batch) do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_key(tensor) for tensor in known}
        self._parameters = {_key(t) for t in known if isinstance(t, torch.nn.Parameter)}
        self._workspaces = workspaces
        self._kernels: list[tuple[Hashable, int] | None] = []
        self._sizes: dict[int, tuple[int, int]] = {}  # storage → category, bytes
        self._watched: dict[int, Any] = {}
        self._live = [0, 0, 0, 0]
        self._history: list[tuple[int, ...]] = []
        self._moments: list[tuple[MomentKind, int, int, tuple[int, ...]]] = []
        self._category = _ACTIVATION
        self._in_backward = False
        self._flops = 0
        self._sum: tuple[int, tuple[int, ...]] | None = None

    def moment(self, kind: MomentKind, index: int = 0) -> None:
        """Something happened that the engine acts on."""
        self._settle()
        self._moments.append((kind, index, len(self._history), tuple(self._live)))
        if kind == "forward":
            self._category = _ACTIVATION
        elif kind == "forwarded":
            self._category = _LOGITS
        elif kind == "loss":
            self._category, self._in_backward = _TEMPORARY, True

    def gradient(self, index: int, gradient: Tensor) -> None:
        """The gradient of parameter `index` is complete: it stops counting."""
        self._settle()
        key = _key(gradient)
        category, size = self._sizes.pop(key, (0, 0))
        self._live[category] -= size
        self._known.add(key)
        self._moments.append(("gradient", index, len(self._history), tuple(self._live)))

    def sample(self, micro_batch_size: int, dtype: torch.dtype | None = None) -> Sample:
        """All that was seen; with `dtype`, as if that had stood in the place of bfloat16.

        Both are as wide, but kernels for one may take workspace where those for the other do not.
        """
        self._settle()
        history = tuple(self._with_workspaces(dtype))
        return Sample(micro_batch_size, history, tuple(self._moments), self._flops)

    def _with_workspaces(self, dtype: torch.dtype | None) -> Iterator[tuple[int, ...]]:
        workspaces = self._workspaces
        if workspaces is None:
            yield from self._history
            return
        keys = {item[0]: item[0] for item in self._kernels if item is not None}
        if dtype is not None:
            keys = {key: workspaces.in_dtype(key, dtype) for key in keys}
        taken = workspaces.taken(keys.values())
        for live, item in zip(self._history, self._kernels, strict=True):
            extra = 0 if item is None else max(0, taken[keys[item[0]]] - item[1])
            yield (*live[:_TEMPORARY], live[_TEMPORARY] + extra, *live[_TEMPORARY + 1 :])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _prim.device.default:
            return func(*args)  # autograd asks for it all the time
        self._settle()
        kernel = None
        if self._workspaces is None:
            out = func(*args, **kwargs)
        else:
            out, kernel = self._workspaces.call(func, args, kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._flops += count(*args, **kwargs, out_val=out)
        new = 0
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor):
                new += self._see(leaf, func, args)
            elif isinstance(leaf, (tuple, list)):
                new += sum(self._see(x, func, args) for x in leaf if isinstance(x, Tensor))
        live = tuple(self._live)
        if new and self._in_backward and self._is_accumulation(func, args):
            self._sum = (_key(args[0]), live)
        elif new or kernel is not None:
            self._note(live, kernel, new)
        return out

    def _note(self, live: tuple[int, ...], kernel: Hashable | None, new: int) -> None:
        self._history.append(live)
        self._kernels.append(None if kernel is None else (kernel, new))

    def _is_accumulation(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd adds two gradients that meet in one tensor.

        It adds in place where it holds the only reference to the first, but never while a dispatch
        mode is active (torch/csrc/autograd/input_buffer.cpp): here the sum is always a new tensor.
        """
        return (
            func is _aten.add.Tensor
            and not torch.is_grad_enabled()
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and args[0].dtype == args[1].dtype
        )

    def _settle(self) -> None:
        """Decide on the sum before: was it in place, in the real engine?"""
        if self._sum is not None:
            key, live = self._sum
            self._sum = None
            if key in self._sizes:  # the first operand lives on, so the sum needed memory
                self._note(live, None, 0)

    def _see(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return 0  # sparse, or a wrapper: what it holds are tensors of their own
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return 0
        size = storage.nbytes()
        if not size:
            return 0
        category = self._category
        if (
            func is _aten._to_copy.default
            and not self._in_backward
            and _key(args[0]) in self._parameters
        ):
            category = _WEIGHT
        self._sizes[key] = (category, size)
        self._live[category] += size
        self._watched[key] = weakref.ref(storage, lambda _: self._died(key))
        return size

    def _died(self, key: int) -> None:
        self._watched.pop(key, None)
        category, size = self._sizes.pop(key, (0, 0))
        self._live[category] -= size
        self._known.discard(key)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def live_tensors(tree: Any) -> list[Tensor]:
    """The tensors in `tree`."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
