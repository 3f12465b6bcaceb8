"""Throughput by micro-batch size, one line for each ZeRO stage (or precision on one rank)."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from autotune.records import SearchResult
from autotune.report.configurations import Tried, series_name, tried_configurations
from autotune.report.figures import BAD, INK, SURFACE, Canvas, draw_svg, series_style
from autotune.report.render import render
from autotune.units import significant
from runtime.measurement import Outcome


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series."""

    series: str
    best: tuple[tuple[int, float, str], ...]
    """Micro-batch size, best samples per second measured with it, label of that configuration."""
    others: tuple[tuple[int, float, str], ...]
    """The rest of what was measured."""
    out_of_memory: tuple[tuple[int, str], ...]
    """Micro-batch sizes at which only out of memory was met, and a label."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The lines of the figure."""

    lines: tuple[Line, ...]
    by_stage: bool
    """Series are ZeRO stages; else precisions."""


def micro_batches(result: SearchResult) -> MicroBatches:
    """The lines, in the order of their names."""
    tried = tried_configurations(result)
    configs = [item.config for item in tried]
    groups: dict[str, list[Tried]] = {}
    for item in tried:
        groups.setdefault(series_name(item.config, configs), []).append(item)
    return MicroBatches(
        lines=tuple(_line(series, groups[series]) for series in sorted(groups)),
        by_stage=any(series.startswith("ZeRO") for series in groups),
    )


def draw_micro_batches(record: MicroBatches) -> Markup:
    """Empty where fewer than two micro-batch sizes were measured."""
    if len({size for line in record.lines for size, _, _ in line.best}) < 2:
        return Markup("")
    figure = draw_svg(
        lambda canvas: _draw(canvas, record),
        name="micro-batches",
        description=_description(record),
        height=380,
        narrow_height=350,
    )
    return render("micro_batches.html", record=record, figure=figure)


def _line(series: str, items: list[Tried]) -> Line:
    measured = [
        (item.config.micro_batch_size, item.samples_per_second, item.config.label())
        for item in items
        if item.samples_per_second is not None
    ]
    sizes = sorted({size for size, _, _ in measured})
    best = [max((m for m in measured if m[0] == size), key=lambda m: m[1]) for size in sizes]
    lost = {
        item.config.micro_batch_size: item.config.label()
        for item in items
        if item.outcome is Outcome.OUT_OF_MEMORY and item.config.micro_batch_size not in sizes
    }
    return Line(
        series=series,
        best=tuple(best),
        others=tuple(point for point in measured if point not in best),
        out_of_memory=tuple(sorted(lost.items())),
    )


def _description(record: MicroBatches) -> str:
    parts = [
        f"{line.series}: "
        + ", ".join(f"{size} gives {significant(rate)}" for size, rate, _ in line.best)
        for line in record.lines
        if line.best
    ]
    return "Best samples per second by micro-batch size. " + "; ".join(parts)


def _draw(canvas: Canvas, record: MicroBatches) -> None:
    axes = canvas.axes()
    points = [point for line in record.lines for point in (*line.best, *line.others)]
    top = max(rate for _, rate, _ in points)
    sizes = {size for size, _, _ in points}
    sizes |= {size for line in record.lines for size, _ in line.out_of_memory}
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
    axes.set_ylim(0, top * 1.1)
    lost_at: dict[int, int] = {}
    for line in record.lines:
        colour, marker = series_style(line.series)
        axes.plot(
            [size for size, _, _ in line.best],
            [rate for _, rate, _ in line.best],
            color=colour,
            marker=marker,
            markersize=7,
            markeredgecolor=SURFACE,
            markeredgewidth=0.6,
            label=line.series,
        )
        for size, rate, label in (*line.best, *line.others):
            chosen = (size, rate, label) in line.best
            (dot,) = axes.plot(
                size,
                rate,
                marker,
                color=colour,
                alpha=0 if chosen else 0.4,
                markersize=7 if chosen else 4,
            )
            canvas.tip(dot, f"{label}: {significant(rate, 4)} samples/s")
        for size, label in line.out_of_memory:
            row = lost_at.get(size, 0)
            lost_at[size] = row + 1
            (cross,) = axes.plot(
                size,
                top * (0.03 + 0.05 * row),
                "x",
                color=colour,
                markersize=6,
                markeredgewidth=1.8,
                clip_on=False,
            )
            canvas.tip(cross, f"{label}: out of memory")
    if lost_at:
        axes.plot([], [], "x", color=BAD, markersize=6, label="out of memory")
    axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
    axes.minorticks_off()
    axes.set_xlabel("micro-batch size (samples of one rank; logarithmic)")
    axes.set_ylabel("samples/s (measured)")
    canvas.figure.legend(loc="outside upper left", ncols=3 if canvas.narrow else 6, labelcolor=INK)
