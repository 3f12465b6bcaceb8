"""The command `search` between its options and its output: prepare, watch, write, print."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from autotune.hardware import measure_hardware
from autotune.progress import Progress
from autotune.records import SearchResult
from autotune.search import SearchOptions, output_folder, search
from autotune.space import check_request
from autotune.summary import summary_json, summary_lines
from runtime.config import load_config
from runtime.limits import total_memory_bytes
from runtime.model_file import check_model_file

WIDEST = 100
"""Columns beyond which lines of text are hard to read."""


def run_search(
    *,
    model: Path,
    memory_limit: float | None,
    baseline: Path | None,
    time_budget: float | None,
    as_json: bool,
    **given: Any,
) -> bool:
    """Search, write best.json, trials.csv and report.html, print; whether anything was found.

    `memory_limit` is bytes (int) or a share (float), see `share_of_memory`; `given` holds further
    fields of `SearchOptions`, None where the option was not given.

    Raises:
        UserError: an option, the model file or the output folder is not as it must be.
    """
    check_model_file(model)
    ranks = given.get("ranks")
    check_request(
        ranks=ranks,
        global_batch_size=given.get("global_batch_size"),
        fix=given["fix"],
        vary=given["vary"],
    )
    options = SearchOptions(
        model_file=model,
        memory_limit_bytes=limit_bytes(memory_limit, ranks),
        own=load_config(baseline) if baseline is not None else None,
        time_budget_seconds=time_budget,
        **{name: value for name, value in given.items() if value is not None},
    )
    console = Console(stderr=True)
    title = f"{os.path.relpath(model)}, writing to {shortened(output_folder(options))}"
    with Progress(console, title=title) as progress:
        result = search(options, progress)
        progress.on_phase("writing the report")
        files = write(result, output_folder(options))
    print_result(result, files, as_json=as_json)
    return result.best is not None


def write(result: SearchResult, folder: Path) -> list[Path]:
    """`autotune.report.write_outputs`, imported late: matplotlib and pandas take a second."""
    from autotune.report import write_outputs

    # Its warnings (a font cache being built, no writable home) would break the live view.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    return write_outputs(result, folder)


def print_result(result: SearchResult, files: Sequence[Path], *, as_json: bool) -> None:
    """The answer on standard output: a few lines, or one JSON object."""
    if as_json:
        click.echo(json.dumps(summary_json(result, files), indent=2))
        return
    width = min(WIDEST, shutil.get_terminal_size().columns)
    shown = [shortened(path) for path in files]
    lines = summary_lines(result, shown, width)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(lines[0], style="bold green" if result.best else "bold red")
        lines = lines[1:]
    click.echo("\n".join(lines))


def limit_bytes(limit: float | None, ranks: int | None) -> int | None:
    """`--memory-limit` as bytes of one rank; None where it was not given.

    A share is of the memory of one GPU, or of the host's (or its control group's) over the ranks.
    It is a share of all, not of what is free now, so that the same command means the same limit.
    """
    if limit is None or isinstance(limit, int):
        return limit
    hardware = measure_hardware()
    if hardware.device == "cuda":
        return int(limit * hardware.device_memory_bytes)
    return int(limit * total_memory_bytes() / (ranks or 1))


def shortened(path: Path) -> Path:
    """Relative to the working folder where it lies in it."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path
