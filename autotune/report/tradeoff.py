"""Throughput against memory: what fits, what does not, and what nothing else beats in both."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from autotune.records import SearchResult
from autotune.report.configurations import name_of, series_name, tried_configurations
from autotune.report.figures import (
    BAD,
    INK,
    MUTED,
    SURFACE,
    Canvas,
    draw_svg,
    memory_axis,
    series_style,
)
from autotune.report.render import render
from autotune.units import format_bytes, significant
from runtime.measurement import Outcome


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration that ran."""

    label: str
    name: str
    """`winner`, `plain`, ...; empty for the others."""
    series: str
    reserved_bytes: float
    """Of one rank: measured where it ended well, predicted where it was out of memory."""
    samples_per_second: float | None
    """None where it was out of memory."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """The marks of the figure, and the line through the best of them."""

    points: tuple[Point, ...]
    front: tuple[Point, ...]
    """By memory: each is faster than everything that needs less."""
    memory_limit_bytes: int
    ranks: int


def tradeoff(result: SearchResult) -> Tradeoff:
    """The points, and their Pareto front."""
    tried = tried_configurations(result)
    configs = [item.config for item in tried]
    points = []
    for item in tried:
        rate, peak = item.samples_per_second, item.reserved_peak_bytes
        if rate is None or peak is None:
            if item.outcome is not Outcome.OUT_OF_MEMORY:
                continue
            predicted = item.prediction.reserved_bytes if item.prediction else 0.0
            rate, peak = None, max(round(predicted), result.memory_limit_bytes)
        points.append(
            Point(
                label=item.config.label(),
                name=name_of(item.config, result),
                series=series_name(item.config, configs),
                reserved_bytes=peak,
                samples_per_second=rate,
                low=item.interval.low if item.interval else None,
                high=item.interval.high if item.interval else None,
            )
        )
    return Tradeoff(
        points=tuple(points),
        front=_front(points),
        memory_limit_bytes=result.memory_limit_bytes,
        ranks=result.ranks,
    )


def draw_tradeoff(record: Tradeoff) -> Markup:
    """Empty where no run ended well."""
    drawable = any(point.samples_per_second is not None for point in record.points)
    if not drawable:
        return Markup("")
    figure = draw_svg(
        lambda canvas: _draw(canvas, record),
        name="tradeoff",
        description=_description(record),
        height=430,
        narrow_height=380,
    )
    return render("tradeoff.html", record=record, figure=figure)


def _front(points: list[Point]) -> tuple[Point, ...]:
    front: list[Point] = []
    measured = [point for point in points if point.samples_per_second is not None]
    for point in sorted(measured, key=lambda p: (p.reserved_bytes, -(p.samples_per_second or 0))):
        if not front or (point.samples_per_second or 0) > (front[-1].samples_per_second or 0):
            front.append(point)
    return tuple(front)


def _description(record: Tradeoff) -> str:
    measured = [point for point in record.points if point.samples_per_second is not None]
    lost = len(record.points) - len(measured)
    return (
        f"Throughput against reserved memory of {len(measured)} configurations; {lost} more were "
        f"out of memory; the limit is {format_bytes(record.memory_limit_bytes)} a rank."
    )


def _draw(canvas: Canvas, record: Tradeoff) -> None:
    axes = canvas.axes()
    measured = [point for point in record.points if point.samples_per_second is not None]
    lost = [point for point in record.points if point.samples_per_second is None]
    fastest = max(point.samples_per_second or 0 for point in measured)
    top = min(1.4 * fastest, max(fastest, *(point.high or 0 for point in measured)))
    unit = memory_axis(
        axes,
        name="reserved memory peak of a rank (measured)",
        largest_bytes=max(point.reserved_bytes for point in measured),
        limit_bytes=record.memory_limit_bytes,
        ticks=4 if canvas.narrow else 8,
        room=1.18,
    )
    right = axes.get_xlim()[1]
    axes.set_ylim(0, top * (1.28 if canvas.narrow else 1.16))
    axes.set_ylabel("samples/s (measured)")
    if len(record.front) > 1:
        axes.step(
            [point.reserved_bytes / unit for point in record.front],
            [point.samples_per_second or 0 for point in record.front],
            where="post",
            color=MUTED,
            linewidth=1,
            label="best for its memory",
        )
    for series in sorted({point.series for point in record.points}):
        colour, marker = series_style(series)
        axes.plot([], [], marker, color=colour, markersize=6, label=series)  # for the legend
    for point in sorted(measured, key=lambda p: bool(p.name)):
        _mark(canvas, axes, point, unit)
    for point in lost:
        _mark_lost(canvas, axes, point, unit, right, top * 0.035)
    if lost:
        label = "out of memory" if canvas.narrow else "out of memory (predicted need)"
        axes.plot([], [], "x", color=BAD, markersize=6, markeredgewidth=1.6, label=label)
    _label_named(axes, measured, unit, top)
    canvas.figure.legend(loc="outside upper left", ncols=2 if canvas.narrow else 6, labelcolor=INK)


def _mark(canvas: Canvas, axes: Axes, point: Point, unit: float) -> None:
    colour, marker = series_style(point.series)
    x, y = point.reserved_bytes / unit, point.samples_per_second or 0
    if point.low is not None and point.high is not None:
        axes.plot([x, x], [point.low, point.high], color=INK, linewidth=1.2)
    (dot,) = axes.plot(
        x,
        y,
        marker,
        color=colour,
        markersize=9 if point.name else 6,
        markeredgecolor=INK if point.name else SURFACE,
        markeredgewidth=1.4 if point.name else 0.6,
    )
    name = f"{point.name}: " if point.name else ""
    peak = format_bytes(point.reserved_bytes)
    canvas.tip(dot, f"{name}{point.label}: {significant(y, 4)} samples/s, {peak}")


def _mark_lost(
    canvas: Canvas, axes: Axes, point: Point, unit: float, right: float, height: float
) -> None:
    x = point.reserved_bytes / unit
    (cross,) = axes.plot(
        min(x, right * 0.985),
        height,
        "x",
        color=BAD,
        markersize=6,
        markeredgewidth=1.6,
        clip_on=False,
    )
    beyond = ", beyond the axis" if x > right else ""
    need = f"predicted to need {format_bytes(point.reserved_bytes)}{beyond}"
    canvas.tip(cross, f"{point.label}: out of memory, {need}")


def _label_named(axes: Axes, points: list[Point], unit: float, top: float) -> None:
    taken: list[tuple[float, float]] = []  # places of labels already set: two never overlap
    for point in sorted(points, key=lambda p: -(p.samples_per_second or 0)):
        if point.name.partition(" = ")[0] not in ("winner", "plain", "yours"):
            continue
        x, y = point.reserved_bytes / unit, point.samples_per_second or 0
        near = any(
            abs(x - other) < axes.get_xlim()[1] * 0.15 and abs(y - height) < top * 0.12
            for other, height in taken
        )
        taken.append((x, y))
        axes.annotate(
            point.name,
            (x, min((point.low if near else point.high) or y, top)),
            xytext=(0, -9 if near else 9),
            textcoords="offset points",
            ha="left" if x < axes.get_xlim()[1] * 0.1 else "center",
            va="top" if near else "bottom",
            color=INK,
            weight="bold",
        )
