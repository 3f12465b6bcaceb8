"""Memory by part, predicted beside measured, of a few configurations against the limit."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from autotune.records import Prediction, SearchResult
from autotune.report.configurations import Tried, name_of, tried_configurations
from autotune.report.figures import (
    BLUE,
    GREEN,
    INK,
    LINE,
    MUTED,
    PURPLE,
    SURFACE,
    YELLOW,
    Canvas,
    draw_svg,
    memory_axis,
)
from autotune.report.render import render
from autotune.units import format_bytes
from runtime.measurement import Measurement, Outcome

PARTS = ("parameters", "gradients", "optimizer states", "other", "reserved beyond")
"""Their sum is the reserved peak. "other" is what else lives at the peak: activations, gathered
parameters, communication buffers, batches. "reserved beyond" is charged but holds no tensor."""

_COLOURS = dict(zip(PARTS, (BLUE, YELLOW, GREEN, PURPLE, LINE), strict=True))
_BEHIND = {"facecolor": SURFACE, "edgecolor": "none", "pad": 0.8}
_MOST = 7


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bytes of one rank, in the order of `PARTS`."""

    parts: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One configuration."""

    label: str
    name: str
    predicted: Bar | None
    measured: Bar | None
    """None where no run ended well."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """The bars of the figure, and how good the predictions were."""

    stacks: tuple[Stack, ...]
    memory_limit_bytes: int
    error: float | None
    """Median of |predicted - measured| ÷ measured reserved peak, over all measured
    configurations, each as predicted before its first run."""
    error_count: int


def memory_parts(result: SearchResult) -> MemoryParts:
    """The named configurations, the leanest and the largest that fit, one out of memory."""
    tried = tried_configurations(result)
    errors = sorted(
        abs(item.prediction.reserved_bytes - item.reserved_peak_bytes) / item.reserved_peak_bytes
        for item in tried
        if item.prediction and item.reserved_peak_bytes
    )
    return MemoryParts(
        stacks=tuple(_stack(item, result) for item in _selected(tried, result)),
        memory_limit_bytes=result.memory_limit_bytes,
        error=errors[len(errors) // 2] if errors else None,
        error_count=len(errors),
    )


def draw_memory_parts(record: MemoryParts) -> Markup:
    """Empty where nothing ran."""
    if not record.stacks:
        return Markup("")
    figure = draw_svg(
        lambda canvas: _draw(canvas, record),
        name="memory",
        description="Memory of one rank by part, predicted and measured, against the limit of "
        + format_bytes(record.memory_limit_bytes),
        height=104 + 62 * len(record.stacks),
        narrow_height=146 + 66 * len(record.stacks),
    )
    return render("memory_parts.html", record=record, figure=figure, parts=PARTS)


def _selected(tried: list[Tried], result: SearchResult) -> list[Tried]:
    order = {"winner": 0, "yours": 1, "plain": 2, "runner-up": 3}
    named = [item for item in tried if name_of(item.config, result)]
    named.sort(key=lambda item: order[name_of(item.config, result).partition(" = ")[0]])
    measured = [item for item in tried if item.reserved_peak_bytes]
    by_size = sorted(measured, key=lambda item: item.reserved_peak_bytes or 0)
    lost = [item for item in tried if item.outcome is Outcome.OUT_OF_MEMORY and item.prediction]
    lost.sort(key=lambda item: item.prediction.reserved_bytes if item.prediction else 0.0)
    chosen: list[Tried] = []
    for item in (*named, *by_size[:1], *by_size[-1:], *lost[:1]):
        if item not in chosen:
            chosen.append(item)
    return chosen[:_MOST]


def _stack(item: Tried, result: SearchResult) -> Stack:
    runs = [run for run in item.finished if run.reserved_peak_bytes]
    largest = max(runs, key=lambda run: run.reserved_peak_bytes or 0, default=None)
    return Stack(
        label=item.config.label(),
        name=name_of(item.config, result),
        predicted=_predicted(item.prediction) if item.prediction else None,
        measured=_measured(largest) if largest else None,
        note="" if item.outcome is Outcome.OK else item.outcome.value,
    )


def _predicted(prediction: Prediction) -> Bar:
    known = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for name, size in prediction.terms.items():
        part = next((part for part in known if name.lower().startswith(part.rstrip("s"))), None)
        if part is not None:
            known[part] += size
    other = max(0.0, prediction.allocated_bytes - sum(known.values()))
    beyond = max(0.0, prediction.reserved_bytes - prediction.allocated_bytes)
    return Bar(parts=(*known.values(), other, beyond))


def _measured(run: Measurement) -> Bar:
    rank = max(run.memory, key=lambda memory: memory.charged_peak_bytes)
    beyond = max(0, rank.charged_peak_bytes - rank.allocated_peak_bytes)
    held = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes)
    return Bar(parts=(*map(float, held), float(rank.other_bytes), float(beyond)))


def _draw(canvas: Canvas, record: MemoryParts) -> None:
    axes = canvas.axes()
    bars = [bar for stack in record.stacks for bar in (stack.predicted, stack.measured) if bar]
    unit = memory_axis(
        axes,
        name="memory of one rank",
        largest_bytes=max(bar.total for bar in bars),
        limit_bytes=record.memory_limit_bytes,
        ticks=4 if canvas.narrow else 8,
        room=1.5 if canvas.narrow else 1.2,
    )
    axes.set_ylim(-1.25 * len(record.stacks) + 0.65, 1.15)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    for row, stack in enumerate(record.stacks):
        middle = -1.25 * row
        title = " · ".join(part for part in (stack.name, stack.label, stack.note) if part)
        axes.text(0, middle + 0.42, title, va="bottom", color=INK, weight="bold", bbox=_BEHIND)
        if stack.predicted:
            _draw_bar(canvas, axes, stack, stack.predicted, middle + 0.2, unit)
        if stack.measured:
            _draw_bar(canvas, axes, stack, stack.measured, middle - 0.2, unit)
    handles = [Patch(color=_COLOURS[part], label=part) for part in PARTS]
    canvas.figure.legend(
        handles=handles, loc="outside upper left", ncols=2 if canvas.narrow else 5, labelcolor=INK
    )


def _draw_bar(
    canvas: Canvas, axes: Axes, stack: Stack, bar: Bar, height: float, unit: float
) -> None:
    kind = "measured" if bar is stack.measured else "predicted"
    left = 0.0
    for part, size in zip(PARTS, bar.parts, strict=True):
        (patch,) = axes.barh(
            height,
            size / unit,
            left=left,
            height=0.34,
            color=_COLOURS[part],
            alpha=1 if kind == "measured" else 0.45,
            linewidth=0,
        )
        canvas.tip(patch, f"{stack.label}, {part}: {format_bytes(size)} {kind}")
        left += size / unit
    axes.annotate(
        f"{format_bytes(bar.total)} {kind}",
        (left, height),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=INK if kind == "measured" else MUTED,
        bbox=_BEHIND,
    )
