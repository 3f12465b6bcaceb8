"""What a finished search says at the end: a few lines for people, one JSON object for programs."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.records import Interval, Ranked, SearchResult, dump
from autotune.report.answer import Answer, Comparison, answer, peak_bytes
from autotune.units import format_bytes, format_seconds, significant
from runtime.measurement import Outcome


def summary_lines(result: SearchResult, files: Sequence[Path], width: int = 80) -> list[str]:
    """The answer first, then what it rests on, then what to type next; at most `width` columns,
    save for words that are longer."""
    found = answer(result)
    rows = _answer_rows(found, result) if found.best else [("", found.sentence)]
    if found.advice:
        rows.append(("to do", found.advice))
    if found.stopped_because:
        rows.append(("ended", found.stopped_because))
    rows += [("note", note) for note in found.notes]
    if files:
        folder = files[0].parent
        rows.append(("wrote", f"{folder}/ " + ", ".join(path.name for path in files)))
        if found.best:
            model = _relative(result.model_file)
            command = ["autotune", "measure", model, "--config", f"{folder}/best.json"]
            rows.append(("next", shlex.join(command)))
        else:
            rows.append(("see", f"{folder}/report.html"))
    lines = [found.headline]
    for name, text in rows:
        lines += textwrap.wrap(
            text,
            width=max(width, 30),
            initial_indent=f"  {name:<9}" if name else "  ",
            subsequent_indent=" " * (11 if name else 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def summary_json(result: SearchResult, files: Sequence[Path]) -> dict[str, Any]:
    """The object that `--json` prints. Rates are samples per second, bytes are of one rank.

    Keys: `model_file`, `study`, `command`, `objective`, `global_batch_size`, `ranks`,
    `memory_limit_bytes`, `best`, `runner_up`, `plain`, `own` (each null, or an object with
    `config`, `label`, `samples_per_second` with its interval, `tokens_per_second`,
    `reserved_peak_bytes`), `speedup_over_plain` and `speedup_over_own` (null, or an interval),
    `noisy` (the interval is too wide to decide), `outcomes` (runs by how they ended), `untried`
    (count), `seconds`, `stopped_because`, `advice` (what to do where there is no `best`),
    `notes`, `files`.
    """
    found = answer(result)
    outcomes = [trial.measurement.outcome for trial in result.trials]
    return {
        "model_file": result.model_file,
        "study": result.study_name,
        "command": result.command,
        "objective": result.objective,
        "global_batch_size": result.global_batch_size,
        "ranks": result.ranks,
        "memory_limit_bytes": result.memory_limit_bytes,
        "best": _ranked_json(result.best),
        "runner_up": _ranked_json(result.runner_up),
        "plain": _ranked_json(result.plain),
        "own": _ranked_json(result.own),
        "speedup_over_plain": _speedup_json(found.versus_plain),
        "speedup_over_own": _speedup_json(found.versus_own),
        "noisy": found.noisy,
        "outcomes": {kind.value: outcomes.count(kind) for kind in Outcome},
        "untried": len(result.untried),
        "seconds": result.seconds,
        "stopped_because": result.stopped_because,
        "advice": found.advice,
        "notes": list(found.notes),
        "files": [os.fspath(path) for path in files],
    }


def rate_text(rate: Interval) -> str:
    """`109.4 samples/s (107.1 to 111.7, 3 runs)`."""
    runs = f"{rate.processes} runs" if rate.processes > 1 else "1 run"
    bounds = f"{significant(rate.low, 4)} to {significant(rate.high, 4)}"
    return f"{significant(rate.value, 4)} samples/s ({bounds}, {runs})"


def _answer_rows(found: Answer, result: SearchResult) -> list[tuple[str, str]]:
    assert found.best is not None
    rate = rate_text(found.best.samples_per_second)
    if found.tokens_per_second:
        rate += f", {found.tokens_per_second:,.0f} tokens/s"
    rows = [("winner", found.best.config.label()), ("rate", rate)]
    for name, versus in (("plain", found.versus_plain), ("yours", found.versus_own)):
        if versus is not None and versus.baseline.config != found.best.config:
            bounds = f"{versus.rate.low:.2f} to {versus.rate.high:.2f}"
            base = significant(versus.baseline.samples_per_second.value, 4)
            text = f"{base} samples/s with {versus.baseline.config.label()}"
            rows.append((name, f"{text}: the winner is {versus.rate.value:.2f}x ({bounds})"))
    if found.reserved_peak_bytes is not None:
        share = found.reserved_peak_bytes / found.memory_limit_bytes
        peak, limit = (
            format_bytes(found.reserved_peak_bytes),
            format_bytes(found.memory_limit_bytes),
        )
        rows.append(("memory", f"{peak} of {limit} a rank ({share:.0%})"))
    count = len(result.trials)
    runs = f"{count} run{'s' * (count != 1)} in {format_seconds(result.seconds)}"
    rows.append(("search", f"{runs}, {len(result.untried):,} configurations not run"))
    if found.warning:
        rows.append(("warning", found.warning))
    return rows


def _relative(path: str) -> str:
    """Shorter, where `path` lies in the working folder."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _ranked_json(ranked: Ranked | None) -> dict[str, Any] | None:
    if ranked is None:
        return None
    tokens = next((run.tokens_per_sample for run in ranked.measurements), None)
    return {
        "config": ranked.config.model_dump(mode="json"),
        "label": ranked.config.label(),
        "samples_per_second": dump(ranked.samples_per_second),
        "tokens_per_second": ranked.samples_per_second.value * tokens if tokens else None,
        "reserved_peak_bytes": peak_bytes(ranked),
    }


def _speedup_json(versus: Comparison | None) -> dict[str, Any] | None:
    return None if versus is None else dump(versus.rate)
