"""A convolutional network with BatchNorm that tells which way a noisy stripe pattern runs.

No two of its layers are alike, so there are no repeated blocks to shard by; and BatchNorm makes the
loss depend on the micro-batch. Letters in shape comments: B samples, C channels, S image side.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, default_collate

side = 32
directions = 12  # classes: stripes turned by multiples of 15 degrees
noise = 1.0  # standard deviation; the stripes' own is 0.7
dropout = 0.0
global_batch_size = 64


class ConvNet(nn.Module):
    """Images (B, 3, S, S) to logits (B, directions); given labels (B,), to the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=5, padding=2, bias=False),  # (B, 32, S, S)
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 32, S/2, S/2)
            nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 128, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 256, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(256),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),  # (B, 256, 1, 1)
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(256, directions)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.classifier(self.dropout(self.features(images)))
        return logits if labels is None else F.cross_entropy(logits, labels)


class Stripes(Dataset[tuple[Tensor, int]]):
    """Image (3, S, S) and class of each index, the same at every look."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        pixels = torch.linspace(-1, 1, side)
        self.y, self.x = torch.meshgrid(pixels, pixels, indexing="ij")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(directions, (), generator=generator))
        frequency, phase = torch.rand(2, generator=generator).tolist()
        angle = math.pi * label / directions
        across = self.x * math.cos(angle) + self.y * math.sin(angle)  # (S, S)
        stripes = torch.sin((8 + 8 * frequency) * across + 2 * math.pi * phase)
        image = stripes * torch.randn(3, 1, 1, generator=generator)  # a colour
        return image + noise * torch.randn(3, side, side, generator=generator), label


def build_dataset(split: Literal["train", "held_out"] = "train") -> Stripes:
    """50,000 images to train on, and 10,000 others to test on."""
    return Stripes(0, 50_000) if split == "train" else Stripes(50_000, 10_000)


def build_model() -> nn.Module:
    return ConvNet()


def make_batch(micro_batch_size: int) -> tuple[Tensor, Tensor]:
    """Images (B, 3, S, S) and labels (B,). The model is called with both and returns its loss."""
    dataset = build_dataset()
    places = torch.randint(len(dataset), (micro_batch_size,)).tolist()
    images, labels = default_collate([dataset[place] for place in places])
    return images, labels


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
