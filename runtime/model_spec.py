"""Loads the model file: plain functions, found by name (see the README, "The model file").

A model file is imported afresh in each rank of each run, so an edit is always seen, and what it
leaves behind dies with the rank.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from runtime.errors import ModelFileError, UserError
from runtime.model_file import REQUIRED, check_model_file, missing_function, user_error
from runtime.verdict import is_out_of_memory

Batch = Any
"""A tensor, a dict (called as `model(**batch)`), or a tuple or list (`model(*batch)`)."""

_MODULE_NAME = "autotune_user_model"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The functions of one model file, with the defaults filled in and the user's errors named."""

    path: Path
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    """CPU batch of the given micro-batch size."""
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    """0-dim loss, the mean over the samples of the batch."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    """The optimizer over the model's trainable parameters."""
    default_optimizer: bool
    global_batch_size: int | None
    block_classes: tuple[type[nn.Module], ...] | None


def load_model_spec(path: Path) -> ModelSpec:
    """Import the model file at `path`.

    Raises:
        ModelFileError: no such file, a required function is missing, or the file raised on import
            (then `detail` holds the user's traceback).
    """
    path = path.resolve()
    module = _run_file(path, check_model_file(path))
    for name in REQUIRED:
        if not callable(getattr(module, name, None)):
            functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
            raise missing_function(path, name, functions)
    build_optimizer = getattr(module, "build_optimizer", None)
    return ModelSpec(
        path=path,
        build_model=_checked_build_model(path, module.build_model),
        make_batch=_checked_make_batch(path, module.make_batch),
        compute_loss=_checked_compute_loss(path, getattr(module, "compute_loss", None)),
        build_optimizer=_checked_build_optimizer(path, build_optimizer),
        default_optimizer=build_optimizer is None,
        global_batch_size=_checked_global_batch_size(path, module),
        block_classes=_checked_block_classes(path, module),
    )


def first_dimension(batch: Batch) -> set[int]:
    """The sizes met as first dimension of the tensors in `batch` (0-dim tensors left out)."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return {int(tensor.shape[0]) for tensor in tensors if tensor.ndim}


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """`batch` with every tensor on `device`; other entries as they are."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, batch)


def split_batch(batch: Batch, size: int, parts: int) -> list[Batch]:
    """`batch` of `size` samples cut into `parts` equal batches along the first dimension.

    Tensors whose first dimension is not `size`, and other entries, go whole into each part.
    `parts` must divide `size`.
    """
    if size % parts:
        raise ValueError(f"`size % parts == 0` must hold, but got ({size=}, {parts=}).")
    step = size // parts

    def take(leaf: Any, part: int) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size:
            return leaf[part * step : (part + 1) * step]
        return leaf

    return [tree_map(lambda leaf, part=part: take(leaf, part), batch) for part in range(parts)]


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's output on `batch`: `model(**batch)`, `model(*batch)`, or `model(batch)`."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    raise ModelFileError(
        f"make_batch must return a tensor, dict or tuple, but got {type(batch).__name__}"
    )


def _default_loss(model: nn.Module, batch: Batch) -> Any:
    output = call_model(model, batch)
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) or hasattr(output, "keys"):
        return output.get("loss")
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, (tuple, list)) and output:
        return output[0]  # transformers with return_dict=False: (loss, logits, ...)
    return loss


def _run_file(path: Path, tree: ast.Module) -> ModuleType:
    """The module that `tree` makes.

    Not by an import: that may take stale bytecode for a file edited within the same second.
    """
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python model.py` would: helper modules lie beside it
    module = ModuleType(_MODULE_NAME)
    module.__file__ = str(path)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickling look their module up here
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[_MODULE_NAME]
        raise user_error(path, error, "importing it") from error
    return module


def _checked_build_model(path: Path, function: Callable[[], Any]) -> Callable[[], nn.Module]:
    def build_model() -> nn.Module:
        model = _call_user(path, "build_model()", function)
        if not isinstance(model, nn.Module):
            raise ModelFileError(
                f"{path}: build_model() must return an nn.Module, but got {type(model).__name__}"
            )
        return model

    return build_model


def _checked_make_batch(path: Path, function: Callable[[int], Batch]) -> Callable[[int], Batch]:
    def make_batch(micro_batch_size: int) -> Batch:
        batch = _call_user(path, f"make_batch({micro_batch_size})", function, micro_batch_size)
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # a tokenizer's BatchEncoding, which tree_map takes for a leaf
        sizes = first_dimension(batch)
        if micro_batch_size not in sizes:
            met = f"first dimensions {sorted(sizes)}" if sizes else "no tensor"
            raise ModelFileError(
                f"{path}: make_batch({micro_batch_size}) must return tensors whose first "
                f"dimension is the micro-batch size, {micro_batch_size}, but got {met}"
            )
        return batch

    return make_batch


def _checked_compute_loss(
    path: Path, function: Callable[[nn.Module, Batch], Any] | None
) -> Callable[[nn.Module, Batch], Tensor]:
    name = "compute_loss" if function is not None else "the model's output"

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        loss = (function or _default_loss)(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            hint = (
                ""
                if function is not None
                else "; define compute_loss(model, batch), or let the model return its loss"
            )
            raise ModelFileError(f"{path}: {name} must give a scalar loss, but got {got}{hint}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ModelFileError(
                f"{path}: {name} must give a loss that depends on a trainable parameter, "
                f"but it needs no gradient; is it detached, or taken under no_grad?"
            )
        return loss.reshape(())

    return compute_loss


def _checked_build_optimizer(
    path: Path, function: Callable[[Any], Any] | None
) -> Callable[[nn.Module], Optimizer]:
    def build_optimizer(model: nn.Module) -> Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trainable:
            raise ModelFileError(
                f"{path}: the model must have a trainable parameter, but none requires a gradient"
            )
        if function is None:
            return AdamW(trainable, fused=True)
        first = next(iter(inspect.signature(function).parameters), "params")
        argument = model if first == "model" else trainable
        optimizer = _call_user(path, f"build_optimizer({first})", function, argument)
        if not isinstance(optimizer, Optimizer):
            raise ModelFileError(
                f"{path}: build_optimizer() must return a torch.optim.Optimizer, "
                f"but got {type(optimizer).__name__}"
            )
        return optimizer

    return build_optimizer


def _checked_global_batch_size(path: Path, module: ModuleType) -> int | None:
    size = getattr(module, "global_batch_size", None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ModelFileError(f"{path}: global_batch_size must be an integer >= 1, but got {size!r}")
    return size


def _checked_block_classes(path: Path, module: ModuleType) -> tuple[type[nn.Module], ...] | None:
    classes = getattr(module, "block_classes", None)
    if classes is None:
        return None
    classes = classes if isinstance(classes, (tuple, list)) else (classes,)
    for item in classes:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ModelFileError(
                f"{path}: block_classes must be a tuple of nn.Module classes, but got {item!r}"
            )
    return tuple(classes)


def _call_user(path: Path, call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise user_error(path, error, call) from error
