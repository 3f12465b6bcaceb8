"""Optimizers that do and do not work on shards, by name; each is built from a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Flattening(Optimizer):
    """Reads each parameter as one row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.view(-1).sub_(0.1 * parameter.grad.view(-1))


class Sign(Optimizer):
    """Element-wise, but not one of torch's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-0.01)


class LocalNorm(Sign):
    """Divides by the norm of what it holds, which on a shard is the shard's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    local = getattr(parameter, "_local_tensor", parameter)
                    local.sub_(0.1 * gradient / gradient.norm())


class TrustRatio(Sign):
    """Scales by norms of whole parameters, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(0.01 * ratio * parameter.grad)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decay_groups(model: nn.Module) -> Optimizer:
    matrices = [item for item in trainable(model) if item.ndim >= 2]
    others = [item for item in trainable(model) if item.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9, nesterov=True),
    "Adam foreach": lambda model: torch.optim.Adam(trainable(model), lr=1e-2, foreach=True),
    "RMSprop": lambda model: torch.optim.RMSprop(trainable(model), lr=1e-3),
    "Adagrad fused": lambda model: torch.optim.Adagrad(trainable(model), lr=1e-2, fused=True),
    "decay groups": decay_groups,
    "Adafactor": lambda model: torch.optim.Adafactor(trainable(model), lr=1e-2),
    "LBFGS": lambda model: torch.optim.LBFGS(trainable(model)),
    "Rprop": lambda model: torch.optim.Rprop(trainable(model)),
    "Flattening": lambda model: Flattening(trainable(model)),
    "Sign": lambda model: Sign(trainable(model)),
    "LocalNorm": lambda model: LocalNorm(trainable(model)),
    "TrustRatio": lambda model: TrustRatio(trainable(model)),
}
