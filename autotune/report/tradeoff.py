"""Throughput against memory: what fits, what does not, and what nothing else beats in both."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from autotune.records import SearchResult
from autotune.report.configurations import name_of, series_name, tried_configurations
from autotune.report.figures import BAD, INK, MUTED, SURFACE, Canvas, draw_svg, series_style
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
        common = {
            "label": item.config.label(),
            "name": name_of(item.config, result),
            "series": series_name(item.config, configs),
        }
        if rate is not None and peak is not None:
            low = item.interval.low if item.interval else None
            high = item.interval.high if item.interval else None
            points.append(
                Point(**common, reserved_bytes=peak, samples_per_second=rate, low=low, high=high)
            )
        elif item.outcome is Outcome.OUT_OF_MEMORY:
            predicted = item.prediction.reserved_bytes if item.prediction else 0.0
            need = max(predicted, float(result.memory_limit_bytes))
            points.append(Point(**common, reserved_bytes=need, samples_per_second=None))
    return Tradeoff(
        points=tuple(points),
        front=_front(points),
        memory_limit_bytes=result.memory_limit_bytes,
        ranks=result.ranks,
    )


def draw_tradeoff(record: Tradeoff) -> Markup:
    drawable = any(point.samples_per_second is not None for point in record.points)
    figure = (
        draw_svg(
            lambda canvas: _draw(canvas, record),
            name="tradeoff",
            description=_description(record),
            height=430,
            narrow_height=380,
        )
        if drawable
        else None
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
    mib = 2**20
    limit = record.memory_limit_bytes / mib
    measured = [point for point in record.points if point.samples_per_second is not None]
    lost = [point for point in record.points if point.samples_per_second is None]
    top = max(point.samples_per_second or 0 for point in measured)
    right = max(limit, *(point.reserved_bytes / mib for point in measured)) * 1.18

    axes.set_xlim(0, right)
    axes.set_ylim(0, top * 1.16)
    axes.axvline(limit, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvspan(limit, right, color=BAD, alpha=0.06, linewidth=0)
    axes.text(
        limit - right * 0.008,
        top * 1.15,
        f"limit {format_bytes(record.memory_limit_bytes)}",
        color=BAD,
        ha="right",
        va="top",
    )
    if len(record.front) > 1:
        axes.step(
            [point.reserved_bytes / mib for point in record.front],
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
        _mark(canvas, axes, point)
    for point in lost:
        beyond = point.reserved_bytes / mib > right
        (cross,) = axes.plot(
            min(point.reserved_bytes / mib, right * 0.985), top * 0.035,
            "x", color=BAD, markersize=6, markeredgewidth=1.6, clip_on=False,
        )
        need = f"predicted {format_bytes(point.reserved_bytes)}" + (" (off the axis)" * beyond)
        canvas.tip(cross, f"{point.label}: out of memory, {need}")
    if lost:
        axes.plot([], [], "x", color=BAD, markersize=6, label="out of memory (predicted need)")
    _label_named(axes, measured, right, top)

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value * mib)))
    axes.locator_params(axis="x", nbins=4 if canvas.narrow else 8)
    axes.set_xlabel("reserved memory peak of a rank (measured)")
    axes.set_ylabel("samples/s (measured)")
    canvas.figure.legend(
        loc="outside upper left", ncols=2 if canvas.narrow else 6, labelcolor=INK
    )


def _mark(canvas: Canvas, axes: Axes, point: Point) -> None:
    colour, marker = series_style(point.series)
    x, y = point.reserved_bytes / 2**20, point.samples_per_second or 0
    if point.low is not None and point.high is not None:
        axes.plot([x, x], [point.low, point.high], color=INK, linewidth=1.2)
    (dot,) = axes.plot(
        x, y, marker, color=colour, markersize=9 if point.name else 6,
        markeredgecolor=INK if point.name else SURFACE, markeredgewidth=1.4 if point.name else 0.6,
    )
    name = f"{point.name}: " if point.name else ""
    canvas.tip(
        dot, f"{name}{point.label}: {significant(y, 4)} samples/s, {format_bytes(x * 2**20)}"
    )


def _label_named(axes: Axes, points: list[Point], right: float, top: float) -> None:
    taken: list[float] = []  # heights of labels already set, so that two never overlap
    for point in sorted(points, key=lambda p: -(p.samples_per_second or 0)):
        name = point.name.partition(" = ")[0]
        if name not in ("winner", "plain", "yours"):
            continue
        x, y = point.reserved_bytes / 2**20, point.samples_per_second or 0
        height = y
        while any(abs(height - other) < top * 0.06 for other in taken):
            height -= top * 0.06
        taken.append(height)
        left = x > right * 0.55
        axes.annotate(
            point.name,
            (x, y),
            xytext=(-9 if left else 9, (height - y) / top * 260),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=INK,
            weight="bold",
        )
