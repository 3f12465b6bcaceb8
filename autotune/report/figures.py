"""Matplotlib figures as inline SVG that follows the page: its colours, its font, its width.

A figure is drawn twice, for wide and for narrow pages; the page's CSS shows one. Colours are CSS
variables (light and dark), text stays text, ids are the same in every run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.units import format_bytes

INK = "#1d2125"
MUTED = "#5d6671"
LINE = "#dce1e6"
SURFACE = "#fefefe"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PURPLE = "#b8609a"
YELLOW = "#e69f00"
BAD = "#a3333d"
_SERIES = {
    "ZeRO 0": (BLUE, "o"),
    "ZeRO 1": (ORANGE, "s"),
    "ZeRO 2": (GREEN, "^"),
    "ZeRO 3": (PURPLE, "D"),
    "fp32": (BLUE, "o"),
    "bf16": (ORANGE, "s"),
    "fp16": (GREEN, "^"),
}
"""Colours of Okabe and Ito's palette, and a shape each: told apart with any colour blindness."""

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    SURFACE: "--surface",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    PURPLE: "--purple",
    YELLOW: "--yellow",
    BAD: "--bad",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autotune",
    "font.family": "DejaVu Sans",  # what text is measured with; the page's own font is narrower
    "font.size": 9,  # points: 12 CSS pixels
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.6,
}


def series_style(series: str) -> tuple[str, str]:
    """Colour and marker of a series of `configurations.series_name`."""
    return _SERIES[series]


@dataclass
class Canvas:
    """One drawing of one figure."""

    figure: Figure
    width: int
    """CSS pixels."""
    tips: dict[str, str] = field(default_factory=dict)

    @property
    def narrow(self) -> bool:
        return self.width < 500

    def axes(self) -> Axes:
        return self.figure.add_subplot()

    def tip(self, artist: Artist, text: str) -> None:
        """Show `text` where the pointer rests on `artist`."""
        key = f"tip{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text


def memory_axis(
    axes: Axes, *, name: str, largest_bytes: float, limit_bytes: float, ticks: int, room: float
) -> float:
    """Make the horizontal axis one of memory, with the limit marked; returns bytes of one unit.

    It reaches to the larger of `largest_bytes` and the limit, times `room`; a limit so far off
    that it would squeeze everything else is named at the right edge instead.
    """
    far = limit_bytes > 2.5 * largest_bytes
    end = room * (largest_bytes if far else max(largest_bytes, limit_bytes))
    unit, size = ("GiB", 2**30) if end > 1.5 * 2**30 else ("MiB", 2**20)
    axes.set_xlim(0, end / size)
    axes.set_xlabel(f"{name}, {unit}")
    axes.locator_params(axis="x", nbins=ticks)
    label = f"limit {format_bytes(limit_bytes)}" + (", beyond the axis →" if far else "")
    place = end if far else limit_bytes
    axes.annotate(
        label,
        (place / size, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-6, -2),
        textcoords="offset points",
        color=BAD,
        ha="right",
        va="top",
    )
    if not far:
        axes.axvline(place / size, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0.5)
        axes.axvspan(place / size, end / size, color=BAD, alpha=0.06, linewidth=0, zorder=0.4)
    return float(size)


def draw_svg(
    draw: Callable[[Canvas], None],
    *,
    name: str,
    description: str,
    height: int,
    narrow_height: int | None = None,
) -> Markup:
    """`draw` at both widths, as one HTML fragment. Heights are CSS pixels.

    `name` must be unique on the page: it prefixes every id. `description` is read to those who
    cannot see the figure.
    """
    sizes = (("wide", 920, height), ("narrow", 350, narrow_height or height))
    return Markup("").join(
        _one_svg(draw, f"{name}-{kind}", kind, description, width, size)
        for kind, width, size in sizes
    )


def _one_svg(
    draw: Callable[[Canvas], None], name: str, kind: str, description: str, width: int, height: int
) -> Markup:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width / 96, height / 96), layout="constrained")
        canvas = Canvas(figure=figure, width=width)
        draw(canvas)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
        )
    return Markup(_inline(buffer.getvalue(), name, kind, description, canvas.tips))


def _inline(svg: str, name: str, kind: str, description: str, tips: dict[str, str]) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the page
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    for key, text in tips.items():
        svg = svg.replace(f'<g id="{key}">', f'<g id="{key}"><title>{escape(text)}</title>', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'(?:, [^;\"]*)?", "inherit", svg)
    svg = re.sub(r"font: ([\d.]+)px inherit", r"font-size: \1px", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    view = re.search(r'viewBox="[^"]+"', svg)
    head = (
        f'<svg class="figure {kind}" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{view[0] if view else ""} role="img" aria-label="{escape(description)}">'
    )
    return head + svg[svg.index(">") + 1 :]
