from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.memory_trace import lives, trace_allocations

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


def test_a_block_whose_address_is_handed_out_again_was_freed() -> None:
    events = [(0, 100, 50), (3, 100, -50), (10, 100, 50), (20, 140, 80), (30, 300, 50)]
    ends = {block.start_ns: (block.end_ns, block.silent) for block in lives(events, None)}
    # The second block of 50 is overlapped at 20, but blocks of its size usually live for 3.
    assert ends == {0: (3, False), 10: (13, True), 20: (None, False), 30: (None, False)}


def test_a_block_that_nothing_holds_at_the_end_was_freed() -> None:
    events = [(0, 100, 50), (4, 100, -50), (10, 200, 50), (20, 300, 60), (30, 400, 70)]
    ends = {block.start_ns: block.end_ns for block in lives(events, {400})}
    assert ends == {0: 4, 10: 14, 20: 30, 30: None}


def test_neighbours_do_not_overlap() -> None:
    events = [(0, 100, 50), (1, 150, 50), (2, 50, 50), (3, 150, -50), (4, 150, 50)]
    assert [block.end_ns for block in lives(events, None)] == [None, 3, None, None]


def test_events_need_not_be_in_order() -> None:
    events = [(5, 100, -50), (0, 100, 50), (2, 200, 10)]
    assert [(block.size, block.end_ns) for block in lives(events, None)] == [(50, 5), (10, None)]


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
