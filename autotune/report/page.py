"""report.html: every panel in one self-contained page."""

from __future__ import annotations

from pathlib import Path

from autotune import __version__
from autotune.folder import study_name
from autotune.records import SearchResult
from autotune.report.answer import answer, draw_answer
from autotune.report.memory_parts import draw_memory_parts, memory_parts
from autotune.report.micro_batches import draw_micro_batches, micro_batches
from autotune.report.render import render, stylesheet
from autotune.report.runs import draw_runs, runs
from autotune.report.setting import draw_setting, setting
from autotune.report.tradeoff import draw_tradeoff, tradeoff


def report_html(result: SearchResult) -> str:
    """The whole page. The same result gives the same text."""
    panels = {
        "answer": draw_answer(answer(result)),
        "tradeoff": draw_tradeoff(tradeoff(result)),
        "micro-batches": draw_micro_batches(micro_batches(result)),
        "memory": draw_memory_parts(memory_parts(result)),
        "runs": draw_runs(runs(result)),
        "setting": draw_setting(setting(result)),
    }
    panels = {name: panel for name, panel in panels.items() if panel}
    return str(
        render(
            "page.html",
            name=study_name(Path(result.model_file)),
            result=result,
            panels=panels,
            css=stylesheet(),
            version=__version__,
        )
    )
