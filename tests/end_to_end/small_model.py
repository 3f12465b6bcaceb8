"""A model file for searches in tests: a few blocks, steps of a few milliseconds."""

import torch
from torch import nn

global_batch_size = 16
WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return (x.mean(dim=(1, 2)) - y).square().mean()


def build_model():
    return Model()


def make_batch(micro_batch_size):
    return torch.randn(micro_batch_size, 64, WIDTH), torch.randn(micro_batch_size)
