from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.memory_trace import trace_allocations

CPU = torch.device("cpu")
MIB = 2**20


def block(mib: int, device: torch.device = CPU) -> Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


def test_peak_is_the_largest_rise_not_the_sum() -> None:
    with trace_allocations(CPU) as trace:
        kept = block(1)
        for _ in range(3):
            block(4)
    assert trace.peak_bytes == 5 * MIB
    assert trace.end_bytes == kept.nbytes


def test_what_lived_before_and_dies_within_makes_room() -> None:
    before = [block(8)]
    with trace_allocations(CPU) as trace:
        first = block(2)
        before.clear()
        second = block(4)
    assert trace.peak_bytes == first.nbytes
    assert trace.end_bytes == first.nbytes + second.nbytes - 8 * MIB


def test_what_lived_before_stays_counted_while_a_view_holds_it() -> None:
    before = [block(8)]
    view = before[0][:10]
    with trace_allocations(CPU) as trace:
        before.clear()
        block(4)
    assert view.numel() == 10
    assert (trace.peak_bytes, trace.end_bytes) == (4 * MIB, 0)


def test_gradients_from_before_are_freed_when_set_to_none() -> None:
    layer = nn.Linear(512, 512, bias=False)  # 1 MiB
    layer(torch.ones(1, 512)).sum().backward()
    with trace_allocations(CPU) as trace:
        layer.zero_grad()
        layer(torch.ones(1, 512)).sum().backward()
    assert trace.end_bytes == 0
    assert 0 < trace.peak_bytes < MIB // 4


def test_sizes_of_an_earlier_trace_do_not_leak_into_a_later_one() -> None:
    with trace_allocations(CPU):
        kept = [block(8)]
    kept.clear()
    kept.append(block(2))  # may well lie at the same address
    with trace_allocations(CPU) as trace:
        kept.clear()
        kept.append(block(1))
    assert (trace.peak_bytes, trace.end_bytes) == (0, -MIB)


def test_forward_and_backward_match_a_count_by_hand() -> None:
    layer = nn.Linear(256, 256, bias=False)
    inputs = torch.ones(1024, 256)
    with trace_allocations(CPU) as trace:
        loss = layer(inputs).square().sum()  # linear: 1 MiB, square: 1 MiB
        loss.backward()
    # Backward of square holds the linear's output and three products of its size at most.
    gradient = layer.weight.nbytes
    assert 2 * MIB <= trace.peak_bytes <= 5 * MIB + gradient
    assert gradient <= trace.end_bytes <= gradient + 64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_figures_are_the_allocators() -> None:
    device = torch.device("cuda")
    before = [block(8, device)]
    with trace_allocations(device) as trace:
        first = block(2, device)
        before.clear()
        block(4, device)
    assert trace.peak_bytes == first.nbytes
    assert trace.end_bytes == first.nbytes - 8 * MIB
