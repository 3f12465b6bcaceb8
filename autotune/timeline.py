"""What happens to memory within one micro-batch, as a function of its size.

A timeline is a list of moments: a block's forward begins, a parameter's gradient is complete, and
so on. Between two moments the live bytes of activations rise and fall; what is kept of that is the
upper envelope of their lines in the micro-batch size. Parameters and their gradients are left out:
who holds which of them, and when, depends on the configuration; `autotune.ledger` adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MomentKind = Literal["forward", "forwarded", "loss", "backward", "gradient", "backwarded", "end"]
CATEGORIES = ("activations", "loss and logits", "temporaries", "weight copies")
"""Kinds of live bytes: kept by the blocks' forward passes; made after the last block, by the loss
and the output layer; made in backward (recomputed activations too) or inside kernels; and
autocast's narrow copies of weights. The sizes of a `Line`, in this order."""


@dataclass(frozen=True)
class Line:
    """Live bytes at one point of the pass: `fixed[i] + per_sample[i] * micro_batch_size`."""

    fixed: tuple[float, ...]
    """Bytes by category, in the order of `CATEGORIES`."""
    per_sample: tuple[float, ...]

    def at(self, micro_batch_size: int) -> tuple[float, ...]:
        """Bytes by category; never negative."""
        return tuple(
            max(0.0, fixed + slope * micro_batch_size)
            for fixed, slope in zip(self.fixed, self.per_sample, strict=True)
        )

    @property
    def total(self) -> tuple[float, float]:
        """Fixed bytes and bytes per sample, over all categories."""
        return sum(self.fixed), sum(self.per_sample)


@dataclass(frozen=True)
class Moment:
    """Something that the engine acts on, and the memory up to then."""

    kind: MomentKind
    index: int
    """Of the group (`forward`, `forwarded`, `backward`, `backwarded`) or parameter (`gradient`)."""
    before: tuple[Line, ...]
    """Upper envelope of the live bytes since the moment before this one; empty if nothing ran."""
    live: Line
    """What is live at this moment."""


@dataclass(frozen=True)
class Timeline:
    """The moments of one micro-batch's forward and backward pass."""

    moments: tuple[Moment, ...]
    flops: tuple[float, float]
    """Floating-point operations: fixed, and for each sample; recomputation counts."""


_Noted = tuple[MomentKind, int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Sample:
    """One traced pass: live bytes by category after each operation, and the moments between."""

    size: int
    """Micro-batch size."""
    live: tuple[tuple[int, ...], ...]
    moments: tuple[_Noted, ...]
    """Kind, index, how many operations came before it, live bytes by category at it."""
    flops: int


def join(first: Sample, second: Sample) -> Timeline:
    """The timeline through two passes of different micro-batch sizes.

    Moments that only one of the passes has (an expert used by chance) are left out, and what lies
    between the others is merged.

    Raises:
        ValueError: the sizes are equal.
    """
    if first.size == second.size:
        raise ValueError(f"sizes must differ, but got {first.size} twice")
    first, second = _common(first, second)
    moments = []
    begin = (0, 0)
    for one, two in zip(first.moments, second.moments, strict=True):
        kind, index, end_one, live_one = one
        _, _, end_two, live_two = two
        lines = _lines(
            first.live[begin[0] : end_one], second.live[begin[1] : end_two], first, second
        )
        live = _line(live_one, live_two, first.size, second.size)
        moments.append(Moment(kind, index, _envelope(lines), live))
        begin = (end_one, end_two)
    fixed, slope = _through(first.flops, second.flops, first.size, second.size)
    return Timeline(tuple(moments), (fixed, slope))


def _common(first: Sample, second: Sample) -> tuple[Sample, Sample]:
    """Both passes with only the moments that occur in both, in the order of the first."""
    keys_one = [(kind, index) for kind, index, *_ in first.moments]
    keys_two = [(kind, index) for kind, index, *_ in second.moments]
    if keys_one == keys_two:
        return first, second
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(a=keys_one, b=keys_two, autojunk=False)
    kept_one: list[_Noted] = []
    kept_two: list[_Noted] = []
    for block in matcher.get_matching_blocks():
        kept_one += first.moments[block.a : block.a + block.size]
        kept_two += second.moments[block.b : block.b + block.size]
    return (
        Sample(first.size, first.live, tuple(kept_one), first.flops),
        Sample(second.size, second.live, tuple(kept_two), second.flops),
    )


def _lines(
    one: Sequence[tuple[int, ...]],
    two: Sequence[tuple[int, ...]],
    first: Sample,
    second: Sample,
) -> list[Line]:
    """A line for each operation; for the peak alone where the operations differ."""
    if len(one) != len(two):
        one = [max(one, key=sum)] if one else []
        two = [max(two, key=sum)] if two else []
        if len(one) != len(two):
            one = two = one or two
    pairs = dict.fromkeys(zip(one, two, strict=True))
    return [_line(a, b, first.size, second.size) for a, b in pairs]


def _line(one: tuple[int, ...], two: tuple[int, ...], size_one: int, size_two: int) -> Line:
    parts = [_through(a, b, size_one, size_two) for a, b in zip(one, two, strict=True)]
    return Line(tuple(fixed for fixed, _ in parts), tuple(slope for _, slope in parts))


def _through(one: float, two: float, size_one: int, size_two: int) -> tuple[float, float]:
    slope = (two - one) / (size_two - size_one)
    return one - slope * size_one, slope


def _envelope(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those of `lines` that are highest at some micro-batch size >= 1."""
    # Steepest last; of equal slopes the higher one. At size 1 the highest leads, and steeper ones
    # overtake it one after the other.
    ordered = sorted(lines, key=lambda line: (line.total[1], line.total[0]))
    kept: list[Line] = []
    for line in ordered:
        fixed, slope = line.total
        while kept and (
            sum(kept[-1].total) <= fixed + slope  # no higher at size 1, and less steep
            or (len(kept) > 1 and _crossing(kept[-2], line) <= _crossing(kept[-2], kept[-1]))
        ):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _crossing(low: Line, steep: Line) -> float:
    """The size from which `steep` lies above `low`."""
    fixed, slope = low.total
    steep_fixed, steep_slope = steep.total
    return (fixed - steep_fixed) / (steep_slope - slope)
